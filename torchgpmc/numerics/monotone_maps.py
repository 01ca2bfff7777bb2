"""Maps from the standard normal to one-dimensional densities that depend on a number, fitted for many at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_NUM_BASIS = 5
_PLACES = 3  # at which densities are seen, the roots of a Chebyshev polynomial on [-1, 1]
_REACH, _NODES = 3.6, 9  # of the standard normal, evenly spaced
# Of the nodes' weights as a power of the normal density: below one, tails are fitted better than their share.
_POWER = 0.8
_ROUNDS = 3  # the second settles nearly all of logit labels, the third of probit's
_SHORTER = 0.3
_LEAST_SLOPE = 0.05
# Bernstein's coefficients on [-1, 1] of 1, s, s^2, s^3, and of 1, t, t^2: where all are positive so is the polynomial.
_CUBIC = ((1.0, -1.0, 1.0, -1.0), (1.0, -1 / 3, -1 / 3, 1.0), (1.0, 1 / 3, -1 / 3, -1.0), (1.0, 1.0, 1.0, 1.0))
_QUADRATIC = ((1.0, -1.0, 1.0), (1.0, 0.0, -1.0), (1.0, 1.0, 1.0))

# Log density up to a constant, and its slope, at (C, places, nodes, N).
LogDensities = Callable[[Tensor], tuple[Tensor, Tensor]]


class MonotoneMaps(NamedTuple):
    r"""Maps :math:`T_t(z) = \sum_{jk} c_{jk} t^j B_k(z)` that increase from :math:`-\infty` to :math:`\infty` for t in [-1, 1].

    Their slopes are cubics in :math:`s = z / r` of (-1, 1), :math:`r = \sqrt{1 + z^2}`:

    .. math:: B = (1, \; z, \; r - 1, \; z - \arctan z, \; r + 1 / r - 2), \qquad B' = (0, 1, s, s^2, s^3)

    so the density of T(z) falls as a normal one's does, by another width on either side.
    """

    coefficients: Tensor  # (places, 5, C, N)

    def parts(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Of T and of its slope at z ``(C, N, P)`` the coefficients of powers of t, ``(places, C, N, P)`` each."""
        values, slopes = _basis(z)
        coefficients = self.coefficients.unsqueeze(-1)
        value = sum((c * b for c, b in zip(coefficients[:, 1:].unbind(1), values[1:], strict=True)), coefficients[:, 0])
        slope = sum((c * b for c, b in zip(coefficients[:, 2:].unbind(1), slopes[2:], strict=True)), coefficients[:, 1])
        return value, slope.expand_as(value)


def at_place(parts: Tensor, place: Tensor) -> Tensor:
    """The polynomial with coefficients ``(places, ...)`` at ``place`` ``(...)``."""
    value = parts[-1]
    for part in reversed(parts[:-1].unbind(0)):
        value = torch.addcmul(part, value, place)
    return value


def places(like: Tensor) -> Tensor:
    """The numbers t ``(places,)`` at which :func:`fitted` sees densities."""
    return _chebyshev(like.dtype, like.device)[0]


def fitted(log_densities: LogDensities, like: Tensor) -> MonotoneMaps:
    r"""Maps under which the normal density becomes nearly the given one, at every place: the log of their ratio is flat.

    .. math:: \rho(z) = \log p_t(T_t(z)) + \log T_t'(z) + z^2 / 2

    is fitted to a constant by weighted least squares, Gauss and Newton's steps from the identity on; what does not lower its
    variance, or bends a map back, is not taken. Between places coefficients are interpolated by quadratics; where that could bend a
    map back, slopes depend the less on t.

    Args:
        log_densities: those at all places of C x N problems, which should be nearly standard normal at first.
        like: ``(C, N)``, gives shape, dtype and device.
    """
    nodes, weights, values, slopes = _nodes(like.dtype, like.device)
    cubic = torch.tensor(_CUBIC, dtype=like.dtype, device=like.device)
    maps = like.new_zeros(len(like), _PLACES, _NUM_BASIS, like.shape[-1])
    maps[:, :, 1] = 1.0
    damping = torch.ones_like(maps[:, :, 0])
    now = _residuals(log_densities, maps, nodes, weights, values, slopes, cubic)
    for last in reversed(range(_ROUNDS)):
        trial = maps - damping.unsqueeze(2) * _step(now, weights)
        found = _residuals(log_densities, trial, nodes, weights, values, slopes, cubic)
        better = found.variance < now.variance
        maps = torch.where(better.unsqueeze(2), trial, maps)
        if last:
            damping = torch.where(better, 1.0, _SHORTER * damping)
            now = _Residuals(
                torch.where(better, found.variance, now.variance),
                torch.where(better.unsqueeze(2), found.residual, now.residual),
                torch.where(better.unsqueeze(2), found.gradient, now.gradient),
            )
    return MonotoneMaps(_interpolated(maps, cubic))


class _Residuals(NamedTuple):
    variance: Tensor  # (C, places, N), infinite where a map bends back
    residual: Tensor  # (C, places, nodes, N), about its mean
    gradient: Tensor  # (5, C, places, nodes, N), the same


def _residuals(
    log_densities: LogDensities, maps: Tensor, nodes: Tensor, weights: Tensor, values: Tensor, slopes: Tensor, cubic: Tensor
) -> _Residuals:
    at, slope = values @ maps, slopes @ maps
    log_density, steepness = log_densities(at)
    column = weights.unsqueeze(-1)
    residual = log_density + slope.clamp_min(_LEAST_SLOPE).log() + 0.5 * nodes.square().unsqueeze(-1)
    residual = residual - (column * residual).sum(-2, keepdim=True)
    variance = (column * residual.square()).sum(-2)
    rises = (cubic @ maps[:, :, 1:]).amin(2) > _LEAST_SLOPE
    shape = (_NUM_BASIS, 1, 1, len(nodes), 1)
    gradient = torch.addcmul(steepness * values.T.reshape(shape), slopes.T.reshape(shape), slope.reciprocal())
    gradient -= (column * gradient).sum(-2, keepdim=True)
    return _Residuals(torch.where(rises & torch.isfinite(variance), variance, torch.inf), residual, gradient)


def _step(now: _Residuals, weights: Tensor) -> Tensor:
    """Gauss and Newton's, ``(C, places, 5, N)``; where numbers are not finite nor is it, and no comparison takes it."""
    # Written out: batched products and solves of five rows take several times as long.
    weighted = now.gradient * weights.unsqueeze(-1)
    rows = [(weighted[a] * now.gradient[a:]).sum(-2) for a in range(_NUM_BASIS)]  # of the upper triangle
    right = list((weighted * now.residual).sum(-2).unbind(0))
    ridge = torch.finfo(weights.dtype).eps ** 0.5
    for a, row in enumerate(rows):
        row[0] += ridge
        for b in range(a + 1, _NUM_BASIS):
            factor = row[b - a] / row[0]
            rows[b] = torch.addcmul(rows[b], factor, row[b - a :], value=-1)
            right[b] = torch.addcmul(right[b], factor, right[a], value=-1)
    step = [right[-1]] * _NUM_BASIS
    for a in reversed(range(_NUM_BASIS)):
        known = right[a]
        for b in range(a + 1, _NUM_BASIS):
            known = torch.addcmul(known, rows[a][b - a], step[b], value=-1)
        step[a] = known / rows[a][0]
    return torch.stack(step, 2)


def _interpolated(maps: Tensor, cubic: Tensor) -> Tensor:
    """Coefficients ``(places, 5, C, N)`` of powers of t, from maps at the places ``(C, places, 5, N)``."""
    _, inverse = _chebyshev(maps.dtype, maps.device)
    coefficients = torch.einsum("jp,cpkn->jkcn", inverse, maps)
    quadratic = torch.tensor(_QUADRATIC, dtype=maps.dtype, device=maps.device)
    control = torch.einsum("aj,bk,jkcn->abcn", quadratic, cubic, coefficients[:, 1:])
    # That at the middle place rises, so some share of what slopes depend on t can stay.
    middle = torch.einsum("bk,kcn->bcn", cubic, coefficients[0, 1:])
    share = (middle - _LEAST_SLOPE) / (middle - control).clamp_min(torch.finfo(maps.dtype).tiny)
    share = torch.where(control < _LEAST_SLOPE, share, 1.0).amin((0, 1))
    return torch.cat([coefficients[:1], torch.cat([coefficients[1:, :1], share * coefficients[1:, 1:]], 1)])


def _basis(z: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    r = torch.sqrt(1 + z.square())
    s = z / r
    values = [torch.ones_like(z), z, r - 1, z - torch.atan(z), r + 1 / r - 2]
    return values, [torch.zeros_like(z), torch.ones_like(z), s, s.square(), s**3]


@lru_cache(maxsize=8)
def _nodes(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes and weights ``(nodes,)``, the basis and its slopes there ``(nodes, 5)``."""
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=dtype, device=device)
    values, slopes = _basis(nodes)
    return nodes, torch.softmax(-0.5 * _POWER * nodes.square(), 0), torch.stack(values, -1), torch.stack(slopes, -1)


@lru_cache(maxsize=8)
def _chebyshev(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The places, and the matrix that makes coefficients of powers of what is known there."""
    at = [math.cos(math.pi * (place + 0.5) / _PLACES) for place in range(_PLACES)]
    t = torch.tensor(at, dtype=torch.float64)
    inverse = torch.linalg.inv(t.unsqueeze(-1) ** torch.arange(_PLACES))
    return t.to(dtype=dtype, device=device), inverse.to(dtype=dtype, device=device)
