"""Adaptive multiple importance sampling: every draw is weighed against the mixture of all proposals used so far (paper E)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.importance.proposal import Proposal, log_density_of, with_defence
from torchgpmc.numerics.linalg import cholesky

_LEAST_SHARE = 1e-3
_ROUNDS = 5


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
    among the others: one that stands where little mass is keeps its part of that, however few draws it answers for. ``rounds`` of
    expectation maximisation a batch bring one that has far to go there in half the draws; of many components they make more of the
    draws they are learned from than is there, and so of those draws' weights less.

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
    rounds: int = _ROUNDS


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


def own_log_weights(state: AdaptiveState) -> Tensor:
    """Log weights ``(S,)`` by the proposal that each draw came from alone.

    A proposal is settled before its draws are, so each of these weights has the evidence for its mean, whatever was learned when;
    those of :func:`log_weights` have not, since the proposals in their denominators were learned from the draws they weigh.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> wide = state._replace(current=from_modes(torch.zeros(1, 1), 4 * torch.eye(1)[None], torch.zeros(1), math.inf))
        >>> state = add_draws(wide, torch.zeros(1000, 1), torch.zeros(1000))  # a second batch, for once all at zero
        >>> own_log_weights(state)[[0, -1]].exp()  # by the proposal of each: the density of N(0, 4) at zero is half that of N(0, 1)
        tensor([2.5066, 5.0133])
        >>> log_weights(state)[-1].exp()  # by the mixture of both, three quarters of it
        tensor(3.3422)
    """
    return state.log_target - _of_own_proposal(state, _log_densities(state))


def log_evidence(state: AdaptiveState) -> tuple[Tensor, Tensor]:
    r"""Log of the mean of :func:`own_log_weights`, which is unbiased, adaptation or not, and its relative standard error.

    Weights less their common mean are a martingale's differences, so their variances add up (Owen & Zhou 2020, "The square root
    rule for adaptive importance sampling"). Each batch's variance and third moment are estimated twice, by its own draws and by all
    draws weighed by :math:`q_t / q`, :math:`q` the mixture of all proposals: a proposal that has lost a region has no draws there
    to tell, and other batches have. A sum with skewness :math:`\kappa` comes out low together with its own standard error, and
    its t statistic falls below :math:`-z - \kappa (2 z^2 + 1) / 6` as seldom as a normal one below :math:`-z` (Hall 1992, "On the
    removal of skewness by transformation"). The error is the larger of the two estimates times :math:`1 + 11 \kappa / 8`, at which
    even four errors reach as far as they say; where weights are even, it is the usual one.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * (position - 0.5).square().sum(-1))
        >>> value, error = log_evidence(state)
        >>> bool((value - 0.5 * math.log(2 * math.pi)).abs() < 3 * error), bool(error < 0.05)
        (True, True)
    """
    log_density = _log_densities(state)
    count = float(state.counts.sum())
    own = state.log_target - _of_own_proposal(state, log_density)
    value = torch.logsumexp(own, 0) - math.log(count)
    log_share = log_density - (state.log_denominator - math.log(count))  # of a draw in the integral over its batch's proposal
    log_weight = state.log_target - log_density
    errors = [
        _skewed_error(own - value, torch.zeros_like(own), count),
        _skewed_error(log_weight - value, log_share + (state.counts / count).log().unsqueeze(-1), count),
    ]
    return value, torch.stack(errors).max()


def _log_densities(state: AdaptiveState) -> Tensor:
    """Of every past proposal at every draw, ``(T, S)``."""
    proposals = [Proposal(*(part[index] for part in state.past)) for index in range(len(state.counts))]
    return torch.stack([log_density_of(proposal, state.position) for proposal in proposals])


def _of_own_proposal(state: AdaptiveState, log_density: Tensor) -> Tensor:
    """From ``(T, S)``, each draw's own ``(S,)``."""
    batch = torch.arange(len(state.counts), device=state.counts.device).repeat_interleave(state.counts.long())
    return log_density.gather(0, batch.unsqueeze(0)).squeeze(0)


def _skewed_error(log_relative: Tensor, log_share: Tensor, count: float) -> Tensor:
    """Relative error of a sum of ``count`` weights whose logs, less that of their mean, have moments of the given log shares."""
    # log |w - 1|, which neither a proposal's thin tail nor a third power carries beyond what floating point can hold.
    log_gap = torch.where(log_relative > 30, log_relative, torch.expm1(log_relative.clamp_max(30)).abs().log()).double()
    second = torch.logsumexp((log_share + 2 * log_gap).flatten(), 0)
    cubes = log_share + 3 * log_gap - 1.5 * second
    skewness = torch.nan_to_num(log_relative.sign() * cubes.exp()).sum().clamp_min(0.0)  # NaN where all weights are equal
    return ((0.5 * second).exp() * (1 + 1.375 * skewness) / (count * (count - 1)) ** 0.5).to(log_relative)


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
    if plan.modified:
        last = int(state.counts[-1])
        position = state.position[-last:]
        came_from = Proposal(*(part[-1] for part in state.past))
        log_weight = state.log_target[-last:] - log_density_of(came_from, position)
    else:
        position, log_weight = state.position, log_weights(state)
    if not bool(torch.isfinite(log_weight).any()):
        return state
    log_weight = truncated_log_weights(log_weight)
    log_weight = log_weight - torch.logsumexp(log_weight, 0)
    proposal = state.current
    for _ in range(plan.rounds if len(proposal.mean) > 1 else 1):
        proposal = _followed(proposal, state.first, position, log_weight, plan)
    return state._replace(current=proposal)


def hold_their_part(state: AdaptiveState, components: int) -> bool:
    """Whether the first components of a run's only proposal weigh as much as their part of the draws, or more.

    By how likely each draw is to be of one of them: a share of the mass, where proposals cover it, against a share of the draws.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import draw_from, from_modes
        >>> both = from_modes(torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.zeros(2), math.inf)
        >>> position = draw_from(both, 1000, torch.Generator().manual_seed(0))
        >>> left, right = (add_draws(start(both), position, -0.5 * (position - at).square().sum(-1)) for at in (-3, 3))
        >>> hold_their_part(left, 1), hold_their_part(right, 1)  # the first component is the one at -3
        (True, False)
    """
    shares = _responsibilities(state.current, state.position).exp()[:components].sum(0)
    return bool(torch.softmax(log_weights(state), 0) @ shares >= shares.mean())


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
    shares = _responsibilities(proposal, position) + log_weight  # (components, S)
    kept = 1 if plan.defensive_share else 0
    parts = [_moments(shares[index], position, first.mean[index], first.factor[index], plan) for index in range(len(shares) - kept)]
    mean, factor, weight = (torch.stack(columns) for columns in zip(*parts, strict=True))
    log_share = torch.log_softmax(weight.clamp_min(max(_LEAST_SHARE, plan.kept_share / len(weight))).log(), 0)
    moved = Proposal(log_share, mean, factor, proposal.degrees_of_freedom)
    return with_defence(moved, first.mean[-1], first.factor[-1], plan.defensive_share) if kept else moved


def _responsibilities(proposal: Proposal, position: Tensor) -> Tensor:
    """Log probability that each draw belongs to each component ``(components, S)``."""
    if len(proposal.mean) == 1:
        return position.new_zeros(1, len(position))
    logs = [
        log_density_of(Proposal(torch.zeros_like(share)[None], mean[None], factor[None], proposal.degrees_of_freedom), position)
        + share
        for share, mean, factor in zip(proposal.log_share, proposal.mean, proposal.factor, strict=True)
    ]
    return torch.log_softmax(torch.stack(logs), 0)


def _moments(
    log_share: Tensor, position: Tensor, first_mean: Tensor, first_factor: Tensor, plan: Adaptation
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, factor and weight of one component, the first proposal counting as ``prior_strength`` draws."""
    weight = log_share.exp()
    total = weight.sum()
    effective = total.square() / weight.square().sum().clamp_min(1e-300)
    normalised = weight / total.clamp_min(1e-300)
    mean = normalised @ position
    centred = position - mean
    covariance = (centred * normalised.unsqueeze(-1)).mT @ centred
    kept = effective / (effective + plan.prior_strength)
    shift = mean - first_mean
    first_covariance = first_factor @ first_factor.mT
    # Conjugate updating of a normal's mean and covariance with that many prior draws.
    covariance = kept * covariance + (1 - kept) * (first_covariance + kept * torch.outer(shift, shift))
    mean = kept * mean + (1 - kept) * first_mean
    if plan.diagonal:
        covariance = covariance.diagonal().diag()
    factor, ok = cholesky(covariance)
    if not bool(ok) or not bool(torch.isfinite(factor).all()):
        return first_mean, first_factor, total
    return mean, factor, total


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
