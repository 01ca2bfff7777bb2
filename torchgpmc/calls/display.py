"""The progress bar of a run."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

_SECONDS_BETWEEN_DISPLAYS = 0.2


class Display:
    """The progress bar's numbers, read off the device a few times a second."""

    def __init__(self, bar: Any):
        self.bar = bar
        self.divergences: Tensor | None = None
        self.gradients: Tensor | None = None  # since the last display
        self.shown = time.monotonic()
        self.pending = 0

    def show(self, stats: dict[str, Tensor], warming_up: bool) -> None:
        """One more advance, with its statistics."""
        if self.bar.disable:
            return
        self.pending += 1
        if "diverging" in stats and not warming_up:
            now = stats["diverging"].sum()
            self.divergences = now if self.divergences is None else self.divergences + now
        if "n_steps" in stats:
            now = stats["n_steps"].sum()
            self.gradients = now if self.gradients is None else self.gradients + now
        waited = time.monotonic() - self.shown
        if waited < _SECONDS_BETWEEN_DISPLAYS and self.bar.n + self.pending < self.bar.total:
            return
        numbers = {"accept": f"{float(stats['acceptance_rate'].mean()):.2f}"} if "acceptance_rate" in stats else {}
        if "step_size" in stats:
            numbers["step"] = f"{float(stats['step_size'].mean()):.2g}"
        if self.gradients is not None:
            numbers["depth"] = f"{math.log2(float(stats['n_steps'].mean()) + 1):.1f}"
            numbers["gradients/s"] = f"{float(self.gradients) / waited:.3g}"
            self.gradients = None
        if self.divergences is not None:
            numbers["divergences"] = str(int(self.divergences))
        if "n_failures" in stats and float(stats["n_failures"].sum()):
            numbers["failures"] = str(int(stats["n_failures"].sum()))
        self.bar.set_description("warm-up" if warming_up else "sampling", refresh=False)
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(self.pending)
        self.pending, self.shown = 0, time.monotonic()
