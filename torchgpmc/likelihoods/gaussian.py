"""Regression with Gaussian noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor
from torch.distributions import Normal

from torchgpmc.likelihoods.likelihood import Derivatives, Factorised, Moments, TiltedMoments
from torchgpmc.likelihoods.slopes import ExpectedSlopes, through_parameters
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import LOG_SQRT_2PI


def _log_normal(residual: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (residual.square() / variance + variance.log()) - LOG_SQRT_2PI


class GaussianFormulas(Factorised):
    """Closed forms for y = f + noise, noise ~ N(0, ``noise``): a variance for all data ``(C, 1)``, or one a datum."""

    is_log_concave = True
    has_normal_sites = True
    is_f_plus_noise = True
    predicts_quickly = True
    noise: Tensor

    def forward(self, function_samples: Tensor) -> Normal:  # type: ignore[override]  # gpytorch's has unused extra arguments
        return Normal(function_samples, self.noise.sqrt())

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return _log_normal(targets - f, self.noise)

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        f, residual = f.detach(), targets - f.detach()
        precision = (1 / self.noise).expand_as(residual)
        return Derivatives(_log_normal(residual, self.noise), residual * precision, -precision, torch.zeros_like(f))

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        gain = variance / (variance + self.noise)
        return TiltedMoments(_log_normal(targets - mean, variance + self.noise), mean + gain * (targets - mean), gain * self.noise)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return _log_normal(targets - mean, self.noise) - 0.5 * variance / self.noise

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        noise = self.noise
        precision = 1 / noise.detach()
        residual = targets - mean
        square = (residual.square() + variance) * precision
        value = (-0.5 * (square - precision.log()) - LOG_SQRT_2PI).sum(-1)
        noise_slope = 0.5 * (square - 1) * precision
        slopes = through_parameters([noise], [noise_slope], parameters)
        return ExpectedSlopes(value, residual * precision, (-0.5 * precision).expand_as(mean), slopes)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return _log_normal(targets - mean, variance + self.noise)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(mean, variance + self.noise)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f + self.noise.sqrt() * normal_like(f, generator)


class Gaussian(GaussianFormulas, GaussianLikelihood):
    """y = f + noise, noise ~ N(0, ``noise``); gpytorch's ``GaussianLikelihood`` with closed forms at C settings.

    Takes gpytorch's arguments, among them ``noise_prior`` and ``noise_constraint``. ``noise`` is a variance.

    Example:
        >>> import torch
        >>> likelihood = Gaussian()
        >>> likelihood.noise = 1.0
        >>> likelihood.log_prob(torch.zeros(1, 2), torch.zeros(2)).detach()
        tensor([-1.8379])
    """
