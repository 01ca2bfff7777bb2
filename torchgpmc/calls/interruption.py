"""What Ctrl-C says where there are no draws to return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchgpmc.storage.checkpoint import Checkpoint


@contextmanager
def before_draws(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Preparation of a run, before its first step.

    Raises:
        KeyboardInterrupt: interrupted, in words.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or f"interrupted before the first step: {_in_preparation(checkpoint)}") from None


def _in_preparation(checkpoint: Checkpoint | None) -> str:
    if checkpoint is not None and checkpoint.exists():
        return f"no draws are returned. The same call goes on from {checkpoint.path}."
    return "no draws exist yet, nor anything to go on from. Once there are draws, Ctrl-C returns them; the same call begins anew."


def nothing_kept(done: int, total: int, checkpoint: Checkpoint | None) -> str:
    """Words on a run that was interrupted after ``done`` of ``total`` steps, none of which has left a draw."""
    # What has no warm-up has draws after its first step, which may be a batch of them.
    where = f"in warm-up after {done} of {total} steps" if done else f"in the first of {total} steps"
    if checkpoint is None:
        return f"interrupted {where}: no draws exist yet. With checkpoint=path, a run goes on where it was interrupted."
    if checkpoint.exists():
        return f"interrupted {where}: no draws exist yet. The same call goes on from {checkpoint.path}."
    return f"interrupted {where}: no draws exist yet, nor a step for {checkpoint.path} to hold. The same call begins anew."
