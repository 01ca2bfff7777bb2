"""Randomness through explicit generators alone; the global generators are never touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` seeded with ``seed``."""
    return torch.Generator(device=device).manual_seed(seed)


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of ``tensor``."""
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers on [0, 1) with the dtype and device of ``like``."""
    return torch.rand(tuple(shape), dtype=like.dtype, device=like.device, generator=generator)


def log_uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Logs of uniform numbers on (0, 1]; never -inf."""
    return torch.log1p(-uniform(shape, like, generator))


def with_forked_global_generator(function: Callable[[], Tensor], generator: torch.Generator) -> Tensor:
    """Calls code that only knows the global generator, seeded from ours and restored afterwards.

    ``torch.distributions`` cannot take a generator, so drawing from a user's distribution goes through here.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [generator.device] if generator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return function()


def draw(distribution: Distribution, generator: torch.Generator) -> Tensor:
    """One draw from a torch distribution, determined by ``generator``."""
    return with_forked_global_generator(lambda: distribution.sample(), generator)
