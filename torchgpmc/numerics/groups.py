"""Sums over groups of entries."""

from __future__ import annotations

import torch
from torch import Tensor


def sums_of_groups(values: Tensor, group: Tensor, size: int) -> Tensor:
    """The sums of ``(..., E)`` over entries of each of some groups, ``(..., size)``.

    The same to the last bit every time, which off the CPU those of ``index_add`` are not: their order is that of threads.

    Args:
        values: ``(..., E)``.
        group: of each entry, ``(E,)``.
        size: how many groups there are.

    Example:
        >>> import torch
        >>> sums_of_groups(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), 3)
        tensor([2., 5., 0.])
    """
    if values.device.type != "cpu":
        return values @ torch.nn.functional.one_hot(group, size).to(values)
    return values.new_zeros(*values.shape[:-1], size).index_add(-1, group, values)
