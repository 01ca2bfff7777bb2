r"""Integrals of a sampled function against a decaying exponential: what a first-order decay remembers of its input."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp(-700) is about the smallest number that is not denormal, and denormal numbers cost a hundredfold.
_MAX_EXPONENT = 700.0
# Below this D h weights are by Gauss-Legendre, exact to rounding there with so many nodes; above, where nothing cancels, in closed
# form.
_SMALL, _NUM_NODES = 2.0, 12
# The parabola through values at -1, 0 and 1 is the values times these polynomials of r, the distance before the end of the
# interval; coefficients of 1, r and r^2 in rows. The interval of the first table is (-1, 0), of the second (0, 1).
_FIRST_HALF = ((0.0, 0.5, 0.5), (1.0, 0.0, -1.0), (0.0, -0.5, 0.5))
_SECOND_HALF = ((0.0, -0.5, 0.5), (0.0, 2.0, -1.0), (1.0, -1.5, 0.5))
_PAIR_KIND, _FIRST_KIND, _SECOND_KIND = range(3)


def decayed(exponent: Tensor) -> Tensor:
    """exp(-exponent), without denormal numbers."""
    return (-exponent.clamp_max(_MAX_EXPONENT)).exp()


class DecayingIntegral(torch.nn.Module):
    r"""From values of functions g on an equally spaced grid, how much of each is left at some of its points under a decay.

    .. math:: I(t) = \int_{u_1}^{t} g(s) \, e^{-D (t - s)} \, ds

    g is taken as a parabola over each pair of intervals, as by Simpson's rule, and the parabolas are integrated exactly against the
    exponential. So the error is that of interpolating g, whatever D: as D h, h being the spacing, goes to zero this is Simpson's
    rule, and as it goes to infinity g(t) / D. At the end of an odd number of intervals the parabola through the last three points
    does for the last one (Cartwright 2017, as in ``scipy.integrate.simpson``), and at the grid's second point that through the
    first three.

    Args:
        spacing: h, above zero.
        num_points: P, of the grid, three at least.
        rows: of the grid's points that are the ends t of the integrals, T of them.

    Example:
        >>> import torch
        >>> integral = DecayingIntegral(0.5, 9, [8])  # from 0 to 4
        >>> decay = torch.tensor(2.0).double()
        >>> bool(torch.isclose(integral(torch.ones(1, 9).double(), decay), (1 - torch.exp(-4 * decay)) / decay))
        True
    """

    points: Tensor
    kinds: Tensor
    lags: Tensor
    used: Tensor
    nodes: Tensor
    low_table: Tensor
    high_table: Tensor

    def __init__(self, spacing: float, num_points: int, rows: list[int]):
        super().__init__()
        self.spacing, self.num_points = spacing, num_points
        odd = sorted({row for row in rows if row % 2})
        pairs = [(end - 2, end, _PAIR_KIND) for end in range(2, num_points, 2)]
        remainders = [(max(row - 2, 0), row, _FIRST_KIND if row == 1 else _SECOND_KIND) for row in odd]
        start, end, kinds = torch.tensor(pairs + remainders).unbind(-1)
        row = torch.tensor(rows).unsqueeze(-1)
        used = torch.where(kinds == _PAIR_KIND, end <= row, end == row)
        self.register_buffer("points", (start + torch.arange(3).unsqueeze(-1)).flatten())  # (3 * pieces,)
        self.register_buffer("kinds", kinds)  # (pieces,)
        self.register_buffer("lags", (row - end).clamp_min(0).double())  # (T, pieces), in units of the spacing
        self.register_buffer("used", used.double())  # (T, pieces)
        nodes, masses = (torch.as_tensor(made) for made in np.polynomial.legendre.leggauss(_NUM_NODES))
        nodes, masses = 0.5 * (nodes + 1), 0.5 * masses.unsqueeze(-1)
        powers = nodes.unsqueeze(-1) ** torch.arange(4)
        # Columns: weights of the first interval, of the second, and the derivatives of both.
        table = torch.zeros(4, 12, dtype=torch.float64)
        table[:3, :6] = spacing * torch.tensor((*_FIRST_HALF, *_SECOND_HALF), dtype=torch.float64).mT
        table[1:, 6:] = -table[:3, :6]
        self.register_buffer("nodes", nodes)
        self.register_buffer("low_table", masses * powers @ table)
        self.register_buffer("high_table", table)

    def forward(self, values: Tensor, decay: Tensor) -> Tensor:
        """I: values of R functions g that decay alike ``(..., R, P)`` and their D, not negative ``(...)``, to ``(..., R, T)``."""
        scaled = self.spacing * decay.unsqueeze(-1)
        weights = _Weights.apply(scaled, self.nodes, self.low_table, self.high_table)
        weights = weights.index_select(-1, self.kinds)  # (..., 3, pieces)
        pieces = (values.index_select(-1, self.points).unflatten(-1, (3, -1)) * weights.unsqueeze(-3)).sum(-2)
        left = self.used * decayed(scaled.unsqueeze(-1) * self.lags)  # (..., T, pieces)
        return pieces @ left.mT


class _Weights(torch.autograd.Function):
    """Of three successive points, over both of their intervals, the first, and the second: D h ``(..., 1)`` to ``(..., 3, 3)``.

    All are moments, whose derivatives are moments: as a graph this would be most of the cost of the integral.
    """

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, nodes: Tensor, low_table: Tensor, high_table: Tensor) -> Tensor:
        low = (-scaled.clamp_max(_SMALL) * nodes).exp() @ low_table
        high = _moments(scaled.clamp_min(_SMALL)) @ high_table
        first, second, first_slope, second_slope = torch.where(scaled < _SMALL, low, high).chunk(4, -1)
        over_second = decayed(scaled)
        both_slope = (first_slope - first) * over_second + second_slope
        ctx.save_for_backward(torch.stack([both_slope, first_slope, second_slope], -1))
        return torch.stack([first * over_second + second, first, second], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (gradient * slopes).sum((-2, -1)).unsqueeze(-1), None, None, None


def _moments(z: Tensor) -> Tensor:
    r""":math:`\int_0^1 r^j e^{-z r} dr` for j = 0, ..., 3, where z is not small: ``(..., 1)`` to ``(..., 4)``."""
    end = decayed(z)
    moments = [(1 - end) / z]
    for j in range(1, 4):
        moments.append((j * moments[-1] - end) / z)
    return torch.cat(moments, -1)
