"""Normals plus a Gumbel variable, on a lattice: distribution functions and densities, and the way back to means and variances.

Of a normal N(m, s^2) plus a Gumbel variable with the distribution function F, H(u) = E F(u - f) is a sum over a lattice of f.
Normals are told apart by width, in powers of two: narrow ones have fine lattices, and those of like mean share a stretch of one.
Those narrower than 0.08 are wider ones with a correction; those wider than 1.28 have F smoothed by a part of their own width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from numpy.polynomial.hermite_e import herme2poly
from torch import Tensor

from torchgpmc.likelihoods.gumbel import MAX_RATE
from torchgpmc.numerics.threads import slices

# Sums err by about a Gumbel variable's characteristic function at the frequency 2 pi / 0.3, which is 8e-14, and slopes in variances
# by a hundred times as much, so that nobody sees which lattice a batch gets (3e-10 with 0.333).
STEP = 0.3
REACH = 7.5  # standard deviations of f, beyond which lies 6e-14
_BELOW = 24.0  # so far below u f + g is surely less, but for e^-24
_HARDLY = 1e-15  # of F, whose density is as good as zero where it is less
_LOWEST = -300.0  # of exponents: lower ones are denormal, which costs a hundredfold
# The narrowest normals that a lattice sums over as they are, and how far apart its points are, in deviations of the narrowest: it
# errs by exp(-(2 pi / 0.7)^2 / 2).
_NARROW, _APART = 0.08, 0.7
# Narrower ones are corrected for, to 1e-13; their tails are powers times a normal's.
_CORRECTIONS, _CORRECTED_APART, _CORRECTED_REACH = 6, 0.6, 10.0
# Of the widths, so many doublings wider, that F is smoothed by, and how far points are apart then: exp(-(2 pi / 0.38)^2 0.115).
_PLAIN_KINDS, _SMOOTHED, _SMOOTHED_APART = 4, 0.8, 0.38
_KINDS = 10  # doublings up to deviations of 50
_PART = 256  # normals of like mean


class LikeNormals(NamedTuple):
    """Normals of like width, and of like mean, with the lattice that they are summed over."""

    which: Tensor  # (b,), of all
    distance: Tensor  # (b, n), of lattice points from means, in the deviations that stand for theirs
    mass: Tensor  # (b, n), of a normal of this deviation
    corrections: Tensor | None  # (b, 7), of those that stand for narrower ones
    deviation: Tensor  # (b, 1), that stands for theirs
    values: Tensor  # (n, u), of F less one
    densities: Tensor  # (n, u), of F'; (n, 0) if not wanted

    def below(self) -> Tensor:
        """H less one at every u ``(b, u)``."""
        return self._corrected() @ self.values

    def density(self) -> Tensor:
        """H' at every u ``(b, u)``."""
        return self._corrected() @ self.densities

    def _corrected(self) -> Tensor:
        if self.corrections is None:
            return self.mass
        return self.mass * _powers(self.corrections, 0, self.distance.square())

    def slopes(self, slope: Tensor) -> tuple[Tensor, Tensor]:
        """In means and variances ``(b,)`` each, from those in H at every u ``(b, u)``."""
        back = (slope @ self.values.mT).mul_(self.mass)
        once = back * self.distance
        if self.corrections is None:
            first, second = once.sum(-1), once.mul_(self.distance).sum(-1) - back.sum(-1)
        else:
            square = self.distance.square()
            first = (once * _powers(self.corrections, 1, square)).sum(-1)
            second = (back * _powers(self.corrections, 2, square)).sum(-1)
        scale = self.deviation.squeeze(-1).reciprocal()
        return first * scale, 0.5 * second * scale.square()


def parts_of(mean: Tensor, deviation: Tensor, u: Tensor, *, densities: bool) -> Iterator[LikeNormals]:
    """Of normals ``(n,)``, so many at a time that their means are close; on a GPU, which would have to be asked, all at once.

    Args:
        mean: on the scale on which ``u`` begins at zero.
        deviation: a standard deviation, at most 50.
        u: evenly spaced.
        densities: whether they are wanted, too.
    """
    if mean.device.type != "cpu":
        yield from _all_at_once(mean, deviation, u, densities=densities)
        return
    kind = (deviation / _NARROW).clamp_min(0.5).log2().floor()
    order = torch.argsort(kind * (2 + mean.amax() - mean.amin()) + mean)
    ends = torch.searchsorted(kind[order], kind.new_tensor(range(-1, _KINDS)), right=True).tolist()
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), -1):
        if end > begin:
            alike = order[begin:end]
            lattice = _lattice(*_ends(mean[alike], deviation[alike], number), number, u, densities)
            for rows in slices(end - begin, _PART):
                which = alike[rows]
                first, count = _window(*_ends(mean[which], deviation[which], number), lattice.step)
                stretch = slice(first - lattice.first, first - lattice.first + count)
                yield _part(which, mean[which], deviation[which], lattice, stretch)


def _all_at_once(mean: Tensor, deviation: Tensor, u: Tensor, *, densities: bool) -> Iterator[LikeNormals]:
    """Asked for numbers once."""
    reach = torch.where(deviation < _NARROW, _CORRECTED_REACH * _NARROW, REACH * deviation)
    narrowest, low, high = torch.stack([deviation.amin(), (mean - reach).amin(), (mean + reach).amax()]).tolist()
    kind = -1 if narrowest < _NARROW else min(math.floor(math.log2(narrowest / _NARROW)), _PLAIN_KINDS - 1)
    lattice = _lattice(max(low, -_BELOW), max(high, -_BELOW), kind, u, densities)
    yield _part(torch.arange(len(mean), device=mean.device), mean, deviation, lattice, slice(None))


class _Lattice(NamedTuple):
    """Points for normals of a kind: those as wide as 0.08 (0), as twice that (1), and so on; of narrower ones -1."""

    kind: int
    step: float
    first: int  # point, in steps
    points: Tensor  # (n,)
    values: Tensor  # (n, u), of F less one, maybe smoothed
    densities: Tensor  # (n, u), or (n, 0)


def _lattice(low: float, high: float, kind: int, u: Tensor, densities: bool) -> _Lattice:
    width = _NARROW * 2.0 ** max(kind, 0)
    apart = _CORRECTED_APART if kind < 0 else _APART if kind < _PLAIN_KINDS else _SMOOTHED_APART
    step = apart * width if kind >= _PLAIN_KINDS else min(STEP, apart * width)
    first, count = _window(low, high, step)
    points = step * torch.arange(first, first + count, dtype=u.dtype, device=u.device)
    if kind < _PLAIN_KINDS:
        return _Lattice(kind, step, first, points, *_gumbel(points, u, densities))
    reach = REACH * _SMOOTHED * width
    fine = STEP * torch.arange(-_BELOW / STEP, (step * (first + count - 1) + reach) / STEP + 1, dtype=u.dtype, device=u.device)
    mass = _mass(fine, points, torch.full_like(points, _SMOOTHED * width).unsqueeze(-1), STEP)[1]
    values, slopes = _gumbel(fine, u, densities)
    return _Lattice(kind, step, first, points, mass @ values, mass @ slopes)


def _gumbel(points: Tensor, u: Tensor, densities: bool) -> tuple[Tensor, Tensor]:
    """F less one, and F' if wanted, at u less each of the points."""
    values = torch.expm1((points.unsqueeze(-1) - u).clamp_max_(math.log(MAX_RATE)).exp_().neg_())
    if not densities:
        return values, values[:, :0]
    return values, torch.log1p(values.clamp_min(_HARDLY - 1)).neg_() * (1 + values)


def _stand_in(deviation: Tensor, kind: int) -> Tensor:
    """The deviation that is summed over in place of one of this kind."""
    if kind < _PLAIN_KINDS:
        return deviation.clamp_min(_NARROW)
    width = _NARROW * 2.0**kind
    return (deviation.clamp_min(width).square() - (_SMOOTHED * width) ** 2).sqrt()


def _window(low: float, high: float, step: float) -> tuple[int, int]:
    """Where points begin, in steps, and how many they are."""
    first = math.floor(low / step)
    return first, math.ceil(high / step) - first + 1


def _ends(mean: Tensor, deviation: Tensor, kind: int) -> tuple[float, float]:
    """Between which normals of a kind have mass."""
    below = _BELOW + (REACH * _SMOOTHED * _NARROW * 2.0**kind if kind >= _PLAIN_KINDS else 0.0)
    reach = (REACH if kind >= 0 else _CORRECTED_REACH) * _stand_in(deviation, kind)
    low, high = torch.stack([(mean - reach).amin(), (mean + reach).amax()]).clamp_min(-below).tolist()
    return low, high


def _part(which: Tensor, mean: Tensor, deviation: Tensor, lattice: _Lattice, stretch: slice) -> LikeNormals:
    width = _stand_in(deviation, lattice.kind).unsqueeze(-1)
    distance, mass = _mass(lattice.points[stretch], mean, width, lattice.step)
    corrections = _corrections(deviation) if lattice.kind < 0 else None
    return LikeNormals(which, distance, mass, corrections, width, lattice.values[stretch], lattice.densities[stretch])


def _mass(points: Tensor, mean: Tensor, deviation: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Distances ``(b, n)`` from means ``(b,)`` in deviations ``(b, 1)``, and the mass of normals that each point stands for."""
    distance = (points - mean.unsqueeze(-1)).div_(deviation)
    mass = distance.square().mul_(-0.5).clamp_min_(_LOWEST).exp_()
    return distance, mass.mul_(step / math.sqrt(2 * math.pi) / deviation)


def _corrections(deviation: Tensor) -> Tensor:
    r"""What makes an integral over a normal of deviation 0.08 one over a narrower normal ``(b, 7)``: factors of derivatives.

    :math:`E_s F = \exp(-\tfrac12 (\sigma^2 - s^2) \partial^2) E_\sigma F`, and derivatives of a normal density are Hermite
    polynomials times it.
    """
    less = 1 - (deviation / _NARROW).square().clamp_max(1.0)
    factors = torch.ones_like(less).unsqueeze(-1).repeat(1, _CORRECTIONS + 1)
    factors[:, 1:] = -0.5 * less.unsqueeze(-1) / torch.arange(1, _CORRECTIONS + 1, dtype=less.dtype, device=less.device)
    return factors.cumprod(-1)


def _powers(corrections: Tensor, more: int, square: Tensor) -> Tensor:
    """Sums of factors times Hermite polynomials in t of degrees ``more``, ``more`` + 2, ... ``(b, n)``; over t, where it is 1."""
    coefficients = corrections @ _hermite(more, corrections.device)
    *lower, found = coefficients.unsqueeze(-1).unbind(1)
    found = found.expand_as(square).clone()
    for column in reversed(lower):
        torch.addcmul(column, found, square, out=found)
    return found


@lru_cache(maxsize=12)
def _hermite(more: int, device: torch.device) -> Tensor:
    """Coefficients of the squares' powers ``(7, powers)``."""
    rows = [herme2poly([0.0] * (2 * i + more) + [1.0])[more % 2 :: 2] for i in range(_CORRECTIONS + 1)]
    found = torch.zeros(len(rows), len(rows[-1]), dtype=torch.float64)
    for row, polynomial in zip(found, rows, strict=True):
        row[: len(polynomial)] = torch.as_tensor(polynomial)
    return found.to(device)
