"""Counts that vary more than a Poisson distribution's."""

from __future__ import annotations

import math

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import NegativeBinomial as NegativeBinomialDistribution
from torch.nn.functional import softplus

from torchgpmc.likelihoods.counts import Counts
from torchgpmc.likelihoods.likelihood import Derivatives, Moments
from torchgpmc.numerics import smooth_rules
from torchgpmc.priors import register_prior_of


class NegativeBinomial(Counts):
    r"""Counts with mean :math:`\mu = e \exp(f)` and variance :math:`\mu + \alpha \mu^2`, e the exposure, alpha the dispersion.

    .. math:: \log p(y | f) = \log \frac{\Gamma(y + r)}{\Gamma(r) y!} + y \eta - (y + r) \log(1 + e^\eta),
        \quad r = 1 / \alpha, \; \eta = f + \log(e \alpha)

    A Poisson distribution whose rate has a Gamma distribution of relative variance ``dispersion``, which is sampled.

    Args:
        dispersion_prior: of alpha.
        dispersion_constraint: positive by default.
        exposure: as :class:`Poisson`'s.

    Raises:
        ValueError: an exposure that is not positive, or neither a number nor ``(N,)``.

    Example:
        >>> import torch
        >>> from gpytorch.priors import GammaPrior
        >>> likelihood = NegativeBinomial(dispersion_prior=GammaPrior(2.0, 4.0))
        >>> likelihood.dispersion = 0.5
        >>> moments = likelihood.conditional_moments(torch.zeros(1))
        >>> moments.mean.detach(), moments.variance.detach()
        (tensor([1.]), tensor([1.5000]))
    """

    has_moments_by_formula = True

    is_log_concave = True
    is_analytic = True

    def __init__(
        self,
        dispersion_prior: Prior | None = None,
        dispersion_constraint: Interval | None = None,
        *,
        exposure: float | Tensor = 1.0,
    ):
        super().__init__(exposure)
        self.register_parameter("raw_dispersion", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_dispersion", dispersion_constraint or Positive())
        if dispersion_prior is not None:
            register_prior_of(self, "dispersion", dispersion_prior)

    @property
    def dispersion(self) -> Tensor:
        """alpha, the relative variance of the rate."""
        return self.raw_dispersion_constraint.transform(self.raw_dispersion)

    @dispersion.setter
    def dispersion(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value).to(self.raw_dispersion)
        self.initialize(raw_dispersion=self.raw_dispersion_constraint.inverse_transform(value))

    def _log_odds(self, f: Tensor) -> Tensor:
        """eta, the log of the mean over r."""
        return self.log_mean(f) + self.dispersion.log()

    def _log_choices(self, targets: Tensor) -> Tensor:
        size = 1 / self.dispersion
        return torch.lgamma(targets + size) - torch.lgamma(size) - torch.lgamma(targets + 1)

    def forward(self, function_samples: Tensor) -> NegativeBinomialDistribution:
        odds = self._log_odds(function_samples)
        return NegativeBinomialDistribution((1 / self.dispersion).expand_as(odds), logits=odds, validate_args=False)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        odds = self._log_odds(f)
        return self._log_choices(targets) + targets * odds - (targets + 1 / self.dispersion) * softplus(odds)

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        share = torch.sigmoid(self._log_odds(f))
        total = targets + 1 / self.dispersion
        second = -total * share * (1 - share)
        return Derivatives(self.pointwise_log_prob(f, targets), targets - total * share, second, second * (1 - 2 * share))

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """To 1e-6 of its size: the softplus of eta is all that has no closed form."""
        odds = self._log_odds(mean)
        turns = smooth_rules.expectation_about(softplus, odds, variance, 0.0, math.pi)
        return self._log_choices(targets) + targets * odds - (targets + 1 / self.dispersion) * turns

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        rate = torch.exp(self.log_mean(mean) + 0.5 * variance)
        second = rate.square() * variance.exp()
        return Moments(rate, rate + self.dispersion * second + rate.square() * torch.expm1(variance))
