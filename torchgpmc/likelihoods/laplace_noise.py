"""Regression with outliers, log-concave."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.likelihoods import LaplaceLikelihood
from torch import Tensor
from torch.distributions import Laplace as LaplaceDistribution

from torchgpmc.likelihoods.likelihood import Derivatives, Factorised, Moments, TiltedMoments
from torchgpmc.numerics.random import normal_like, uniform
from torchgpmc.numerics.special import LOG_2, log_ndtr, normal_hazard

_EULER = 0.5772156649015329  # minus the mean of the logarithm of an exponential number
_DEVIATION = math.pi / math.sqrt(6)  # of it


class _Sides(NamedTuple):
    """Of p(y_n | f) N(f | mean_n, variance_n) the parts where f is above and below y_n."""

    log_above: Tensor  # but for log 2b
    log_below: Tensor
    hazard_above: Tensor  # phi / Phi where each part ends, over the normal's deviation
    hazard_below: Tensor


class LaplaceNoise(Factorised, LaplaceLikelihood):
    r"""y = f + e, e with the density :math:`\exp(-|e| / b) / (2b)`, :math:`b^2` the ``noise``; gpytorch's, at C settings.

    Takes gpytorch's arguments, among them ``noise_prior``. The noise variance is ``2 * noise``. Log p(y | f) is concave and has no
    curvature but a corner at y: engines that draw f one datum after another are right for it, those that go by curvature are not.

    Example:
        >>> import torch
        >>> likelihood = LaplaceNoise()
        >>> likelihood.noise = 4.0
        >>> likelihood.log_prob(torch.zeros(1, 2), torch.tensor([0.0, 2.0])).exp().detach() * 16  # (2b)^2 = 16; exp(-1)
        tensor([0.3679])
    """

    is_log_concave = True
    is_f_plus_noise = True
    predicts_quickly = True
    has_moments_by_formula = True
    mixes_variances = True

    @property
    def _scale(self) -> Tensor:
        return self.noise.sqrt()

    def forward(self, function_samples: Tensor) -> LaplaceDistribution:  # type: ignore[override]  # unused extra arguments
        return LaplaceDistribution(function_samples, self._scale, validate_args=False)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        scale = self._scale
        return -(targets - f).abs() / scale - scale.log() - LOG_2

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        f = f.detach()
        none = torch.zeros_like(f)
        return Derivatives(self.pointwise_log_prob(f, targets), torch.sign(targets - f) / self._scale, none, none)

    def noise_variances(self, white: Tensor) -> tuple[Tensor, Tensor]:
        r"""e is normal with the variance 2 b^2 E, E of the exponential distribution of mean one (Andrews & Mallows 1974).

        .. math:: \log E = \pi w / \sqrt 6 - \gamma

        ``white`` is w: log E less its mean, over its deviation.
        """
        log_share = _DEVIATION * white - _EULER
        share = log_share.exp()
        return 2 * self.noise * share, (log_share - share + math.log(_DEVIATION)).sum(-1)

    def white_given_noise(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        r"""1 / variance given e is inverse Gaussian, of mean :math:`1 / (b |e|)`, shape :math:`1 / b^2` (Park & Casella 2008).

        Drawn by its two roots (Michael, Schucany & Haas 1976), written for the variance, which is then b^2 chi^2 where e is zero.
        """
        scale = self._scale
        size, half = noise.abs(), 0.5 * scale * normal_like(noise, generator).square()
        variance = scale * (size + half + (half.square() + 2 * half * size).sqrt())
        other = (scale * size).square() / variance
        is_first = uniform(noise.shape, noise, generator) * (variance + scale * size) < variance
        variance = torch.where(is_first, variance, other)
        return ((0.5 * variance / self.noise).log() + _EULER) / _DEVIATION

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """By the mean of a normal number's size."""
        deviation, scale = variance.sqrt(), self._scale
        z = (mean - targets) / deviation
        density = torch.exp(-0.5 * z.square()) * math.sqrt(2 / math.pi)
        size = deviation * (density + z * torch.erf(z * math.sqrt(0.5)))
        return -size / scale - scale.log() - LOG_2

    def _sides(self, mean: Tensor, variance: Tensor, targets: Tensor) -> _Sides:
        deviation, slope = variance.sqrt(), 1 / self._scale
        z, shift = (mean - targets) / deviation, deviation * slope
        above, below = z - shift, -z - shift
        half = 0.5 * shift.square()
        log_above, log_below = log_ndtr(above), log_ndtr(below)
        hazards = (normal_hazard(end, log_cdf) / deviation for end, log_cdf in ((above, log_above), (below, log_below)))
        return _Sides(half - z * shift + log_above, half + z * shift + log_below, *hazards)

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        """Of two truncated normals side by side."""
        sides, slope = self._sides(mean, variance, targets), 1 / self._scale
        share = torch.sigmoid(sides.log_below - sides.log_above)  # below
        log_normaliser = torch.logaddexp(sides.log_above, sides.log_below) + (0.5 * slope).log()
        # Its derivatives in the mean are what the moments are made of (Rasmussen & Williams 2006, eq. 3.85).
        first = slope * (2 * share - 1)
        second = 2 * slope * share * (1 - share) * (2 * slope - sides.hazard_above - sides.hazard_below)
        return TiltedMoments(log_normaliser, mean + variance * first, variance + variance.square() * second)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.tilted_moments(mean, variance, targets).log_normaliser

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(mean, variance + 2 * self.noise)
