"""From a trained gpytorch ``ApproximateGP`` to a model's parts and q(v)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from torchgpmc.approximations.normal_latents import GaussianLatents
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix, solve_lower

_COMPARED = 5  # inputs at which the two priors are held against one another
_REMEDY = "Expected a kernel and inducing points that all latent functions share; use tg.initialize on a SparseGP instead."


class VariationalParts(NamedTuple):
    """What a gpytorch model is made of."""

    kernel: Kernel
    mean: Mean
    inducing_points: Tensor  # (M, D)
    jitter: float
    location: Tensor  # (K, M), of q(u), or of gpytorch's whitened latents
    covariance: Tensor  # (K, M, M)
    whitened: bool

    def latents(self, model: GPModel) -> GaussianLatents:
        """q(v) of ``model``, whose v = L^-1 (u - m) has a Cholesky factor L with a jitter of its own."""
        theta = model.layout.present(model)
        prior = model.prior(theta)
        location, covariance = (part.to(prior.factor) for part in (self.location, self.covariance))
        root = torch.linalg.cholesky(covariance)
        factor = prior.factor
        if not self.whitened:
            location, root = location - prior.mean, solve_lower(factor, root)
        elif model.jitter == self.jitter:
            return GaussianLatents(location[None].detach(), root[None].detach())
        else:
            change = self.jitter - model.jitter
            theirs = torch.linalg.cholesky(prior.covariance + change * identity_matrix(factor.shape[-1], factor))
            turn = solve_lower(factor, theirs)
            return GaussianLatents((location @ turn[0].mT)[None].detach(), (turn @ root)[None].detach())
        return GaussianLatents(solve_lower(factor, location.mT).mT.detach().view(1, *location.shape), root[None].detach())


def convert_variational(svgp: ApproximateGP) -> VariationalParts:
    """The parts of a trained gpytorch model.

    Raises:
        TypeError: not an ``ApproximateGP``.
        ValueError: a model that has no counterpart here.
    """
    if not isinstance(svgp, ApproximateGP):
        raise TypeError(f"svgp is {type(svgp).__name__}. Expected a trained gpytorch.models.ApproximateGP.")
    strategy: Any = svgp.variational_strategy
    if type(strategy) is IndependentMultitaskVariationalStrategy:
        strategy = strategy.base_variational_strategy
    if type(strategy) not in (VariationalStrategy, UnwhitenedVariationalStrategy):
        raise ValueError(
            f"{type(strategy).__name__} has no counterpart here. Expected VariationalStrategy or UnwhitenedVariationalStrategy, "
            f"for several latent functions inside IndependentMultitaskVariationalStrategy."
        )
    kernel, mean, points = _prior_of(svgp, strategy)
    distribution = strategy.variational_distribution
    if not isinstance(distribution, MultivariateNormal):
        raise ValueError(
            f"{type(strategy._variational_distribution).__name__} has no spread, which coordinates need. Expected a normal "
            f"distribution, such as CholeskyVariationalDistribution."
        )
    if len(distribution.batch_shape) > 1:
        raise ValueError(f"q(u) has batch shape {tuple(distribution.batch_shape)}. Expected one dimension at most, the latents.")
    location = distribution.mean.detach().double().reshape(-1, len(points))
    covariance = distribution.covariance_matrix.detach().double().reshape(-1, len(points), len(points))
    whitened = type(strategy) is VariationalStrategy
    return VariationalParts(kernel, mean, points, float(strategy.jitter_val), location, covariance, whitened)


def _prior_of(svgp: ApproximateGP, strategy: Any) -> tuple[Kernel, Mean, Tensor]:
    """Kernel, mean and inducing points ``(M, D)``."""
    kernel, mean = getattr(svgp, "covar_module", None), getattr(svgp, "mean_module", None)
    if not isinstance(kernel, Kernel) or not isinstance(mean, Mean):
        raise ValueError(
            f"{type(svgp).__name__} has no covar_module and mean_module to take its prior from. Expected its forward to be "
            f"MultivariateNormal(mean_module(x), covar_module(x))."
        )
    if kernel.batch_shape != torch.Size([]):
        raise ValueError(f"covar_module has batch shape {tuple(kernel.batch_shape)}: a kernel for each latent function. {_REMEDY}")
    points = strategy.inducing_points.detach()
    if points.dim() > 2 and bool((points == points.flatten(0, -3)[0]).all()):
        points = points.flatten(0, -3)[0]
    if points.dim() != 2:
        raise ValueError(f"inducing points have shape {tuple(points.shape)}: other ones for each latent function. {_REMEDY}")
    if mean(points).dim() != 1:
        raise ValueError(f"mean_module gives shape {tuple(mean(points).shape)}: a mean for each latent function. {_REMEDY}")
    return kernel, mean, points


def check_forward_is_the_prior(model: Any, converted: GPModel) -> None:
    """A ``forward`` may do more than its parts say, a deep kernel's features for one: the two priors must agree.

    Args:
        model: gpytorch's, exact or approximate.
        converted: of this package, from its mean, kernel and values.

    Raises:
        ValueError: they do not.
    """
    x = converted.train_x[:_COMPARED]
    parameter = next(model.parameters())
    with torch.no_grad():
        theirs = model.forward(x.to(parameter))
        values = converted.layout.raw_values(converted.layout.present(converted)).by_module
        mean = converted.mean_function(values["mean"], x, 1)[0]
        covariance = converted.covariance.bind(x, x)(values["kernel"])[0]
        same = theirs.mean.shape == mean.shape and bool(
            torch.allclose(theirs.mean.to(mean), mean, rtol=1e-3, atol=1e-4)
            and torch.allclose(theirs.covariance_matrix.to(mean), covariance, rtol=1e-3, atol=1e-4)
        )
    if not same:
        raise ValueError(
            f"the prior that {type(model).__name__}.forward gives is not that of its mean_module and covar_module. Expected "
            f"MultivariateNormal(mean_module(x), covar_module(x)). Features of a deep kernel can be held fixed: "
            f"torchgpmc.GPRegression(features(x), y, kernel, likelihood), or a SparseGP of them."
        )
