"""A posterior's draws in a file, and whether a model is the one that they are of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchgpmc.checks import described
from torchgpmc.diagnostics.summaries import Row, Source
from torchgpmc.models.gp_model import GPModel
from torchgpmc.storage.draws import Draw, Draws, check_draws
from torchgpmc.storage.files import read_tensors, write_atomically
from torchgpmc.storage.fingerprint import differences, model_fingerprint

_FORMAT = "torchgpmc posterior 2"


class SavedDraws(NamedTuple):
    """What a file holds."""

    draws: Draws
    stats: dict[str, Tensor]
    info: dict[str, Any]
    source: Source | None


def write_draws(path: str | os.PathLike[str], model: GPModel, saved: SavedDraws) -> None:
    """Writes one file, atomically; tensors, numbers and strings only."""
    draws, stats, info, source = saved
    content = {
        "format": _FORMAT,
        "model": model_fingerprint(model),
        "theta": draws.theta,
        "whitened": draws.whitened,
        "log_weights": draws.log_weights,
        "further_whitened": draws.further_whitened,
        "stats": stats,
        "info": info,
        "source": None if source is None else [[tuple(row) for row in source.rows], source.complaints],
    }
    write_atomically(Path(path), content)


def read_draws(path: str | os.PathLike[str], model: GPModel) -> SavedDraws:
    """What :func:`write_draws` wrote, for a model with the same density.

    Raises:
        TypeError: ``model`` is none.
        ValueError: not such a file, one made with another model, or one whose draws are not of this model's shape.
    """
    if not isinstance(model, GPModel):
        raise TypeError(f"model is {described(model)}. Expected the model that was sampled, after the path: load(path, model).")
    content = read_tensors(Path(path), _FORMAT, ["model", "theta", "whitened", "log_weights", "stats", "info"])
    model.refresh()
    different = differences(content["model"], model_fingerprint(model))
    if different:
        raise ValueError(
            f"{path} was made with another model: {different}. Expected the model it was sampled from, built under the same "
            f"torch.set_default_dtype(), to which priors round their numbers."
        )
    further = content.get("further_whitened")
    draw = Draw(content["theta"], content["whitened"], content["log_weights"], further)
    check_draws(path, draw, content["stats"], model.layout.size, model.latent_size)
    draws, source = Draws(*draw[:3], further_whitened=further), content.get("source")
    if source is not None:
        source = Source([Row(*row) for row in source[0]], source[1])
    return SavedDraws(draws, content["stats"], content["info"], source)
