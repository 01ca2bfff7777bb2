"""Draws dealt to streams, the proposals of each learned from the draws of the others.

A proposal that was learned from the draws it weighs has its density where they happen to lie, and weighs them down, those in the
tails most: means and variances of every run come out low alike. Draws of another stream tell it as much, and nothing of where those
that it weighs lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpmc.importance.adaptive import Adaptation, AdaptiveState, add_draws, follow, lesson, log_weights, responsibilities
from torchgpmc.importance.proposal import draw_from

Streams = tuple[AdaptiveState, ...]


def draw_from_each(streams: Streams, count: int, generator: torch.Generator) -> Tensor:
    """A batch ``(count, D)``, of each stream's current proposal as many as can be, one stream's after another's.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> far = [from_modes(torch.full((1, 1), at), torch.eye(1)[None], torch.zeros(1), math.inf) for at in (-50.0, 50.0)]
        >>> draw_from_each(tuple(start(proposal) for proposal in far), 5, torch.Generator().manual_seed(0))[:, 0] < 0
        tensor([ True,  True,  True, False, False])
    """
    sizes = _dealt(count, len(streams))
    parts = [
        draw_from(stream.current, size, generator) if size else stream.position[:0]
        for stream, size in zip(streams, sizes, strict=True)
    ]
    return torch.cat(parts)


def add_to_each(streams: Streams, position: Tensor, log_target: Tensor) -> Streams:
    """Such a batch, with log targets ``(count,)``, each stream's draws weighed against that stream's proposals.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> both = add_to_each((start(unit), start(unit)), torch.zeros(5, 1), torch.zeros(5))
        >>> [len(stream.position) for stream in both]
        [3, 2]
    """
    sizes = _dealt(len(position), len(streams))
    parts = zip(streams, position.split(sizes), log_target.split(sizes), strict=True)
    return tuple(add_draws(*part) for part in parts)


def with_last_targets(streams: Streams, log_target: Tensor) -> Streams:
    """Such a batch, the last that was added, with other log targets ``(count,)``; its densities are not worked out again.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> both = add_to_each((start(unit), start(unit)), torch.zeros(3, 1), torch.zeros(3))
        >>> [stream.log_target for stream in with_last_targets(both, torch.tensor([1.0, 2.0, 3.0]))]
        [tensor([1., 2.]), tensor([3.])]
    """
    parts = log_target.split([int(stream.counts[-1]) for stream in streams])
    firsts = [stream.log_target[: len(stream.log_target) - len(part)] for stream, part in zip(streams, parts, strict=True)]
    return tuple(
        stream._replace(log_target=torch.cat([first, part])) for stream, first, part in zip(streams, firsts, parts, strict=True)
    )


def teach_each(streams: Streams, plan: Adaptation) -> Streams:
    """:func:`adapt`, a stream's proposal learning from the draws of all others; a single stream's from its own.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> both = add_to_each((start(unit), start(unit)), torch.tensor([[1.0], [2.0], [3.0], [5.0]]), torch.zeros(4))
        >>> plan = Adaptation(modified=True, diagonal=False, prior_strength=0.0)
        >>> at_target = [stream._replace(log_target=-0.5 * stream.position[:, 0] ** 2) for stream in both]  # so weights are even
        >>> [round(float(stream.current.mean)) for stream in teach_each(tuple(at_target), plan)]  # 4 and 1.5 are the others' means
        [4, 2]
    """
    lessons = [lesson(stream, modified=plan.modified) for stream in streams]
    taught = []
    for number, stream in enumerate(streams):
        others = lessons[:number] + lessons[number + 1 :] or lessons
        position, log_weight = (torch.cat(parts) for parts in zip(*others, strict=True))
        taught.append(follow(stream, position, log_weight, plan))
    return tuple(taught)


def streamed_log_weights(streams: Streams) -> Tensor:
    """:func:`log_weights` of all streams ``(S,)``, in the order in which draws were made.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> streams = (start(unit), start(unit))
        >>> for batch in ([1.0, 2.0, 3.0], [4.0, 5.0]):
        ...     streams = add_to_each(streams, torch.zeros(len(batch), 1), torch.tensor(batch))
        >>> (streamed_log_weights(streams) - 0.5 * math.log(2 * math.pi)).round(decimals=4)
        tensor([1., 2., 3., 4., 5.])
    """
    return in_order_drawn(streams, [log_weights(stream) for stream in streams])


def in_order_drawn(streams: Streams, parts: Sequence[Tensor]) -> Tensor:
    """What each stream has of its draws ``(S_k, ...)`` as one tensor ``(S, ...)``, batch after batch.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import from_modes, start
        >>> unit = from_modes(torch.zeros(1, 1), torch.eye(1)[None], torch.zeros(1), math.inf)  # N(0, 1)
        >>> streams = (start(unit), start(unit))
        >>> for batch in (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [5.0]])):
        ...     streams = add_to_each(streams, batch, torch.zeros(len(batch)))
        >>> in_order_drawn(streams, [stream.position for stream in streams])[:, 0]
        tensor([1., 2., 3., 4., 5.])
    """
    batches = [part.split(stream.counts.long().tolist()) for stream, part in zip(streams, parts, strict=True)]
    return torch.cat([piece for batch in zip(*batches, strict=True) for piece in batch])


def hold_their_part(streams: Streams, components: int) -> bool:
    """Whether the first components of a run's only proposal weigh as much as their part of the draws, or more.

    By how likely each draw is to be of one of them: a share of the mass, where proposals cover it, against a share of the draws.

    Example:
        >>> import math, torch
        >>> from torchgpmc.importance import add_draws, from_modes, start
        >>> both = from_modes(torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.zeros(2), math.inf)
        >>> position = draw_from(both, 1000, torch.Generator().manual_seed(0))
        >>> left, right = (add_draws(start(both), position, -0.5 * (position - at).square().sum(-1)) for at in (-3, 3))
        >>> hold_their_part((left,), 1), hold_their_part((right,), 1)  # the first component is the one at -3
        (True, False)
    """
    position, log_weight = (torch.cat(parts) for parts in zip(*[(s.position, log_weights(s)) for s in streams], strict=True))
    shares = responsibilities(streams[0].current, position).exp()[:components].sum(0)
    return bool(torch.softmax(log_weight, 0) @ shares >= shares.mean())


def _dealt(count: int, num_streams: int) -> list[int]:
    """Numbers of draws that differ by one at most.

    Example:
        >>> _dealt(8, 3)
        [3, 3, 2]
    """
    return [count // num_streams + (index < count % num_streams) for index in range(num_streams)]
