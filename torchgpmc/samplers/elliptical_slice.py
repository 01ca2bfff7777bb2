"""Elliptical slice sampling of whitened latents on C chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_linear
from torchgpmc.numerics.random import log_uniform, normal_like, uniform
from torchgpmc.trees import where
from torchgpmc.types import Density, Sampler

# The bracket always holds the current point; this many shrinks exhaust the digits of a float64.
_MAX_SHRINKS = 200


class EllipticalSliceState(NamedTuple):
    """Position ``(C, D)``, its log likelihood ``(C,)``, and what that was made from."""

    position: Tensor
    log_density: Tensor
    payload: Any = ()


class EllipticalSliceInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # one over the number of angles tried
    n_steps: Tensor  # likelihood evaluations
    n_failures: Tensor  # evaluations that gave -inf


def elliptical_slice(log_likelihood: Density | Callable[[Tensor], Tensor]) -> Sampler:
    """Elliptical slice sampling for a standard normal prior (Murray, Adams & MacKay 2010, figure 2).

    The bracket on the angle shrinks for the chains still searching; the others are masked and wait. Of a density that sees v
    through a linear map, as f = m + L v, the map is applied once a step: every f on the ellipse is a combination of two.

    Args:
        log_likelihood: ``(C, D) -> (C,)``, known and not estimated; the prior is N(0, I), so latents come whitened.

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
    density = as_linear(log_likelihood)

    def init(position: Tensor, generator: torch.Generator) -> EllipticalSliceState:
        return EllipticalSliceState(position, *density.draw(position, generator))

    def step(state: EllipticalSliceState, generator: torch.Generator) -> tuple[EllipticalSliceState, EllipticalSliceInfo]:
        position, current, _ = state
        chains = current.shape
        other = normal_like(position, generator)
        here, there = density.image(torch.stack([position, other], 1)).unbind(1)
        level = current + log_uniform(chains, current, generator)
        angle = 2 * math.pi * uniform(chains, current, generator)
        low, high = angle - 2 * math.pi, angle
        searching = torch.ones_like(current, dtype=torch.bool)
        tried, values = [], []
        for _ in range(_MAX_SHRINKS):
            # Chains that have found their angle stay at it, and get the same value again: cheaper than to set their results aside.
            value, payload = density.draw_at(_combined(here, there, angle), generator)
            tried.append(searching)
            values.append(value)
            searching = searching & ~(value > level)
            if not bool(searching.any()):
                break
            below = angle < 0
            low, high = torch.where(below, angle, low), torch.where(below, high, angle)
            angle = torch.where(searching, torch.lerp(low, high, uniform(chains, current, generator)), angle)
        chosen = EllipticalSliceState(_combined(position, other, angle), value, payload)
        if len(tried) == _MAX_SHRINKS:
            chosen = where(searching, state, chosen)
        counted = torch.stack(tried)
        failures = (counted & torch.isinf(torch.stack(values))).sum(0)
        n_steps = counted.sum(0).to(current)
        return chosen, EllipticalSliceInfo(1 / n_steps, n_steps, failures.to(current))

    return Sampler(init, step)


def _combined(here: Tensor, there: Tensor, angle: Tensor) -> Tensor:
    """The point ``(C, D)`` of each chain's ellipse."""
    return torch.addcmul(here * torch.cos(angle).unsqueeze(-1), there, torch.sin(angle).unsqueeze(-1))
