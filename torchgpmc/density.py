"""Log densities from plain functions: gradients by autograd, failure of one row confined to that row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgpmc.types import LogDensity


def mask_failures(value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Turns rows whose value or gradient is not finite into the pair (-inf, 0).

    Args:
        value: log densities ``(C,)``, NaN where the algebra failed.
        gradient: their gradients ``(C, D)``.

    Returns:
        The same two tensors, with -inf and zeros in the failed rows.
    """
    ok = torch.isfinite(value + 0.0 * gradient.sum(-1))  # zero times infinity is NaN
    return torch.where(ok, value, -torch.inf), torch.where(ok[:, None], gradient, 0.0)


def keep_freed_memory() -> None:
    """Lets the C allocator keep freed memory instead of handing it back after every operation.

    glibc returns large temporaries to the kernel as they are freed, and clears them page by page when they are asked for again: up
    to half the time of a gradient. Freeing one block just under its 32 MiB limit makes it keep blocks up to that size. Elsewhere
    this does nothing, and nowhere does it hold memory that is not free for reuse.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class AutogradDensity:
    """A log density from a function of a batch of positions, ``(C, D) -> (C,)``, with rows independent.

    Args:
        function: the log density; NaN and -inf both mean "outside the support".

    Example:
        >>> import torch
        >>> normal = AutogradDensity(lambda x: -0.5 * (x * x).sum(-1))
        >>> normal.value_and_grad(torch.tensor([[1.0, 2.0]]))
        (tensor([-2.5000]), tensor([[-1., -2.]]))
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function

    def __call__(self, position: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.function(position)
        return torch.where(torch.isfinite(value), value, -torch.inf)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        position = position.detach().requires_grad_(True)
        with torch.enable_grad():
            value = self.function(position)
            (gradient,) = torch.autograd.grad(value.sum(), position)
        return mask_failures(value.detach(), gradient)

    def select(self, rows: Tensor) -> LogDensity:
        return self


class ChunkedDensity:
    """A density evaluated in chunks of chains, to bound memory; random numbers stay the same, rounding may not.

    Args:
        density: the density to evaluate.
        num_chains: how many chains ``density`` stands for.
        chunk: chains evaluated at once.
    """

    def __init__(self, density: LogDensity, num_chains: int, chunk: int):
        self.density = density
        self.chunk = chunk
        indices = torch.arange(num_chains)
        self.parts = [(part, density.select(part)) for part in indices.split(chunk)]

    def __call__(self, position: Tensor) -> Tensor:
        return torch.cat([density(position[rows]) for rows, density in self.parts])

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = zip(*(density.value_and_grad(position[rows]) for rows, density in self.parts), strict=True)
        return torch.cat(values), torch.cat(gradients)

    def select(self, rows: Tensor) -> LogDensity:
        return ChunkedDensity(self.density.select(rows), len(rows), self.chunk)
