"""Component-wise slice sampling on C chains at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.numerics.random import log_uniform, uniform
from torchgpmc.trees import where
from torchgpmc.types import Density, Sampler

# Shrinkage brackets the current point, so it always ends; this many halvings exhaust the digits of a float64.
_MAX_SHRINKS = 200


class SliceState(NamedTuple):
    """Position ``(C, D)``, its log density ``(C,)``, and what that was made from."""

    position: Tensor
    log_density: Tensor
    payload: Any = ()


class SliceInfo(NamedTuple):
    """What is known about one round of updates of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # accepted points over points tried within the brackets
    n_steps: Tensor  # density evaluations
    n_failures: Tensor  # evaluations that gave -inf


def slice_sampler(density: Density | Callable[[Tensor], Tensor], *, width: Tensor, max_steps_out: int = 8) -> Sampler:
    """One round of univariate slice updates with stepping out and shrinkage (Neal 2003, figures 3 and 5).

    Args:
        density: log density of the target, ``(C, D) -> (C,)``, known and not estimated.
        width: initial bracket of each coordinate ``(D,)``.
        max_steps_out: limit on the number of widths in a bracket; shared at random between both ends.

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
    target = as_density(density)

    def init(position: Tensor, generator: torch.Generator) -> SliceState:
        return SliceState(position, *target.draw(position, generator))

    def step(state: SliceState, generator: torch.Generator) -> tuple[SliceState, SliceInfo]:
        updates = _Round(target, max_steps_out, generator, torch.zeros_like(state.log_density))
        for index in range(state.position.shape[1]):
            state = updates.one_coordinate(state, index, width[index])
        rate = updates.accepted / updates.tried.clamp_min(1.0)
        return state, SliceInfo(rate, updates.n_steps, updates.n_failures)

    return Sampler(init, step)


class _Round:
    """Updates of one coordinate after another, and their counters, each ``(C,)``."""

    def __init__(self, density: Density, max_steps_out: int, generator: torch.Generator, zero: Tensor):
        self.density = density
        self.max_steps_out = max_steps_out
        self.generator = generator
        self.n_steps = self.n_failures = self.tried = self.accepted = zero

    def _moved(self, state: SliceState, index: int, value: Tensor) -> SliceState:
        """``state`` with another ``value`` ``(C,)`` of one coordinate."""
        position = state.position.clone()
        position[:, index] = value
        log_density, payload = self.density.draw(position, self.generator)
        self.n_steps = self.n_steps + 1
        self.n_failures = self.n_failures + torch.isinf(log_density)
        return SliceState(position, log_density, payload)

    def one_coordinate(self, state: SliceState, index: int, width: Tensor) -> SliceState:
        """One coordinate of every chain; a chain that has found its point waits for the others."""
        current = state.position[:, index]
        chains = current.shape
        level = state.log_density + log_uniform(chains, current, self.generator)
        left = current - width * uniform(chains, current, self.generator)
        right = left + width
        steps_left = torch.floor(self.max_steps_out * uniform(chains, current, self.generator))
        steps_right = self.max_steps_out - 1 - steps_left
        left = self._step_out(state, index, left, -width, steps_left, level)
        right = self._step_out(state, index, right, width, steps_right, level)
        searching = torch.ones_like(current, dtype=torch.bool)
        chosen = state
        for _ in range(_MAX_SHRINKS):
            proposal = left + (right - left) * uniform(chains, current, self.generator)
            tried = self._moved(state, index, torch.where(searching, proposal, chosen.position[:, index]))
            found = searching & (tried.log_density > level)
            self.tried = self.tried + searching
            self.accepted = self.accepted + found
            chosen = where(found, tried, chosen)
            searching = searching & ~found
            if not bool(searching.any()):
                break
            left = torch.where(searching & (proposal < current), proposal, left)
            right = torch.where(searching & (proposal >= current), proposal, right)
        return chosen

    def _step_out(self, state: SliceState, index: int, edge: Tensor, width: Tensor, allowance: Tensor, level: Tensor) -> Tensor:
        """Moves each chain's bracket edge outwards by ``width`` while it is inside the slice and its allowance lasts."""
        while True:
            going = allowance > 0
            if not bool(going.any()):
                return edge
            going = going & (self._moved(state, index, edge).log_density > level)
            edge = torch.where(going, edge + width, edge)
            allowance = torch.where(going, allowance - 1, torch.zeros_like(allowance))
