"""Component-wise slice sampling on C chains at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.random import log_uniform, uniform
from torchgpmc.types import Sampler

# Shrinkage brackets the current point, so it always ends; this many halvings exhaust the digits of a float64.
_MAX_SHRINKS = 200


class SliceState(NamedTuple):
    """Position ``(C, D)`` and its log density ``(C,)``."""

    position: Tensor
    log_density: Tensor


class SliceInfo(NamedTuple):
    """What is known about one sweep of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # accepted points over points tried within the brackets
    n_steps: Tensor  # density evaluations
    n_failures: Tensor  # evaluations that gave -inf


class Block(NamedTuple):
    """Coordinates updated in turn, and the log density of the whole position to use meanwhile.

    ``conditional(position)`` may do once, for the whole block, the work that the block's coordinates leave unchanged. It returns a
    function ``(C, D) -> (C,)`` that is the target up to a constant of each chain.
    """

    coordinates: Sequence[int]
    conditional: Callable[[Tensor], Callable[[Tensor], Tensor]]


def slice_sampler(
    density: Callable[[Tensor], Tensor], *, width: Tensor, max_steps_out: int = 8, blocks: Sequence[Block] | None = None
) -> Sampler:
    """One sweep of univariate slice updates with stepping out and shrinkage (Neal 2003, figures 3 and 5).

    Args:
        density: log density of the target, ``(C, D) -> (C,)``.
        width: initial bracket of each coordinate ``(D,)``.
        max_steps_out: limit on the number of widths in a bracket; shared at random between both ends.
        blocks: how to divide the coordinates; one block of all with ``density`` itself by default.

    Returns:
        A sampler with :class:`SliceState` and :class:`SliceInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import slice_sampler
        >>> generator = torch.Generator().manual_seed(0)
        >>> sampler = slice_sampler(lambda x: (x - x.exp()).sum(-1), width=torch.full((1,), 4.0))  # logs of exponential variables
        >>> state = sampler.init(torch.zeros(1000, 1), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> abs(state.position.exp().mean() - 1) < 0.15  # five standard errors
        tensor(True)
    """

    def init(position: Tensor, generator: torch.Generator) -> SliceState:
        return SliceState(position, density(position))

    def step(state: SliceState, generator: torch.Generator) -> tuple[SliceState, SliceInfo]:
        position = state.position
        parts = blocks if blocks is not None else [Block(range(position.shape[1]), lambda _: density)]
        sweep = _Sweep(torch.zeros_like(state.log_density))
        for block in parts:
            conditional = sweep.counting(block.conditional(position))
            log_density = conditional(position)
            for index in block.coordinates:
                position, log_density = _update(
                    conditional, position, log_density, index, width[index], max_steps_out, generator, sweep
                )
        log_density = density(position)
        tried = sweep.tried.clamp_min(1.0)
        return SliceState(position, log_density), SliceInfo(sweep.accepted / tried, sweep.n_steps, sweep.n_failures)

    return Sampler(init, step)


class _Sweep:
    """Counters of one sweep, each ``(C,)``."""

    def __init__(self, zero: Tensor):
        self.n_steps = self.n_failures = self.tried = self.accepted = zero

    def counting(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``function``, with its evaluations and failures counted."""

        def evaluate(position: Tensor) -> Tensor:
            value = function(position)
            self.n_steps = self.n_steps + 1
            self.n_failures = self.n_failures + torch.isinf(value)
            return value

        return evaluate


def _update(
    log_density_at: Callable[[Tensor], Tensor],
    position: Tensor,
    log_density: Tensor,
    index: int,
    width: Tensor,
    max_steps_out: int,
    generator: torch.Generator,
    sweep: _Sweep,
) -> tuple[Tensor, Tensor]:
    """One coordinate of every chain; a chain that has found its point waits for the others."""
    current = position[:, index]

    def at(value: Tensor) -> Tensor:
        moved = position.clone()
        moved[:, index] = value
        return log_density_at(moved)

    chains = current.shape
    level = log_density + log_uniform(chains, current, generator)
    left = current - width * uniform(chains, current, generator)
    right = left + width
    steps_left = torch.floor(max_steps_out * uniform(chains, current, generator))
    steps_right = max_steps_out - 1 - steps_left
    left = _step_out(at, left, -width, steps_left, level)
    right = _step_out(at, right, width, steps_right, level)
    searching = torch.ones_like(current, dtype=torch.bool)
    chosen, chosen_density = current, log_density
    for _ in range(_MAX_SHRINKS):
        proposal = left + (right - left) * uniform(chains, current, generator)
        value = at(torch.where(searching, proposal, chosen))
        found = searching & (value > level)
        sweep.tried = sweep.tried + searching
        sweep.accepted = sweep.accepted + found
        chosen = torch.where(found, proposal, chosen)
        chosen_density = torch.where(found, value, chosen_density)
        searching = searching & ~found
        if not bool(searching.any()):
            break
        left = torch.where(searching & (proposal < current), proposal, left)
        right = torch.where(searching & (proposal >= current), proposal, right)
    moved = position.clone()
    moved[:, index] = chosen
    return moved, chosen_density


def _step_out(at: Callable[[Tensor], Tensor], edge: Tensor, width: Tensor, allowance: Tensor, level: Tensor) -> Tensor:
    """Moves each chain's bracket edge outwards by ``width`` while it is inside the slice and its allowance lasts."""
    while True:
        going = allowance > 0
        if not bool(going.any()):
            return edge
        going = going & (at(edge) > level)
        edge = torch.where(going, edge + width, edge)
        allowance = torch.where(going, allowance - 1, torch.zeros_like(allowance))
