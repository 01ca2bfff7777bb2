"""Draws of hyperparameters: traces, pairs, intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgpmc.diagnostics.summaries import scalar_columns
from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.plots.figures import new_figure
from torchgpmc.posterior import Posterior

_LEAST_WEIGHT = 0.01  # of the mean weight: less is too little to be seen, and draws from a wide prior would decide the axes
_LARGEST_AREA = 200.0  # of a dot, in square points, so that a draw that carries all the weight hides no other axes


def plot_trace(posterior: Posterior, names: list[str] | None = None, *, most: int = 12) -> Any:
    """Each chain's draws in order, beside their histogram.

    Weighted draws are dots whose area is their weight, histograms add up weights, and the title says the effective size; draws of
    less than a hundredth of the mean weight are left out.

    Args:
        posterior: what to show.
        names: keys of ``posterior.samples``; all by default.
        most: at most this many scalars.

    Returns:
        A matplotlib ``Figure``; save it with ``figure.savefig``.

    Raises:
        ImportError: there is no matplotlib.
        KeyError: a name that no hyperparameter has.
        ValueError: the model has no hyperparameters to sample.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), outputscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
        >>> figure = tg.plots.plot_trace(posterior)
        >>> [axis.get_ylabel() for axis in figure.axes[::2]]  # a row each, histograms on the right
        ['outputscale', 'base_kernel.lengthscale']
    """
    columns = _columns(posterior, names, most)
    figure, axes = new_figure(len(columns), 2, 2.6)
    figure.set_size_inches(10, 1.6 * len(columns) + 0.4)
    _say_effective_size(figure, posterior)
    weights = _relative_weights(posterior)
    for (name, values), (left, right) in zip(columns, axes, strict=True):
        for index, chain in enumerate(values.numpy()):
            if weights is None:
                left.plot(chain, linewidth=0.5, alpha=0.8)
                right.hist(chain, bins=40, density=True, histtype="step")
            else:
                seen = np.flatnonzero(weights[index] >= _LEAST_WEIGHT)
                left.scatter(seen, chain[seen], s=_areas(weights[index][seen], 2.0), alpha=0.6, linewidths=0)
                right.hist(chain[seen], bins=40, weights=weights[index][seen], histtype="step")
        left.set_ylabel(name.removeprefix("kernel."), fontsize=7)
        right.set_yticks([])
    axes[-1, 0].set_xlabel("draw")
    axes[-1, 1].set_xlabel("value")
    return figure


def plot_pair(posterior: Posterior, names: list[str] | None = None, *, most: int = 5) -> Any:
    """Scatter of every pair of hyperparameters, of their log10 where all draws are positive; divergent draws in red.

    Weighted draws are dots whose area is their weight, histograms add up weights, and the title says the effective size; draws of
    less than a hundredth of the mean weight are left out.

    Args:
        posterior: what to show.
        names: keys of ``posterior.samples``; all by default.
        most: at most this many scalars.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ImportError: there is no matplotlib.
        KeyError: a name that no hyperparameter has.
        ValueError: the model has no hyperparameters to sample.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), outputscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
        >>> tg.plots.plot_pair(posterior).axes[2].get_xlabel()  # below the first histogram, both against one another
        'log10 outputscale'
    """
    weights = _relative_weights(posterior)
    seen = slice(None) if weights is None else weights.ravel() >= _LEAST_WEIGHT
    columns = [_as_shown(name, values.flatten()[seen]) for name, values in _columns(posterior, names, most)]
    figure, axes = new_figure(len(columns), len(columns), 2.0, sharex="col")
    _say_effective_size(figure, posterior)
    flat = None if weights is None else weights.ravel()[seen]
    bad = posterior.stats["diverging"].bool().flatten().numpy()[seen] if "diverging" in posterior.stats else np.zeros(0, dtype=bool)
    for row, (y_name, y) in enumerate(columns):
        for column, (x_name, x) in enumerate(columns):
            axis = axes[row, column]
            if column > row:
                axis.set_axis_off()
                continue
            if column == row:
                axis.hist(x, bins=40, weights=flat, histtype="step")
                axis.set_yticks([])
            else:
                areas = 1.0 if flat is None else _areas(flat, 1.0)
                axis.scatter(x, y, s=areas, alpha=0.4, linewidths=0)
                if bad.any():
                    axis.plot(x[bad], y[bad], "r.", markersize=4)
            if row == len(columns) - 1:
                axis.set_xlabel(x_name, fontsize=7)
            if column == 0 and row > 0:
                axis.set_ylabel(y_name, fontsize=7)
    return figure


def plot_forest(posterior: Posterior, names: list[str] | None = None, *, most: int = 40) -> Any:
    """Medians of hyperparameters with intervals that hold half of the draws and nine tenths, weights respected.

    Args:
        posterior: what to show.
        names: keys of ``posterior.samples``; all by default.
        most: at most this many scalars.

    Returns:
        A matplotlib ``Figure``; the axis is logarithmic where all draws are positive.

    Raises:
        ImportError: there is no matplotlib.
        KeyError: a name that no hyperparameter has.
        ValueError: the model has no hyperparameters to sample.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), outputscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
        >>> axis = tg.plots.plot_forest(posterior).axes[0]
        >>> [label.get_text() for label in axis.get_yticklabels()], axis.get_xscale()
        (['outputscale', 'base_kernel.lengthscale'], 'log')
    """
    columns = _columns(posterior, names, most)
    figure, axes = new_figure(1, 1, 5.0)
    figure.set_size_inches(7, 0.28 * len(columns) + 1.0)
    _say_effective_size(figure, posterior)
    axis, weights = axes[0, 0], _relative_weights(posterior)
    flat = None if weights is None else weights.ravel()
    for row, (_, values) in enumerate(columns):
        low, quarter, middle, three_quarters, high = _quantiles(values.flatten().double().numpy(), flat)
        axis.plot([low, high], [row, row], color="C0", linewidth=1)
        axis.plot([quarter, three_quarters], [row, row], color="C0", linewidth=3)
        axis.plot([middle], [row], "o", color="white", markeredgecolor="C0", markersize=5)
    axis.set_yticks(range(len(columns)), [name.removeprefix("kernel.") for name, _ in columns], fontsize=7)
    axis.set_ylim(len(columns) - 0.5, -0.5)
    axis.set_xscale("log" if all(bool((values > 0).all()) for _, values in columns) else "linear")
    return figure


def _columns(posterior: Posterior, names: list[str] | None, most: int) -> list[tuple[str, Tensor]]:
    if not posterior.samples:
        raise ValueError(
            "every hyperparameter of the model is fixed. Expected some that were sampled; plot_fit shows the function."
        )
    samples = posterior.samples if names is None else {name: posterior.samples[name] for name in names}
    return list(scalar_columns(samples))[:most]


def _relative_weights(posterior: Posterior) -> np.ndarray | None:
    """Weights ``(C, S)`` of mean one; ``None`` where draws weigh the same."""
    if posterior.log_weights is None:
        return None
    weights = torch.softmax(posterior.log_weights.double().flatten(), 0)
    return (weights * len(weights)).view(posterior.log_weights.shape).numpy()


def _areas(weights: np.ndarray, area: float) -> np.ndarray:
    """Of dots, ``area`` for a draw of mean weight."""
    return np.minimum(area * weights, _LARGEST_AREA)


def _say_effective_size(figure: Any, posterior: Posterior) -> None:
    if posterior.log_weights is not None:
        size, count = kish_effective_size(posterior.log_weights), posterior.log_weights.numel()
        figure.suptitle(f"{count} weighted draws, effective size {size:.3g}", fontsize=9)


def _as_shown(name: str, values: Tensor) -> tuple[str, np.ndarray]:
    """Draws as one axis, their log10 where all are positive: ticks of logarithmic axes lie on one another."""
    short = name.removeprefix("kernel.").replace(".", ".\n")  # a panel is narrow
    return (f"log10 {short}", values.log10().numpy()) if bool((values > 0).all()) else (short, values.numpy())


def _quantiles(values: np.ndarray, weights: np.ndarray | None) -> list[float]:
    """At 5, 25, 50, 75 and 95 per cent."""
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    if weights is None:
        return [float(level) for level in np.quantile(values, levels)]
    order = values.argsort()
    reached = weights[order].cumsum()
    return [float(values[order[reached.searchsorted(level * reached[-1])]]) for level in levels]
