"""Counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Poisson as PoissonDistribution

from torchgpmc.likelihoods.counts import Counts
from torchgpmc.likelihoods.likelihood import Derivatives, Moments
from torchgpmc.likelihoods.slopes import ExpectedSlopes


class Poisson(Counts):
    r"""Counts with mean :math:`e \exp(f)`, e the exposure; over the cells of a grid, the log Gaussian Cox process.

    .. math:: \log p(y | f) = y (f + \log e) - e \exp(f) - \log y!

    Args:
        exposure: e, a number for all counts alike, or a tensor ``(N,)``, one a count; 1 by default. exp(f) is the intensity per
            unit of exposure (:attr:`torchgpmc.Prediction.intensity`). Test points have the same exposure where it is a
            number, else those that ``posterior.predict(x, exposure=...)`` is given.

    Raises:
        ValueError: an exposure that is not positive, or neither a number nor ``(N,)``.

    Example:
        >>> import torch
        >>> Poisson().log_prob(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
        tensor([-2.])
        >>> Poisson(exposure=0.5).response_moments(torch.zeros(1), torch.full((1,), 1e-9)).mean
        tensor([0.5000])
    """

    has_moments_by_formula = True

    is_log_concave = True
    is_analytic = True

    def forward(self, function_samples: Tensor) -> PoissonDistribution:
        return PoissonDistribution(self.log_mean(function_samples).exp(), validate_args=False)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        log_mean = self.log_mean(f)
        return targets * log_mean - log_mean.exp() - torch.lgamma(targets + 1)

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        log_mean = self.log_mean(f)
        rate = log_mean.exp()
        return Derivatives(targets * log_mean - rate - torch.lgamma(targets + 1), targets - rate, -rate, -rate)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        log_mean = self.log_mean(mean)
        return targets * log_mean - torch.exp(log_mean + 0.5 * variance) - torch.lgamma(targets + 1)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        log_mean = self.log_mean(mean)
        rate = torch.exp(log_mean + 0.5 * variance)
        value = (targets * log_mean - rate - torch.lgamma(targets + 1)).sum(-1)
        return ExpectedSlopes(value, targets - rate, -0.5 * rate)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        rate = torch.exp(self.log_mean(mean) + 0.5 * variance)
        return Moments(rate, rate + rate.square() * torch.expm1(variance))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(self.log_mean(f).exp(), generator=generator)
