"""Sums of a normal and a Gumbel variable, of which the greatest tells of softmax: what rules for them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.quadrature import gauss_hermite

GUMBEL_LEAST = -4.0  # below which a Gumbel variable lies with probability exp(-e^4), 2e-24
GUMBEL_MOST = 22.0  # above which, with probability e^-22, 3e-10
EULER = 0.5772156649015329  # a Gumbel variable's mean
WIDEST = 50.0  # standard deviation of f up to which lattices are used: they grow with it
MAX_RATE = 600.0  # exponentials of less than this with a minus sign are denormal, which costs a hundredfold
# Gauss-Hermite nodes for narrow normals: standard deviations up to which so many err by at most 2e-10.
_FEW_NODES = (0.003, 2), (0.017, 3), (0.06, 5), (0.22, 9)


class Likeness(NamedTuple):
    """Which normals one rule serves at little more cost than their own.

    Args:
        widths: standard deviations, between which rules cost about the same.
        step: of the finest lattice.
        steps: of coarser ones, between which lattices cost about the same.
    """

    widths: tuple[float, ...]
    step: float
    steps: tuple[float, ...]


def by_likeness(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], mean: Tensor, variance: Tensor, likeness: Likeness
) -> tuple[Tensor, ...]:
    """``function`` of means and variances ``(..., K)``, those that want like rules together.

    What a rule costs is set by the widest normal, and by all K together, which say how coarse the lattice may be. On a GPU nothing
    is told apart: it would have to be looked at from the host.
    """
    if variance.device.type != "cpu":
        return function(mean, variance)
    known = variance.detach()
    widths, steps = (torch.tensor(edges, dtype=known.dtype) for edges in (likeness.widths, likeness.steps))
    kinds = torch.bucketize(known.amax(-1), widths.square())
    kinds = kinds * (len(steps) + 1) + torch.bucketize(widest_step(known, likeness.step), steps)
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


def normal_rule(widest: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E exp(-e^(f - u)) and its derivatives for normals of at most this standard deviation, 0.63 at most."""
    for limit, count in _FEW_NODES:
        if widest <= limit:
            return gauss_hermite(count, torch.float64, torch.device("cpu"))
    nodes = 0.8 * torch.arange(-8, 9, dtype=torch.float64)
    return nodes, torch.softmax(-0.5 * nodes.square(), 0)
