"""Draws as they come out of a run: plain tensors, one entry a chain and draw."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """What one advance of a run yields: B draws of each of C chains (B is 1 for Markov chains)."""

    theta: Tensor  # (C, B, P), unconstrained
    whitened: Tensor  # (C, B, V)


class Draws(NamedTuple):
    """All kept draws of a run."""

    theta: Tensor  # (C, S, P), unconstrained
    whitened: Tensor  # (C, S, V)
    log_weights: Tensor | None  # (C, S), unnormalised; None for Markov chains


class DrawStore:
    """Collects draws and their statistics, off the device, in pieces that can be written to disk and read back."""

    def __init__(self) -> None:
        self._draws: list[Draw] = []
        self._stats: list[dict[str, Tensor]] = []

    def append(self, draw: Draw, stats: dict[str, Tensor]) -> None:
        """Keeps one advance's draws, with statistics ``(C,)`` each."""
        self._draws.append(Draw(draw.theta.to("cpu"), draw.whitened.to("cpu")))
        self._stats.append({name: value.to("cpu").unsqueeze(-1) for name, value in stats.items()})

    def __len__(self) -> int:
        """Draws kept a chain."""
        return sum(draw.theta.shape[1] for draw in self._draws)

    def piece(self, start: int) -> dict[str, Any]:
        """The advances from number ``start`` on, joined, as tensors alone."""
        return {
            "theta": torch.cat([draw.theta for draw in self._draws[start:]], 1),
            "whitened": torch.cat([draw.whitened for draw in self._draws[start:]], 1),
            "stats": {name: torch.cat([s[name] for s in self._stats[start:]], 1) for name in self._stats[start]},
        }

    @property
    def num_pieces(self) -> int:
        """Advances kept, a restored piece counting as one."""
        return len(self._draws)

    def restore(self, piece: dict) -> None:
        """Puts back what :meth:`piece` gave."""
        self._draws.append(Draw(piece["theta"], piece["whitened"]))
        self._stats.append(dict(piece["stats"]))

    def joined(self) -> tuple[Draw, dict[str, Tensor]]:
        """All draws ``(C, S, ...)`` and statistics ``(C, S)``."""
        piece = self.piece(0)
        return Draw(piece["theta"], piece["whitened"]), piece["stats"]
