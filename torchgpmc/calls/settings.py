"""Numbers that a call was given, checked before anything is sampled."""

from __future__ import annotations

import secrets

from torchgpmc.checks import check_count
from torchgpmc.runs.run import Settings
from torchgpmc.storage.checkpoint import Checkpoint, saved_seed


def check_settings(num_samples: int, warmup_steps: int | None, num_chains: int | None, chain_chunk: int | None) -> Settings:
    """Raises a ``ValueError`` for a number out of range."""
    check_count("num_samples", num_samples)
    return Settings(
        int(num_samples),
        _checked_count("warmup_steps", warmup_steps, 0),
        _checked_count("num_chains", num_chains),
        _checked_count("chain_chunk", chain_chunk),
    )


def _checked_count(name: str, count: int | None, least: int = 1) -> int | None:
    if count is None:
        return None
    check_count(name, count, least)
    return int(count)  # numpy's whole numbers are neither torch's nor a file's


def checked_seed(seed: int | None, checkpoint: Checkpoint | None) -> int:
    """The seed; where the user gave none, that of the run which the checkpoint is of, or one that is drawn."""
    if seed is None:
        seed = saved_seed(checkpoint)
    if seed is None:
        seed = secrets.randbits(62)
    check_count("seed", seed, 0)
    return int(seed)
