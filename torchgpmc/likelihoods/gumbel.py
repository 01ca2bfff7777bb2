"""Sums of a normal and a Gumbel variable, of which the greatest tells of softmax: rules for their distribution functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.quadrature import gauss_hermite
from torchgpmc.numerics.threads import slices

GUMBEL_LEAST = -4.0  # below which a Gumbel variable lies with probability exp(-e^4), 2e-24
_MOST = 15.0  # beyond which densities fall as e^-u, but for a share of e^-15, and sums of them are known
WIDEST = 50.0  # standard deviation of f up to which lattices are used: they grow with it
MAX_RATE = 600.0  # exponentials of less than this with a minus sign are denormal, which costs a hundredfold
_NARROW = 0.22  # the standard deviation below which nodes of its own take less time than a lattice for f
# Gauss-Hermite nodes for narrow normals: standard deviations up to which so many err by at most 1e-11, so that nobody sees which of
# them a batch gets.
_FEW_NODES = (0.005, 3), (0.017, 4), (0.04, 5), (0.09, 6), (0.15, 8), (_NARROW, 11)
_LONGEST_STEP = 0.63  # the step of f's lattice at most, in the narrowest standard deviations
_LOWEST = -300.0  # of exponents: lower ones are denormal, which costs a hundredfold
_BLOCK_ELEMENTS = 2**16  # of a temporary that stays in a core's cache


class RuleEdges(NamedTuple):
    """Where a next rule begins: normals between the same edges share one, at little more cost than their own.

    Args:
        widths: standard deviations, increasing, of the widest of K normals.
        step: of the finest lattice.
        steps: of coarser ones, increasing, as :func:`widest_step` says them.
    """

    widths: tuple[float, ...]
    step: float
    steps: tuple[float, ...]


def by_rule(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], mean: Tensor, variance: Tensor, edges: RuleEdges
) -> tuple[Tensor, ...]:
    """``function`` of means and variances ``(..., K)``, those between the same edges together.

    What a rule costs is set by the widest normal, and by all K together, which say how coarse the lattice may be. On a GPU nothing
    is told apart: it would have to be looked at from the host.

    Example:
        >>> edges = RuleEdges((1.0,), 0.5, ())
        >>> batches = []
        >>> mean, variance = torch.zeros(3, 2), torch.tensor([[0.1, 0.1], [4.0, 0.1], [0.2, 0.3]])
        >>> result = by_rule(lambda m, v: (batches.append(len(v)), (m + v).sum(-1))[1:], mean, variance, edges)
        >>> result, batches
        ((tensor([0.2000, 4.1000, 0.5000]),), [2, 1])
    """
    if variance.device.type != "cpu":
        return function(mean, variance)
    known = variance.detach()
    widths, steps = (torch.tensor(part, dtype=known.dtype) for part in (edges.widths, edges.steps))
    kinds = torch.bucketize(known.amax(-1), widths.square())
    kinds = kinds * (len(steps) + 1) + torch.bucketize(widest_step(known, edges.step), steps)
    parts = [(kinds == kind).nonzero(as_tuple=True) for kind in kinds.unique().tolist()]
    if len(parts) < 2:
        return function(mean, variance)
    found = [function(mean[part], variance[part]) for part in parts]
    results = [first.new_empty(*kinds.shape, *first.shape[1:]) for first in found[0]]
    for result, pieces in zip(results, zip(*found, strict=True), strict=True):
        for part, piece in zip(parts, pieces, strict=True):
            result = result.index_put_(part, piece)
    return tuple(results)


def widest_step(variance: Tensor, finest: float) -> Tensor:
    r"""The step ``(...)`` of a lattice for normals ``(..., K)``, whose sums err as little as the finest one's for the narrowest.

    A normal of variance s^2 plus a Gumbel variable has of frequency w a part of about :math:`\exp(-\pi w / 2 - s^2 w^2 / 2)`. In a
    product of such functions, which share w, the greatest part is :math:`\exp(-\pi w / 2 - w^2 / (2 P))`, P the sum of all
    :math:`1 / s^2`; a lattice errs by that at :math:`w = 2 \pi / step`.

    Example:
        >>> widest_step(torch.tensor([[1e-9, 1e-9], [100.0, 100.0]]), 0.5)
        tensor([0.5000, 7.3...])
    """
    frequency = 2 * math.pi / finest
    exponent, half = 0.5 * math.pi * frequency, 0.5 * math.pi
    precision = variance.reciprocal().sum(-1).nan_to_num(nan=torch.inf)  # a normal that is none has no say
    return 2 * math.pi * (half + (half**2 + 2 * exponent / precision).sqrt()) / (2 * exponent)


class Lattice(NamedTuple):
    """What is asked of sums f_k + g_k, g_k standard Gumbel variables, on a lattice u that is the same but for where it begins.

    Args:
        step: of u for narrow normals, and of a lattice for f.
        reach: standard deviations of f that count.
    """

    step: float
    reach: float

    def sums(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        r"""On u, from where some f_k + g_k all but surely exceeds it up to where all are surely below.

        :math:`H_k(u) = E F(u - f_k)`, F being a Gumbel variable's distribution function, is a sum over a lattice x of f:
        :math:`H_k(u_i) = \sum_j w_{kj} F(u_i - x_j)`. With both lattices counted from where u begins, F's values are one matrix:
        all data and functions are one product with it. Normals narrower than 0.22 have nodes of their own.

        Args:
            mean: ``(R, K)``, finite.
            variance: the same shape.

        Returns:
            Weights ``(n,)`` of sums over u in place of integrals of densities, and for some data after another which they are and
            their distribution functions, right to rounding of their own size, and densities ``(r, K, 2, n)``.

        Source:
            Sums over lattices of functions that are analytic in a strip converge geometrically (Trefethen & Weideman 2014).

        Example:
            >>> zero = torch.zeros(4, 2).double()
            >>> weights, parts = Lattice(0.5, 9.0).sums(zero, zero + 1)
            >>> [(rows, functions.shape[:3]) for rows, functions in parts]
            [(slice(0, 4, None), torch.Size([4, 2, 2]))]
        """
        deviation = variance.sqrt()
        lowest = (mean - self.reach * deviation).detach().amax(-1, keepdim=True) + GUMBEL_LEAST
        centre = mean - lowest
        known, width = centre.detach(), deviation.detach()
        is_narrow = width < _NARROW
        # All that is asked of a device, at once.
        step, bottom, top, widest, narrowest = torch.stack(
            [
                widest_step(width.square(), self.step).amin(),
                (known - self.reach * width).amin(),
                (known + self.reach * width).amax(),
                torch.where(is_narrow, width, -1.0).amax(),
                torch.where(is_narrow, torch.inf, width).amin(),
            ]
        ).tolist()
        u = step * torch.arange(int((top + _MOST) / step) + 2, dtype=mean.dtype, device=mean.device)
        functions = _Functions(u, self.step, bottom, top, widest, narrowest)
        rows = slices(len(mean), max(1, _BLOCK_ELEMENTS // (mean.shape[-1] * functions.width)))
        return _weights(u, step), ((part, functions.at(centre[part], deviation[part])) for part in rows)


def _weights(u: Tensor, step: float) -> Tensor:
    """Densities beyond the last u are a geometric series, which the weight of the last one holds."""
    weights = torch.full_like(u, step)
    weights[-1] += step / math.expm1(step)
    return weights


class _Functions:
    """Distribution function and density of normals plus a Gumbel variable, on u.

    Args:
        u: ``(n,)``, from 0.
        step: of the lattice for f at most.
        bottom: where that begins.
        top: above which no normal has mass.
        widest: standard deviation of the narrow normals, negative where there are none.
        narrowest: of the wide ones, infinite where there are none.
    """

    def __init__(self, u: Tensor, step: float, bottom: float, top: float, widest: float, narrowest: float):
        self.u = u
        self.width = 2 * len(u)
        self.rule = _normal_rule(widest) if widest >= 0 else None
        self.matrix: Tensor | None = None
        if math.isfinite(narrowest):
            self.step = min(step, _LONGEST_STEP * narrowest)
            self.x = self.step * torch.arange(int((top - bottom) / self.step) + 2, dtype=u.dtype, device=u.device) + bottom
            rates = (self.x.unsqueeze(-1) - u).clamp_max(math.log(MAX_RATE)).exp()
            below = torch.exp(-rates)
            self.matrix = torch.cat([below, rates * below], -1)
            self.width = max(self.width, len(self.x))

    def at(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """Of some of the normals, ``(R, K, 2, n)``."""
        if self.rule is None:
            return self._by_lattice(mean, deviation)
        if self.matrix is None:
            return self._by_nodes(mean, deviation)
        is_narrow = deviation < _NARROW
        if mean.device.type != "cpu":  # the narrow ones would have to be counted on the host
            lattice = self._by_lattice(mean, deviation.clamp_min(_NARROW))
            return torch.where(is_narrow[..., None, None], self._by_nodes(mean, deviation.clamp_max(_NARROW)), lattice)
        found = mean.new_empty(*mean.shape, 2, len(self.u))
        for rule, chosen in (self._by_nodes, is_narrow), (self._by_lattice, ~is_narrow):
            which = chosen.nonzero(as_tuple=True)
            found = found.index_put(which, rule(mean[which], deviation[which]))
        return found

    def _by_lattice(self, mean: Tensor, deviation: Tensor) -> Tensor:
        assert self.matrix is not None
        scale = deviation.reciprocal().unsqueeze(-1)
        exponent = ((self.x - mean.unsqueeze(-1)) * scale).square() * -0.5
        weights = exponent.clamp_min(_LOWEST).exp() * ((self.step / math.sqrt(2 * math.pi)) * scale)
        return (weights @ self.matrix).view(*mean.shape, 2, len(self.u))

    def _by_nodes(self, mean: Tensor, deviation: Tensor) -> Tensor:
        assert self.rule is not None
        cdf, density = (mean.new_zeros(*mean.shape, len(self.u)) for _ in range(2))
        at_mean = mean.unsqueeze(-1).clamp_min(_LOWEST).exp() * -torch.exp(-self.u)
        for node, weight in zip(*(part.tolist() for part in self.rule), strict=True):
            rate = (at_mean * (node * deviation).exp().unsqueeze(-1)).clamp_min(-MAX_RATE)
            below = rate.exp()
            cdf.add_(below, alpha=weight)
            density.sub_(below * rate, alpha=weight)
        return torch.stack([cdf, density], -2)


def _normal_rule(widest: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E exp(-e^(f - u)) and its derivatives for normals of at most this standard deviation, 0.22 at most."""
    count = next(count for limit, count in _FEW_NODES if widest <= limit)
    return gauss_hermite(count, torch.float64, torch.device("cpu"))
