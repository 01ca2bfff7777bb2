r"""Integrals of a sampled function against a decaying exponential: what a first-order decay remembers of its input."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp(-700) is about the smallest number that is not denormal, and denormal numbers cost a hundredfold.
_MAX_EXPONENT = 700.0
# The parabola through values at -1, 0 and 1 is the values times these polynomials of r, the distance before the end of the
# interval; coefficients of 1, r and r^2 in rows. The interval of the first table is (-1, 0), of the second (0, 1).
_FIRST_HALF = ((0.0, 0.5, 0.5), (1.0, 0.0, -1.0), (0.0, -0.5, 0.5))
_SECOND_HALF = ((0.0, -0.5, 0.5), (0.0, 2.0, -1.0), (1.0, -1.5, 0.5))
# z^{j+1} times the moment of r^j, from P(4, z), z e^-z, z^2 e^-z and z^3 e^-z in rows: by parts, from the highest moment down, so
# that all terms are positive and nothing cancels.
_BY_PARTS = ((1.0, 1.0, 2.0, 6.0), (1.0, 0.0, 0.0, 0.0), (1 / 2, 1 / 2, 0.0, 0.0), (1 / 6, 1 / 6, 1 / 3, 0.0))


def decayed(exponent: Tensor) -> Tensor:
    """exp(-exponent), without denormal numbers."""
    return (-exponent.clamp_max(_MAX_EXPONENT)).exp()


class _Weights(NamedTuple):
    """Of the three points of a parabola in an integral, ``(..., 3)`` each; W with its derivative in D h."""

    pair: Tensor  # over both of its intervals
    pair_slope: Tensor
    halves: Tensor  # over the first and over the second alone, (..., 6)
    halves_slope: Tensor


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
    is_before: Tensor
    odd_ends: Tensor
    odd_points: Tensor
    odd_weights: Tensor
    powers: Tensor
    by_parts: Tensor
    table: Tensor

    def __init__(self, spacing: float, num_points: int, rows: list[int]):
        super().__init__()
        self.spacing, self.num_points = spacing, num_points
        self.num_ends, self.num_pairs = len(rows), (num_points - 1) // 2
        # A last interval without a partner: its parabola's points, and which weights they have.
        odd = [(number, row) for number, row in enumerate(rows) if row % 2]
        points = [max(row - 2, 0) + point for _, row in odd for point in range(3)]
        kinds = [3 * (row > 1) + point for _, row in odd for point in range(3)]
        # Between ends of pairs and of integrals, (T, pairs) in units of the spacing.
        lags = torch.tensor(rows, dtype=torch.float64).unsqueeze(-1) - torch.arange(2.0, num_points, 2.0)
        self.register_buffer("lags", lags.clamp_min(0.0))
        self.register_buffer("is_before", (lags >= 0).double())
        self.register_buffer("odd_ends", torch.tensor([number for number, _ in odd], dtype=torch.long))
        self.register_buffer("odd_points", torch.tensor(points, dtype=torch.long))
        self.register_buffer("odd_weights", torch.tensor(kinds, dtype=torch.long))
        self.register_buffer("powers", torch.arange(4, dtype=torch.float64))
        self.register_buffer("by_parts", torch.tensor(_BY_PARTS, dtype=torch.float64))
        # Columns: weights of the first interval, of the second, and the derivatives of both: moments' derivatives are moments.
        table = torch.zeros(4, 12, dtype=torch.float64)
        table[:3, :6] = spacing * torch.tensor((*_FIRST_HALF, *_SECOND_HALF), dtype=torch.float64).mT
        table[1:, 6:] = -table[:3, :6]
        self.register_buffer("table", table)

    def forward(self, values: Tensor, decay: Tensor) -> Tensor:
        """I: values of R functions g that decay alike ``(..., R, P)`` and their D, not negative ``(...)``, to ``(..., R, T)``."""
        integrals: Tensor = _Integral.apply(values, self.spacing * decay.unsqueeze(-1), self)
        return integrals

    def matrix(self, decay: Tensor) -> Tensor:
        """The integrals' weights W ``(..., T, P)``, without a graph: I = g W' for any g."""
        with torch.no_grad():
            scaled = self.spacing * decay.unsqueeze(-1)
            left = self.left(scaled)
            return self.spread(left, torch.eye(self.num_ends).to(left), self.weights(scaled))

    def left(self, scaled: Tensor) -> Tensor:
        """What is left of each pair of intervals at each end, ``(..., T, pairs)`` at D h ``(..., 1)``: nothing of later ones."""
        return decayed(scaled.unsqueeze(-1) * self.lags) * self.is_before

    def weights(self, scaled: Tensor) -> _Weights:
        """At D h ``(..., 1)``."""
        first, second, first_slope, second_slope = (self.moments(scaled) @ self.table).chunk(4, -1)
        over_second = decayed(scaled)
        pair = torch.addcmul(second, first, over_second)
        pair_slope = torch.addcmul(second_slope, first_slope - first, over_second)
        return _Weights(pair, pair_slope, torch.cat([first, second], -1), torch.cat([first_slope, second_slope], -1))

    def moments(self, scaled: Tensor) -> Tensor:
        r""":math:`\int_0^1 r^j e^{-z r} dr` for j = 0, ..., 3 at z ``(..., 1)``, not negative: ``(..., 4)``."""
        z = scaled.clamp_min(torch.finfo(scaled.dtype).tiny ** 0.2)  # the least whose fourth power is not denormal
        powers = z**self.powers
        highest = torch.special.gammainc(torch.full_like(z, 4.0), z)
        terms = torch.cat([highest, powers[..., 1:] * decayed(z)], -1)
        return terms @ self.by_parts / (z * powers)

    def windows(self, values: Tensor) -> Tensor:
        """The three points of each pair of intervals, from ``(..., R, P)`` to ``(..., 3, R, pairs)``."""
        return values[..., : 2 * self.num_pairs + 1].unfold(-1, 3, 2).movedim(-1, -3)

    def with_odd_ends(self, integrals: Tensor, values: Tensor, halves: Tensor) -> Tensor:
        """Integrals ``(..., R, T)``, and over the last intervals that have no partner."""
        if not len(self.odd_ends):
            return integrals
        weights = halves.index_select(-1, self.odd_weights).unsqueeze(-2)
        odd = (values.index_select(-1, self.odd_points) * weights).unflatten(-1, (-1, 3)).sum(-1)
        return integrals.index_add(-1, self.odd_ends, odd.expand(*integrals.shape[:-1], -1))

    def spread(self, of_pairs: Tensor, of_ends: Tensor, weights: _Weights) -> Tensor:
        """Slopes in the values ``(..., R, P)``, from those in what pairs of intervals give ``(..., R, pairs)``.

        ``of_ends`` are those in the integrals ``(..., R, T)``, for last intervals that have no partner.
        """
        last, found = 2 * self.num_pairs, of_pairs.new_zeros(*of_pairs.shape[:-1], self.num_points)
        first, middle, third = (weights.pair[..., point, None, None] for point in range(3))
        torch.mul(of_pairs, first, out=found[..., 0:last:2])
        torch.mul(of_pairs, middle, out=found[..., 1:last:2])
        found[..., 2 : last + 1 : 2].addcmul_(of_pairs, third)
        if len(self.odd_ends):
            odd = of_ends.index_select(-1, self.odd_ends).repeat_interleave(3, -1) * weights.halves[..., None, self.odd_weights]
            found.index_add_(-1, self.odd_points, odd.expand(*found.shape[:-1], -1))
        return found


class _Integral(torch.autograd.Function):
    """The integrals with their slopes in D: as a graph these would cost several times as much."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scaled: Tensor, integral: DecayingIntegral) -> Tensor:
        left, weights = integral.left(scaled), integral.weights(scaled)
        windows, of_points = integral.windows(values).contiguous(), weights.pair[..., None, None]
        with_slope = ctx.needs_input_grad[1]
        # What is left of each point's values at each end, and its derivative; weighted over a pair's points.
        rows = torch.cat([left, left * -integral.lags], -2) if with_slope else left
        remain, *changes = (windows.flatten(-3, -2) @ rows.mT).unflatten(-2, (3, -1)).split(integral.num_ends, -1)
        found = integral.with_odd_ends((remain * of_points).sum(-3), values, weights.halves)
        slope = None
        if with_slope:
            slope = torch.addcmul(changes[0] * of_points, remain, weights.pair_slope[..., None, None]).sum(-3)
            slope = integral.with_odd_ends(slope, values, weights.halves_slope)
        ctx.integral, ctx.shapes = integral, (values.shape, scaled.shape)
        ctx.save_for_backward(slope, left, *weights)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        slope, left, *weights = ctx.saved_tensors
        of_values, of_scaled = ctx.shapes
        values = None
        if ctx.needs_input_grad[0]:
            values = ctx.integral.spread(gradient @ left, gradient, _Weights(*weights)).sum_to_size(of_values)
        return values, None if slope is None else (gradient * slope).sum((-2, -1)).unsqueeze(-1).sum_to_size(of_scaled), None
