"""Expectations of smooth functions over scalar normal variables, by as few nodes as the widths of these ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

REACH = 8.0  # standard deviations from the mean within which nodes about a centre lie
_LATTICE_REACH = 7.6  # standard deviations; 3e-14 of a normal's mass are beyond
_LATTICE_DIGITS = 31.0  # minus the log of a lattice's error; derivatives in the variance err by up to a thousand times as much
_HALVES = range(10, 33)  # nodes of a lattice on either side of the mean
_BLOCK_ELEMENTS = 2**16  # of temporaries that stay in a core's cache
_LEVELS = 10, 14, 20, 32  # of these, where normals of different widths get different lattices
_MANY = 2**11  # normals from where on that is worth its overhead


def rule_about(
    mean: Tensor, variance: Tensor, centre: Tensor | float, scale: Tensor | float, num_nodes: int = 64
) -> tuple[Tensor, Tensor]:
    r"""Nodes x and weights w such that E g(f) = sum w g(mean + sd x) where g is smooth but turns at ``centre``, however narrowly.

    ``scale`` is how far from the real line g has its nearest singularity, which is what rules converge by. Where all standard
    deviations are below it these are 21 to 65 evenly spaced nodes, the fewer the narrower the normals; else those normals that are
    wider get Gauss-Legendre nodes in t, f = centre + scale sinh(t), over mean +- 8 standard deviations. Both err by 2e-11 and
    less, slopes too, so that which a batch gets is not seen. Off the CPU it is always the latter, which the host need not know.

    Args:
        mean: any shape ``...``.
        variance: the same shape, positive; a variance, not a standard deviation.
        centre: broadcasts against the mean.
        scale: the same; positive.
        num_nodes: of the second rule; 64 are enough up to deviations of a hundred times the scale.

    Returns:
        x ``(num_nodes, ...)``, and w with w x below it ``(2, num_nodes, ...)``, or to be broadcast to it; constants to autograd.
        E g' and E x g' / (2 sd), which they give too, are the derivatives of E g in mean and variance.

    Source:
        The trapezoidal rule on the real line is the best for integrands that are analytic in a strip (Trefethen & Weideman 2014,
        section 5); Gauss-Hermite nodes lie where the normal is negligible.
    """
    if mean.device.type == "cpu":
        widest = float((variance.detach() / scale**2).max()) if variance.numel() else 0.0
        fewest = next((half for half in _HALVES if widest <= _widest(half)), None)
        if fewest is not None:
            return _lattice(fewest, mean.dim(), mean.dtype, mean.device)
    # The second rule's nodes are differences of numbers as large as the mean, which narrow normals are lost in.
    half = num_nodes // 2
    with torch.no_grad():
        even = _lattice(half, mean.dim(), mean.dtype, mean.device)
        nodes, weights = _over_reach(mean, variance, centre, scale, 2 * half + 1)
        narrow = variance / scale**2 <= _widest(half)
        return torch.where(narrow, even[0], nodes), torch.where(narrow, even[1], torch.stack([weights, weights * nodes]))


def _over_reach(
    mean: Tensor, variance: Tensor, centre: Tensor | float, scale: Tensor | float, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The second rule of :func:`rule_about`."""
    shape = (-1,) + (1,) * mean.dim()
    nodes, weights = _legendre(num_nodes, mean.dtype, mean.device)
    deviation, offset = variance.sqrt() / scale, (mean - centre) / scale
    low, high = torch.asinh(offset - REACH * deviation), torch.asinh(offset + REACH * deviation)
    t = low + (high - low) * nodes.view(shape)
    x = (torch.sinh(t) - offset) / deviation
    density = weights.view(shape) * torch.cosh(t) * torch.exp(-0.5 * x.square())
    return x, density / density.sum(0)


@lru_cache(maxsize=64)
def _widest(half: int) -> float:
    """Variance over squared distance of singularities that a lattice serves; y deviations cost exp(y^2 / 2 - 2 pi y / step)."""
    frequency = 2 * math.pi * half / _LATTICE_REACH
    return (frequency - math.sqrt(frequency**2 - 2 * _LATTICE_DIGITS)) ** -2


@lru_cache(maxsize=64)
def _lattice(half: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes = (_LATTICE_REACH / half) * torch.arange(-half, half + 1, dtype=torch.float64).view(-1, *[1] * dim)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    return nodes.to(device, dtype), torch.stack([weights, weights * nodes]).to(device, dtype)


def add_up(sums: Callable[..., tuple[Tensor, ...]], nodes: Tensor, like: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Totals of sums over blocks of nodes with their weights, so few that functions of them at every ``like`` stay in the cache."""
    count = nodes.shape[0]
    size = max(1, _BLOCK_ELEMENTS // max(1, like.numel())) if like.device.type == "cpu" else count
    if size >= count:
        return sums(nodes, *weights)
    blocks = zip(*(part.split(size, -nodes.dim()) for part in (nodes, *weights)), strict=True)
    totals = sums(*next(blocks))
    for block in blocks:  # one at a time: many of them, stacked, leave the cache
        totals = tuple(total + part for total, part in zip(totals, sums(*block), strict=True))
    return totals


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """sum w g over the nodes of :func:`rule_about`: values ``(num_nodes, ...)`` to ``(...)``; weights ``(R, ...)`` give R sums."""
    lead, nodes = weights.shape[: weights.dim() - values.dim()], values.shape[0]
    if weights.numel() == lead.numel() * nodes:
        return (weights.reshape(-1, nodes) @ values.reshape(nodes, -1)).view(lead + values.shape[1:])
    return (weights * values).sum(len(lead))


def expectation_about(
    function: Callable[[Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    centre: Tensor | float,
    scale: Tensor | float,
    num_nodes: int = 64,
) -> Tensor:
    """E function(f), f ~ N(mean, variance), by :func:`rule_about`; ``function`` maps ``(num_nodes, ...)`` to the same shape."""
    nodes, weights = rule_about(mean, variance, centre, scale, num_nodes)
    return weighted_sum(weights[0], function(mean + variance.sqrt() * nodes))


@lru_cache(maxsize=8)
def _legendre(num_nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return torch.as_tensor((nodes + 1) / 2, dtype=dtype, device=device), torch.as_tensor(weights / 2, dtype=dtype, device=device)


def in_groups(function: Callable[..., tuple[Tensor, ...]], variance: Tensor, scale: float, *others: Tensor) -> tuple[Tensor, ...]:
    """``function(variance, *others)``, elementwise, a few of the last dimension's indices at a time: those of like width.

    Else one wide normal among thousands of narrow ones would have :func:`rule_about` take many nodes for each.

    Args:
        function: of tensors ``(..., N)`` to such tensors.
        variance: ``(..., N)``, of the normals.
        scale: of :func:`rule_about`.
        others: ``(..., N)`` each, or what broadcasts to it with as many columns.
    """
    if variance.device.type != "cpu" or variance.numel() < _MANY:
        return function(variance, *others)
    widest = variance.detach()[None].amax(tuple(range(variance.dim()))) / scale**2
    level = torch.bucketize(widest, widest.new_tensor([_widest(half) for half in _LEVELS]))
    groups = [(level == number).nonzero().squeeze(-1) for number in level.unique()]
    if len(groups) == 1:
        return function(variance, *others)
    found = [function(*(part[..., rows] for part in (variance, *others))) for rows in groups]
    order = torch.cat(groups).argsort()
    return tuple(torch.cat(parts, -1)[..., order] for parts in zip(*found, strict=True))
