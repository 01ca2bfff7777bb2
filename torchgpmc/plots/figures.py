"""Figures without global state."""

from __future__ import annotations

from typing import Any


def new_figure(rows: int, columns: int, size: float, **options: Any) -> tuple[Any, Any]:
    """A figure with ``(rows, columns)`` axes, each so many inches wide and high; options as matplotlib's ``subplots`` takes them.

    Raises:
        ImportError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib. Install it with: pip install 'torchgpmc[plots]'") from error
    figure = Figure(figsize=(size * columns, size * rows), layout="constrained")  # no pyplot: no global state
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
