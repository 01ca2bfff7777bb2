"""Counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Poisson as PoissonDistribution

from torchgpmc.likelihoods.base import Derivatives, Factorised, Moments, require_targets
from torchgpmc.likelihoods.slopes import ExpectedSlopes


class Poisson(Factorised, Likelihood):
    """Counts with rate exp(f); the log Gaussian Cox process on a grid when f is offset by the log cell volume.

    Example:
        >>> import torch
        >>> Poisson().log_prob(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
        tensor([-2.])
    """

    is_log_concave = True

    def forward(self, function_samples: Tensor) -> PoissonDistribution:
        return PoissonDistribution(function_samples.exp(), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        ok = (targets >= 0) & (targets == targets.round())
        require_targets(ok, targets, "counts 0, 1, 2, ...", "Poisson models whole numbers; for real data use Gaussian or StudentT.")
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return targets * f - f.exp() - torch.lgamma(targets + 1)

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        rate = f.exp()
        return Derivatives(targets * f - rate - torch.lgamma(targets + 1), targets - rate, -rate, -rate)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return targets * mean - torch.exp(mean + 0.5 * variance) - torch.lgamma(targets + 1)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        rate = torch.exp(mean + 0.5 * variance)
        value = (targets * mean - rate - torch.lgamma(targets + 1)).sum(-1)
        return ExpectedSlopes(value, targets - rate, -0.5 * rate)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        rate = torch.exp(mean + 0.5 * variance)
        return Moments(rate, rate + rate.square() * torch.expm1(variance))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)
