"""Means and variances of mixtures whose components come in parts."""

from __future__ import annotations

import torch
from torch import Tensor


class MixtureMoments:
    """Mean and variance of a mixture at each of T points, whose components come in parts (Chan, Golub & LeVeque 1979).

    All points have their place from the start: small results among large temporaries would leave memory in pieces too small to use.
    """

    def __init__(self, num_points: int):
        self._num_points = num_points
        self.mean = self.variance = self._weight = torch.zeros(0)

    def add(self, points: slice, weights: Tensor, means: Tensor, variances: Tensor) -> None:
        """Components of weights ``(s,)``, with means and variances ``(s, t, ...)`` at some points."""
        if not len(self.mean):
            self.mean, self.variance, self._weight = means.new_zeros(3, self._num_points, *means.shape[2:]).unbind(0)
        tiny = torch.finfo(weights.dtype).tiny
        total = weights.sum()
        shares = weights / total.clamp_min(tiny)
        mean = torch.tensordot(shares, means, 1)
        variance = torch.tensordot(shares, variances + (means - mean).square(), 1)
        self._weight[points] += total
        share = total / self._weight[points].clamp_min(tiny)
        shift = mean - self.mean[points]
        self.mean[points] += share * shift
        self.variance[points] += share * (variance - self.variance[points] + (1 - share) * shift.square())
