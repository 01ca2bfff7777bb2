"""Randomness through explicit generators alone; the global generators are never touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchgpmc.numerics.special import ndtr

_SOBOL_CELLS = 2**30  # torch's Sobol numbers have this many binary digits


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` seeded with ``seed``."""
    return torch.Generator(device=device).manual_seed(int(seed))


def derived_seed(seed: int, number: int) -> int:
    """A seed for the ``number``-th of several runs that are to be independent, from one for all."""
    return int(torch.randint(2**62, (number + 1,), generator=make_generator(seed))[number])


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of ``tensor``."""
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers on [0, 1) with the dtype and device of ``like``."""
    return torch.rand(tuple(shape), dtype=like.dtype, device=like.device, generator=generator)


def open_uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers on (0, 1), whose quantiles are finite."""
    return uniform(shape, like, generator).clamp_min_(torch.finfo(like.dtype).tiny)


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


def sobol_points(num_points: int, dimension: int, num_shifts: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Scrambled Sobol points on (0, 1), randomised anew for each of a batch of integrals.

    One scrambled net serves all; each replicate of each integral shifts its binary digits at random, which makes it unbiased and
    the replicates of an integral independent given the net.

    Args:
        num_points: of a replicate.
        dimension: D.
        num_shifts: replicates R.
        batch: integrals.
        generator: on the CPU or the device of the integrals.

    Yields:
        ``(D, R * num_points)`` for each integral, float64, replicates one after another.
    """
    device = generator.device
    seed = int(torch.randint(2**31, (), generator=generator, device=device))
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)
    net = (engine.draw(num_points, dtype=torch.float64).T.contiguous() * _SOBOL_CELLS).to(torch.int32).to(device)
    for _ in range(batch):
        shift = torch.randint(_SOBOL_CELLS, (dimension, num_shifts, 1), generator=generator, device=device, dtype=torch.int32)
        yield ((net.unsqueeze(1) ^ shift).double().add_(0.5).mul_(1 / _SOBOL_CELLS)).view(dimension, -1)


def sobol_net(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """One net of Sobol points for all, ``(D, P)``, the same at every call; ``like`` gives dtype and device."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0)
    return engine.draw(num_points, dtype=torch.float64).T.to(like)


def shifted_net(net: Tensor, normals: Tensor) -> Tensor:
    """A net ``(D, P)`` shifted modulo one for each row of standard normals ``(C, D)``: ``(C, D, P)``, each point uniform."""
    smallest = torch.finfo(normals.dtype).eps
    return (net + ndtr(normals).unsqueeze(-1)).frac_().clamp_(smallest, 1 - smallest)
