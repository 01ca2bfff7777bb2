"""Keeping numpy's threads out of torch's way."""

from __future__ import annotations

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no stubs


def one_blas_thread() -> AbstractContextManager[object]:
    """While this holds, numpy and scipy use one thread for linear algebra; torch is not affected.

    After every small operation OpenBLAS's threads wait for the next one spinning. Called in turn with torch, as by an optimiser
    whose objective is ours, they take the cores from torch's own: a search took three times as long.
    """
    return threadpool_limits(limits=1, user_api="blas")
