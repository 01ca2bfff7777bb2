"""Checkpoints of a run: a small file for its state, and numbered segments of draws that are never rewritten."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchgpmc.checks import check_count, warn
from torchgpmc.storage.draws import DrawStore, check_draws, draws_of
from torchgpmc.storage.files import read_tensors, write_atomically
from torchgpmc.storage.fingerprint import Fingerprint, differences
from torchgpmc.trees import pack

_FORMAT = "torchgpmc checkpoint 4"
_SEGMENT_FORMAT = "torchgpmc checkpoint segment 2"


class Checkpoint(NamedTuple):
    """Where and how often to save a run: ``torchgpmc.sample(..., checkpoint=Checkpoint("run.ckpt", every=50))``.

    Args:
        path: the state's file; segments of draws lie beside it as ``<path>.00000``, ``<path>.00001``, ...
        every: steps between two saves, warm-up included; each draw of a batch of weighted ones is a step.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     settings = {"num_samples": 4000, "seed": 1, "checkpoint": tg.Checkpoint(pathlib.Path(folder) / "run.ckpt", every=2)}
        ...     first = tg.sample(model, tg.AMIS(), progress=False, **settings)
        ...     again = tg.sample(model, tg.AMIS(), progress=False, **settings)  # goes on from the file
        >>> torch.equal(first.theta, again.theta)
        True
    """

    path: str | os.PathLike[str]
    every: int = 100

    def exists(self) -> bool:
        """Whether there is something to go on from.

        Example:
            >>> Checkpoint("no such folder/run.ckpt").exists()
            False
        """
        return Path(self.path).exists()


class CheckpointError(ValueError):
    """A checkpoint file that is damaged, or belongs to another run.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "run.ckpt"
        ...     _ = file.write_text("no tensors")
        ...     saved_seed(Checkpoint(file))
        Traceback (most recent call last):
            ...
        torchgpmc.storage.checkpoint.CheckpointError: ...
    """


def as_checkpoint(checkpoint: Any) -> Checkpoint | None:
    """What was given as ``checkpoint=``, checked.

    Raises:
        TypeError: no path.
        ValueError: a folder, or a number of steps that is none.
    """
    if checkpoint is None:
        return None
    found = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    if not isinstance(found.path, str | os.PathLike):
        raise TypeError(f"checkpoint is {checkpoint!r}. Expected a path, for instance 'run.ckpt', or torchgpmc.Checkpoint(path).")
    if Path(found.path).is_dir():
        raise ValueError(f"checkpoint {found.path} is a folder. Expected the path of a file, for instance in it.")
    check_count("checkpoint.every", found.every)
    return found


def saved_seed(checkpoint: Checkpoint | None) -> int | None:
    """The seed of the call that a checkpoint is of, ``None`` where there is none yet.

    Raises:
        CheckpointError: the file is damaged.
    """
    if checkpoint is None:
        return None
    path = Path(checkpoint.path)
    # Of a call without a method an engine that failed at once has left no file, and the next one's ends with its number.
    written = [path] * path.exists() or sorted(path.parent.glob(f"{glob.escape(path.name)}.[2-9]"))
    try:
        return int(read_tensors(written[0], _FORMAT, ["settings"])["settings"]["seed"]) if written else None
    except ValueError as error:
        raise CheckpointError(str(error)) from error


class Saved(NamedTuple):
    """What a checkpoint file gives back."""

    state: Any  # packed
    generator_state: Tensor
    num_done: int
    info: dict[str, Any]
    store: DrawStore


class CheckpointFile:
    """Saves and restores one run.

    Args:
        checkpoint: where, and how often.
        settings: everything that determines the draws; a file made with other settings is refused.
        widths: numbers of hyperparameters and of latents in a draw.
        longer: whether a run of fewer draws may go on to this one's ``num_samples``, since all it drew are this one's first.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Fingerprint, widths: tuple[int, int], longer: bool = False):
        self.checkpoint = checkpoint
        self.path = Path(checkpoint.path)
        self.every = checkpoint.every
        self.settings = settings
        self._widths = widths
        self._longer = longer
        self._segments = 0
        self._draws_saved = 0

    def _segment_path(self, index: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{index:05d}")

    def restore(self) -> Saved | None:
        """What was saved, or ``None`` if there is no file yet.

        Raises:
            CheckpointError: the file is damaged, lacks another that goes with it, holds draws of the wrong shapes, or belongs to a
                run with other settings; the message lists the differences.
        """
        try:
            return self._read() if self.path.exists() else None
        except ValueError as error:
            raise CheckpointError(str(error)) from error

    def _read(self) -> Saved:
        content = read_tensors(self.path, _FORMAT, ["settings", "state", "generator", "num_done", "segments", "info"])
        before, now = content["settings"], self.settings
        if self._longer and int(before["num_samples"]) < int(now["num_samples"]):
            before = {**before, "num_samples": now["num_samples"]}
        different = differences(before, now)
        if different:
            raise ValueError(
                f"checkpoint {self.path} belongs to another run: {different}. "
                f"Expected the same settings; use another path, or delete it."
            )
        store = DrawStore()
        for index in range(content["segments"]):
            path = self._segment_path(index)
            if not path.exists():
                raise ValueError(
                    f"checkpoint {self.path} lacks some of its draws, the file {path}. Expected all files together; put it "
                    f"back, or delete {self.path}, or take another path, to begin anew."
                )
            piece = read_tensors(path, _SEGMENT_FORMAT, ["theta", "whitened", "log_weight", "stats"])
            check_draws(path, draws_of(piece), piece["stats"], *self._widths)
            store.restore(piece)
        self._segments, self._draws_saved = content["segments"], len(store)
        return Saved(content["state"], content["generator"], content["num_done"], content["info"], store)

    def is_due(self, before: int, after: int) -> bool:
        """Whether an advance from ``before`` to ``after`` steps ends with a save."""
        return after // self.every > before // self.every

    def save(self, state: Any, generator_state: Tensor, num_done: int, info: dict[str, Any], store: DrawStore) -> None:
        """New draws to a segment, then the state; if the disk refuses, a warning, and the draws wait for the next save."""
        try:
            segments, draws = self._segments, self._draws_saved
            if len(store) > draws:
                write_atomically(self._segment_path(segments), {"format": _SEGMENT_FORMAT, **store.piece(draws)})
                segments, draws = segments + 1, len(store)
            content = {
                "format": _FORMAT,
                "settings": self.settings,
                "state": pack(state),
                "generator": generator_state,
                "num_done": num_done,
                "segments": segments,
                "info": info,
            }
            write_atomically(self.path, content)
            self._segments, self._draws_saved = segments, draws
        except OSError as error:
            warn(
                f"checkpoint {self.path} could not be written ({error}); sampling goes on and the draws are kept in memory. "
                f"Free some space: the next save will try again.",
            )
