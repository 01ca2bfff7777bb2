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
    """Collects draws and their statistics, off the device, in pieces that can be written to disk and read back.

    What is kept goes into large tensors that grow, some advances at a time. One small tensor a draw would lie in the middle of what
    larger temporaries have given back to the allocator, which then has no room for the next of these: a run of sweeps over 200
    latents grew by 130 times what it kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Growing] = {}
        self._settled = 0  # draws in these
        self._waiting: list[dict[str, Tensor]] = []
        self._count = 0  # asked for at every step; set last, so that an interrupted advance is not counted

    def append(self, draw: Draw, stats: Mapping[str, Tensor]) -> None:
        """Keeps one advance's draws, with statistics ``(C,)`` or ``(C, B)`` each."""
        parts = {name: value.to("cpu") for name, value in zip(Draw._fields, draw, strict=True) if value is not None}
        parts |= {f"{_STATS}{name}": value.to("cpu").view(len(draw.theta), -1) for name, value in stats.items()}
        self._waiting.append(parts)
        self._count += draw.theta.shape[1]
        if len(self._waiting) >= _AT_ONCE:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        for name in self._waiting[0]:
            joined = torch.cat([parts[name] for parts in self._waiting], 1)
            self._kept.setdefault(name, _Growing()).write(self._settled, joined)
        self._settled += joined.shape[1]
        self._waiting = []

    def __len__(self) -> int:
        """Draws kept a chain."""
        return self._count

    def cut(self, count: int) -> None:
        """Forgets all but the first ``count`` draws."""
        self._settle()
        self._settled = self._count = count

    def piece(self, start: int) -> dict[str, Any]:
        """The draws from number ``start`` on, as tensors alone."""
        self._settle()
        found = {name: kept.read(start, self._count) for name, kept in self._kept.items()}
        stats = {name.removeprefix(_STATS): value for name, value in found.items() if name.startswith(_STATS)}
        return {**{name: found.get(name) for name in Draw._fields}, "stats": stats}

    def restore(self, piece: dict) -> None:
        """Puts back what :meth:`piece` gave."""
        self.append(draws_of(piece), piece["stats"])

    def joined(self) -> tuple[Draw, dict[str, Tensor]]:
        """All draws ``(C, S, ...)`` and statistics ``(C, S)``."""
        piece = self.piece(0)
        return draws_of(piece), piece["stats"]


_STATS = "stats."
_AT_ONCE = 32  # advances: joining them one by one would cost a small model's step some percent


class _Growing:
    """A tensor of draws, whose room doubles when it is full."""

    def __init__(self) -> None:
        self.room: Tensor | None = None  # (room, C, ...)

    def write(self, start: int, draws: Tensor) -> None:
        """Draws ``(C, B, ...)`` from number ``start`` on, all before being there."""
        draws = draws.transpose(0, 1)
        stop, before = start + len(draws), self.room
        if before is None or stop > len(before):
            self.room = draws.new_empty(2 * stop, *draws.shape[1:])
            if before is not None:
                self.room[:start] = before[:start]
        self.room[start:stop] = draws  # type: ignore[index]

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of draws, ``(C, stop - start, ...)``."""
        assert self.room is not None
        return self.room[start:stop].transpose(0, 1).clone(memory_format=torch.contiguous_format)


def draws_of(piece: Mapping[str, Any]) -> Draw:
    """The draws in a piece of a :class:`DrawStore`, from a file perhaps, and then perhaps of other shapes than they should be."""
    return Draw(piece["theta"], piece["whitened"], piece["log_weight"], piece.get("further_whitened"))
