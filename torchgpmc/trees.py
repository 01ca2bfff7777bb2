"""Nested NamedTuples and dictionaries of tensors: states, payloads. The first dimension of every tensor is the chain's.

What is no tensor (a number, ``None``) belongs to all chains alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def mapped(function: Callable[..., Tensor], *trees: Any) -> Any:
    """``function`` of the tensors that stand in the same place, in the containers of the first tree."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, tuple):
        parts = [mapped(function, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, dict):
        return {key: mapped(function, *(tree[key] for tree in trees)) for key in first}
    return trees[-1]


def take(tree: Any, rows: Tensor | slice) -> Any:
    """The given rows of every tensor."""
    return mapped(lambda leaf: leaf[rows], tree)


def where(mask: Tensor, yes: Any, no: Any) -> Any:
    """Rows of ``yes`` where ``mask`` ``(C,)`` holds, rows of ``no`` elsewhere.

    Example:
        >>> import torch
        >>> where(torch.tensor([True, False]), (torch.ones(2, 1), torch.ones(2)), (torch.zeros(2, 1), torch.zeros(2)))
        (tensor([[1.],
                [0.]]), tensor([1., 0.]))
    """

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        if a is b:  # what a step holds
            return a
        return torch.where(mask if a.dim() == 1 else mask.view(-1, *[1] * (a.dim() - 1)), a, b)

    return mapped(chosen, yes, no)


def put(tree: Any, rows: Tensor, new: Any) -> Any:
    """``tree`` with its ``rows`` (indices) replaced by all rows of ``new``."""
    return mapped(lambda old, part: old.index_put((rows,), part), tree, new)


def concatenate(trees: Sequence[Any]) -> Any:
    """The rows of several trees one after another."""
    return mapped(lambda *parts: torch.cat(parts), *trees)


def moved(tree: Any, device: torch.device) -> Any:
    """All tensors on ``device``."""
    return mapped(lambda leaf: leaf.to(device), tree)


def numbers_of(other: Any, tree: Any) -> Any:
    """``tree`` with what is no tensor taken from ``other``.

    Example:
        >>> import torch
        >>> numbers_of((torch.zeros(2), 7), (torch.ones(2), 3))
        (tensor([1., 1.]), 7)
    """
    return mapped(lambda own, _: own, tree, other)


def pack(tree: Any) -> Any:
    """A state as lists, dictionaries, tensors and numbers, which load from a file without executing anything."""
    if isinstance(tree, dict):
        return {key: pack(part) for key, part in tree.items()}
    return [pack(part) for part in tree] if isinstance(tree, tuple) else tree


def unpack(template: Any, packed: Any, device: torch.device) -> Any:
    """The inverse of :func:`pack`, in the containers of ``template``.

    Raises:
        ValueError: what was packed is not built as ``template`` is; of a tensor the leading dimension may have grown, no other.
    """
    if isinstance(template, tuple) and isinstance(packed, list) and len(packed) == len(template):
        parts = [unpack(part, saved, device) for part, saved in zip(template, packed, strict=True)]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    if isinstance(template, dict) and isinstance(packed, dict) and template.keys() == packed.keys():
        return {key: unpack(part, packed[key], device) for key, part in template.items()}
    if isinstance(template, Tensor) and isinstance(packed, Tensor) and packed.dim() == template.dim():
        if packed.shape[1:] == template.shape[1:] and packed.shape[:1] >= template.shape[:1]:
            return packed.to(device)
    elif not isinstance(template, tuple | dict | Tensor) and not isinstance(packed, list | dict | Tensor):
        return packed
    raise ValueError(
        f"the checkpoint's state holds {_kind(packed)} where this run has {_kind(template)}. Expected the state of the same run; "
        f"the file is damaged, or another version of torchgpmc wrote it: delete it, or use another path."
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{len(value)} parts" if isinstance(value, list | tuple | dict) else f"{value!r}"
