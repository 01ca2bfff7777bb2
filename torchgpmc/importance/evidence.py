"""The log evidence that weighted draws estimate, and its error: by the proposal that each draw came from, so without bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchgpmc.importance.proposal import Proposal, log_density_of
from torchgpmc.importance.streams import Streams, in_order_drawn


def own_log_weights(streams: Streams) -> Tensor:
    """Log weights ``(S,)`` by the proposal that each draw came from alone, in the order in which draws were made.

    A proposal is settled before its draws are, so each of these weights has the evidence for its mean, whatever was learned when;
    those against a mixture have not, where the proposals in it were learned from the draws they weigh.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import add_draws, draw_from, from_modes, log_weights, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * position.square().sum(-1))
        >>> wide = state._replace(current=from_modes(torch.zeros(1, 1), 4 * torch.eye(1)[None], torch.zeros(1), math.inf))
        >>> state = add_draws(wide, torch.zeros(1000, 1), torch.zeros(1000))  # a second batch, for once all at zero
        >>> own_log_weights((state,))[[0, -1]].exp()  # by the proposal of each: N(0, 4) has half the density of N(0, 1) at zero
        tensor([2.5066, 5.0133])
        >>> log_weights(state)[-1].exp()  # by the mixture of both, three quarters of it
        tensor(3.3422)
    """
    counts = _counts(streams)
    return _log_target(streams) - _of_own_proposal(_log_densities(streams), counts)


def log_evidence(streams: Streams) -> tuple[Tensor, Tensor]:
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
        >>> from torchgpmc.importance import add_draws, draw_from, from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> state = start(unit)
        >>> position = draw_from(state.current, 1000, torch.Generator().manual_seed(0))
        >>> state = add_draws(state, position, -0.5 * (position - 0.5).square().sum(-1))
        >>> value, error = log_evidence((state,))
        >>> bool((value - 0.5 * math.log(2 * math.pi)).abs() < 3 * error), bool(error < 0.05)
        (True, True)
    """
    log_density, counts = _log_densities(streams), _counts(streams)
    count = float(counts.sum())
    log_target, log_shares = _log_target(streams), (counts / count).log().unsqueeze(-1)
    own = log_target - _of_own_proposal(log_density, counts)
    value = torch.logsumexp(own, 0) - math.log(count)
    log_share = log_density - torch.logsumexp(log_density + log_shares, 0)  # of a draw in the integral over its batch's proposal
    errors = [
        _skewed_error(own - value, torch.zeros_like(own), count),
        _skewed_error(log_target - log_density - value, log_share + log_shares, count),
    ]
    return value, torch.stack(errors).max()


def _log_target(streams: Streams) -> Tensor:
    """``(S,)``."""
    return in_order_drawn(streams, [stream.log_target for stream in streams])


def _counts(streams: Streams) -> Tensor:
    """Draws of every proposal ``(T,)``, a batch's of all streams beside one another."""
    return torch.stack([stream.counts for stream in streams], -1).flatten()


def _log_densities(streams: Streams) -> Tensor:
    """Of every past proposal at every draw, ``(T, S)``."""
    position = in_order_drawn(streams, [stream.position for stream in streams])
    batches = range(len(streams[0].counts))
    proposals = [Proposal(*(part[batch] for part in stream.past)) for batch in batches for stream in streams]
    return torch.stack([log_density_of(proposal, position) for proposal in proposals])


def _of_own_proposal(log_density: Tensor, counts: Tensor) -> Tensor:
    """From ``(T, S)``, each draw's own ``(S,)``."""
    proposal = torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())
    return log_density.gather(0, proposal.unsqueeze(0)).squeeze(0)


def _skewed_error(log_relative: Tensor, log_share: Tensor, count: float) -> Tensor:
    """Relative error of a sum of ``count`` weights whose logs, less that of their mean, have moments of the given log shares."""
    # log |w - 1|, which neither a proposal's thin tail nor a third power carries beyond what floating point can hold.
    log_gap = torch.where(log_relative > 30, log_relative, torch.expm1(log_relative.clamp_max(30)).abs().log()).double()
    second = torch.logsumexp((log_share + 2 * log_gap).flatten(), 0)
    cubes = log_share + 3 * log_gap - 1.5 * second
    skewness = torch.nan_to_num(log_relative.sign() * cubes.exp()).sum().clamp_min(0.0)  # NaN where all weights are equal
    return ((0.5 * second).exp() * (1 + 1.375 * skewness) / (count * (count - 1)) ** 0.5).to(log_relative)
