"""Sequential Monte Carlo for box probabilities: particles that survive one limit after another (paper B, section 5)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import check_count, warn
from torchgpmc.numerics.random import normal_like, open_uniform, uniform
from torchgpmc.numerics.special import interval_quantile, log_ndtr_interval
from torchgpmc.orthant.problem import OrthantEstimate, Problem, detached, in_order
from torchgpmc.orthant.separation import Separated, separate
from torchgpmc.orthant.weighting import check_points, in_place

# Rows between two rearrangements of all that a particle has been through; within a panel only the panel moves.
_PANEL = 16
# Numbers in the largest array of the groups that are run at once.
_CHUNK_ELEMENTS = 2**22


class Count(enum.Enum):
    """How each one-dimensional probability is estimated from the particles.

    Example:
        >>> import torch, torchgpmc as tg
        >>> covariance = torch.full((10, 10), 0.5, dtype=torch.float64) + 0.5 * torch.eye(10)  # of probability 1 / 11
        >>> errors = [
        ...     tg.orthant.log_probability(
        ...         covariance,
        ...         lower=0.0,
        ...         num_points=16_000,
        ...         method=Sequential(count=count, num_groups=16),
        ...         generator=torch.Generator().manual_seed(0),
        ...     ).variance
        ...     for count in (Count.ADAPTED, Count.HARD)
        ... ]
        >>> bool(errors[0] < errors[1])
        True
    """

    HARD = "hard"  # share of particles within the limits (paper B, eq. 57)
    SOFT = "soft"  # mean probability of being within them (eq. 62)
    ADAPTED = "adapted"  # the same as a weight, then a draw within the limits: no particle is lost


class Particles(NamedTuple):
    """Particles that have passed every limit: weighted draws from B truncated normals."""

    samples: Tensor  # (B, P, N), x within its limits
    log_weight: Tensor  # (B, P); sums to the estimate within each group
    log_estimate: Tensor  # (B, G), log of each group's unbiased estimate
    emptied: Tensor  # (B, G), whether a group lost all its particles


@dataclass(frozen=True)
class Sequential:
    """The sequential algorithm GPC-MC (paper B, section 5.6), its soft count (section 5.7), or the fully adapted form.

    The hard and the adapted form are unbiased; the soft one has a bias that falls as one over the number of particles, since its
    factors and its survivors come from different draws. None has a derivative: survival is all or nothing.

    Args:
        count: which form. The adapted one weighs particles by the next probability before it draws within the limits, and
            resamples (systematically) when the effective size falls to half: the most accurate of the three.
        num_groups: independent populations, each with its share of the points; their spread is the error. 1: no error estimate.
        shuffle: visit the variables in random order, as the paper advises: classes one after the other make for extreme factors.

    Raises:
        TypeError: ``count`` is not a :class:`Count`.
        ValueError: ``num_groups`` below 1, or fewer than two points a group; a problem that requires a gradient.

    Example:
        >>> import torch
        >>> from torchgpmc.orthant import log_probability
        >>> covariance = torch.full((20, 20), 0.5, dtype=torch.float64) + 0.5 * torch.eye(20)
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = log_probability(covariance, lower=0.0, method=Sequential(), generator=generator)
        >>> abs(float(found.value.exp()) * 21 - 1) < 0.2  # it is 1 / 21
        True
    """

    count: Count = Count.ADAPTED
    num_groups: int = 8
    shuffle: bool = True

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """Estimates with ``num_points`` particles a problem, rounded up to whole groups."""
        if any(part.requires_grad for part in problem) and torch.is_grad_enabled():
            raise ValueError(
                "covariance or a limit requires a gradient, and Sequential has none: its particles survive or not. "
                "Expected SeparationOfVariables(), or inputs without gradients (.detach())."
            )
        particles = self.particles(problem, num_points, generator)
        log_mean = torch.logsumexp(particles.log_estimate, -1) - math.log(self.num_groups)
        relative = (particles.log_estimate - log_mean.unsqueeze(-1)).exp()
        unknown = torch.full_like(log_mean, torch.nan)
        variance = relative.var(-1) / self.num_groups if self.num_groups > 1 else unknown
        weights = torch.softmax(particles.log_weight, -1)
        return OrthantEstimate(log_mean, variance, 1 / weights.square().sum(-1), unknown, unknown)

    def particles(self, problem: Problem, num_points: int, generator: torch.Generator) -> Particles:
        """The surviving particles and each group's estimate.

        Raises:
            ValueError: ``num_points`` or ``num_groups`` out of range, or ``count`` not a :class:`Count`.
        """
        if not isinstance(self.count, Count):
            raise TypeError(f"count is {self.count!r}. Expected one of torchgpmc.orthant.Count.HARD, .SOFT and .ADAPTED.")
        check_count("num_groups", self.num_groups)
        check_points(num_points, 2 * self.num_groups)
        problem = detached(problem)
        order = torch.arange(problem.lower.shape[-1], device=problem.lower.device).expand(problem.lower.shape)
        if self.shuffle:
            order = uniform(problem.lower.shape, problem.lower, generator).argsort(-1)
        shuffled, order = in_order(problem, order)
        each = math.ceil(num_points / self.num_groups)
        separated = separate(shuffled)
        at_once = max(1, min(self.num_groups, _CHUNK_ELEMENTS // (separated.rows[..., 0].numel() * each)))
        shares = [min(at_once, self.num_groups - first) for first in range(0, self.num_groups, at_once)]
        parts = [_run(separated, self.count, groups, each, generator) for groups in shares]
        particles = Particles(*(torch.cat(columns, 1) for columns in zip(*parts, strict=True)))
        particles = particles._replace(samples=in_place(problem, order, particles.samples @ shuffled.factor.mT))
        if bool(particles.emptied.any()):
            entry, group = particles.emptied.nonzero()[0].tolist()
            warn(
                f"no particle of batch entry {entry}, group {group} was within the limits of some variable, so that its "
                f"estimate is 0 ({int(particles.emptied.sum())} groups of {particles.emptied.numel()} are so): use more points, or "
                f"Count.ADAPTED, or SeparationOfVariables()."
            )
        return particles


def _run(separated: Separated, count: Count, groups: int, each: int, generator: torch.Generator) -> Particles:
    rows, lower, upper = separated
    batch, size, _ = rows.shape
    total = groups * each
    points = rows.new_empty(batch, size, total)
    log_estimate = rows.new_zeros(batch, groups)
    log_weight = rows.new_zeros(batch, groups, each)
    emptied = torch.zeros(batch, groups, dtype=torch.bool, device=rows.device)
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        means = rows[:, begin:end, :begin] @ points[:, :begin] if begin else rows.new_zeros(batch, end - begin, total)
        lineage = None
        for i in range(begin, end):
            mean = means[:, i - begin]
            if i > begin:
                mean = mean + (rows[:, i : i + 1, begin:i] @ points[:, begin:i]).squeeze(1)
            below, above = lower[:, i, None] - mean, upper[:, i, None] - mean
            if count is Count.ADAPTED:
                log_weight = log_weight + log_ndtr_interval(below, above).view(batch, groups, each)
                ancestors, log_weight, gained = _resample_where_uneven(log_weight, generator)
                log_estimate = log_estimate + gained
                if ancestors is not None:
                    below, above = below.gather(1, ancestors), above.gather(1, ancestors)
                move_up_to = i
            else:
                points[:, i] = normal_like(mean, generator)
                inside = ((points[:, i] >= below) & (points[:, i] <= above)).view(batch, groups, each)
                if count is Count.HARD:
                    gained = inside.to(mean).mean(-1).log()
                else:
                    log_probability = log_ndtr_interval(below, above).view(batch, groups, each)
                    gained = torch.logsumexp(log_probability, -1) - math.log(each)
                log_estimate = log_estimate + gained
                emptied |= ~inside.any(-1)
                ancestors = _replenish(inside, generator)
                move_up_to = i + 1
            if ancestors is not None:
                points[:, begin:move_up_to] = _take(points[:, begin:move_up_to], ancestors)
                means[:, i - begin + 1 :] = _take(means[:, i - begin + 1 :], ancestors)
                lineage = ancestors if lineage is None else lineage.gather(1, ancestors)
            if count is Count.ADAPTED:
                points[:, i] = interval_quantile(open_uniform(below.shape, below, generator), below, above)
        if lineage is not None and begin:
            points[:, :begin] = _take(points[:, :begin], lineage)
    log_estimate = log_estimate + torch.logsumexp(log_weight, -1) - math.log(each)
    log_estimate = torch.where(emptied, -torch.inf, log_estimate)
    shares = log_weight - torch.logsumexp(log_weight, -1, keepdim=True) + log_estimate.unsqueeze(-1)
    return Particles(points.mT, shares.reshape(batch, total), log_estimate, emptied)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Columns ``index`` ``(B, P)`` of ``values`` ``(B, K, P)``."""
    if len(values) == 1:
        return values[0].index_select(1, index[0]).unsqueeze(0)
    return values.gather(2, index.unsqueeze(1).expand_as(values))


def _replenish(inside: Tensor, generator: torch.Generator) -> Tensor:
    """Ancestors ``(B, P)``: survivors stay, the places of the others go to survivors chosen at random."""
    batch, groups, each = inside.shape
    rank = inside.cumsum(-1)
    survivors = rank[..., -1:]
    place = torch.where(inside, rank - 1, each)
    own = torch.arange(each, device=inside.device).expand_as(inside)
    listed = torch.zeros(batch, groups, each + 1, dtype=torch.long, device=inside.device).scatter(-1, place, own)
    random = torch.rand(inside.shape, generator=generator, device=inside.device, dtype=torch.float64)
    chosen = listed.gather(-1, (random * survivors).long().clamp_max(each - 1))
    return _across_groups(torch.where(inside, own, chosen))


def _resample_where_uneven(log_weight: Tensor, generator: torch.Generator) -> tuple[Tensor | None, Tensor, Tensor]:
    """Systematic resampling of the groups ``(B, G, M)`` whose effective size has fallen to half: ancestors, weights, log factor."""
    batch, groups, each = log_weight.shape
    normaliser = torch.logsumexp(log_weight, -1, keepdim=True)
    weights = (log_weight - normaliser).exp()
    uneven = weights.square().sum(-1) * each > 2
    offset = uniform((batch, groups, 1), log_weight, generator)
    if not bool(uneven.any()):
        return None, log_weight, torch.zeros_like(normaliser[..., 0])
    own = torch.arange(each, device=log_weight.device).expand_as(weights)
    marks = (own + offset) / each
    chosen = torch.searchsorted(weights.cumsum(-1), marks).clamp_max(each - 1)
    gained = torch.where(uneven, normaliser[..., 0] - math.log(each), 0.0)
    kept = torch.where(uneven.unsqueeze(-1), 0.0, log_weight)
    return _across_groups(torch.where(uneven.unsqueeze(-1), chosen, own)), kept, gained


def _across_groups(index: Tensor) -> Tensor:
    """Places within groups ``(B, G, M)`` to places among all particles ``(B, G * M)``."""
    batch, groups, each = index.shape
    first = torch.arange(groups, device=index.device).view(1, groups, 1) * each
    return (index + first).reshape(batch, groups * each)
