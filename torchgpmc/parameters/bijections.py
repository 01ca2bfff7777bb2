"""Maps between an interval of the real line and the whole line, with their log Jacobians."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Interval(NamedTuple):
    r"""The open interval (lower, upper), either end possibly infinite, as the image of the real line.

    The map is the identity on the line, :math:`lower + e^t` or :math:`upper - e^t` on a half line, and
    :math:`lower + (upper - lower) / (1 + e^{-t})` on a bounded interval.

    Example:
        >>> import torch
        >>> Interval(0.0, math.inf).constrain(torch.zeros(1))
        tensor([1.])
    """

    lower: float
    upper: float

    def intersect(self, other: Interval) -> Interval:
        """The points in both; an empty result has ``lower >= upper``."""
        return Interval(max(self.lower, other.lower), min(self.upper, other.upper))

    def constrain(self, unconstrained: Tensor) -> Tensor:
        """From the line to the interval, elementwise."""
        if math.isinf(self.lower) and math.isinf(self.upper):
            return unconstrained
        if math.isinf(self.upper):
            return unconstrained.exp() + self.lower if self.lower else unconstrained.exp()
        if math.isinf(self.lower):
            return self.upper - torch.exp(unconstrained)
        return self.lower + (self.upper - self.lower) * torch.sigmoid(unconstrained)

    def unconstrain(self, value: Tensor) -> Tensor:
        """From the interval to the line, elementwise; infinite or NaN for values outside."""
        if math.isinf(self.lower) and math.isinf(self.upper):
            return value
        if math.isinf(self.upper):
            return torch.log(value - self.lower) if self.lower else torch.log(value)
        if math.isinf(self.lower):
            return torch.log(self.upper - value)
        return torch.log(value - self.lower) - torch.log(self.upper - value)

    def log_jacobian(self, unconstrained: Tensor) -> Tensor:
        """log |d constrain / d unconstrained|, elementwise."""
        if math.isinf(self.lower) and math.isinf(self.upper):
            return torch.zeros_like(unconstrained)
        if math.isinf(self.lower) or math.isinf(self.upper):
            return unconstrained
        return math.log(self.upper - self.lower) + logsigmoid(unconstrained) + logsigmoid(-unconstrained)

    def derivative(self, unconstrained: Tensor, value: Tensor) -> Tensor:
        """Of :meth:`constrain`, whose ``value`` is given, elementwise."""
        if math.isinf(self.lower) and math.isinf(self.upper):
            return torch.ones_like(value)
        if math.isinf(self.upper):
            return value - self.lower if self.lower else value
        if math.isinf(self.lower):
            return value - self.upper
        share = torch.sigmoid(unconstrained)
        return (self.upper - self.lower) * share * (1 - share)

    def jacobian_slope(self, unconstrained: Tensor) -> Tensor | float:
        """The derivative of :meth:`log_jacobian`, elementwise; a number where it is the same everywhere."""
        if math.isinf(self.lower) and math.isinf(self.upper):
            return 0.0
        if math.isinf(self.lower) or math.isinf(self.upper):
            return 1.0
        return 1 - 2 * torch.sigmoid(unconstrained)

    def contains(self, value: Tensor) -> Tensor:
        """Whether each element lies strictly inside."""
        return (value > self.lower) & (value < self.upper)
