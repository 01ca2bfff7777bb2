"""What ranks say to one another, and Ctrl-C held back while they do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchgpmc.checks import check_positive
from torchgpmc.trees import moved

Result = TypeVar("Result")

_CPU = torch.device("cpu")


class RankLostError(RuntimeError):
    """Another rank has ended, or does not answer."""


class Ranks:
    """The processes of one run, over a group of its own: gloo, beside whatever the default group is.

    Messages are trees of tensors of a few kilobytes, once a gradient at most. gloo reports a lost rank as an error, where nccl ends
    the process that waits for it.

    Args:
        timeout: seconds to wait for the others.

    Raises:
        ValueError: no process group, and no environment to make one from.
    """

    def __init__(self, timeout: float):
        check_positive("timeout", timeout)
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise ValueError(
                    "there are no ranks: torch.distributed is not initialised, and its environment variables are not set. Expected "
                    "a program started by torchrun, for instance torchrun --nproc-per-node 2 program.py."
                )
            dist.init_process_group("gloo")
        self.timeout = timeout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = self._said(lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
        # A rank that raised at once would otherwise close its connections while another is still making them.
        self._said(lambda: dist.barrier(group=self._group))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def close(self) -> None:
        """Leaves; those who still wait for this rank learn it at once."""
        dist.destroy_process_group(self._group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        found: list[Any] = [None] * self.size
        self._said(lambda: dist.all_gather_object(found, moved(value, _CPU), group=self._group))
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0; nothing elsewhere."""
        found: list[Any] = [None] * self.size if self.leads else []
        self._said(lambda: dist.gather_object(moved(value, _CPU), found if self.leads else None, dst=0, group=self._group))
        return found

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        message = [moved(value, _CPU) if self.leads else None]
        self._said(lambda: dist.broadcast_object_list(message, src=0, group=self._group))
        return message[0]

    def _said(self, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except RuntimeError as error:
            raise RankLostError(
                f"rank {dist.get_rank()} has lost another rank of {dist.get_world_size()}, which ended or did not answer for "
                f"{self.timeout:g} seconds. Start all ranks again: with a checkpoint they go on from it."
            ) from error


class HeldInterrupt:
    """Whether Ctrl-C was pressed since it was held back; whoever holds it acts on it where all ranks can follow."""

    def __init__(self) -> None:
        self.seen = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remembers it."""
        self.seen = True


@contextmanager
def held_interrupt() -> Iterator[HeldInterrupt]:
    """Holds Ctrl-C back while this holds; signals reach Python's main thread alone, so elsewhere there is nothing to hold."""
    held = HeldInterrupt()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
