"""[theta, v] in blocks: the joint density hands out p(f | theta), with which latents move without a factorisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import AutogradDensity, mask_failures
from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import LatentsAt, likelihood_parameters, likelihood_values
from torchgpmc.models.reverse import has_slope
from torchgpmc.numerics.linalg import times_blocks
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.overriding import is_newest, keeps_methods, methods_of
from torchgpmc.samplers.sweep import Conditional
from torchgpmc.trees import take
from torchgpmc.types import LogDensity


class KeptPrior(NamedTuple):
    """What depends on theta alone; see :func:`kept_prior`."""

    log_prior: Tensor  # (C,), of theta; NaN where the covariance could not be factorised
    at: LatentsAt  # f at the data
    likelihood: Any  # what its parameters decide of the likelihood of f; None if that is little


def kept_prior(model: GPModel, at: LatentsAt, log_prior: Tensor, likelihood: Any = None) -> KeptPrior:
    """From f at the data and log p(theta) ``(C,)``; what parameters decide of the likelihood is worked out unless it is at hand."""
    decided = decided_by_parameters(model, at.prior.values) if likelihood is None else likelihood
    return KeptPrior(torch.where(at.prior.ok, log_prior, torch.nan), at, decided)


def decided_by_parameters(model: GPModel, values: dict[str, dict[str, Tensor]]) -> Any:
    """Of a likelihood of f at constrained values; ``None`` where there is little, or a subclass has a density of its own."""
    if not sees_f_alone(model):
        return None

    def worked_out(likelihood: Any) -> Any:
        kind: Any = type(likelihood)
        return likelihood.at_these_parameters() if is_newest(kind, "at_these_parameters", _DENSITIES) else None

    return model.likelihood_function(likelihood_parameters(values["likelihood"]), worked_out)


class JointWithPrior:
    """The density of ``joint`` (without sites), whose payload is p(f | theta).

    Args:
        joint: the density.
        likelihood: as in :class:`KeptPrior`, where the likelihood's parameters stay as they are.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> joint = JointWithPrior(tg.joint_log_density(model))
        >>> value, payload = joint.draw(torch.zeros(3, 9).double(), torch.Generator())  # one hyperparameter, eight latents
        >>> joint.value_at(torch.ones(3, 9).double(), payload).shape  # with other latents; K is not factorised again
        torch.Size([3])
    """

    def __init__(self, joint: JointLogDensity, likelihood: Any = None):
        self.joint = joint
        self.likelihood = likelihood

    def __call__(self, position: Tensor) -> Tensor:
        return self.joint(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.joint.value_and_grad(position)

    def select(self, rows: Tensor) -> JointWithPrior:
        return JointWithPrior(self.joint.select(rows), take(self.likelihood, rows))

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, KeptPrior]:
        """The log density ``(C,)``, and what it took of theta."""
        model = self.joint.model
        with torch.no_grad():
            hyperparameters, log_prior = model.layout.raw_values_and_log_prior(position[:, : model.layout.size])
            kept = kept_prior(model, model.at_data(hyperparameters), log_prior, self.likelihood)
        return self.value_at(position, kept), kept

    def value_at(self, position: Tensor, kept: KeptPrior) -> Tensor:
        """The log density ``(C,)`` at ``position`` whose theta ``kept`` is of."""
        return LatentsGivenTheta(self.joint, kept)(position[:, self.joint.model.layout.size :])

    def latents(self, position: Tensor, kept: KeptPrior) -> Conditional:
        """Of a block of all latents."""
        return Conditional(LatentsGivenTheta(self.joint, kept))

    def latents_likelihood(self, position: Tensor, kept: KeptPrior) -> Conditional:
        """Of a block of all latents, for kernels with a standard normal prior of their own."""
        density = LatentsGivenTheta(self.joint, kept, with_prior=False)
        return Conditional(density, rest=lambda v: kept.log_prior + log_standard_normal(v))


_OF_F_ALONE = methods_of(GPModel, ("log_likelihood", "latents"))
_DENSITIES = "log_prob", "log_prob_by_part", "expected_response"


def _slope_of(likelihood: Any) -> Any:
    """``log_prob_and_slope_at``: by autograd where a subclass has redefined what it is the slope of."""
    kind: Any = type(likelihood)
    written = is_newest(kind, "log_prob_and_slope_at", ("at_these_parameters", "log_prob_at", "log_prob_by_part_at"))
    return kind.log_prob_and_slope_at if written else LogLikelihood.log_prob_and_slope_at


def sees_f_alone(model: GPModel) -> bool:
    """Whether the model's log likelihood is that of f at its latent inputs, and no way of its own."""
    return keeps_methods(model, _OF_F_ALONE)


class LatentsGivenTheta(AutogradDensity):
    """The joint log density as a function of v ``(C, V)``; without its priors the log likelihood.

    ``kept`` is of C thetas, or of one for all chains.
    """

    def __init__(self, joint: JointLogDensity, kept: KeptPrior, *, with_prior: bool = True):
        self.joint = joint
        self.kept = kept
        self.with_prior = with_prior
        super().__init__(self._evaluate)

    def _evaluate(self, v: Tensor) -> Tensor:
        model = self.joint.model
        if sees_f_alone(model):
            value = self._log_likelihood_of_f(model.latents(self.kept.at.prior, v))
        else:
            value = model.log_likelihood(self.kept.at, v, self.joint.targets)
        if not self.with_prior:
            return torch.where(self.kept.at.prior.ok, value, torch.nan)
        return self.kept.log_prior + log_standard_normal(v) + value

    def _log_likelihood_of_f(self, f: Tensor) -> Tensor:
        model, targets, decided = self.joint.model, self.joint.targets, self.kept.likelihood
        if decided is None:
            return model.log_likelihood_of_f(self.kept.at.prior, f, targets)
        value: Tensor = model.likelihood_function({}, lambda likelihood: likelihood.log_prob_at(decided, f, targets.values))
        return value

    def value_and_grad(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """By the chain rule through f where the likelihood has its slope."""
        model, prior = self.joint.model, self.kept.at.prior
        with torch.no_grad():
            found = self._value_and_slope_of_f(model.latents(prior, v)) if sees_f_alone(model) else None
            if found is None:
                return super().value_and_grad(v)
            value, slope = found
            gradient = times_blocks(slope, prior.factor).flatten(1)
            if self.with_prior:
                value, gradient = self.kept.log_prior + log_standard_normal(v) + value, gradient - v
            else:
                value = torch.where(prior.ok, value, torch.nan)
            return mask_failures(value, gradient)

    def _value_and_slope_of_f(self, f: Tensor) -> tuple[Tensor, Tensor] | None:
        """The log likelihood ``(C,)`` and its slope ``(C, K, M)``."""
        model, y, decided = self.joint.model, self.joint.targets.values, self.kept.likelihood
        found: tuple[Tensor, Tensor] | None = None
        if decided is not None:
            found = model.likelihood_function({}, lambda likelihood: _slope_of(likelihood)(likelihood, decided, f, y))
        elif has_slope(model.likelihood):
            values = likelihood_values(self.kept.at.prior)
            found = model.likelihood_function(values, lambda likelihood: likelihood.log_prob_and_slope(f, y))
        if found is None:
            return None
        value, slope = found
        return value, slope.unsqueeze(1) if model.num_latents == 1 else slope.mT

    @property
    def sees_f_alone(self) -> bool:
        """Whether f is all that the value takes of v."""
        return sees_f_alone(self.joint.model) and not self.with_prior

    def image(self, vectors: Tensor) -> Tensor:
        """f less its mean, of vectors v ``(C, B, V)``; v itself where the value takes more than f."""
        return times_blocks(vectors, self.kept.at.prior.factor.mT) if self.sees_f_alone else vectors

    def at_deviation(self, deviation: Tensor) -> Tensor:
        """The log likelihood ``(C,)`` of f less its mean ``(C, K, M)``, of a model that sees f alone."""
        return self._log_likelihood_of_f(self.joint.model.about_mean(self.kept.at.prior, deviation))

    def value_and_slope_at_deviation(self, deviation: Tensor) -> tuple[Tensor, Tensor] | None:
        """The same and its slope in f ``(C, K, M)``; ``None`` where that is not written out."""
        if not self.sees_f_alone:
            return None
        return self._value_and_slope_of_f(self.joint.model.about_mean(self.kept.at.prior, deviation))

    def draw(self, v: Tensor, generator: torch.Generator) -> tuple[Tensor, tuple[()]]:
        """The value, and no payload."""
        return self(v), ()

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, tuple[()]]:
        """The same from :meth:`image`, without a product with L."""
        if not self.sees_f_alone:
            return self.draw(image, generator)
        with torch.no_grad():
            likelihood = self.at_deviation(image.view(len(image), *self.joint.model.latent_shape))
            value = torch.where(self.kept.at.prior.ok, likelihood, torch.nan)
        return value.nan_to_num_(-torch.inf, -torch.inf, -torch.inf), ()

    def select(self, rows: Tensor) -> LogDensity:
        one_theta = len(self.kept.at.mean) == 1
        kept = self.kept if one_theta else take(self.kept, rows)
        return LatentsGivenTheta(self.joint.select(rows), kept, with_prior=self.with_prior)
