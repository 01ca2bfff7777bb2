"""Draws as they come out of a run: plain tensors, one entry a chain and draw."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """What one advance of a run yields: B draws of each of C chains (B is 1 for Markov chains)."""

    theta: Tensor  # (C, B, P), unconstrained
    whitened: Tensor  # (C, B, V)
    log_weight: Tensor | None = None  # (C, B), unnormalised, where draws do not weigh the same
    further_whitened: Tensor | None = None  # (C, B, J - 1, V), where each theta has J latent vectors


class Draws(NamedTuple):
    """All kept draws of a run."""

    theta: Tensor  # (C, S, P), unconstrained
    whitened: Tensor  # (C, S, V)
    log_weights: Tensor | None  # (C, S), unnormalised; None for Markov chains
    info: Mapping[str, float | str] = MappingProxyType({})  # about the whole run, for ``Posterior.info``
    further_whitened: Tensor | None = None  # (C, S, J - 1, V), further latent vectors of the same thetas, for predictions


def check_draws(
    path: str | os.PathLike[str], draws: Draw, stats: Mapping[str, Any], num_hyperparameters: int, num_latents: int
) -> None:
    """Checks what a file gave back: draws and statistics, ``(C, S)`` each.

    Args:
        path: of the file, for the message.
        draws: all of them.
        stats: by name.
        num_hyperparameters: P.
        num_latents: V.

    Raises:
        ValueError: another shape.
    """
    shape = list(getattr(draws.theta, "shape", ())[:2])
    expected: dict[str, tuple[Any, list[int]]] = {
        "theta": (draws.theta, [*shape, num_hyperparameters]),
        "whitened": (draws.whitened, [*shape, num_latents]),
    }
    expected |= {name: (value, shape) for name, value in stats.items()}
    if draws.log_weight is not None:
        expected["log_weights"] = draws.log_weight, shape
    if draws.further_whitened is not None:
        expected["further latents"] = (
            draws.further_whitened,
            [*shape, *getattr(draws.further_whitened, "shape", ())[2:3], num_latents],
        )
    for name, (value, wanted) in expected.items():
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != wanted:
            raise ValueError(
                f"{path} holds {name} of shape {found}. Expected {wanted}: {num_hyperparameters} hyperparameters and "
                f"{num_latents} latents, for every draw of every chain. The file is damaged; sample again."
            )


class DrawStore:
    """Collects draws and their statistics, off the device, in pieces that can be written to disk and read back."""

    def __init__(self) -> None:
        self._draws: list[Draw] = []
        self._stats: list[dict[str, Tensor]] = []
        self._count = 0  # asked for at every step

    def append(self, draw: Draw, stats: dict[str, Tensor]) -> None:
        """Keeps one advance's draws, with statistics ``(C,)`` or ``(C, B)`` each."""
        weight, further = (None if part is None else part.to("cpu") for part in draw[2:])
        self._draws.append(Draw(draw.theta.to("cpu"), draw.whitened.to("cpu"), weight, further))
        self._stats.append({name: value.to("cpu").view(len(draw.theta), -1) for name, value in stats.items()})
        self._count += draw.theta.shape[1]

    def __len__(self) -> int:
        """Draws kept a chain."""
        return self._count

    def piece(self, start: int) -> dict[str, Any]:
        """The advances from number ``start`` on, joined, as tensors alone."""
        draws = self._draws[start:]
        return {
            **{name: _joined([getattr(draw, name) for draw in draws]) for name in Draw._fields},
            "stats": {name: torch.cat([s[name] for s in self._stats[start:]], 1) for name in self._stats[start]},
        }

    @property
    def num_pieces(self) -> int:
        """Advances kept, a restored piece counting as one."""
        return len(self._draws)

    def restore(self, piece: dict) -> None:
        """Puts back what :meth:`piece` gave."""
        self._draws.append(draws_of(piece))
        self._stats.append(dict(piece["stats"]))
        self._count += piece["theta"].shape[1]

    def joined(self) -> tuple[Draw, dict[str, Tensor]]:
        """All draws ``(C, S, ...)`` and statistics ``(C, S)``."""
        piece = self.piece(0)
        return draws_of(piece), piece["stats"]


def draws_of(piece: Mapping[str, Any]) -> Draw:
    """The draws in a piece of a :class:`DrawStore`, from a file perhaps, and then perhaps of other shapes than they should be."""
    return Draw(piece["theta"], piece["whitened"], piece["log_weight"], piece.get("further_whitened"))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """Parts of one field of successive draws, all there or none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found, 1) if found else None
