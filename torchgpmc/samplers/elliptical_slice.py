"""Elliptical slice sampling of whitened latents on C chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.random import log_uniform, normal_like, uniform
from torchgpmc.types import Sampler

# The bracket always holds the current point; this many shrinks exhaust the digits of a float64.
_MAX_SHRINKS = 200


class EllipticalSliceState(NamedTuple):
    """Position ``(C, D)`` and its log likelihood ``(C,)``."""

    position: Tensor
    log_density: Tensor


class EllipticalSliceInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # one over the number of angles tried
    n_steps: Tensor  # likelihood evaluations
    n_failures: Tensor  # evaluations that gave -inf


def elliptical_slice(log_likelihood: Callable[[Tensor], Tensor]) -> Sampler:
    """Elliptical slice sampling for a standard normal prior (Murray, Adams & MacKay 2010, figure 2).

    The bracket on the angle shrinks for the chains still searching; the others are masked and wait.

    Args:
        log_likelihood: ``(C, D) -> (C,)``; the prior is N(0, I), so latents come whitened.

    Returns:
        A sampler with :class:`EllipticalSliceState` and :class:`EllipticalSliceInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import elliptical_slice
        >>> generator = torch.Generator().manual_seed(0)
        >>> sampler = elliptical_slice(lambda v: -0.5 * (v - 1).square().sum(-1))  # the posterior is N(1/2, 1/2)
        >>> state = sampler.init(torch.zeros(1000, 1), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> abs(state.position.mean() - 0.5) < 0.11, abs(state.position.var() - 0.5) < 0.11  # five standard errors
        (tensor(True), tensor(True))
    """

    def init(position: Tensor, generator: torch.Generator) -> EllipticalSliceState:
        return EllipticalSliceState(position, log_likelihood(position))

    def step(state: EllipticalSliceState, generator: torch.Generator) -> tuple[EllipticalSliceState, EllipticalSliceInfo]:
        position, current = state
        chains = current.shape
        other = normal_like(position, generator)
        level = current + log_uniform(chains, current, generator)
        angle = 2 * math.pi * uniform(chains, current, generator)
        low, high = angle - 2 * math.pi, angle
        searching = torch.ones_like(current, dtype=torch.bool)
        chosen, chosen_value = position, current
        tried, failures = torch.zeros_like(current), torch.zeros_like(current)
        for _ in range(_MAX_SHRINKS):
            proposal = position * torch.cos(angle).unsqueeze(-1) + other * torch.sin(angle).unsqueeze(-1)
            value = log_likelihood(proposal)
            found = searching & (value > level)
            tried = tried + searching
            failures = failures + (searching & torch.isinf(value))
            chosen = torch.where(found.unsqueeze(-1), proposal, chosen)
            chosen_value = torch.where(found, value, chosen_value)
            searching = searching & ~found
            if not bool(searching.any()):
                break
            low = torch.where(searching & (angle < 0), angle, low)
            high = torch.where(searching & (angle >= 0), angle, high)
            angle = low + (high - low) * uniform(chains, current, generator)
        return EllipticalSliceState(chosen, chosen_value), EllipticalSliceInfo(1 / tried, tried, failures)

    return Sampler(init, step)
