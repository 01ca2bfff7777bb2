"""Unbiased estimates of p(y | theta) by annealed importance sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import Approximation
from torchgpmc.approximations.gaussian_form import check_latents_at_data, covariance_factor, problem_of, without_graph
from torchgpmc.checks import check_count
from torchgpmc.diagnostics.weights import pareto_khat
from torchgpmc.evidence.estimators import importance
from torchgpmc.evidence.gaussian_draws import log_likelihoods, or_prior, quadratic, stacked_mean
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import triangular_log_determinant
from torchgpmc.numerics.random import normal_like
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.types import LogEstimate


@dataclass(frozen=True, eq=False)
class AnnealedEstimator:
    r"""Annealed importance sampling from a Gaussian density q to the posterior (Neal 2001; Filippone 2013).

    Densities :math:`q(f) w(f)^{\beta_t}`, w = p(y, f | theta) / q(f), with :math:`\beta_t` from 0 to 1. In the coordinates that
    make q standard normal, elliptical slice sampling leaves each invariant and has nothing to tune. Made by :func:`annealed`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> at_once, in_steps = (tg.evidence.annealed(model, num_importance=200, num_temperatures=count) for count in (1, 10))
        >>> bool(in_steps(theta, generator).variance < at_once(theta, generator).variance)  # no step has to bridge all of the gap
        True
    """

    model: GPModel
    approximation: Approximation
    num_importance: int
    num_temperatures: int
    num_steps: int
    targets: Targets

    def __call__(self, theta: Tensor, generator: torch.Generator) -> LogEstimate:
        """Log estimates at ``theta`` ``(C, P)`` with their relative variances."""
        log_weight = self.log_weights(theta, generator)
        value = torch.logsumexp(log_weight, -1) - math.log(self.num_importance)
        relative = (log_weight - value.unsqueeze(-1)).exp()
        count = self.num_importance
        variance = relative.var(-1) / count if count > 1 else torch.full_like(value, torch.nan)
        return LogEstimate(value, variance)

    def pareto_khat(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Pareto k-hat of the weights at each theta ``(C,)``."""
        weights = self.log_weights(theta, generator)
        return torch.tensor([pareto_khat(row) for row in weights.cpu()], dtype=weights.dtype)

    def log_weights(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """The log weights ``(C, num_importance)`` whose mean weight an estimate is."""
        theta = self.model.layout.checked(theta)
        targets = self.targets
        with torch.no_grad():
            prior = self.model.prior(theta)
            found = or_prior(self.model, self.approximation.importance_density(self.model, prior, targets), prior)
            if not as_likelihood(self.model.likelihood).is_log_concave:  # annealing from one mode would seldom see another
                found = found.or_prior(torch.zeros_like(found.converged), stacked_mean(self.model, prior))
            problem = without_graph(problem_of(self.model, prior, targets))
            root = covariance_factor(prior, found)
            alpha = found.alpha.unsqueeze(-1)
            log_determinant = triangular_log_determinant(found.factor)
            constant = -0.5 * (found.alpha * (found.mean - stacked_mean(self.model, prior))).sum(-1) - log_determinant

            def log_ratio(standard: Tensor) -> Tensor:
                delta = standard.view(len(theta), self.num_importance, -1) @ root.mT
                value = log_likelihoods(self.model, problem.values, found.mean.unsqueeze(1) + delta, targets)
                value = value + 0.5 * quadratic(found.precision, delta) - (delta @ alpha).squeeze(-1) + constant.unsqueeze(-1)
                return torch.nan_to_num(value, nan=-torch.inf, neginf=-torch.inf).flatten()

            standard = normal_like(theta.new_empty(len(theta) * self.num_importance, self.model.latent_size), generator)
            total = torch.zeros_like(standard[:, 0])
            value = log_ratio(standard)
            for level in range(1, self.num_temperatures + 1):
                total = total + value / self.num_temperatures
                if level == self.num_temperatures:
                    break
                power = level / self.num_temperatures
                kernel = elliptical_slice(_powered(log_ratio, power))
                state = EllipticalSliceState(standard, power * value)
                for _ in range(self.num_steps):
                    state, _ = kernel.step(state, generator)
                standard, value = state.position, state.log_density / power
        total = total.view(len(theta), self.num_importance)
        return torch.where(prior.ok.unsqueeze(-1), total, -torch.inf)


def _powered(log_ratio: Callable[[Tensor], Tensor], power: float) -> Callable[[Tensor], Tensor]:
    return lambda standard: power * log_ratio(standard)


def annealed(
    model: GPModel,
    approximation: Approximation | None = None,
    *,
    num_importance: int = 16,
    num_temperatures: int = 10,
    num_steps: int = 1,
    targets: Tensor | Targets | None = None,
) -> AnnealedEstimator:
    """An unbiased estimator of p(y | theta) by annealing from a Gaussian approximation to the posterior.

    Where the likelihood is not log-concave it begins at the prior, which has every mode.

    Dearer than :func:`importance` and worth it where the approximation is poor: no single step has to bridge all of the gap.

    Args:
        model: a :class:`GP` with a factorised likelihood.
        approximation: where to begin: :class:`Laplace` (default), or :class:`EP` for one latent function.
        num_importance: latent vectors an estimate.
        num_temperatures: steps from the approximation to the posterior; 1 is plain importance sampling.
        num_steps: elliptical slice steps at each.
        targets: ``(N,)``, or ``(C, N)`` for one data set a row.

    Returns:
        A function ``(theta (C, P), generator) -> LogEstimate``.

    Raises:
        ValueError: a count below 1, or a model that cannot be approximated so; an approximation that has no root of its covariance.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> estimator = tg.evidence.annealed(model, num_importance=4, num_temperatures=3)
        >>> estimator(torch.zeros(3, 1, dtype=torch.float64), torch.Generator().manual_seed(0)).value.shape
        torch.Size([3])
    """
    for name, count in (("num_temperatures", num_temperatures), ("num_steps", num_steps)):
        check_count(name, count)
    check_latents_at_data(model, "evidence.annealed")
    plain = importance(model, approximation, num_importance=num_importance, antithetic=False, targets=targets)
    if plain.approximation.has_no_root:
        raise ValueError(
            f"evidence.annealed cannot begin at {type(approximation).__name__}(), which has no root of its covariance. "
            f"Expected torchgpmc.Laplace() or None."
        )
    return AnnealedEstimator(model, plain.approximation, num_importance, num_temperatures, num_steps, plain.targets)
