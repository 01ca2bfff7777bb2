"""Expectations over normal variables: fixed rules, and an adaptive one for densities of any width."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgpmc.checks import warn

DEFAULT_NODES = 20
PROMISED = 1e-6  # relative error of the adaptive rule

_PRODUCT_NODES = 640
_REPLICATES = 8
_REPLICATE_POINTS = 512
_FIRST_EDGES = (-12.0, -7.0, -4.0, -2.0, 0.0, 2.0, 4.0, 7.0, 12.0)  # in standard deviations from the mean
_PANEL_NODES = 12
FIRST_NODES = (_PANEL_NODES + 2) * (2 * len(_FIRST_EDGES) - 1)  # of the adaptive rule at first, where a peak is given
_PARTS = 4  # into which a panel is split
_SPLITS = 2  # panels of each integral that are split in a round
_MAX_DOUBLINGS = 10
_MAX_ROUNDS = 40
_TOLERANCE = 1e-8  # of the estimated error, which at a kink is less than the true one


@lru_cache(maxsize=32)
def gauss_hermite(num_nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(num_nodes,)`` such that sum w g(x) is E g(x), x standard normal.

    Example:
        >>> import torch
        >>> x, w = gauss_hermite(20, torch.float64, torch.device("cpu"))
        >>> round(float((w * x**4).sum()), 10)
        3.0
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / weights.sum()
    return torch.as_tensor(nodes, dtype=dtype, device=device), torch.as_tensor(weights, dtype=dtype, device=device)


@lru_cache(maxsize=32)
def normal_points(dimension: int, dtype: torch.dtype, device: torch.device, num_points: int = 256, seed: int = 0) -> Tensor:
    """Quasi-random standard normal points ``(num_points, dimension)``: a Sobol sequence, scrambled with a fixed seed."""
    uniform = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed).draw(num_points, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)).to(dtype=dtype, device=device)


@lru_cache(maxsize=32)
def product_rule(dimension: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points ``(n, dimension)`` and weights ``(n,)`` for standard normal vectors, n at most 640.

    A product of Gauss-Hermite rules, of 20 nodes for two dimensions, 8 for three, 5 for four; quasi-random points beyond. In
    E log softmax(f) at variance 1 they err by 2e-12, 2e-7, 2e-5, and 1e-3.
    """
    nodes = min(DEFAULT_NODES, int(_PRODUCT_NODES ** (1 / dimension) + 1e-9))
    if nodes < 4:
        points = normal_points(dimension, dtype, device, _PRODUCT_NODES)
        return points, torch.full_like(points[:, 0], 1 / _PRODUCT_NODES)
    at, weights = gauss_hermite(nodes, dtype, device)
    return torch.cartesian_prod(*[at] * dimension).view(-1, dimension), torch.cartesian_prod(*[weights] * dimension).prod(-1)


def expectation_of_several(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """E function(f), smooth, of K independent normals, by :func:`product_rule`: maps ``(n, ..., K)`` to ``(n, ...)``."""
    points, weights = product_rule(mean.shape[-1], mean.dtype, mean.device)
    values = function(mean + variance.sqrt() * points.view(len(points), *[1] * (mean.dim() - 1), -1))
    return torch.tensordot(weights, values, 1)


def log_integral_of_several(log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """Log of E exp(log_function(f)) over K independent normals, from 8 times 512 quasi-random points.

    No rule reaches 1e-6 here: the error is about 1e-3 where the density is as wide as the normal, and grows as it gets narrower.

    Args:
        log_function: maps ``(n, ..., K)`` to ``(n, ...)``, or to several functions ``(n, ..., J)``.
        mean: ``(..., K)``.
        variance: the same shape.

    Warns:
        UserWarning: the eight parts differ so that the standard error of the logarithm exceeds 0.01 nats somewhere.
    """
    dimension, deviation = mean.shape[-1], variance.sqrt()
    logs = []
    for seed in range(_REPLICATES):
        points = normal_points(dimension, mean.dtype, mean.device, _REPLICATE_POINTS, seed)
        at = mean + deviation * points.view(len(points), *[1] * (mean.dim() - 1), -1)
        logs.append(torch.logsumexp(log_function(at), 0) - math.log(_REPLICATE_POINTS))
    parts = torch.stack(logs)
    result = torch.logsumexp(parts, 0) - math.log(_REPLICATES)
    error = float((parts.detach() - result.detach()).exp().std(0).nan_to_num(1.0).max()) / math.sqrt(_REPLICATES)
    if error > 0.01:
        warn(
            f"a predictive density that integrates over {dimension} latent functions has a standard error of up to {error:.1g} "
            f"nats: the likelihood is narrow beside the latents' spread. Expected at most 0.01; override predictive_log_prob "
            f"of the likelihood with a closed form or a rule of its own.",
            UserWarning,
        )
    return result


class Integrals(NamedTuple):
    """Integrals of J functions under one density: the j-th is exp(log_scale) * values[j]."""

    log_scale: Tensor  # (...)
    values: Tensor  # (J, ...)


# Points (n, ...) to log p (n, ...) and to the J functions, which broadcast against it.
LogDensityAndFunctions = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]


class _Panels(NamedTuple):
    """Disjoint intervals."""

    left: Tensor  # (panels, ...)
    width: Tensor
    log_scale: Tensor  # of what follows
    values: Tensor  # (J, panels, ...)
    sizes: Tensor  # integrals of absolute values
    errors: Tensor


def integrals(
    function: LogDensityAndFunctions, mean: Tensor, variance: Tensor, peak: tuple[Tensor, Tensor] | None = None
) -> Integrals:
    r""":math:`\int p(f) g_j(f) N(f | mean, variance) df`, elementwise, to a relative error of 1e-6, however narrow p is.

    Twelve Gauss-Legendre nodes a panel, over mean +- 12 standard deviations at first. The interval is doubled while its ends
    matter, and the worst panels are split while their errors do. A peak is found by its flanks; one that cannot be seen from the
    nodes about the mean (of a density that is not log-concave, beyond 12 standard deviations) has to be given. Kinks and jumps may
    be anywhere.

    Args:
        function: maps points ``(n, ...)``, constants to autograd, to log p ``(n, ...)`` (-inf, or NaN, is no density) and to a
            tuple of tensors g_j of that shape, or scalars.
        mean: any shape ``...``.
        variance: the same shape, positive; a variance, not a standard deviation.
        peak: where p has its peak, and its width there; both broadcast against the mean. Saves nodes if p is narrow.

    Returns:
        Differentiable in the mean, the variance, and in what ``function`` depends on.

    Warns:
        UserWarning: the error was not reached, and how large it is thought to be.

    Source:
        A panel's error is estimated by its last four Legendre coefficients, to the power 3/2, as QUADPACK raises the difference of
        its two rules (Piessens, de Doncker-Kapenga, Ueberhuber & Kahaner 1983), and by what its ends show.

    Example:
        >>> import torch
        >>> zero, width = torch.zeros(2).double(), torch.tensor([1e-4, 1.0]).double()
        >>> found = integrals(lambda f: (-0.5 * ((f - 3) / width) ** 2, (f,)), zero, zero + 1)
        >>> found.log_scale.exp() * found.values[0] / width
        tensor([0.0333, 0.1118], dtype=torch.float64)
    """
    centre, scale = mean.detach(), variance.detach().sqrt()

    def weighted(points: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        log_p, functions = function(points)
        log_normal = -0.5 * ((points - mean).square() / variance + (2 * torch.pi * variance).log())
        return torch.where(log_p.isnan(), -torch.inf, log_p) + log_normal, functions

    relative = centre.new_tensor(_FIRST_EDGES).view(-1, *[1] * centre.dim())
    edges, reach = centre + scale * relative, _FIRST_EDGES[-1] * scale
    if peak is not None:
        around = peak[0].detach() + peak[1].detach() * relative
        edges = torch.cat([edges, around.expand_as(edges)]).sort(0).values
        reach = torch.maximum(edges[-1] - centre, centre - edges[0])
    tolerance = max(_TOLERANCE, 16 * torch.finfo(centre.dtype).eps)
    panels = _evaluated(weighted, edges[:-1], edges.diff(dim=0))
    low, high, ends = edges[0], edges[-1], [0, len(edges) - 2]
    for _ in range(_MAX_DOUBLINGS):
        sizes = _one_scale(panels).sizes
        if not bool((sizes[:, ends].sum(1) > tolerance * sizes.sum(1)).any()):
            break
        reach, ends = 2 * reach, [-2, -1]
        left = torch.stack([centre - reach, high])
        panels = _joined(panels, _evaluated(weighted, left, torch.stack([low, centre + reach]) - left))
        low, high = centre - reach, centre + reach
    for _ in range(_MAX_ROUNDS):
        scaled = _one_scale(panels)
        shares = scaled.errors / scaled.sizes.sum(1, keepdim=True)
        if not bool((shares.sum(1) > tolerance).any()):
            break
        panels = _split(weighted, panels, shares.nan_to_num().amax(0).topk(_SPLITS, 0).indices)
    else:
        scaled = _one_scale(panels)
        _warn_of_errors(scaled)
    return Integrals(scaled.log_scale[0], scaled.values.sum(1))


def log_integral(
    log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, peak: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Log of E exp(log_function(f)), f ~ N(mean, variance), by :func:`integrals`."""
    one = mean.new_ones(())
    found = integrals(lambda f: (log_function(f), (one,)), mean, variance, peak)
    return found.log_scale + found.values[0].log()


def adaptive_expectation(function: Callable[[Tensor], tuple[Tensor, ...]], mean: Tensor, variance: Tensor) -> Tensor:
    """E g_j(f), f ~ N(mean, variance), by :func:`integrals`: ``(J, ...)``."""
    found = integrals(lambda f: (torch.zeros_like(f), function(f)), mean, variance)
    return found.log_scale.exp() * found.values


@lru_cache(maxsize=8)
def _panel_rule(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [0, 1]; rows for the last four Legendre coefficients; rows for what the ends show.

    The ends are nodes of weight zero, last among the nodes. Where they are off the polynomial through the others there is a kink
    or a jump between an end and its neighbour, which no rule on the others sees.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
    basis = np.polynomial.legendre.legvander(nodes, _PANEL_NODES - 1) * (np.arange(_PANEL_NODES) + 0.5) * weights[:, None]
    ends = np.polynomial.legendre.legvander(np.array([-1.0, 1.0]), _PANEL_NODES - 1) @ basis.T
    gap = (nodes[0] + 1) / 2
    parts = (
        (np.append(nodes, [-1.0, 1.0]) + 1) / 2,
        np.append(weights, [0.0, 0.0]) / 2,
        np.pad(basis[:, -4:].T, ((0, 0), (0, 2))),
        gap * np.concatenate([ends, -np.eye(2)], 1),
    )
    at, weight, last, outside = (torch.as_tensor(part, dtype=dtype, device=device) for part in parts)
    return at, weight, last, outside


def _evaluated(weighted: LogDensityAndFunctions, left: Tensor, width: Tensor) -> _Panels:
    nodes, weights, last, outside = _panel_rule(left.dtype, left.device)
    points = left + width * nodes.view(-1, *[1] * left.dim())
    shape = points.shape
    log_density, functions = weighted(points.flatten(0, 1))
    log_density = log_density.view(shape)
    log_scale = log_density.detach().amax(0).clamp_min(torch.finfo(left.dtype).min)
    density = (log_density - log_scale).exp()
    terms = torch.stack([density * (g.view(shape) if g.dim() else g) for g in functions])
    values = torch.einsum("q,jq...->j...", weights, terms) * width
    with torch.no_grad():
        sizes = torch.einsum("q,jq...->j...", weights, terms.abs()) * width
        unresolved = torch.einsum("lq,jq...->lj...", last, terms).abs().sum(0) * width
        beyond = torch.einsum("eq,jq...->ej...", outside, terms).abs().sum(0) * width
        errors = (unresolved * (unresolved / sizes).sqrt()).nan_to_num(0.0) + beyond.nan_to_num(0.0)
    return _Panels(left, width, log_scale, values, sizes, errors)


def _one_scale(panels: _Panels) -> _Panels:
    """A copy on the scale of the greatest panel. The panels keep their own: a split may find less than the nodes before it."""
    greatest = panels.log_scale.amax(0, keepdim=True)
    factor = (panels.log_scale - greatest).exp()
    return panels._replace(
        log_scale=greatest.expand_as(panels.log_scale),
        values=panels.values * factor,
        sizes=panels.sizes * factor,
        errors=panels.errors * factor,
    )


def _joined(first: _Panels, second: _Panels) -> _Panels:
    return _Panels(*(torch.cat(parts, -first.left.dim()) for parts in zip(first, second, strict=True)))


def _split(weighted: LogDensityAndFunctions, panels: _Panels, index: Tensor) -> _Panels:
    """The panels at ``index`` ``(splits, ...)`` cut into equal parts, the first of which takes the old one's place."""
    width, left = panels.width.gather(0, index) / _PARTS, panels.left.gather(0, index)
    new = _evaluated(weighted, torch.cat([left + part * width for part in range(_PARTS)]), torch.cat([width] * _PARTS))
    dim, count = -left.dim(), len(index)
    pairs = [(old, *part.tensor_split([count], dim)) for old, part in zip(panels, new, strict=True)]
    kept = _Panels(*(old.scatter(dim, index.expand_as(first), first) for old, first, _ in pairs))
    return _joined(kept, _Panels(*(rest for _, _, rest in pairs)))


def _warn_of_errors(panels: _Panels) -> None:
    error = float((panels.errors.sum(1) / panels.sizes.sum(1)).nan_to_num().max())
    if error > PROMISED:
        warn(
            f"an integral over a latent function value did not settle: its relative error may be {error:.1g}. The likelihood has "
            f"more peaks or jumps in f than quadrature can follow; do not trust expectations or predictive densities beyond that.",
            UserWarning,
        )
