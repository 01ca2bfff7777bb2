"""Shares: numbers between 0 and 1."""

from __future__ import annotations

import math

import torch
from gpytorch.likelihoods import BetaLikelihood
from torch import Tensor
from torch.distributions import Beta as BetaDistribution

from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.likelihoods.log_likelihood import require_targets
from torchgpmc.numerics import smooth_rules


class Beta(Factorised, BetaLikelihood):
    r"""Shares y in (0, 1) from :math:`Beta(1 + s \sigma(f), 1 + s \sigma(-f))`, sigma the logistic function, s the scale.

    gpytorch's ``BetaLikelihood`` at C settings, with the digits that its ``forward`` loses where a latent is far out. The mean is
    :math:`(1 + s \sigma(f)) / (2 + s)`, the mode sigma(f).

    Takes gpytorch's arguments, among them ``scale_prior``.

    Example:
        >>> import torch
        >>> likelihood = Beta()
        >>> likelihood.scale = 2.0
        >>> likelihood.log_prob(torch.zeros(1, 1), torch.tensor([0.5])).exp().detach()
        tensor([1.5000])
    """

    levels_off = True

    def _concentrations(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return 1 + self.scale * torch.sigmoid(f), 1 + self.scale * torch.sigmoid(-f)

    def forward(self, function_samples: Tensor) -> BetaDistribution:  # type: ignore[override]  # unused extra arguments
        return BetaDistribution(*self._concentrations(function_samples), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        ok = (targets > 0) & (targets < 1)
        remedy = "Move shares of exactly 0 or 1 inwards by what rounding hides, or model them apart."
        require_targets(ok, targets, "shares between 0 and 1, both excluded", remedy)
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        one, zero = self._concentrations(f)
        constant = torch.lgamma(2 + self.scale) - torch.lgamma(one) - torch.lgamma(zero)
        return constant + (one - 1) * targets.log() + (zero - 1) * torch.log1p(-targets)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """To 1e-6: poles of the sigmoids, and of Gamma functions of them, are all at a distance of pi from the real line.

        Poles weigh more than the logarithms that rules are made for, as if they were nearer.
        """
        return smooth_rules.expectation_about(
            lambda f: self.pointwise_log_prob(f, targets), mean, variance, 0.0, 0.9 * math.pi, 100
        )

    def _peak(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return torch.logit(targets), (self.scale * targets * (1 - targets)).rsqrt()
