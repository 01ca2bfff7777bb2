"""Predicted probabilities against what was seen: calibration, and answers that are not given."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.plots.figures import new_figure
from torchgpmc.scores import AbstentionCurves


def plot_calibration(curves: dict[str, Tensor], test_y: Tensor, *, bins: int = 10, level: float = 0.9) -> Any:
    """Observed frequency of class 1 against its predicted probability, with intervals and counts.

    Points are means over bins of about equal numbers of predictions; intervals (Wilson's) are those of a binomial frequency; the
    histogram below counts predictions.

    Args:
        curves: label -> predicted probabilities of class 1 ``(T,)``, one line each.
        test_y: labels 0 and 1 ``(T,)``.
        bins: at most so many; fewer where predictions are equal.
        level: of the intervals.

    Returns:
        A matplotlib ``Figure``.

    Source: Wilson 1927.

    Raises:
        ImportError: there is no matplotlib.

    Example:
        >>> import torch, torchgpmc as tg
        >>> probs, labels = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.8, 0.8]), torch.tensor([0, 0, 0, 1, 1, 1])
        >>> axis = tg.plots.plot_calibration({"NUTS": probs}, labels, bins=2).axes[0]
        >>> axis.containers[0].lines[0].get_ydata().tolist()  # one of four that were given 0.2, both that were given 0.8
        [0.25, 1.0]
    """
    figure, axes = new_figure(2, 1, 4.5, height_ratios=[3, 1], sharex=True)
    figure.set_size_inches(4.8, 5.8)
    axis, below = axes[:, 0]
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    labels = torch.as_tensor(test_y).int().cpu().numpy()
    for number, (label, probabilities) in enumerate(curves.items()):
        values, colour = as_tensor(label, probabilities).detach().cpu().numpy(), f"C{number}"
        predicted, observed, counts = _binned(values, labels, bins)
        chance = [
            scipy.stats.binomtest(hits, count) for hits, count in zip((observed * counts).round().astype(int), counts, strict=True)
        ]
        ends = np.array([test.proportion_ci(level, method="wilson") for test in chance]).T
        # Frequencies of 0 and 1 are ends of their intervals, but for rounding.
        lengths = np.maximum(np.abs(ends - observed), 0.0)
        axis.errorbar(
            predicted, observed, lengths, fmt="o-", color=colour, linewidth=1, elinewidth=0.8, capsize=2, markersize=4, label=label
        )
        below.hist(values, bins=np.linspace(0, 1, 21), histtype="step", color=colour)
    axis.set_ylabel(f"observed frequency, {level:.0%} intervals")
    axis.legend()
    below.set_xlabel("predicted probability of class 1")
    below.set_ylabel("count")
    return figure


def plot_abstention(curves: dict[str, AbstentionCurves]) -> Any:
    """Accuracy and AUC of the answers given against the share of questions not answered (paper A, figure 5).

    Args:
        curves: label -> what :func:`torchgpmc.scores.abstention_curves` returned, one line each.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ImportError: there is no matplotlib.

    Example:
        >>> import torch, torchgpmc as tg
        >>> curves = tg.scores.abstention_curves(torch.tensor([0.9, 0.6, 0.2]), torch.tensor([1, 0, 0]))
        >>> figure = tg.plots.plot_abstention({"NUTS": curves})
        >>> [axis.get_ylabel() for axis in figure.axes], len(figure.axes[0].lines)
        (['accuracy', 'auc'], 1)
    """
    figure, axes = new_figure(1, 2, 4.0)
    for axis, score in zip(axes[0], ("accuracy", "auc"), strict=True):
        for label, curve in curves.items():
            axis.plot(curve.abstention.numpy(), getattr(curve, score).numpy(), label=label)
        axis.set_xlabel("degree of abstention")
        axis.set_ylabel(score)
    axes[0, 0].legend()
    return figure


def _binned(values: np.ndarray, labels: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean prediction, frequency of class 1 and count of each bin that is not empty; equal predictions share a bin."""
    edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
    place = np.searchsorted(edges, values)
    counts = np.bincount(place, minlength=bins)
    kept = counts > 0
    means = [np.bincount(place, weights, minlength=bins)[kept] / counts[kept] for weights in (values, labels)]
    return means[0], means[1], counts[kept]
