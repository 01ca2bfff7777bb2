"""The mean of the greatest sum of a normal and a Gumbel variable, and its slopes: one lattice, run forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from numpy.polynomial.hermite_e import herme2poly
from torch import Tensor

from torchgpmc.likelihoods.gumbel import GUMBEL_LEAST, MAX_RATE, widest_step
from torchgpmc.numerics.threads import slices

# Sums err by about a Gumbel variable's characteristic function at the frequency 2 pi / 0.3, which is 8e-14, and slopes in variances
# by a hundred times as much, so that nobody sees which lattice a batch gets (3e-10 with 0.333).
STEP = 0.3
_REACH = 7.5  # standard deviations of f, beyond which lies 6e-14
_BELOW = 24.0  # so far below u f + g is surely less, but for e^-24
_MOST = 7.5  # above all normals, and the logarithm of how many: from there on two exponentials are right to e^-22
_EULER = 0.5772156649015329  # a Gumbel variable's mean
_LEAST = 1e-25  # of distribution functions, below which differences from one are rounding
_HARDLY = 1e-15  # of F, whose density is as good as zero where it is less
_LOWEST = -300.0  # of exponents: lower ones are denormal, which costs a hundredfold
# The narrowest normals that a lattice sums over as they are, and how far apart its points are, in deviations of the narrowest: it
# errs by exp(-(2 pi / 0.7)^2 / 2). Narrower ones are corrected for, to 1e-13; their tails are powers times a normal's.
_NARROW, _APART = 0.08, 0.7
_CORRECTIONS, _CORRECTED_APART, _CORRECTED_REACH = 6, 0.6, 10.0
_ROWS_ELEMENTS, _PART = 2**19, 256  # of distribution functions at once; normals of like mean that have a lattice of their own


def greatest_of_sums(mean: Tensor, variance: Tensor, *, products: bool = False) -> tuple[Tensor, ...]:
    r"""E log sum exp(f), f independent normals, and its derivatives in their means and variances; to 1e-10, whatever K is.

    Given f, the greatest of all :math:`f_k + g_k`, g standard Gumbel variables, is a Gumbel variable about log sum exp(f), whose
    mean lies higher by Euler's constant. With :math:`H_k` the distribution functions of these sums, F that of g,

    .. math:: E \max_k (f_k + g_k) = u_0 + \int_{u_0}^\infty \Big(1 - \prod_k H_k(u)\Big) du,
        \quad H_k(u) = \int N(x | m_k, v_k) F(u - x) \, dx

    where u_0 is surely exceeded. Both integrals are sums over lattices, and slopes are those of the sums: with weights
    :math:`\omega_i`, the derivative in :math:`H_k(u_i)` is :math:`-\omega_i \prod_{j \ne k} H_j(u_i)`, and goes back to x through
    the values F(u - x) that it came by. Normals are told apart by width, and those of like mean share a stretch of the lattice.
    Products of s = softmax(f) are curvatures, :math:`E s_j s_k = \int H_j' H_k' \prod_{i \ne j, k} H_i \, du`.

    Args:
        mean: ``(R, K)``, finite.
        variance: the same shape.
        products: whether E s_j s_k are wanted, too.

    Returns:
        ``(R,)``, ``(R, K)``, ``(R, K)``, and with ``products`` ``(R, K, K)``.

    Source:
        Sums over lattices of functions that are analytic in a strip converge geometrically (Trefethen & Weideman 2014).

    Example:
        >>> zero = torch.zeros(1, 2).double()
        >>> [part.round(decimals=4) for part in greatest_of_sums(zero, zero + 0.01)]  # doctest: +NORMALIZE_WHITESPACE
        [tensor([0.6956], dtype=torch.float64), tensor([[0.5000, 0.5000]], dtype=torch.float64),
         tensor([[0.1244, 0.1244]], dtype=torch.float64)]
    """
    rows = slices(len(mean), max(1, _ROWS_ELEMENTS // (mean.shape[-1] * 64)))
    found = [_of_rows(mean[part], variance[part], products) for part in rows]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _of_rows(mean: Tensor, variance: Tensor, products: bool) -> tuple[Tensor, ...]:
    deviation = variance.sqrt()
    lowest = (mean - _REACH * deviation).amax(-1, keepdim=True) + GUMBEL_LEAST
    centre = mean - lowest
    highest = (centre + _REACH * deviation).amax()
    step, top = torch.stack([widest_step(variance, STEP).amin(), highest]).tolist()
    count = int((top + _MOST + math.log(mean.shape[-1])) / step) + 2
    u = step * torch.arange(count, dtype=mean.dtype, device=mean.device)
    weights = _weights(count, step).to(mean)
    parts = list(_parts(centre.flatten(), deviation.flatten(), u, top))
    below = mean.new_empty(mean.numel(), count)  # H less one
    for part in parts:
        below[part.which] = part.below()
    functions = below.add_(1).clamp_min_(_LEAST).view(*mean.shape, count)
    product = functions.prod(1, keepdim=True)
    value = lowest.squeeze(-1) + (1 - product.squeeze(1)) @ weights - _EULER
    hazard = mean.new_empty(mean.numel(), count if products else 0)  # H' / H
    for part in parts if products else ():
        hazard[part.which] = part.density()
    hazard = hazard.view(*mean.shape, -1).div_(functions) if products else hazard
    slope = torch.div(product * -weights, functions, out=functions).flatten(0, 1)
    mean_slope, variance_slope = torch.empty_like(centre).flatten(), torch.empty_like(centre).flatten()
    for part in parts:
        mean_slope[part.which], variance_slope[part.which] = part.slopes(slope[part.which])
    mean_slope, variance_slope = mean_slope.view_as(mean), variance_slope.view_as(mean)
    if not products:
        return value, mean_slope, variance_slope
    of_pairs = (hazard * (product * _weights_of_pairs(count, step).to(mean))) @ hazard.mT
    of_pairs.diagonal(dim1=-2, dim2=-1).copy_(mean_slope - 2 * variance_slope)  # of E s (1 - s) / 2
    return value, mean_slope, variance_slope, of_pairs


def _weights(count: int, step: float) -> Tensor:
    r"""Of 1 - G at 0, step, ..., for its integral from 0 on: half of one at first, where it is level.

    Beyond the last it is :math:`A e^{-u} - B e^{-2u}`, with A and B from the last two, and so is what sums of it add.
    """
    weights = torch.full((count,), step, dtype=torch.float64)
    weights[0] *= 0.5
    fall = math.exp(-step)
    once, twice = fall / (1 - fall), fall**2 / (1 - fall**2)  # sums beyond the last, of one that is 1 there
    # Of last = A - B and the one before = A / fall - B / fall^2.
    scale = 1 / fall**2 - 1 / fall
    a_of_last, a_of_before = 1 / fall**2 / scale, -1 / scale
    weights[-1] += step * (a_of_last * once - (a_of_last - 1) * twice)
    weights[-2] += step * (a_of_before * once - a_of_before * twice)
    return weights


def _weights_of_pairs(count: int, step: float) -> Tensor:
    """Of products of two densities, which fall as exp(-2 u) beyond the last."""
    weights = torch.full((count,), step, dtype=torch.float64)
    weights[-1] += step / math.expm1(2 * step)
    return weights


class _Part(NamedTuple):
    """Normals of like width, and of like mean, with the lattice that they are summed over."""

    which: Tensor  # (b,), of all
    distance: Tensor  # (b, n), of lattice points from means, in the deviations that stand for theirs
    mass: Tensor  # (b, n), of a normal of this deviation
    corrections: Tensor | None  # (b, 7), of those that stand for narrower ones
    deviation: Tensor  # (b, 1), that stands for theirs
    values: Tensor  # (n, u), of F less one

    def below(self) -> Tensor:
        """H less one at every u ``(b, u)``."""
        return self._corrected() @ self.values

    def density(self) -> Tensor:
        """H' at every u ``(b, u)``."""
        rates = torch.log1p(self.values.clamp_min(_HARDLY - 1)).neg_()
        return self._corrected() @ (rates * (1 + self.values))

    def _corrected(self) -> Tensor:
        if self.corrections is None:
            return self.mass
        return self.mass * _powers(self.corrections, 0, self.distance.square())

    def slopes(self, slope: Tensor) -> tuple[Tensor, Tensor]:
        """In means and variances ``(b,)`` each, from those in H at every u ``(b, u)``."""
        back = (slope @ self.values.mT).mul_(self.mass)
        once = back * self.distance
        if self.corrections is None:
            first, second = once.sum(-1), (once * self.distance).sum(-1) - back.sum(-1)
        else:
            square = self.distance.square()
            first = (once * _powers(self.corrections, 1, square)).sum(-1)
            second = (back * _powers(self.corrections, 2, square)).sum(-1)
        scale = self.deviation.squeeze(-1).reciprocal()
        return first * scale, 0.5 * second * scale.square()


def _parts(mean: Tensor, deviation: Tensor, u: Tensor, top: float) -> Iterator[_Part]:
    """Of normals ``(n,)``, so many at a time that their means are close; on a GPU, which would have to be asked, all at once."""
    if mean.device.type != "cpu":
        yield _part(torch.arange(len(mean), device=mean.device), mean, deviation, u, top)
        return
    coarsest = math.ceil(math.log2(STEP / (_APART * _NARROW)))
    # Those as wide as 0.08, as twice that, and so on; -1 for narrower ones.
    kind = (deviation / _NARROW).clamp_min(0.5).log2().floor().clamp_max(coarsest)
    order = torch.argsort(kind * (2 * (top + _BELOW) + mean.amax() - mean.amin()) + mean)
    sizes = kind.new_tensor(range(-1, coarsest + 1))
    ends = torch.searchsorted(kind[order], sizes, right=True).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        for rows in slices(end - begin, _PART) if end > begin else ():
            which = order[begin:end][rows]
            yield _part(which, mean[which], deviation[which], u, top)


def _part(which: Tensor, mean: Tensor, deviation: Tensor, u: Tensor, top: float) -> _Part:
    wide = deviation.clamp_min(_NARROW)
    narrowest, least, low, high = torch.stack(
        [wide.amin(), deviation.amin(), (mean - _REACH * wide).amin(), (mean + _REACH * wide).amax()]
    ).tolist()
    corrects = least < _NARROW
    beyond = (_CORRECTED_REACH - _REACH) * _NARROW if corrects else 0.0
    step = min(STEP, (_CORRECTED_APART if corrects else _APART) * narrowest)
    first = math.floor(max(low - beyond, -_BELOW) / step)
    count = max(math.ceil((high + beyond) / step) - first, 0) + 1
    x = step * torch.arange(first, first + count, dtype=mean.dtype, device=mean.device)
    wide = wide.unsqueeze(-1)
    distance = (x - mean.unsqueeze(-1)).div_(wide)
    mass = distance.square().mul_(-0.5).clamp_min_(_LOWEST).exp_().mul_(step / math.sqrt(2 * math.pi) / wide)
    values = torch.expm1((x.unsqueeze(-1) - u).clamp_max_(math.log(MAX_RATE)).exp_().neg_())
    return _Part(which, distance, mass, _corrections(deviation) if corrects else None, wide, values)


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
    coefficients = corrections @ _hermite(more).to(corrections)
    *lower, found = coefficients.unsqueeze(-1).unbind(1)
    found = found.expand_as(square).clone()
    for column in reversed(lower):
        torch.addcmul(column, found, square, out=found)
    return found


@lru_cache(maxsize=3)
def _hermite(more: int) -> Tensor:
    """Coefficients of the squares' powers ``(7, powers)``."""
    rows = [herme2poly([0.0] * (2 * i + more) + [1.0])[more % 2 :: 2] for i in range(_CORRECTIONS + 1)]
    found = torch.zeros(len(rows), len(rows[-1]), dtype=torch.float64)
    for row, polynomial in zip(found, rows, strict=True):
        row[: len(polynomial)] = torch.as_tensor(polynomial)
    return found
