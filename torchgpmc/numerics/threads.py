"""Sharing the cores: parts of a batch side by side, and numpy's threads out of torch's way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no stubs

Part = TypeVar("Part")
Result = TypeVar("Result")

_WORTH_TORCH_THREADS = 1e9  # operations of a step, some tenths of a second, beside which the waiting of torch's threads is little


def one_blas_thread() -> AbstractContextManager[object]:
    """While this holds, numpy and scipy use one thread for linear algebra; torch is not affected.

    After every small operation OpenBLAS's threads wait for the next one spinning. Called in turn with torch, as by an optimiser
    whose objective is ours, they take the cores from torch's own: a search took three times as long.
    """
    return threadpool_limits(limits=1, user_api="blas")


class _OneTorchThread:
    """While any thread holds this, torch's operations run on the thread that calls them; then as before.

    Torch's own threads wait for one another spinning after every operation. Beside one other busy process an operation of
    microseconds then takes milliseconds, whatever its size: gradients became ten to a hundred times slower
    (``benchmarks/threads.py``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = 1
        self._is_lent = False
        self._worker = threading.local()
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def cores(self) -> int:
        """How many threads may work side by side: torch's, as the caller of the outermost holder has them; one within a part."""
        if getattr(self._worker, "busy", False):
            return 1
        return self._before if self._holders else torch.get_num_threads()

    def executor(self) -> ThreadPoolExecutor:
        """As many Python threads as cores, until the outermost holder ends: new ones for each gradient took 1.3 times as long."""
        with self._lock:
            if self._executor is None or self._process != os.getpid():  # a forked process has none of its parent's threads
                self._executor, self._process = ThreadPoolExecutor(self._before), os.getpid()
            return self._executor

    def as_part(self, function: Callable[[], Result]) -> Result:
        """``function()``, which may not share its work any further."""
        self._worker.busy = True
        return function()

    @contextmanager
    def lent_back(self) -> Iterator[None]:
        """Within this, torch has its threads back, unless others hold it to one."""
        with self._lock:
            lend = self._holders == 1 and not getattr(self._worker, "busy", False)
            if lend:
                self._is_lent = True
                torch.set_num_threads(self._before)
        try:
            yield
        finally:
            if lend:
                with self._lock:
                    self._is_lent = False
                    torch.set_num_threads(1)

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = torch.get_num_threads()
            if self._holders == 0 or self._is_lent:
                torch.set_num_threads(1)
            self._holders += 1

    def __exit__(self, *error: object) -> None:
        ended = None
        with self._lock:
            self._holders -= 1
            if self._holders == 0 or (self._is_lent and self._holders == 1):
                torch.set_num_threads(self._before)
            if self._holders == 0:
                ended, self._executor = self._executor, None
        if ended is not None and self._process == os.getpid():
            ended.shutdown()


_ONE_TORCH_THREAD = _OneTorchThread()


def one_torch_thread() -> AbstractContextManager[object]:
    """While this holds, torch's operations run on one thread each, and :func:`side_by_side` has the cores that torch had.

    Example:
        >>> before = torch.get_num_threads()
        >>> with one_torch_thread():
        ...     torch.get_num_threads(), num_cores() == before
        (1, True)
        >>> torch.get_num_threads() == before
        True
    """
    return _ONE_TORCH_THREAD


def threads_for(operations: float) -> AbstractContextManager[object]:
    """One thread of torch for so few floating-point operations: beside another busy process two took fifty times as long.

    Example:
        >>> before = torch.get_num_threads()
        >>> with threads_for(1e6):
        ...     torch.get_num_threads()
        1
        >>> with threads_for(1e12):
        ...     torch.get_num_threads() == before
        True
    """
    return nullcontext() if operations > _WORTH_TORCH_THREADS else one_torch_thread()


def torch_threads_back() -> AbstractContextManager[object]:
    """Within :func:`one_torch_thread`, for operations so large that sharing each of them pays on a busy machine too."""
    return _ONE_TORCH_THREAD.lent_back()


def num_cores() -> int:
    """How many parts :func:`side_by_side` works on at once: ``torch.set_num_threads`` as the user left it."""
    return _ONE_TORCH_THREAD.cores


def side_by_side(function: Callable[[Part], Result], parts: Sequence[Part], device: torch.device) -> list[Result]:
    """``[function(part) for part in parts]``; on CPU with a Python thread for each of torch's, which then has one.

    Cholesky factorisations of a few hundred rows gain little from a second thread within each, and nearly all there is to gain from
    a second thread with matrices of its own. ``function`` must be safe to call from several threads, and is run in their order by
    this one where there is one thread, one part or another device. Whether gradients are recorded is as in the caller's thread.

    Args:
        function: of one part.
        parts: what to work on, for instance slices of a batch; the results do not depend on which thread takes which.
        device: where the tensors live.

    Example:
        >>> side_by_side(lambda part: part * 2, [1, 2, 3], torch.device("cpu"))
        [2, 4, 6]
    """
    if device.type != "cpu" or min(num_cores(), len(parts)) < 2:
        return [function(part) for part in parts]
    recorded = torch.is_grad_enabled()

    def run(part: Part) -> Result:
        with torch.set_grad_enabled(recorded):
            return _ONE_TORCH_THREAD.as_part(lambda: function(part))

    with _ONE_TORCH_THREAD:
        executor = _ONE_TORCH_THREAD.executor()
        futures: list[Future[Result]] = []
        try:
            futures.extend(executor.submit(run, part) for part in parts)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # after an interruption: no running part may see the thread count change


def slices(count: int, size: int) -> list[slice]:
    """Slices of a batch of ``count``, of ``size`` rows each; the last has what remains.

    Example:
        >>> slices(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def even_slices(count: int, largest: int, device: torch.device, least: int = 1) -> list[slice]:
    """Slices of a batch of ``count`` for :func:`side_by_side`: nearly equal, none above ``largest``, as many for each thread.

    Args:
        count: rows of the batch.
        largest: rows a slice may have at most.
        device: where they live.
        least: rows a slice should have to be worth a thread.

    Example:
        >>> even_slices(10, 4, torch.device("meta"))
        [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    number = -(-count // largest)
    threads = num_cores() if device.type == "cpu" else 1
    if threads > 1 and count >= threads * least:
        number = threads * -(-number // threads)
    number = max(1, min(number, count))
    size, longer = divmod(count, number)
    ends = [(index + 1) * size + min(index + 1, longer) for index in range(number)]
    return [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
