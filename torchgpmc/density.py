"""Log densities from plain functions: gradients by autograd, failure of one row confined to that row."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from torchgpmc.numerics.threads import even_slices, side_by_side, slices, torch_threads_back
from torchgpmc.trees import concatenate, take
from torchgpmc.types import Density, LinearDensity, LogDensity, Resolution

Result = TypeVar("Result")


def mask_failures(value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Turns rows whose value or gradient is not finite into the pair (-inf, 0).

    Args:
        value: log densities ``(C,)``, NaN where the algebra failed.
        gradient: their gradients ``(C, D)``.

    Returns:
        The same two tensors, with -inf and zeros in the failed rows.
    """
    failed = 0.0 * (value + gradient.sum(-1)) != 0.0  # zero times infinity is NaN
    return value.masked_fill(failed, -torch.inf), gradient.masked_fill(failed[:, None], 0.0)


def mask_value(value: Tensor) -> Tensor:
    """Log densities ``(C,)`` with -inf where they are not finite: where algebra failed, or outside the support."""
    return torch.where(torch.isfinite(value), value, -torch.inf)


def keep_freed_memory() -> None:
    """Lets the C allocator keep freed memory instead of handing it back after every operation.

    glibc returns large temporaries to the kernel as they are freed, and clears them page by page when they are asked for again: up
    to half the time of a gradient. Freeing one block just under its 32 MiB limit makes it keep blocks up to that size. Elsewhere
    this does nothing, and nowhere does it hold memory that is not free for reuse.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class _Gradient(torch.autograd.Function):
    """A gradient that knows what it depends on, so that asking for its derivative is an error and not zero."""

    @staticmethod
    def forward(position: Tensor, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None]:
        raise NotImplementedError(
            "a second derivative of a log density was asked for. Expected first derivatives alone; "
            "for curvature take differences of value_and_grad's gradients."
        )


class _Value(torch.autograd.Function):
    """A density's value, whose derivative is the gradient that ``value_and_grad`` found along with it."""

    @staticmethod
    def forward(position: Tensor, density: AutogradDensity) -> tuple[Tensor, Tensor]:
        return density.value_and_grad(position)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, AutogradDensity], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return slope.unsqueeze(-1) * _Gradient.apply(*ctx.saved_tensors), None


class AutogradDensity:
    """A log density from a function of a batch of positions, ``(C, D) -> (C,)``, with rows independent.

    Called at positions that require a gradient it is differentiable, once, in the position; a row of density zero has slope zero.

    Args:
        function: the log density; NaN and -inf both mean "outside the support".

    Example:
        >>> import torch
        >>> normal = AutogradDensity(lambda x: -0.5 * (x * x).sum(-1))
        >>> normal.value_and_grad(torch.tensor([[1.0, 2.0]]))
        (tensor([-2.5000]), tensor([[-1., -2.]]))
        >>> position = torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> normal(position).sum().backward()
        >>> position.grad
        tensor([[-1., -2.]])
    """

    resolution: ClassVar[Resolution] = Resolution()

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function

    def __call__(self, position: Tensor) -> Tensor:
        if position.requires_grad and torch.is_grad_enabled():
            value: Tensor = _Value.apply(position, self)[0]
            return value
        with torch.no_grad():
            return mask_value(self.function(position))

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        position = position.detach().requires_grad_(True)
        with torch.enable_grad():
            value = self.function(position)
            if not value.requires_grad:
                raise ValueError(
                    "the log density has no gradient: it does not come from its position by torch operations that autograd can "
                    "follow. Expected a function built of those, or a method without gradients, for instance torchgpmc.Slice()."
                )
            (gradient,) = torch.autograd.grad(value.sum(), position)
        return mask_failures(value.detach(), gradient)

    def select(self, rows: Tensor) -> LogDensity:
        return self


WORTH_A_THREAD = 5e7  # operations of one thread's part, some milliseconds: with less, Python's lock costs what a second core gains
# Elements of a batch's largest tensor, 8 MB: of more the allocator gives memory back, zeroed anew for the next operation.
# A gradient of 64 chains of 500 data took 1.6 times as long.
_LARGEST = 1_000_000
_WORTH_TORCH_THREADS = 3e10  # operations of one evaluation, some seconds: then the waiting of torch's threads is little beside it


class DrawnDensity(NamedTuple):
    """A :class:`Density` from its ``draw``: ``(position (C, D), generator) -> (log density (C,), payload)``."""

    draw: Callable[[Tensor, torch.Generator], tuple[Tensor, Any]]

    def work(self, payload: Any) -> float:
        """None that is known of."""
        return 0.0


def as_density(density: Density | Callable[[Tensor], Tensor]) -> Density:
    """What hands out payloads as it is; a function ``(C, D) -> (C,)`` as a density with the payload ``()``.

    Example:
        >>> import torch
        >>> as_density(lambda x: -0.5 * x.square().sum(-1)).draw(torch.ones(3, 2), torch.Generator())
        (tensor([-1., -1., -1.]), ())
    """
    return density if hasattr(density, "draw") else DrawnDensity(lambda position, _: (density(position), ()))


class _SeenAsItIs(NamedTuple):
    """A density with the identity for its linear map."""

    density: Density

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        return self.density.draw(position, generator)

    def image(self, vectors: Tensor) -> Tensor:
        return vectors

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        return self.density.draw(image, generator)


def as_linear(density: Density | Callable[[Tensor], Tensor]) -> LinearDensity:
    """What has a linear map as it is; anything else sees positions themselves."""
    return cast(LinearDensity, density) if hasattr(density, "image") else _SeenAsItIs(as_density(density))


class ChunkedDensity:
    """A density evaluated in chunks of chains, to bound memory; random numbers stay the same, rounding may not.

    Args:
        density: the density to evaluate: a :class:`LogDensity`, or with a payload and ``select``.
        num_chains: how many chains ``density`` stands for.
        chunk: chains evaluated at once.
    """

    def __init__(self, density: Any, num_chains: int, chunk: int):
        self.density = density
        self.chunk = chunk
        indices = torch.arange(num_chains)
        self.parts = [(part, density.select(part)) for part in indices.split(chunk)]

    def __call__(self, position: Tensor) -> Tensor:
        return torch.cat([density(position[rows]) for rows, density in self.parts])

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = zip(*(density.value_and_grad(position[rows]) for rows, density in self.parts), strict=True)
        return torch.cat(values), torch.cat(gradients)

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        return concatenate([as_density(density).draw(position[rows], generator) for rows, density in self.parts])

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        return concatenate([density.draw_at(image[rows], generator) for rows, density in self.parts])

    def value_at(self, position: Tensor, payload: Any) -> Tensor:
        return torch.cat([density.value_at(position[rows], take(payload, rows)) for rows, density in self.parts])

    def select(self, rows: Tensor) -> ChunkedDensity:
        return ChunkedDensity(self.density.select(rows), len(rows), self.chunk)

    def __getattr__(self, name: str) -> Any:
        """What else the density has, for all chains."""
        return getattr(self.density, name)


def shared_by_rows(
    function: Callable[[slice], Result],
    count: int,
    work: float,
    device: torch.device,
    elements: int = 1,
    chunk: int | None = None,
    worth: float | None = None,
) -> list[Result]:
    """``function`` of slices of a batch's rows, which are shared by the cores where each has enough to do.

    Args:
        function: of some rows.
        count: of rows.
        work: of one row, in floating-point operations, roughly.
        device: where they live.
        elements: of one row's largest tensor; on the CPU tensors are to keep their memory from one operation to the next.
        chunk: rows at once, at most.
        worth: operations that make a thread's part worth it; some milliseconds' if it is left out.

    Example:
        >>> shared_by_rows(lambda rows: rows.stop - rows.start, 5, 1.0, torch.device("cpu"), chunk=2)
        [2, 2, 1]
    """
    worth = WORTH_A_THREAD if worth is None else worth
    if count * work < 2 * worth:
        return [function(rows) for rows in (slices(count, chunk) if chunk else [slice(0, count)])]
    largest = max(1, _LARGEST // elements) if device.type == "cpu" else count
    parts = even_slices(count, min(largest, chunk or count), device, max(1, math.ceil(worth / work)))
    if len(parts) > 1:
        return side_by_side(function, parts, device)
    with torch_threads_back() if count * work > _WORTH_TORCH_THREADS else nullcontext():
        return [function(parts[0])]


class SharedDensity:
    """A density whose rows are shared by the cores where each has enough to do; random numbers stay the same, rounding may not.

    On the CPU rows are also taken so few at a time that their tensors keep their memory from one operation to the next.

    Args:
        density: the density to evaluate, with ``select``.
        work: of one row's value and gradient, in floating-point operations, roughly.
        device: where positions live.
        elements: of one row's largest tensor.

    Example:
        >>> shared = SharedDensity(AutogradDensity(lambda x: -0.5 * (x * x).sum(-1)), work=1e9, device=torch.device("cpu"))
        >>> shared.value_and_grad(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        (tensor([-2.5000, -0.5000]), tensor([[-1., -2.],
                [-0., -1.]]))
    """

    def __init__(self, density: Any, work: float, device: torch.device, elements: int = 1):
        self.density = density
        self.work = work
        self.device = device
        self.elements = elements

    def _shared(self, count: int, function: Callable[[Any, slice], Any]) -> list[Any]:
        def of(rows: slice) -> Any:
            if rows == slice(0, count):  # as most often: choosing rows would take a tenth of a small gradient's time
                return function(self.density, slice(None))
            return function(self.density.select(torch.arange(count, device=self.device)[rows]), rows)

        return shared_by_rows(of, count, self.work, self.device, self.elements)

    def __call__(self, position: Tensor) -> Tensor:
        return torch.cat(self._shared(len(position), lambda density, rows: density(position[rows])))

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        found = self._shared(len(position), lambda density, rows: density.value_and_grad(position[rows]))
        if len(found) == 1:
            return cast(tuple[Tensor, Tensor], found[0])
        values, gradients = zip(*found, strict=True)
        return torch.cat(values), torch.cat(gradients)

    def select(self, rows: Tensor) -> SharedDensity:
        return SharedDensity(self.density.select(rows), self.work, self.device, self.elements)


class FollowedDensity(NamedTuple):
    """A log density with the gradient of another near it, for trajectories that are tested by values at their ends.

    Args:
        density: the one to sample from.
        followed: whose gradient it has.

    Example:
        >>> import torch
        >>> normal, near = (AutogradDensity(lambda x, rate=rate: -0.5 * rate * (x * x).sum(-1)) for rate in (1.0, 1.1))
        >>> FollowedDensity(normal, near).value_and_grad(torch.ones(1, 2))
        (tensor([-1.]), tensor([[-1.1000, -1.1000]]))
    """

    density: LogDensity
    followed: LogDensity

    def __call__(self, position: Tensor) -> Tensor:
        return self.density(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.density(position), self.followed.value_and_grad(position)[1]

    def select(self, rows: Tensor) -> FollowedDensity:
        return FollowedDensity(self.density.select(rows), self.followed.select(rows))
