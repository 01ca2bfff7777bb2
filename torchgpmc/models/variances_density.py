"""The posterior density of hyperparameters and of a noise variance for each datum, the latents integrated out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.closed_form import BoundClosedForm
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures
from torchgpmc.models.exact_evidence import evidence_given_noise, has_the_kernels_prior, log_evidence_given_noise
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_parameters
from torchgpmc.models.reverse import Part, by_autograd
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, times_matrix
from torchgpmc.numerics.random import normal_like
from torchgpmc.overriding import is_newest

_DENSITIES = ("log_prob", "pointwise_log_prob", "forward")
_WHITE = "white"  # beside the likelihood's own parameters
# Rounding, see GivenNoise, from where gradients in single precision are off by a third of what a deviation of theta or w is worth,
# and more. Near the mode of 200 to 500 data, one to eight columns, it is 1e-3 to 0.03; of 500 x 2 and an eighth of the noise 0.15.
_SEEN = 0.06


class VariancesLogDensity(AutogradDensity):
    r"""The posterior density of position = [theta, w] where noise is a mixture of normals, s_n(w_n, theta) the variance of one.

    .. math:: \log p(\theta) + \log |dx / d\theta| + \log p(w | \theta) + \log N(y | m, K + \mathrm{diag}(s(w, \theta)))

    Given the variances noise is normal, and the latents integrate out exactly. Unlike p(f | y, theta) under such noise, which has a
    mode for every guess of which data are outliers, w is nearly what it is under its prior: of mean zero and deviation one.

    Args:
        model: a :class:`GP` whose likelihood ``mixes_variances``.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.
    """

    def __init__(self, model: GPModel, targets: Tensor | Targets | None = None):
        self.model = model
        self.targets = model.as_targets(targets)
        super().__init__(self._value)
        keep_freed_memory()

    def _value(self, position: Tensor) -> Tensor:
        theta, white = self.split(position.detach())
        log_density: Tensor = white  # replaced below

        def noise_at(values: dict[str, Tensor]) -> Tensor:
            nonlocal log_density
            both = self._variances_and_log_density({**values, _WHITE: white})
            log_density = both[:, -1]
            return both[:, :-1]

        return log_evidence_given_noise(self.model, theta, self.targets, noise_at) + log_density

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities ``(C,)`` and gradients ``(C, P + N)``."""
        return self.value_and_grad_with_rounding(position)[:2]

    def value_and_grad_with_rounding(self, position: Tensor, most: float = math.inf) -> tuple[Tensor, Tensor, Tensor]:
        """And by which rounding may show in the algebra ``(C,)``; infinite where it failed, or is beyond ``most`` in all rows."""
        theta, white = self.split(position.detach())
        log_density: Tensor = white  # replaced below

        def noise_at(values: dict[str, Tensor]) -> Part:
            nonlocal log_density
            both = by_autograd(
                lambda parameters: self._variances_and_log_density(dict(parameters)),
                {**values, _WHITE: white},
                [*self.model.layout.sampled_names("likelihood"), _WHITE],
            )
            variances, log_density = both.value[:, :-1], both.value[:, -1]
            return Part(variances, lambda slope: both.slopes(torch.cat([slope, torch.ones_like(slope[:, :1])], -1)))

        found = evidence_given_noise(self.model, theta, self.targets, noise_at, most)
        value, gradient = mask_failures(found.value + log_density, torch.cat([found.gradient, found.of_noise[_WHITE]], -1))
        return value, gradient, torch.where(torch.isfinite(value), found.rounding, torch.inf)

    def split(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """theta ``(C, P)`` and w ``(C, N)``."""
        theta, white = position.tensor_split([self.model.layout.size], -1)
        return theta, white

    def _variances_and_log_density(self, parameters: dict[str, Tensor]) -> Tensor:
        white = parameters.pop(_WHITE)
        variances, log_density = self.model.likelihood_function(
            likelihood_parameters(parameters), lambda likelihood: likelihood.noise_variances(white)
        )
        return torch.cat([variances, log_density.unsqueeze(-1)], -1)

    def draw_latents(self, position: Tensor, generator: torch.Generator) -> Tensor:
        """v ``(C, N)`` given y, theta and the variances."""
        theta, white = self.split(position)
        with torch.no_grad():
            return self.draw_given(self.model.prior(theta), white, generator)

    def draw_given(self, prior: LatentPrior, white: Tensor, generator: torch.Generator) -> Tensor:
        r"""v ``(C, N)`` given y, theta and the variances, by a draw of f and y from the prior at theta (Matheron's rule).

        .. math:: v = v_0 + L^T (L L^T + S)^{-1} (y - m - L v_0 - S^{1/2} e), \quad v_0, e \sim N(0, I)
        """
        variances = self._variances_and_log_density({**prior.values["likelihood"], _WHITE: white})[:, :-1]
        root = prior.factor
        v, noise = normal_like(white, generator), normal_like(white, generator)
        residual = self.targets.values - prior.mean - times_matrix(v, root.mT) - variances.sqrt() * noise
        factor, _ = cholesky(prior.covariance + torch.diag_embed(variances))
        return v + times_matrix(torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1), root)

    def select(self, rows: Tensor) -> VariancesLogDensity:
        return VariancesLogDensity(self.model, self.targets.select(rows)) if self.targets.one_a_chain else self


class RoughVariancesLogDensity(NamedTuple):
    """The same with algebra in single precision, but for rows where rounding would show: for trajectories tested at their ends.

    A row's choice hangs on that row alone, so that trajectories stay reversible.

    Args:
        exact: in double precision.
        quick: the same of inputs in single precision.
    """

    exact: VariancesLogDensity
    quick: VariancesLogDensity

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities ``(C,)`` and gradients ``(C, P + N)``."""
        value, gradient, rounding = self.quick.value_and_grad_with_rounding(position, _SEEN)
        again = (rounding > _SEEN).nonzero().squeeze(-1)
        if len(again):
            exact = self.exact.select(again).value_and_grad(position[again])
            value, gradient = value.index_copy(0, again, exact[0]), gradient.index_copy(0, again, exact[1])
        return value, gradient

    def select(self, rows: Tensor) -> RoughVariancesLogDensity:
        return RoughVariancesLogDensity(self.exact.select(rows), self.quick.select(rows))


def rough_variances(exact: VariancesLogDensity) -> RoughVariancesLogDensity | VariancesLogDensity:
    """That of a density; itself where it is in single precision, or the kernel goes by autograd, which takes what algebra does."""
    model = exact.model
    if model.train_x.dtype != torch.float64 or not isinstance(model.bindings.among_latents, BoundClosedForm):
        return exact
    return RoughVariancesLogDensity(exact, VariancesLogDensity(model.with_buffers(train_x=model.train_x.float()), exact.targets))


def mixes_variances(model: GPModel) -> bool:
    """Whether f at the data is normal given y, theta and a noise variance for each datum, under the kernel's own prior."""
    likelihood = as_likelihood(model.likelihood)
    kind: Any = type(likelihood)
    knows = likelihood.mixes_variances and is_newest(kind, "noise_variances", _DENSITIES)
    return knows and model.has_latents_at_data and has_the_kernels_prior(model)


def check_mixes_variances(model: GPModel) -> None:
    """Raises a ``ValueError`` where that is not so."""
    if not mixes_variances(model):
        raise ValueError(
            f"noise_variances=True integrates out the latents given a noise variance for each datum, and this is a "
            f"{type(model).__name__} with {type(model.likelihood).__name__}. Expected a GP with Student-t or Laplace noise "
            f"(torchgpmc.likelihoods.StudentT, LaplaceNoise), or noise_variances=False."
        )
