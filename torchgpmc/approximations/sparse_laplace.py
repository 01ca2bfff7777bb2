"""Laplace's approximation of the sparse model's posterior of whitened inducing values, batched over theta."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.likelihoods.slopes import slopes_function
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, triangular_log_determinant

_HALVINGS = 8
_TOLERANCE = 1e-8  # of Newton's decrement


class InducingLaplace(NamedTuple):
    """Gaussian sites at the data for f = m + A'v, and the evidence that they give."""

    precision: Tensor  # (C, N), not negative
    shift: Tensor  # (C, N), precision times the sites' centres
    log_evidence: Tensor  # (C,)
    converged: Tensor  # (C,)


def inducing_laplace(model: GPModel, at: LatentsAt, targets: Targets, max_iterations: int = 50) -> InducingLaplace:
    r"""A normal density at the mode of v under :math:`\sum_n E[\log p(y_n | f_n)] + \log N(v | 0, I)` (Hensman et al. 2015, eq. 7).

    Newton's method with halved steps. E log p(y | f) has E (log p)' as its derivative in the mean of f, and half of E (log p)'' as
    that in the variance (Bonnet's and Price's theorems): both come from the rule of the likelihood's own expectation.

    Args:
        model: with a factorised likelihood and one latent function.
        at: f at the data given v, of C thetas.
        targets: of one data set, or one a theta.
        max_iterations: of Newton's method.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.rand(9, 2), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.SparseGP(x, (x[:, 0] > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:3])
        >>> found = inducing_laplace(model, model.at(model.prior(torch.zeros(4, 1, dtype=torch.float64))), model.targets)
        >>> tuple(found.precision.shape), bool(found.converged.all())
        ((4, 9), True)
    """
    values, projection, variance, y = likelihood_values(at.prior), at.projection, at.variance, targets.values

    def latents(v: Tensor) -> Tensor:
        return at.mean + (v.unsqueeze(-2) @ projection).squeeze(-2)

    def objective(v: Tensor) -> Tensor:
        expected = model.likelihood_function(values, lambda likelihood: likelihood.expected_log_likelihood(latents(v), variance, y))
        return torch.nan_to_num(expected.sum(-1) - 0.5 * v.square().sum(-1), nan=-torch.inf)

    def slopes(f: Tensor) -> tuple[Tensor, Tensor]:
        """Expectations of the first and second derivative of log p."""
        found = model.likelihood_function(values, lambda likelihood: slopes_function(likelihood)(f, variance.expand_as(f), y))
        return found.mean, 2 * found.variance

    v = projection.new_zeros(projection.shape[:2])
    value = objective(v)
    converged = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(max_iterations):
        f = latents(v)
        first, second = slopes(f)
        precision = (-second).clamp_min(0.0)
        root = _root(projection, precision)
        gradient = (first.unsqueeze(-2) @ projection.mT).squeeze(-2) - v
        step = torch.cholesky_solve(gradient.unsqueeze(-1), root).squeeze(-1)
        converged = (step * gradient).sum(-1) < _TOLERANCE
        if bool(converged.all()):
            break
        size = torch.ones_like(value)
        for _ in range(_HALVINGS):
            moved = v + size.unsqueeze(-1) * step
            better = objective(moved) >= value
            if bool(better.all()):
                break
            size = torch.where(better, size, size / 2)
        moved = v + size.unsqueeze(-1) * step
        moved_value = objective(moved)
        better = moved_value >= value
        if not bool(better.any()):
            break
        v, value = torch.where(better.unsqueeze(-1), moved, v), torch.where(better, moved_value, value)
    f = latents(v)
    first, second = slopes(f)
    precision = (-second).clamp_min(0.0)
    log_evidence = value - triangular_log_determinant(_root(projection, precision))
    return InducingLaplace(precision, first + precision * f, log_evidence, converged & torch.isfinite(log_evidence))


def _root(projection: Tensor, precision: Tensor) -> Tensor:
    """Lower factor of I + A W A'."""
    inner = (projection * precision.unsqueeze(-2)) @ projection.mT
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return cholesky(inner).factor
