"""Adaptive multiple importance sampling: every draw is weighed against the mixture of all proposals used so far (paper E)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.importance.proposal import Proposal, log_density_of, log_parts_of, with_defence
from torchgpmc.numerics.linalg import cholesky

_LEAST_SHARE = 1e-3
_ROUNDS = 5  # of expectation maximisation a batch: a component that has far to go is there after half the draws


class AdaptiveState(NamedTuple):
    """All draws so far, the proposals they came from, and the proposal to draw from next.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> state.position.shape, state.counts, state.past.mean.shape  # a batch of one proposal, of one component
        (torch.Size([1000, 1]), tensor([1000.]), torch.Size([1, 1, 1]))
    """

    position: Tensor  # (S, D)
    log_target: Tensor  # (S,), log of the (estimated) unnormalised target
    log_denominator: Tensor  # (S,), log of sum_l N_l q_l at each draw
    counts: Tensor  # (T,), draws of each past proposal
    past: Proposal  # their parameters, stacked: (T, components, ...)
    current: Proposal
    first: Proposal


class Adaptation(NamedTuple):
    """How proposals follow the draws.

    ``modified`` (MAMIS, Marin et al. 2014) learns from the last batch alone, with its own proposal's weights; otherwise from all
    draws with the weights of the whole mixture (AMIS, Cornuet et al. 2012). The first proposal counts as ``prior_strength`` draws,
    which keeps a few heavy weights from collapsing them (in the spirit of MAMIS-P, paper E section 4.5.2; ours blends moments).
    With a ``defensive_share``, the last component stays as it is and keeps that share (Hesterberg 1995): where it is broad, no
    weight can be much larger than the target is beside it, whatever the others have come to. A ``kept_share`` is divided evenly
    among the others: one that stands where little mass is keeps its part of that, however few draws it answers for.

    Example:
        >>> plan = Adaptation(modified=False, diagonal=False, prior_strength=10.0, defensive_share=0.1)
        >>> plan.modified, plan.defensive_share  # AMIS, with a component that stays
        (False, 0.1)
    """

    modified: bool
    diagonal: bool
    prior_strength: float
    defensive_share: float = 0.0
    kept_share: float = 0.0


def start(first: Proposal) -> AdaptiveState:
    """No draws yet.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> len(state.position), state.current is unit
        (0, True)
    """
    like = first.mean
    none = like.new_zeros(0)
    past = Proposal(*(part.new_zeros(0, *part.shape) for part in first))
    return AdaptiveState(like.new_zeros(0, like.shape[-1]), none, none, none, past, first, first)


def add_draws(state: AdaptiveState, position: Tensor, log_target: Tensor) -> AdaptiveState:
    """A batch ``(B, D)`` drawn from ``state.current``, with log targets ``(B,)``; all weights brought up to date.

    Algorithm 1 of paper E: old draws see the new proposal, new ones all proposals; O(S + T B) evaluations, no target again.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * (position - 0.5).square().sum(-1))  # N(1/2, 1), without its constant
        >>> weights = torch.softmax(log_weights(state), 0)
        >>> round(float(weights @ position[:, 0]), 1)
        0.5
    """
    count = position.new_tensor([float(len(position))])
    old = torch.logaddexp(state.log_denominator, count.log() + log_density_of(state.current, state.position))
    counts = torch.cat([state.counts, count])
    past = Proposal(*(torch.cat([a, b.unsqueeze(0)]) for a, b in zip(state.past, state.current, strict=True)))
    # All proposals as one mixture, whose shares add up to the number of draws.
    log_share, mean, factor = past.log_share + counts.log().unsqueeze(-1), past.mean, past.factor
    mixture = Proposal(log_share.flatten(), mean.flatten(0, 1), factor.flatten(0, 1), state.current.degrees_of_freedom)
    return AdaptiveState(
        torch.cat([state.position, position]),
        torch.cat([state.log_target, log_target]),
        torch.cat([old, log_density_of(mixture, position)]),
        counts,
        past,
        state.current,
        state.first,
    )


def log_weights(state: AdaptiveState) -> Tensor:
    """Unnormalised log weights ``(S,)`` of eq. 10 (eq. 23 for estimated targets): the target over the mixture of all proposals.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> log_weights(state)[:2].exp()  # the target over N(0, 1), which lacks the constant (2 pi)^1/2
        tensor([2.5066, 2.5066])
    """
    return state.log_target - state.log_denominator + state.counts.sum().log()


def adapt(state: AdaptiveState, plan: Adaptation) -> AdaptiveState:
    """Moves every component to the weighted moments of the draws it answers for.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -2 * (position - 2).square().sum(-1))  # N(2, 1/4)
        >>> plan = Adaptation(modified=False, diagonal=False, prior_strength=0.0)
        >>> moved = adapt(state, plan).current
        >>> moved.mean.round(decimals=1), moved.factor.round(decimals=1)
        (tensor([[2.]]), tensor([[[0.5000]]]))
    """
    return follow(state, *lesson(state, modified=plan.modified), plan)


def lesson(state: AdaptiveState, *, modified: bool) -> tuple[Tensor, Tensor]:
    """Draws ``(S, D)`` that proposals are learned from, all or, ``modified``, the last batch, and their log weights ``(S,)``.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> for count in 1000, 500:
        ...     position = draw_from(state.current, count, torch.Generator().manual_seed(0))
        ...     state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> len(lesson(state, modified=False)[0]), len(lesson(state, modified=True)[0])
        (1500, 500)
    """
    if not modified:
        return state.position, log_weights(state)
    first = len(state.position) - int(state.counts[-1])
    position = state.position[first:]
    came_from = Proposal(*(part[-1] for part in state.past))
    return position, state.log_target[first:] - log_density_of(came_from, position)


def follow(state: AdaptiveState, position: Tensor, log_weight: Tensor, plan: Adaptation) -> AdaptiveState:
    """:func:`adapt` to any draws ``(S, D)`` with log weights ``(S,)``, its own or not.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> position = torch.tensor([[2.0], [4.0]])
        >>> plan = Adaptation(modified=False, diagonal=False, prior_strength=0.0)
        >>> follow(start(unit), position, torch.zeros(2), plan).current.mean
        tensor([[3.]])
    """
    if not bool(torch.isfinite(log_weight).any()):
        return state
    log_weight = truncated_log_weights(log_weight)
    log_weight = log_weight - torch.logsumexp(log_weight, 0)
    tells = torch.isfinite(log_weight)
    position, log_weight = position[tells], log_weight[tells]
    proposal = state.current
    for _ in range(_ROUNDS if len(proposal.mean) > 1 else 1):
        proposal = _followed(proposal, state.first, position, log_weight, plan)
    return state._replace(current=proposal)


def begun_again(state: AdaptiveState, beginning: Proposal) -> AdaptiveState:
    """The same draws, with weights as they are, and a ``beginning`` to go on from, whose last component is a defensive one.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> again = begun_again(state, from_modes(torch.zeros(2, 1), torch.ones(2, 1, 1), torch.zeros(2), math.inf))
        >>> len(again.current.mean), torch.equal(log_weights(again), log_weights(state))
        (2, True)
    """
    size = max(len(beginning.mean), len(state.first.mean))
    again = _divided(beginning, size)
    past = [_divided(Proposal(*(part[batch] for part in state.past)), size) for batch in range(len(state.counts))]
    stacked = Proposal(*(torch.stack(parts) for parts in zip(*past, strict=True)))
    return state._replace(past=stacked, current=again, first=again)


def _divided(proposal: Proposal, size: int) -> Proposal:
    """The same density by ``size`` components: equal parts of the first, then the others.

    Past proposals are one stack, and what a checkpoint holds may grow between its saves but not shrink, so a run that goes on from
    fewer components keeps as many. Parts learn alike, and so stay together what the component is alone.
    """
    extra = size - len(proposal.mean)
    index = torch.arange(-extra, size - extra, device=proposal.mean.device).clamp_min(0)
    log_share = proposal.log_share[index]
    log_share[: extra + 1] -= math.log(extra + 1)
    return Proposal(log_share, proposal.mean[index], proposal.factor[index], proposal.degrees_of_freedom)


def _followed(proposal: Proposal, first: Proposal, position: Tensor, log_weight: Tensor, plan: Adaptation) -> Proposal:
    """One round of expectation maximisation on weighted draws."""
    shares = responsibilities(proposal, position) + log_weight  # (components, S)
    if plan.defensive_share:
        shares = shares[:-1]
    mean, factor, weight = _moments(shares, position, first, plan)
    log_share = torch.log_softmax(weight.clamp_min(max(_LEAST_SHARE, plan.kept_share / len(weight))).log(), 0)
    moved = Proposal(log_share, mean, factor, proposal.degrees_of_freedom)
    return with_defence(moved, first.mean[-1], first.factor[-1], plan.defensive_share) if plan.defensive_share else moved


def responsibilities(proposal: Proposal, position: Tensor) -> Tensor:
    """Log probability that each draw ``(S, D)`` belongs to each component ``(components, S)``.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes
        >>> both = from_modes(torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.zeros(2), math.inf)
        >>> responsibilities(both, torch.zeros(1, 1)).exp()  # half way between them
        tensor([[0.5000],
                [0.5000]])
    """
    if len(proposal.mean) == 1:
        return position.new_zeros(1, len(position))
    return torch.log_softmax(log_parts_of(proposal, position), 0)


def _moments(log_share: Tensor, position: Tensor, first: Proposal, plan: Adaptation) -> tuple[Tensor, Tensor, Tensor]:
    """Means, factors and weights of the first components, as many as rows of ``log_share`` ``(components, S)``.

    What each began as counts for ``prior_strength`` draws.
    """
    first_mean, first_factor = (part[: len(log_share)] for part in (first.mean, first.factor))
    weight = log_share.exp()
    total = weight.sum(-1)
    effective = total.square() / weight.square().sum(-1).clamp_min(1e-300)
    normalised = weight / total.clamp_min(1e-300).unsqueeze(-1)
    mean = normalised @ position
    centred = position - mean.unsqueeze(1)
    covariance = (centred * normalised.unsqueeze(-1)).mT @ centred
    kept = (effective / (effective + plan.prior_strength)).unsqueeze(-1)
    shift = mean - first_mean
    first_covariance = first_factor @ first_factor.mT
    # Conjugate updating of a normal's mean and covariance with that many prior draws.
    prior = first_covariance + (kept * shift).unsqueeze(-1) * shift.unsqueeze(-2)
    covariance = torch.lerp(prior, covariance, kept.unsqueeze(-1))
    mean = torch.lerp(first_mean, mean, kept)
    if plan.diagonal:
        covariance = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    factor, ok = cholesky(covariance)
    ok = (ok & torch.isfinite(factor).all(-1).all(-1)).unsqueeze(-1)
    return torch.where(ok, mean, first_mean), torch.where(ok.unsqueeze(-1), factor, first_factor), total


def truncated_log_weights(log_weights: Tensor) -> Tensor:
    """Weights cut at their mean times the root of their number: one lucky draw decides nothing (Ionides 2008).

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.weights import kish_effective_size
        >>> lucky = torch.tensor([0.0] * 99 + [6.0])
        >>> round(kish_effective_size(lucky), 1), round(kish_effective_size(truncated_log_weights(lucky)), 1)
        (1.6, 8.5)
    """
    return log_weights.clamp_max(torch.logsumexp(log_weights.flatten(), 0) - 0.5 * math.log(log_weights.numel()))
