"""Gibbs sweeps on C chains at once: a sampler made of samplers of some columns given the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.types import COUNTS, ReusableDensity, Sampler, WarmUp


class SweepState(NamedTuple):
    """Position ``(C, D)``, its log density ``(C,)``, and what that was made from."""

    position: Tensor
    log_density: Tensor
    payload: Any


class BlockStep(NamedTuple):
    """What one block's kernel gave."""

    state: Any
    info: Any  # of its steps together
    n_factorizations: Tensor  # (C,)


class SweepInfo(NamedTuple):
    """What is known about one sweep of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # mean over blocks
    n_steps: Tensor  # evaluations of the blocks' densities
    n_failures: Tensor  # those that gave -inf
    n_factorizations: Tensor  # that they took
    blocks: tuple[BlockStep, ...]


class Conditional(NamedTuple):
    """The density of a block's columns given the rest of a position, and what is known of it where the chains are.

    Args:
        density: of ``(C, B)``, B columns; up to a constant of each chain.
        log_density: its value at the present columns ``(C,)``; ``None`` if it is the whole position's, which a sweep knows.
        payload: the sweep's, if it depends on these columns (``density`` then hands out new ones); else ``None``.
        rest: what ``density`` leaves out of the whole position's, as a function of the columns, if that costs less than either:
            then neither is evaluated where the chains are, nor where they end.

    Example:
        >>> import torch
        >>> def second(position, payload):  # x_1 ~ N(x_0, 1)
        ...     return Conditional(lambda x: -0.5 * (x - position[:, :1]).square().sum(-1))
        >>> second(torch.tensor([[3.0, 0.0]]), ()).density(torch.tensor([[5.0]]))
        tensor([-2.])
    """

    density: Any
    log_density: Tensor | None = None
    payload: Any = None
    rest: Callable[[Tensor], Tensor] | None = None


class Update(Protocol):
    """One part of a sweep: leaves the distribution of the whole position as it is."""

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The chains' next state, under ``density`` of the whole position."""
        ...


class Block(NamedTuple):
    """Columns that are updated together, given the others.

    Args:
        columns: which.
        conditional: from a position ``(C, D)`` and the payload that goes with it; what the columns leave unchanged is taken from
            the payload, or worked out once for the whole block.
        kernel: the sampler of a density of these columns. Its state must be a function of position and density alone: it is made
            anew in every sweep, where ``init`` costs nothing for kernels that call ``draw``.
        steps: the kernel's, a sweep.
        work: factorisations that an evaluation of the conditional density takes.
        first_work: those of the kernel's ``init`` beyond them.

    Example:
        >>> import torch
        >>> from torchgpmc.density import as_density
        >>> from torchgpmc.samplers import Block, given_the_rest, slice_sampler, sweep
        >>> density = as_density(lambda x: -0.5 * x.square().sum(-1))
        >>> first = range(1)
        >>> block = Block(first, given_the_rest(density, first), lambda part: slice_sampler(part, width=torch.ones(1)), steps=3)
        >>> sampler, generator = sweep(density, [block]), torch.Generator().manual_seed(0)
        >>> state, info = sampler.step(sampler.init(torch.ones(1000, 2), generator), generator)
        >>> (state.position == 1).double().mean(0)  # the second column is no block's
        tensor([0., 1.], dtype=torch.float64)
    """

    columns: range
    conditional: Callable[[Tensor, Any], Conditional]
    kernel: Callable[[Any], Sampler]
    steps: int = 1
    work: int = 0
    first_work: int = 0

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The kernel's steps on these columns."""
        position, log_density, payload = state
        columns = slice(self.columns.start, self.columns.stop)
        conditional, here = self.conditional(position, payload), position[:, columns]
        rest = conditional.rest
        if rest is not None:
            conditional = conditional._replace(log_density=log_density - rest(here))
        step, found = self.moved(conditional, here, log_density, generator)
        payload = payload if conditional.payload is None else found
        position = torch.cat([position[:, : columns.start], step.state.position, position[:, columns.stop :]], -1)
        if rest is not None:
            log_density = step.state.log_density + rest(step.state.position)
        else:
            of_whole = conditional.log_density is None
            log_density = step.state.log_density if of_whole else density.value_at(position, payload)
        return SweepState(position, log_density, payload), step

    def moved(
        self, conditional: Conditional, here: Tensor, log_density: Tensor, generator: torch.Generator
    ) -> tuple[BlockStep, Any]:
        """The kernel's steps from the columns ``here`` ``(C, B)``, and the payload of where they end, if the density has one."""
        known = _KnownHere(conditional, here, log_density)
        sampler = self.kernel(known)
        state, infos = sampler.init(here, generator), []
        for _ in range(self.steps):
            state, info = sampler.step(state, generator)
            infos.append(info)
        payload = None
        if conditional.payload is not None:
            payload = state.payload if hasattr(state, "payload") else known.draw(state.position, generator)[1]
        return BlockStep(state, _together(infos), self.first_work + self.work * known.evaluations), payload


def sweep(density: ReusableDensity, blocks: Sequence[Update]) -> Sampler:
    """Blocks updated in turn (Gibbs sampling, a kernel's step in place of each draw); the payload goes from one to the next.

    Args:
        density: of the whole position.
        blocks: together they should move every column.

    Returns:
        A sampler with :class:`SweepState` and :class:`SweepInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import Block, elliptical_slice, given_the_rest, metropolis, sweep, Preconditioner
        >>> class Density:  # two standard normals; the payload is what the first column's density took long to work out
        ...     def draw(self, position, generator):
        ...         payload = (-0.5 * position[:, 0] ** 2,)
        ...         return self.value_at(position, payload), payload
        ...     def value_at(self, position, payload):
        ...         return payload[0] - 0.5 * position[:, 1] ** 2
        >>> def first(density):
        ...     unit = Preconditioner(torch.zeros(0, 0), torch.ones(1))
        ...     return metropolis(density, step_size=torch.tensor(2.0), preconditioner=unit)
        >>> second = lambda position, payload: Conditional(lambda x: torch.zeros(len(x)), torch.zeros(len(position)))
        >>> blocks = [Block(range(1), given_the_rest(Density(), range(1)), first), Block(range(1, 2), second, elliptical_slice)]
        >>> sampler, generator = sweep(Density(), blocks), torch.Generator().manual_seed(0)
        >>> state = sampler.init(torch.ones(1000, 2), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> (state.position.square().mean(0) - 1).abs() < 0.25  # five standard errors
        tensor([True, True])
    """

    def init(position: Tensor, generator: torch.Generator) -> SweepState:
        return SweepState(position, *density.draw(position, generator))

    def step(state: SweepState, generator: torch.Generator) -> tuple[SweepState, SweepInfo]:
        steps = []
        for block in blocks:
            state, taken = block.update(density, state, generator)
            steps.append(taken)
        infos = [part.info for part in steps]
        info = SweepInfo(
            torch.stack([part.acceptance_rate for part in infos]).mean(0),
            torch.stack([part.n_steps for part in infos]).sum(0),
            torch.stack([part.n_failures for part in infos]).sum(0),
            torch.stack([part.n_factorizations for part in steps]).sum(0),
            tuple(steps),
        )
        return state, info

    return Sampler(init, step)


def _together(infos: Sequence[Any]) -> Any:
    """One Info of several transitions."""
    last = infos[-1]
    counts = {name: torch.stack([getattr(info, name) for info in infos]).sum(0) for name in COUNTS if hasattr(last, name)}
    return last._replace(acceptance_rate=torch.stack([info.acceptance_rate for info in infos]).mean(0), **counts)


class _KnownHere:
    """A conditional density that is not evaluated where the chains are; it counts the evaluations of each chain."""

    def __init__(self, conditional: Conditional, here: Tensor, whole: Tensor):
        self.density = conditional.density
        self.drawn = as_density(conditional.density)
        self.here = here
        value = whole if conditional.log_density is None else conditional.log_density
        self.known = value, () if conditional.payload is None else conditional.payload
        self.evaluations = torch.zeros_like(value)

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        if position is self.here:
            return self.known
        self.evaluations += 1
        return self.drawn.draw(position, generator)

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        self.evaluations += 1
        found: tuple[Tensor, Any] = self.density.draw_at(image, generator)
        return found

    def __call__(self, position: Tensor) -> Tensor:
        if position is self.here:
            return self.known[0]
        self.evaluations += 1
        value: Tensor = self.density(position)
        return value

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        value_and_grad: tuple[Tensor, Tensor] = self.density.value_and_grad(position)
        return value_and_grad

    def select(self, rows: Tensor) -> _OfSome:
        return _OfSome(self.density.select(rows), rows, self.evaluations)

    def __getattr__(self, name: str) -> Any:
        """What else the density has: p(f | theta), for moves of latents that look at it."""
        return getattr(self.density, name)


class _OfSome(NamedTuple):
    """The density of the chains in ``rows``, whose evaluations count as theirs."""

    density: Any
    rows: Tensor
    evaluations: Tensor  # of all chains

    def __call__(self, position: Tensor) -> Tensor:
        self.evaluations[self.rows] += 1
        value: Tensor = self.density(position)
        return value

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations[self.rows] += 1
        value_and_grad: tuple[Tensor, Tensor] = self.density.value_and_grad(position)
        return value_and_grad

    def select(self, rows: Tensor) -> _OfSome:
        return _OfSome(self.density.select(rows), self.rows[rows], self.evaluations)


def given_the_rest(density: Any, columns: range) -> Callable[[Tensor, Any], Conditional]:
    """The conditional of a block whose columns the payload depends on: ``density`` with all others where they are.

    Args:
        density: of whole positions ``(C, D)``.
        columns: the block's, B of them.

    Returns:
        What :class:`Block` takes: from a position and its payload to the density of ``(C, B)``.

    Example:
        >>> import torch
        >>> conditional = given_the_rest(lambda x: -0.5 * (x[:, 0] - x[:, 1]).square(), range(1))
        >>> conditional(torch.tensor([[0.0, 3.0]]), ()).density(torch.tensor([[1.0]]))  # at [1, 3]
        tensor([-2.])
    """

    def conditional(position: Tensor, payload: Any) -> Conditional:
        return Conditional(_GivenTheRest(density, position, columns), payload=payload)

    return conditional


class _GivenTheRest:
    """A density as a function of some columns ``(C, B)`` of the position."""

    def __init__(self, density: Any, position: Tensor, columns: range):
        self.density = density
        self.position = position
        self.columns = columns

    def _whole(self, part: Tensor) -> Tensor:
        return torch.cat([self.position[:, : self.columns.start], part, self.position[:, self.columns.stop :]], -1)

    def draw(self, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        return self.density.draw(self._whole(part), generator)

    def __call__(self, part: Tensor) -> Tensor:
        return self.density(self._whole(part))

    def value_and_grad(self, part: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.density.value_and_grad(self._whole(part))
        return value, gradient[:, self.columns.start : self.columns.stop]

    def select(self, rows: Tensor) -> _GivenTheRest:
        return _GivenTheRest(self.density.select(rows), self.position[rows], self.columns)


class SweepWarmUp(NamedTuple):
    """A warm-up of its own for every block of a sweep; the tuning is the tuple of theirs.

    Args:
        columns: of each block.
        parts: their warm-ups, which get the states and Infos of the blocks' kernels.
    """

    columns: Sequence[range]
    parts: Sequence[WarmUp]

    @property
    def steps(self) -> int:
        """Until the last block is tuned."""
        return max(part.steps for part in self.parts)

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> tuple[Any, ...]:
        """Each block's, from its columns."""
        tunings = []
        for columns, part in zip(self.columns, self.parts, strict=True):
            own = slice(columns.start, columns.stop)
            tunings.append(part.start(position[:, own], None if covariance is None else covariance[own, own], generator))
        return tuple(tunings)

    def update(
        self, tuning: tuple[Any, ...], iteration: int, state: SweepState, info: SweepInfo, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Each block's that is still being tuned."""
        return tuple(
            part.update(own, iteration, step.state, step.info, generator) if iteration <= part.steps else own
            for part, own, step in zip(self.parts, tuning, info.blocks, strict=True)
        )

    def restarts(self, iteration: int) -> bool:
        """If a block's does."""
        return any(part.restarts(iteration) for part in self.parts)

    def statistics(self, tuning: tuple[Any, ...]) -> dict[str, Tensor]:
        """None: blocks would share names."""
        return {}
