"""From any gpytorch likelihood to one this package can evaluate at C settings."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gpytorch.likelihoods
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from torchgpmc.adapter.functional import PureModule, check_same_at_own_values, parameters_with_owners, public_name, warn_unseen
from torchgpmc.checks import described, warn
from torchgpmc.likelihoods.bernoulli import Bernoulli
from torchgpmc.likelihoods.beta import Beta
from torchgpmc.likelihoods.fixed_noise import FixedNoiseGaussian
from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.likelihoods.laplace_noise import LaplaceNoise
from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.likelihoods.log_likelihood import LogLikelihood, require_targets
from torchgpmc.likelihoods.rows import log_prob_by_rows
from torchgpmc.likelihoods.softmax import Softmax
from torchgpmc.likelihoods.student_t import StudentT
from torchgpmc.numerics.random import draw, make_generator

_WITH_CLOSED_FORMS = {
    gpytorch.likelihoods.BetaLikelihood: Beta,
    gpytorch.likelihoods.FixedNoiseGaussianLikelihood: FixedNoiseGaussian,
    gpytorch.likelihoods.GaussianLikelihood: Gaussian,
    gpytorch.likelihoods.LaplaceLikelihood: LaplaceNoise,
    gpytorch.likelihoods.StudentTLikelihood: StudentT,
    gpytorch.likelihoods.SoftmaxLikelihood: Softmax,
}
_OF_ONE_NUMBER_EACH = (
    gpytorch.likelihoods.BetaLikelihood,
    gpytorch.likelihoods.GaussianLikelihood,
    gpytorch.likelihoods.LaplaceLikelihood,
    gpytorch.likelihoods.StudentTLikelihood,
)


class Foreign(Factorised):
    """A gpytorch likelihood we know nothing about but its ``forward(f)``; everything by quadrature."""

    def __init__(self, likelihood: Any):
        self.likelihood = likelihood
        self.num_latents = count_latents(likelihood)
        self.is_f_plus_noise = isinstance(likelihood, gpytorch.likelihoods.LaplaceLikelihood)  # a user's own kind of it

    def forward(self, function_samples: Tensor) -> Distribution:
        return self.likelihood.forward(function_samples)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return log_prob_by_rows(self.likelihood, f, targets, self.num_latents)


def convert_likelihood(likelihood: Any) -> Any:
    """A private copy of a likelihood, ours in place of gpytorch's where ours is better.

    gpytorch's ``BernoulliLikelihood`` floors the probit (log Phi(-40) comes out near -36 where -804.6 is right) and is replaced by
    :class:`Bernoulli`, with a note; ``GaussianLikelihood``, ``FixedNoiseGaussianLikelihood``, ``StudentTLikelihood``,
    ``LaplaceLikelihood``, ``SoftmaxLikelihood`` and ``BetaLikelihood`` gain closed forms and keep their parameters, priors and
    names.

    Raises:
        TypeError: not a gpytorch likelihood.
        ValueError: one of several models at once.
    """
    if not isinstance(likelihood, gpytorch.likelihoods.Likelihood):
        raise TypeError(
            f"likelihood is {described(likelihood)}. Expected a gpytorch or torchgpmc likelihood object, for instance "
            f"torchgpmc.likelihoods.Bernoulli()."
        )
    if isinstance(likelihood, _OF_ONE_NUMBER_EACH) and any(parameter.numel() > 1 for parameter in likelihood.parameters()):
        raise ValueError(
            f"{type(likelihood).__name__} has a batch_shape, parameters for several models. Expected one without; of several data "
            f"sets make a model each."
        )
    if isinstance(likelihood, LogLikelihood):
        return copy.deepcopy(likelihood)
    if type(likelihood) is gpytorch.likelihoods.BernoulliLikelihood:
        warn(
            "gpytorch's BernoulliLikelihood floors small probabilities; "
            "torchgpmc.likelihoods.Bernoulli(link='probit') is used instead.",
            UserWarning,
        )
        return Bernoulli()
    ours = _WITH_CLOSED_FORMS.get(type(likelihood))
    if ours is None:
        return copy.deepcopy(likelihood)
    # The same attributes under a class with more methods: parameters, priors, constraints and names all stay.
    converted = ours.__new__(ours)
    converted.__dict__.update(copy.deepcopy(likelihood).__dict__)
    return converted


def as_likelihood(module: Any) -> Any:
    """The likelihood's evaluation interface: itself if it is ours, else an adapter around its ``forward``."""
    return module if isinstance(module, LogLikelihood) else Foreign(module)


def count_latents(module: Any) -> int:
    """K, the number of latent functions: ours say ``num_latents``, gpytorch's ``num_features``."""
    return int(getattr(module, "num_latents", getattr(module, "num_features", 1)))


def _forward(f: Tensor, module: Any) -> Any:
    return module.forward(f)


def _stated_support(kind: type) -> Any:
    """Of a class of distributions, "dependent" where it depends on parameters; one's own may state none, as torch's base class."""
    support = getattr(kind, "support", constraints.dependent)
    return constraints.dependent if support is torch.distributions.Distribution.support else support


def check_forward(likelihood: nn.Module, targets: Tensor) -> None:
    """Checks that a foreign likelihood factorises and treats C settings as C rows, and that it can give the targets.

    Raises:
        ValueError: ``forward`` does not return a distribution over each element, or mixes settings, or has no such targets.
    """
    if isinstance(likelihood, LogLikelihood):
        return
    name = type(likelihood).__name__
    pure = PureModule(likelihood)
    settings = {}
    example = torch.zeros((), dtype=torch.float64)
    for raw, owner, leaf in parameters_with_owners(likelihood):
        value = getattr(owner, leaf).detach()
        example = value
        settings[raw] = torch.stack([value + 0.1, value + 0.2]).abs()
        settings[raw] = settings[raw] if value.dim() else settings[raw].unsqueeze(-1)
    f = torch.tensor([[-0.3, 0.2, 0.5], [0.4, -0.1, 0.3]]).to(example)
    latents = count_latents(likelihood)
    if latents > 1:
        f = torch.stack([f + 0.1 * k for k in range(latents)], -1)
    described = "(chains, data) = (2, 3)" if latents == 1 else f"(chains, data, latents) = (2, 3, {latents})"

    try:
        together = pure(settings, partial(_forward, f))
        shape = tuple(together.batch_shape)
    except Exception as error:  # whatever a user's likelihood may raise
        raise ValueError(
            f"{name}.forward failed on f of shape {described}: {error}. Expected it to return a torch distribution "
            f"over each element, with parameters of shape (chains, 1); subclass torchgpmc.likelihoods.Factorised to say more."
        ) from error
    if shape != (2, 3):
        raise ValueError(
            f"{name}.forward gives a distribution of batch shape {shape} for f of shape {described}. "
            f"Expected (2, 3): one distribution for each observation."
        )
    # Where the support depends on parameters, targets outside it have density zero at some of them.
    if not (constraints.is_dependent(_stated_support(type(together))) or together.event_shape):
        distribution, support = type(together).__name__, together.support
        require_targets(
            support.check(targets), targets, f"{support}, the support of {name}'s {distribution}", "Use another likelihood."
        )
    targets = draw(together, make_generator(0, f.device))
    check_same_at_own_values(f"the likelihood ({name})", likelihood, lambda part: part.forward(f).log_prob(targets))
    for row in range(2):
        only = slice(row, row + 1)
        setting = {key: value[only] for key, value in settings.items()}
        alone = pure(setting, partial(_forward, f[only]))
        if not torch.allclose(alone.log_prob(targets[only]), together.log_prob(targets)[only], equal_nan=True):
            raise ValueError(f"{name} mixes hyperparameter settings. Expected parameters of shape (chains, 1) to act row by row.")
    _check_rows_apart(name, pure, settings, f, targets)
    _check_slopes(name, pure, settings, f, targets)


def _check_rows_apart(name: str, pure: PureModule, settings: dict[str, Tensor], f: Tensor, targets: Tensor) -> None:
    """Raises a ``ValueError`` where what one datum is depends on f at another."""
    moved = f.clone()
    moved[:, 0] += 0.7
    before, after = (pure(settings, partial(_forward, g)).log_prob(targets)[:, 1:] for g in (f, moved))
    if not torch.allclose(before, after, equal_nan=True):
        raise ValueError(
            f"{name} mixes observations: the density of one changes with f at another. Expected forward(f) to give each its own; "
            f"for a likelihood that does not factorise subclass torchgpmc.likelihoods.LogLikelihood."
        )


def _check_slopes(name: str, pure: PureModule, settings: dict[str, Tensor], f: Tensor, targets: Tensor) -> None:
    """Raises a ``ValueError`` where autograd does not see f, and warns where it does not see a parameter."""
    with torch.enable_grad():
        leaves = {key: value.detach().clone().requires_grad_() for key, value in {**settings, "f": f}.items()}
        at = leaves.pop("f")
        total = pure(leaves, partial(_forward, at)).log_prob(targets).sum()
    if not total.requires_grad:
        found: list[Tensor | None] = [None]
    else:
        found = list(torch.autograd.grad(total, [at, *leaves.values()], allow_unused=True))
    if found[0] is None:
        raise ValueError(
            f"the log_prob of {name} has no derivative in f. Expected torch operations throughout, without numpy, .detach() or "
            f"no_grad(); or subclass torchgpmc.likelihoods.Factorised with is_smooth = False, for methods without gradients."
        )
    unseen = [public_name(key) for key, slope in zip(leaves, found[1:], strict=True) if slope is None]
    if unseen:
        warn_unseen(f"the likelihood ({name})", unseen)
