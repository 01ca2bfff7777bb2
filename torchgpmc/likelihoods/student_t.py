"""Regression with outliers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import StudentTLikelihood
from torch import Tensor
from torch.distributions import StudentT as StudentTDistribution

from torchgpmc.likelihoods.likelihood import Derivatives, Factorised, Moments
from torchgpmc.likelihoods.slopes import ExpectedSlopes, through_parameters
from torchgpmc.numerics import smooth_rules

_NODES = 100  # where normals are wider than the likelihood


class StudentT(Factorised, StudentTLikelihood):
    """y = f + t, t Student with ``deg_free`` degrees of freedom and squared scale ``noise``; gpytorch's, at C settings.

    Takes gpytorch's arguments, among them ``noise_prior`` and ``deg_free_prior``. The noise variance is
    ``noise * deg_free / (deg_free - 2)``; gpytorch keeps ``deg_free`` above 2 by default.

    Example:
        >>> import torch
        >>> StudentT().log_prob(torch.zeros(1, 2), torch.zeros(2)).shape
        torch.Size([1])
    """

    has_moments_by_formula = True
    is_f_plus_noise = True
    mixes_variances = True

    def forward(self, function_samples: Tensor) -> StudentTDistribution:  # type: ignore[override]  # unused extra arguments
        return StudentTDistribution(self.deg_free, function_samples, self.noise.sqrt(), validate_args=False)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        degrees, squared_scale = self.deg_free, self.noise
        half = 0.5 * (degrees + 1)
        constant = torch.lgamma(half) - torch.lgamma(0.5 * degrees) - 0.5 * torch.log(torch.pi * degrees * squared_scale)
        return constant - half * torch.log1p((targets - f).square() / (degrees * squared_scale))

    def noise_variances(self, white: Tensor) -> tuple[Tensor, Tensor]:
        r"""t is normal with the variance noise / l, l of a Gamma(nu / 2, nu / 2) distribution (West 1987), nu the ``deg_free``.

        .. math:: \log l = \psi(\nu / 2) - \log(\nu / 2) + \sqrt{\psi'(\nu / 2)} \, w

        ``white`` is w: log l less its mean, over its deviation.
        """
        half = 0.5 * self.deg_free
        deviation = torch.polygamma(1, half).sqrt()
        log_precision = torch.digamma(half) - half.log() + deviation * white
        log_density = half * (half.log() + log_precision - log_precision.exp()) - torch.lgamma(half) + deviation.log()
        return self.noise * torch.exp(-log_precision), log_density.sum(-1)

    def white_given_noise(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        r"""l given t is of a Gamma((nu + 1) / 2, (nu + t^2 / noise) / 2) distribution (West 1987)."""
        degrees = self.deg_free
        half, shape = 0.5 * degrees, (0.5 * (degrees + 1)).expand_as(noise)
        rate = 0.5 * (degrees + noise.square() / self.noise)
        log_precision = (torch._standard_gamma(shape.contiguous(), generator=generator) / rate).log()
        return (log_precision - torch.digamma(half) + half.log()) / torch.polygamma(1, half).sqrt()

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """To 1e-6: the logarithm has branch points at a distance of sqrt(deg_free * noise) from the datum."""
        scale = (self.deg_free * self.noise).sqrt().detach()
        return smooth_rules.expectation_about(lambda f: self.pointwise_log_prob(f, targets), mean, variance, targets, scale, _NODES)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        degrees, squared_scale = self.deg_free.detach(), self.noise.detach()
        half, spread = 0.5 * (degrees + 1), degrees * squared_scale
        nodes, weights = smooth_rules.rule_about(mean, variance, targets, spread.sqrt(), _NODES)
        deviation = variance.sqrt()
        centre = mean - targets

        def sums(nodes: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            residual = torch.addcmul(centre, deviation, nodes)
            square = residual.square().div_(spread)  # q; the slope of log(1 + q) in q is 1 / (1 + q)
            share = torch.reciprocal(1 + square)
            logs, shares = (smooth_rules.weighted_sum(weights[0], part) for part in (square.log1p(), square * share))
            return logs, smooth_rules.weighted_sum(weights, residual * share), shares

        logs, (slope, first_slope), share = smooth_rules.add_up(sums, nodes, mean, weights)
        constant = torch.lgamma(half) - torch.lgamma(0.5 * degrees) - 0.5 * torch.log(torch.pi * spread)
        constant_slope = 0.5 * (torch.digamma(half) - torch.digamma(0.5 * degrees)) - 0.5 / degrees
        own = (constant_slope - 0.5 * logs + half * share / degrees, (half * share - 0.5) / squared_scale)
        scaled = -2 * half / spread
        return ExpectedSlopes(
            (constant - half * logs).sum(-1),
            scaled * slope,
            scaled * first_slope / (2 * deviation),
            through_parameters([self.deg_free, self.noise], own, parameters),
        )

    def _peak(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return targets, self.noise.sqrt()

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        residual = targets - f.detach()
        spread = self.deg_free * self.noise
        total = spread + residual.square()
        slope = (self.deg_free + 1) / total
        second = slope * (residual.square() - spread) / total
        third = 2 * slope * residual * (residual.square() - 3 * spread) / total.square()
        return Derivatives(self.pointwise_log_prob(f.detach(), targets), slope * residual, second, third)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        degrees = self.deg_free
        noise = torch.where(degrees > 2, self.noise * degrees / (degrees - 2).clamp_min(1e-300), torch.inf)
        return Moments(mean, variance + noise)
