"""The exact posterior of f under Gaussian noise, in the form that the approximations share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.gaussian_form import (
    Approximation,
    GaussianApproximation,
    LatentProblem,
    needs_gradient,
    problem_of,
    with_gradient,
    without_graph,
)
from torchgpmc.approximations.site_algebra import apply_r, dense_r, factor_of_b
from torchgpmc.models.exact_evidence import evidence_and_grad_by_parts, low_rank_evidence_and_grad
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import times_vector, triangular_log_determinant
from torchgpmc.numerics.special import LOG_2PI


@dataclass(frozen=True)
class Conjugate(Approximation):
    r"""p(f | y, theta) and p(y | theta) under Gaussian noise, exact, from one factorisation.

    .. math:: p(y | \theta) = N(y | m, K + \sigma^2 I), \quad p(f | y, \theta) = N(m + K \alpha, (K^{-1} + \sigma^{-2} I)^{-1})

    with :math:`\alpha = (K + \sigma^2 I)^{-1} (y - m)` (Rasmussen & Williams 2006, section 2.2 and equation 2.30), for a full GP.
    Where it serves, chains under a ``marginal`` have this one, whichever was asked for.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> kernel, likelihood = RBFKernel().requires_grad_(False), GaussianLikelihood().requires_grad_(False)
        >>> likelihood.noise = 1.0
        >>> model = tg.GP(torch.tensor([0.0, 100.0]), torch.tensor([2.0, -4.0]), kernel, likelihood)
        >>> found = tg.approximations.Conjugate().evidence(model, model.prior(torch.zeros(1, 0)))
        >>> found.mean.round(decimals=3)  # two data that know nothing of one another, of as much noise as signal: half of each
        tensor([[ 1., -2.]], dtype=torch.float64)
        >>> y = torch.distributions.Normal(0.0, 2.0**0.5)
        >>> (found.log_evidence - y.log_prob(model.train_y).sum()).abs() < 1e-4
        tensor([True])
    """

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> GaussianApproximation:
        """The posterior; ``start`` is not needed."""
        with torch.no_grad():
            return _posterior(without_graph(problem_of(model, prior, targets)))

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> GaussianApproximation:
        """The posterior with a differentiable ``log_evidence``."""
        problem = problem_of(model, prior, targets)
        with torch.no_grad():
            found = _posterior(without_graph(problem))
        if not needs_gradient(problem):
            return found
        with torch.no_grad():
            r = dense_r(found.factor, found.precision.sqrt())
            covariance = 0.5 * (found.alpha.unsqueeze(-1) * found.alpha.unsqueeze(-2) - r)
            slope = covariance.diagonal(dim1=-2, dim2=-1)
        noise = _noise(problem).expand_as(slope)
        likelihood = (slope * noise).sum(-1)
        return found._replace(log_evidence=with_gradient(found.log_evidence, problem, covariance, found.alpha, likelihood))

    def value_and_grad(self, model: GPModel, theta: Tensor, targets: Targets) -> tuple[Tensor, Tensor] | None:
        """Written out, for the covariance of the kernel itself; see :mod:`torchgpmc.models.exact_evidence`."""
        by_rank = low_rank_evidence_and_grad(model, theta, targets)
        return evidence_and_grad_by_parts(model, theta, targets) if by_rank is None else by_rank


def has_normal_latents(model: GPModel) -> bool:
    """Whether f at the data is normal given y and theta, so that this serves in place of what approximates."""
    likelihood = as_likelihood(model.likelihood)
    return model.has_latents_at_data and likelihood.has_normal_sites and likelihood.is_f_plus_noise


def _noise(problem: LatentProblem) -> Tensor:
    """Noise variance ``(C, 1)``."""
    return problem.model.likelihood_function(problem.values, lambda likelihood: likelihood.noise)


def _posterior(problem: LatentProblem) -> GaussianApproximation:
    precision = (1 / _noise(problem)).expand_as(problem.mean)
    root = precision.sqrt()
    factor, ok = factor_of_b(problem.covariance, root)
    residual = (problem.targets.values - problem.mean).expand_as(problem.mean)
    alpha = apply_r(factor, root, residual.unsqueeze(-1)).squeeze(-1)
    log_determinant = 2 * triangular_log_determinant(factor) - precision.log().sum(-1)
    log_evidence = -0.5 * ((residual * alpha).sum(-1) + log_determinant + problem.mean.shape[-1] * LOG_2PI)
    centred = times_vector(problem.covariance, alpha)
    count = torch.ones_like(log_evidence, dtype=torch.long)
    return GaussianApproximation(problem.mean + centred, alpha, precision, factor, log_evidence, ok, count, alpha)
