"""Draws of a model that stands in for another, in terms of that."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Restored(NamedTuple):
    """Draws of theta and v of the model that another stood in for."""

    theta: Tensor  # (S, P)
    v: Tensor  # (S, V)
    change: Tensor  # (S,), of log p(theta, v, y)
    log_weight: Tensor  # (S,), by which draws from the other's posterior are from the model's
