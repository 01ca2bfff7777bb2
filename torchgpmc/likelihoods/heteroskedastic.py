"""Regression with noise whose size depends on the input."""

from __future__ import annotations

import math

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Normal

from torchgpmc.checks import check_positive
from torchgpmc.likelihoods.likelihood import Curvature, Factorised, Moments
from torchgpmc.numerics import quadrature
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import LOG_SQRT_2PI


class HeteroskedasticGaussian(Factorised, Likelihood):
    r"""y = f_1 + noise of standard deviation :math:`scale \cdot \exp(f_2)`: two latent functions, the mean and the log deviation.

    Both have the model's kernel and mean; f_2 varies about the logarithm of ``scale`` where that mean is zero.

    Args:
        scale: standard deviation of the noise where f_2 is 0.

    Raises:
        ValueError: a scale that is not positive.

    Example:
        >>> import torch
        >>> HeteroskedasticGaussian().log_prob(torch.zeros(1, 2, 2), torch.zeros(2))
        tensor([-1.8379])
    """

    has_moments_by_formula = True

    num_latents = 2

    def __init__(self, scale: float = 1.0):
        super().__init__()
        check_positive("scale", scale)
        self.scale = float(scale)

    def _log_deviation(self, f: Tensor) -> Tensor:
        return f[..., 1] + math.log(self.scale)

    def forward(self, function_samples: Tensor) -> Normal:
        return Normal(function_samples[..., 0], self._log_deviation(function_samples).exp(), validate_args=False)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        log_deviation = self._log_deviation(f)
        return -0.5 * ((targets - f[..., 0]) * (-log_deviation).exp()).square() - log_deviation - LOG_SQRT_2PI

    def curvature(self, f: Tensor, targets: Tensor) -> Curvature:
        """In closed form."""
        inverse = (-self._log_deviation(f)).exp()
        residual = (targets - f[..., 0]) * inverse
        square = residual.square()
        first = torch.stack([residual * inverse, square - 1], -1)
        across = -2 * residual * inverse
        second = torch.stack([torch.stack([-inverse.square(), across], -1), torch.stack([across, -2 * square], -1)], -2)
        return Curvature(self.pointwise_log_prob(f, targets), first, second)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Closed form; mean and variance are ``(..., 2)``, the latents independent."""
        log_deviation = self._log_deviation(mean)
        square = (targets - mean[..., 0]).square() + variance[..., 0]
        return -0.5 * square * torch.exp(2 * (variance[..., 1] - log_deviation)) - log_deviation - LOG_SQRT_2PI

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """To 1e-6: f_1 integrates out in closed form, f_2 by :func:`quadrature.log_integral`."""
        gap, spread = targets - mean[..., 0], variance[..., 0]

        def log_density(log_deviation: Tensor) -> Tensor:
            total = spread + torch.exp(2 * log_deviation)
            return -0.5 * (gap.square() / total + total.log()) - LOG_SQRT_2PI

        # What deviation the datum alone would ask for.
        asked = 0.5 * (gap.square() + torch.finfo(gap.dtype).tiny).log()
        return quadrature.log_integral(log_density, self._log_deviation(mean), variance[..., 1], (asked, torch.ones_like(asked)))

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        noise = torch.exp(2 * (self._log_deviation(mean) + variance[..., 1]))
        return Moments(mean[..., 0], variance[..., 0] + noise)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        deviation = self._log_deviation(f).exp()
        return f[..., 0] + deviation * normal_like(deviation, generator)
