"""Several searches by L-BFGS at once, whose evaluations are made as one batch."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.ascent import Ascent, ascend
from torchgpmc.numerics.threads import one_blas_thread
from torchgpmc.types import LogDensity


def ascend_together(
    density: LogDensity, starts: Tensor, *, bound: float, max_iterations: int, slope: float | None = None
) -> list[Ascent | None]:
    """:func:`torchgpmc.numerics.ascent.ascend` from every row of ``starts`` ``(C, D)``; a batch costs little more than one.

    Each search is scipy's, in a thread that waits for its values. The caller's thread evaluates the density, once all searches that
    are still at work have asked, so that which rows meet in a batch does not depend on the clock.

    Args:
        density: on ``(C, D)``; ``density.select(rows)`` is that of some searches.
        starts: one a search.
        bound: as there.
        max_iterations: as there.
        slope: as there.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> lobes = AutogradDensity(lambda x: -0.5 * (x.square() - 1).square().sum(-1))
        >>> found = ascend_together(lobes, torch.tensor([[-2.0], [0.5]]).double(), bound=5.0, max_iterations=50)
        >>> [round(float(ascent.position), 3) for ascent in found]
        [-1.0, 1.0]
    """
    asked: SimpleQueue[_Question] = SimpleQueue()
    rows = [_Row(number, asked, SimpleQueue()) for number in range(len(starts))]
    found: list[Ascent | None] = [None] * len(rows)

    def search(row: _Row) -> None:
        try:
            found[row.number] = ascend(row, starts[row.number], bound=bound, max_iterations=max_iterations, slope=slope)
        except _CalledOffError:
            pass
        finally:
            asked.put(_Question(row.number, None))

    # An outer hold, since threads that each put back what they found would put back one another's.
    with one_blas_thread():
        threads = [threading.Thread(target=search, args=(row,), daemon=True) for row in rows]
        for thread in threads:
            thread.start()
        try:
            _answer(density, rows, asked)
        finally:
            for row in rows:
                row.answers.put(None)
            for thread in threads:
                thread.join()
    return found


class _CalledOffError(Exception):
    """The evaluation that a search waits for will not be made."""


class _Question(NamedTuple):
    """Where a search wants the density."""

    number: int
    position: Tensor | None  # (1, D); None from a search that has ended


class _Row(NamedTuple):
    """One search's view of the density."""

    number: int
    asked: SimpleQueue[_Question]
    answers: SimpleQueue[tuple[Tensor, Tensor] | None]

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.put(_Question(self.number, position))
        answer = self.answers.get()
        if answer is None:
            raise _CalledOffError
        return answer

    def select(self, rows: Tensor) -> _Row:
        return self


def _answer(density: LogDensity, rows: list[_Row], asked: SimpleQueue[_Question]) -> None:
    """Evaluates the density until all searches have ended."""
    live, waiting = len(rows), dict[int, Tensor]()
    while live:
        number, position = asked.get()
        if position is None:
            live -= 1
        else:
            waiting[number] = position
        if waiting and len(waiting) == live:
            numbers = sorted(waiting)
            batch = torch.cat([waiting[number] for number in numbers])
            value, gradient = density.select(torch.tensor(numbers, device=batch.device)).value_and_grad(batch)
            waiting.clear()
            for place, number in enumerate(numbers):
                rows[number].answers.put((value[place : place + 1], gradient[place : place + 1]))
