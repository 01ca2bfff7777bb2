r"""Integrals of a sampled function against a decaying exponential: what a first-order decay remembers of its input."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

# exp(-700) is about the smallest number that is not denormal, and denormal numbers cost a hundredfold.
_MAX_EXPONENT = 700.0
# Below this D h weights are by Gauss-Legendre, exact to rounding there with so many nodes; above, where nothing cancels, in closed
# form.
_SMALL, _NUM_NODES = 2.0, 12
# The parabola through values at -1, 0 and 1 is the values times these polynomials of r, the distance before the end of the
# interval; coefficients of 1, r and r^2 in rows. The interval of the first table is (-1, 0), of the second (0, 1).
_FIRST_HALF = ((0.0, 0.5, 0.5), (1.0, 0.0, -1.0), (0.0, -0.5, 0.5))
_SECOND_HALF = ((0.0, -0.5, 0.5), (0.0, 2.0, -1.0), (1.0, -1.5, 0.5))


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

    lags: Tensor
    lag_numbers: Tensor
    odd_points: Tensor
    odd_weights: Tensor
    nodes: Tensor
    low_table: Tensor
    high_table: Tensor

    def __init__(self, spacing: float, num_points: int, rows: list[int]):
        super().__init__()
        self.spacing, self.num_points = spacing, num_points
        self.num_ends, self.num_pairs = len(rows), (num_points - 1) // 2
        lags = sorted({row - end for row in rows for end in range(2, row + 1, 2)})
        numbers = [lags.index(row - end) if end <= row else len(lags) for row in rows for end in range(2, num_points, 2)]
        # A last interval without a partner: its parabola's points, among those of all integrals, and which weights they have.
        odd = [(number, row) for number, row in enumerate(rows) if row % 2]
        points = [number * num_points + max(row - 2, 0) + point for number, row in odd for point in range(3)]
        kinds = [3 * (1 if row == 1 else 2) + point for _, row in odd for point in range(3)]
        self.register_buffer("lags", torch.tensor(lags, dtype=torch.float64))  # from the ends of pairs, in units of the spacing
        self.register_buffer("lag_numbers", torch.tensor(numbers))  # (T * pairs,)
        self.register_buffer("odd_points", torch.tensor(points, dtype=torch.long))
        self.register_buffer("odd_weights", torch.tensor(kinds, dtype=torch.long))
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
        integrals: Tensor = _Integral.apply(values, self.spacing * decay.unsqueeze(-1), self)
        return integrals

    def matrix(self, decay: Tensor) -> Tensor:
        """The integrals' weights W ``(..., T, P)``, without a graph: I = g W' for any g."""
        with torch.no_grad():
            return self.matrix_and_slope(self.spacing * decay.unsqueeze(-1), with_slope=False)[0]

    def matrix_and_slope(self, scaled: Tensor, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """W ``(..., T, P)`` at D h ``(..., 1)``, and its derivative there: products of what is left and of a parabola's weights."""
        weights, weight_slopes = self._weights(scaled)
        left = decayed(scaled * self.lags)
        pairs = self._of_pairs(left).unsqueeze(-3)
        matrix = self._assembled(pairs * weights[..., :3, None, None], weights)
        if not with_slope:
            return matrix, None
        pair_slopes = self._of_pairs(-self.lags * left).unsqueeze(-3)
        products = torch.addcmul(pair_slopes * weights[..., :3, None, None], pairs, weight_slopes[..., :3, None, None])
        return matrix, self._assembled(products, weight_slopes)

    def _of_pairs(self, of_lags: Tensor) -> Tensor:
        """From a number a lag to one a pair of intervals ``(..., T, pairs)``, which is zero for pairs after the end."""
        return pad(of_lags, (0, 1)).index_select(-1, self.lag_numbers).unflatten(-1, (self.num_ends, self.num_pairs))

    def _assembled(self, pairs: Tensor, weights: Tensor) -> Tensor:
        """Weights of the grid's points ``(..., T, P)``, from those of each pair's three ``(..., 3, T, pairs)`` and of odd ends."""
        last = 2 * self.num_pairs
        matrix = pairs.new_zeros(*pairs.shape[:-3], self.num_ends, self.num_points)
        matrix[..., 0:last:2] = pairs[..., 0, :, :]
        matrix[..., 1:last:2] = pairs[..., 1, :, :]
        matrix[..., 2 : last + 1 : 2] += pairs[..., 2, :, :]
        matrix.flatten(-2).index_add_(-1, self.odd_points, weights.index_select(-1, self.odd_weights))
        return matrix

    def _weights(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Of three points, over both of their intervals, the first, and the second: ``(..., 9)``, with derivatives in D h.

        All are moments, whose derivatives are moments.
        """
        low = (-scaled.clamp_max(_SMALL) * self.nodes).exp() @ self.low_table
        high = _moments(scaled.clamp_min(_SMALL)) @ self.high_table
        first, second, first_slope, second_slope = torch.where(scaled < _SMALL, low, high).chunk(4, -1)
        over_second = decayed(scaled)
        both_slope = (first_slope - first) * over_second + second_slope
        weights = torch.cat([first * over_second + second, first, second], -1)
        return weights, torch.cat([both_slope, first_slope, second_slope], -1)


class _Integral(torch.autograd.Function):
    """The integrals with their slopes in D: as a graph these would cost several times as much."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scaled: Tensor, integral: DecayingIntegral) -> Tensor:
        matrix, slope = integral.matrix_and_slope(scaled, with_slope=ctx.needs_input_grad[1])
        ctx.shapes = values.shape, scaled.shape
        ctx.save_for_backward(matrix, None if slope is None else values @ slope.mT)
        return values @ matrix.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        matrix, slope = ctx.saved_tensors
        of_values, of_scaled = ctx.shapes
        values = (gradient @ matrix).sum_to_size(of_values) if ctx.needs_input_grad[0] else None
        return values, None if slope is None else (gradient * slope).sum((-2, -1)).unsqueeze(-1).sum_to_size(of_scaled), None


def _moments(z: Tensor) -> Tensor:
    r""":math:`\int_0^1 r^j e^{-z r} dr` for j = 0, ..., 3, where z is not small: ``(..., 1)`` to ``(..., 4)``."""
    end = decayed(z)
    moments = [(1 - end) / z]
    for j in range(1, 4):
        moments.append((j * moments[-1] - end) / z)
    return torch.cat(moments, -1)
