"""What was worked out for each chain, kept for as long as that from which it follows stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpmc.trees import put


class KeptRows:
    """A tree of tensors ``(C, ...)`` that follows, row by row, from a key ``(C, ...)``: worked out anew where that has changed.

    It is no part of a chain's state: what is kept is what would be found again.

    Example:
        >>> import torch
        >>> kept, keys = KeptRows(), torch.tensor([[1.0], [2.0], [3.0]])
        >>> kept(keys, lambda rows: keys[rows].sqrt())[:2].squeeze(-1)
        tensor([1.0000, 1.4142])
        >>> kept(torch.tensor([[1.0], [4.0], [3.0]]), lambda rows: rows.unsqueeze(-1).float()).squeeze(-1)
        tensor([1.0000, 1.0000, 1.7321])
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Any = None

    def __call__(self, key: Tensor, worked_out: Callable[[Tensor], Any]) -> Any:
        """The rows at ``key``; ``worked_out`` gives some of them, from their indices."""
        if self.key is None or self.key.shape != key.shape:
            rows = torch.arange(len(key), device=key.device)
        else:
            rows = (self.key != key).flatten(1).any(1).nonzero().squeeze(-1)
        if len(rows) == len(key):
            self.value = worked_out(rows)
        elif len(rows):
            self.value = put(self.value, rows, worked_out(rows))
        self.key = key
        return self.value
