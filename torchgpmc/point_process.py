"""Point patterns as counts in the cells of a grid: the data of Cox processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.checks import is_count

_ROUNDING = 4.0  # units in the last place within which events are on an edge


class BinnedEvents(NamedTuple):
    """Counts in B cells of equal size.

    Example:
        >>> import torch
        >>> binned = bin_events(torch.tensor([[0.1, 0.1], [0.9, 0.2]]), [[0.0, 1.0], [0.0, 1.0]], (2, 2))
        >>> binned.centres.tolist(), binned.counts.tolist(), float(binned.area)
        ([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]], [1.0, 0.0, 1.0, 0.0], 0.25)
    """

    centres: Tensor  # (B, d), the last dimension running fastest
    counts: Tensor  # (B,), whole numbers in the dtype of the centres
    area: Tensor  # (), of a cell: its length in one dimension, its volume in three


def bin_events(points: Tensor | ArrayLike, window: Tensor | ArrayLike, shape: int | Sequence[int]) -> BinnedEvents:
    """Counts the events of a point pattern in the cells of a regular grid.

    With ``Poisson(exposure=area)`` on the counts at the centres, exp(f) is the intensity per unit area. A cell holds its lower
    edges, and the last cell its upper edge too; the i-th edge is low + i (high - low) / cells. Events within rounding of an edge,
    four units in the last place of the window's larger end, are on it, as edges from ``linspace`` are.

    Args:
        points: where events happened, ``(N, d)``, or ``(N,)`` in one dimension.
        window: lower and upper end of each dimension ``(d, 2)``, or ``(low, high)`` in one.
        shape: cells along each dimension; one number for all of them.

    Raises:
        TypeError: ``points`` or ``window`` is not numbers.
        ValueError: events outside the window, NaN or infinite ones, a window that is empty, or a shape that does not fit it.

    Example:
        >>> import torch
        >>> binned = bin_events(torch.tensor([0.1, 0.2, 0.9, 1.0]), (0.0, 1.0), 4)
        >>> binned.counts, binned.area
        (tensor([2., 0., 0., 2.]), tensor(0.2500))
        >>> binned.centres.squeeze(-1)
        tensor([0.1250, 0.3750, 0.6250, 0.8750])
    """
    points = as_tensor("points", points)
    points = points if points.is_floating_point() else points.double()
    points = points.unsqueeze(-1) if points.dim() == 1 else points
    if points.dim() != 2:
        raise ValueError(f"points has shape {tuple(points.shape)}. Expected (N, d), or (N,) in one dimension.")
    low, high = _ends(window, points)
    cells = _cells(shape, points.shape[-1])
    if not bool(torch.isfinite(points).all()):
        raise ValueError("points holds NaN or infinite values. Expected finite places; drop those events.")
    outside = ((points < low) | (points > high)).any(-1)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise ValueError(
            f"{int(outside.sum())} of {len(points)} events lie outside the window, the first in row {first}: "
            f"{points[first].tolist()}. Expected all of them inside {torch.stack([low, high], -1).tolist()}; widen the window, "
            f"or drop them."
        )
    counts = torch.as_tensor(cells, device=points.device)
    place = torch.stack([_cell(*along) for along in zip(points.unbind(-1), low, high, cells, strict=True)], -1)
    strides = [1]
    for count in reversed(cells[1:]):
        strides.insert(0, strides[0] * count)
    index = (place * torch.as_tensor(strides, device=points.device)).sum(-1)
    total = int(counts.prod())
    width = (high - low) / counts
    axes = [start + step * (torch.arange(n).to(points) + 0.5) for start, step, n in zip(low, width, cells, strict=True)]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(total, -1)
    return BinnedEvents(centres, torch.bincount(index, minlength=total).to(points), width.prod())


def _cell(places: Tensor, low: Tensor, high: Tensor, count: int) -> Tensor:
    """Which of ``count`` cells from ``low`` to ``high`` each of some places ``(N,)`` lies in.

    Places are compared with the edges, not divided by a width, whose rounding moves events at i / 100 a cell down. Edges that were
    worked out in another order of operations, and rounded, lie a little below these, or above.
    """
    steps = torch.arange(1, count, dtype=torch.float64, device=places.device)
    edges = (low.double() + steps * (high.double() - low.double()) / count).to(places)
    rounding = _ROUNDING * torch.finfo(places.dtype).eps * torch.maximum(low.abs(), high.abs())
    return torch.bucketize(places.contiguous(), edges - rounding, right=True)


def _ends(window: Tensor | ArrayLike, points: Tensor) -> tuple[Tensor, Tensor]:
    ends = as_tensor("window", window).to(points)
    ends = ends.unsqueeze(0) if ends.dim() == 1 else ends
    if tuple(ends.shape) != (points.shape[-1], 2):
        raise ValueError(
            f"window has shape {tuple(ends.shape)} and points have {points.shape[-1]} columns. Expected ({points.shape[-1]}, 2): "
            f"lower and upper end of each dimension."
        )
    low, high = ends.unbind(-1)
    if not bool((torch.isfinite(ends).all(-1) & (low < high)).all()):
        raise ValueError(f"window is {ends.tolist()}. Expected finite ends, the lower one below the upper one.")
    return low, high


def _cells(shape: int | Sequence[int], dimension: int) -> list[int]:
    cells: list[Any] = list(shape) if isinstance(shape, Iterable) else [shape] * dimension
    if len(cells) != dimension or not all(is_count(count) for count in cells):
        raise ValueError(
            f"shape is {shape!r}. Expected whole numbers of at least 1, one for each of {dimension} dimensions, or one for all."
        )
    return [int(count) for count in cells]
