"""Separation of variables and minimax tilting as estimators: weighted points, in chunks, with gradients on request."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import scipy.stats
import torch
from torch import Tensor

from torchgpmc.checks import check_count, is_count
from torchgpmc.diagnostics.weights import pareto_khat
from torchgpmc.numerics.random import open_uniform, sobol_points
from torchgpmc.numerics.threads import slices
from torchgpmc.orthant.matching import PILOT_POINTS, Sites, guided, hardest_first, matched_sites, mildest, order_of, shared
from torchgpmc.orthant.problem import OrthantEstimate, Problem, detached, select
from torchgpmc.orthant.quick_draws import quick_draws, quick_guide
from torchgpmc.orthant.separation import SeparatedProposal, draw, log_weights, separate, tilted
from torchgpmc.orthant.tilting import minimax_tilt
from torchgpmc.trees import put

# Numbers in the largest array of a chunk: large enough to hide the cost of operations, small enough to stay near the cache.
_CHUNK_ELEMENTS = 2**21
# Where no pilot decides.
NARROWING = 0.5
# Of sites that draws are made from: weights are as even as at 1e-3, for six tenths of the time
# (docs/results/default_call_tried.md).
_NEAR = 0.03

Proposer = Callable[[Problem], SeparatedProposal]


def check_points(num_points: int, least: int) -> None:
    """Raises a ``ValueError`` unless ``num_points`` is a whole number of at least ``least``."""
    check_count("num_points", num_points, least, ", for instance 10000")


def points_of_replicate(num_points: int, num_replicates: int) -> int:
    """Points of each of ``num_replicates`` nets: the power of two nearest to its share, since Sobol nets are balanced there.

    Example:
        >>> points_of_replicate(10_000, 8)
        1024
    """
    if not is_count(num_replicates, 2):
        raise ValueError(f"num_replicates is {num_replicates!r}. Expected at least 2, for instance 8: their spread is the error.")
    check_points(num_points, num_replicates)
    return 2 ** round(math.log2(num_points / num_replicates))


@dataclass(frozen=True)
class SeparationOfVariables:
    """Separation of variables on scrambled Sobol points (Genz 1992), tilted towards where the limits hold.

    The tilt replaces the limits to come by Gaussian factors, which both shift and narrow the points (see
    :func:`torchgpmc.orthant.matching.guided`). The standard error comes from independent randomisations of one net, and is
    widened by what their small number leaves open (:func:`widening`). :class:`Quadrature` serves up to three variables.

    Args:
        tilting: make the weights nearly even. Without it (plain GHK) a few points can carry the whole estimate in high dimensions,
            and the error estimate misses what they miss: watch ``pareto_khat``.
        reordering: hardest variables first: a gain in accuracy with tilting, a loss on GP covariances without.
        num_replicates: randomisations, each with its share of the points.
        narrowing: how much the points are narrowed, from 0 (shifted alone) to 1 (as much as the matched factors say); by default
            what a pilot of 256 points finds best for each problem, which makes the estimate jump between problems nearly alike.

    Example:
        >>> import torch
        >>> from torchgpmc.orthant import log_probability
        >>> covariance = torch.full((20, 20), 0.5, dtype=torch.float64) + 0.5 * torch.eye(20)
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = log_probability(covariance, lower=0.0, method=SeparationOfVariables(), generator=generator)
        >>> abs(float(found.value.exp()) * 21 - 1) < 0.1  # it is 1 / 21
        True
    """

    tilting: bool = True
    reordering: bool = True
    num_replicates: int = 8
    narrowing: float | None = None

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """Estimates with about ``num_points`` points a problem: the nearest power of two a replicate."""
        replicates = self.num_replicates
        each = points_of_replicate(num_points, replicates)
        if self.narrowing is not None and not 0 <= self.narrowing <= 1:
            raise ValueError(f"narrowing is {self.narrowing!r}. Expected a number from 0 to 1, or None to find it.")
        dimension = problem.lower.shape[-1] - 1
        pilot = open_uniform((dimension, PILOT_POINTS), problem.lower, generator)

        def guide(some: Problem) -> tuple[Problem, Proposer]:
            if not (self.tilting or self.reordering):
                return some, plain(some)
            sites = matched_sites(some)
            if self.reordering:
                some, sites, _ = hardest_first(some, sites)
            if not self.tilting:
                return some, plain(some)
            sites = mildest(some, sites, pilot) if self.narrowing is None else shared(sites, self.narrowing)
            return some, functools.partial(guided, sites=sites)

        def chunks() -> Iterator[tuple[slice, Tensor]]:
            return sobol_chunks(problem.lower, dimension, each, replicates, generator)

        return estimate_from_weights(_estimate(problem, guide, chunks), replicates)


@dataclass(frozen=True)
class MinimaxTilting:
    """Minimax exponential tilting with independent points (Botev 2016): a relative error that stays bounded far in the tails.

    Its points are those that :func:`truncated_normal_draws` accepts or rejects. For a probability alone
    :class:`SeparationOfVariables` is more accurate.

    Example:
        >>> import torch
        >>> from torchgpmc.orthant import log_probability
        >>> covariance = torch.full((20, 20), 0.5, dtype=torch.float64) + 0.5 * torch.eye(20)
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = log_probability(covariance, lower=0.0, method=MinimaxTilting(), generator=generator)
        >>> abs(float(found.value.exp()) * 21 - 1) < 0.1  # it is 1 / 21
        True
    """

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """Estimates with ``num_points`` points a problem."""
        check_points(num_points, 2)
        dimension = problem.lower.shape[-1] - 1

        def chunks() -> Iterator[tuple[slice, Tensor]]:
            at_once = max(1, _CHUNK_ELEMENTS // max(1, dimension * num_points))
            for rows in slices(len(problem.lower), at_once):
                yield rows, open_uniform((rows.stop - rows.start, dimension, num_points), problem.lower, generator)

        def guide(some: Problem) -> tuple[Problem, Proposer]:
            return some, functools.partial(tilted, tilt=minimax_tilt(separate(detached(some))).shift)

        return estimate_from_weights(_estimate(problem, guide, chunks), num_points)


def plain(problem: Problem) -> Proposer:
    """Without a tilt."""
    return functools.partial(tilted, tilt=torch.zeros_like(problem.lower))


def sobol_chunks(
    like: Tensor, dimension: int, each: int, replicates: int, generator: torch.Generator
) -> Iterator[tuple[slice, Tensor]]:
    """Sobol points for B problems, ``like`` ``(B, N)``: rows and points ``(rows, dimension, replicates * each)`` by chunks."""
    batch = len(like)
    points = sobol_points(each, max(1, dimension), replicates, batch, generator)
    at_once = max(1, _CHUNK_ELEMENTS // max(1, dimension * each * replicates))
    for rows in slices(batch, at_once):
        uniforms = torch.stack([next(points)[:dimension] for _ in range(rows.start, rows.stop)])
        if like.dtype != uniforms.dtype:  # rounding must not take them to 1
            uniforms = uniforms.to(like.dtype).clamp_max_(1 - torch.finfo(like.dtype).eps)
        yield rows, uniforms


def _estimate(
    problem: Problem, guide: Callable[[Problem], tuple[Problem, Proposer]], chunks: Callable[[], Iterator[tuple[slice, Tensor]]]
) -> Tensor:
    """Log weights ``(B, P)``; while gradients are wanted, with a graph that carries d log(mean weight)."""
    wanted = torch.is_grad_enabled() and any(part.requires_grad for part in problem)
    parts = []
    for rows, uniforms in chunks():
        some, propose = guide(select(problem, rows))
        with torch.no_grad():
            proposal = propose(some)
            value = torch.cat([log_weights(proposal, block) for block in _blocks(uniforms)], 1)
        parts.append(_with_gradient(value, some, propose, uniforms) if wanted else value)
    return torch.cat(parts)


def _blocks(uniforms: Tensor) -> tuple[Tensor, ...]:
    batch, dimension, count = uniforms.shape
    return uniforms.split(max(1, _CHUNK_ELEMENTS // max(1, batch * dimension)), -1) if count else (uniforms,)


def _with_gradient(value: Tensor, problem: Problem, propose: Proposer, uniforms: Tensor) -> Tensor:
    """``value`` ``(B, P)`` with the derivatives of log(mean weight) attached, worked out block by block to bound memory."""
    parts = (problem.factor, problem.lower, problem.upper)
    leaves = [part.detach().requires_grad_(True) for part in parts]
    normaliser = torch.logsumexp(value, -1, keepdim=True)
    totals = [torch.zeros_like(part) for part in parts]
    done = 0
    for block in _blocks(uniforms):
        with torch.enable_grad():
            log_weight = log_weights(propose(Problem(problem.covariance.detach(), *leaves)), block)
            share = (value[:, done : done + block.shape[-1]] - normaliser).exp()
            gradients = torch.autograd.grad((share * log_weight).sum(), leaves)
        done += block.shape[-1]
        totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
    linear = torch.zeros_like(value[:, 0])
    for part, total in zip(parts, totals, strict=True):
        linear = linear + torch.where(torch.isfinite(part.detach()), part * total, 0.0).flatten(1).sum(-1)
    return value + (linear - linear.detach()).unsqueeze(-1)


def weighted_draws(problem: Problem, uniforms: Tensor, sites: Sites | None = None) -> tuple[Tensor, Tensor]:
    """Weighted draws from B truncated normals: log weights ``(B, P)``, whose mean weight is the probability, and x ``(B, P, N)``.

    Args:
        problem: B problems.
        uniforms: ``(B, N, P)`` in (0, 1).
        sites: that guide the draws, where some are known; matched otherwise.
    """
    with torch.no_grad():
        sites = matched_sites(problem, _NEAR) if sites is None else sites
        if bool((problem.upper < torch.inf).any()):
            return _with_sites(problem, sites, uniforms)
        guide = quick_guide(problem, shared(sites, NARROWING), order_of(problem, sites))
        log_weight, x, sound = quick_draws(problem, guide, uniforms)
        again = (~sound).nonzero().squeeze(-1)
        if not len(again):
            return log_weight, x
        of_them = Problem(*(part[again] for part in problem)), Sites(*(part[again] for part in sites))
        return put((log_weight, x), again, _with_sites(*of_them, uniforms[again]))


def _with_sites(problem: Problem, sites: Sites, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`weighted_draws` without rounding, for any limits."""
    ordered, moved, order = hardest_first(problem, sites)
    proposal = guided(ordered, shared(moved, NARROWING))
    log_weight, points = draw(proposal, uniforms)
    return log_weight, in_place(problem, order, proposal.variables(points).mT)


def in_place(problem: Problem, order: Tensor, x: Tensor) -> Tensor:
    """Variables of a reordered problem ``(B, P, N)`` in the original order, rounding kept within the limits."""
    place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    x = x.gather(2, place.unsqueeze(1).expand_as(x))
    return torch.minimum(torch.maximum(x, problem.lower.unsqueeze(1)), problem.upper.unsqueeze(1))


def widening(groups: int) -> float:
    """By how much a standard error from the spread of ``groups`` estimates is widened, to be read as that of a normal error.

    Three of it then leave out as much as three standard errors of a normal: the quantile of Student's t over that of the normal.

    Example:
        >>> round(widening(8), 2), round(widening(1000), 2)
        (1.51, 1.0)
    """
    return float(scipy.stats.t.isf(scipy.stats.norm.sf(3.0), groups - 1)) / 3.0 if groups > 1 else 1.0


def estimate_from_weights(log_weight: Tensor, groups: int) -> OrthantEstimate:
    """Estimate and diagnostics from log weights ``(B, P)`` in ``groups`` independent, equal groups."""
    count = log_weight.shape[-1]
    value = torch.logsumexp(log_weight, -1) - math.log(count)
    with torch.no_grad():
        relative = (log_weight - value.unsqueeze(-1)).exp()
        means = relative.view(len(value), groups, -1).mean(-1)
        variance = widening(groups) ** 2 * means.var(-1) / groups
        square = relative.square().mean(-1) / relative.mean(-1).square()
        khat = torch.tensor([pareto_khat(row) for row in log_weight], dtype=value.dtype, device=value.device)
    return OrthantEstimate(value, variance, count / square, khat, (square - 1).clamp_min(0.0).sqrt())
