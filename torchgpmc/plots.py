"""Pictures of a posterior: traces, pairs of hyperparameters, calibration, intensities. Needs the extra ``plots`` (matplotlib)."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.arrays import as_tensor
from torchgpmc.diagnostics.summaries import scalar_columns
from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.intensity import Intensity
from torchgpmc.point_process import BinnedEvents
from torchgpmc.posterior import Posterior
from torchgpmc.scores import AbstentionCurves


def _figure(rows: int, columns: int, size: float, **options: Any) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib. Install it with: pip install 'torchgpmc[plots]'") from error
    figure = Figure(figsize=(size * columns, size * rows), layout="constrained")  # no pyplot: no global state
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _columns(posterior: Posterior, names: list[str] | None, most: int) -> list[tuple[str, Tensor]]:
    if not posterior.samples:
        raise ValueError(
            "every hyperparameter of the model is fixed. Expected some that were sampled; plot_fit shows the function."
        )
    samples = posterior.samples if names is None else {name: posterior.samples[name] for name in names}
    return list(scalar_columns(samples))[:most]


_LEAST_WEIGHT = 0.01  # of the mean weight: less is too little to be seen, and draws from a wide prior would decide the axes
_LARGEST_AREA = 200.0  # of a dot, in square points, so that a draw that carries all the weight hides no other axes


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
    """
    columns = _columns(posterior, names, most)
    figure, axes = _figure(len(columns), 2, 2.6)
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
    """
    weights = _relative_weights(posterior)
    seen = slice(None) if weights is None else weights.ravel() >= _LEAST_WEIGHT
    columns = [_as_shown(name, values.flatten()[seen]) for name, values in _columns(posterior, names, most)]
    figure, axes = _figure(len(columns), len(columns), 2.0, sharex="col")
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


def _as_shown(name: str, values: Tensor) -> tuple[str, np.ndarray]:
    """Draws as one axis, their log10 where all are positive: ticks of logarithmic axes lie on one another."""
    short = name.removeprefix("kernel.").replace(".", ".\n")  # a panel is narrow
    return (f"log10 {short}", values.log10().numpy()) if bool((values > 0).all()) else (short, values.numpy())


def plot_forest(posterior: Posterior, names: list[str] | None = None, *, most: int = 40) -> Any:
    """Medians of hyperparameters with intervals that hold half of the draws and nine tenths, weights respected.

    Args:
        posterior: what to show.
        names: keys of ``posterior.samples``; all by default.
        most: at most this many scalars.

    Returns:
        A matplotlib ``Figure``; the axis is logarithmic where all draws are positive.
    """
    columns = _columns(posterior, names, most)
    figure, axes = _figure(1, 1, 5.0)
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


def _quantiles(values: np.ndarray, weights: np.ndarray | None) -> list[float]:
    """At 5, 25, 50, 75 and 95 per cent."""
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    if weights is None:
        return [float(level) for level in np.quantile(values, levels)]
    order = values.argsort()
    reached = weights[order].cumsum()
    return [float(values[order[reached.searchsorted(level * reached[-1])]]) for level in levels]


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
    """
    figure, axes = _figure(2, 1, 4.5, height_ratios=[3, 1], sharex=True)
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


def _binned(values: np.ndarray, labels: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean prediction, frequency of class 1 and count of each bin that is not empty; equal predictions share a bin."""
    edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
    place = np.searchsorted(edges, values)
    counts = np.bincount(place, minlength=bins)
    kept = counts > 0
    means = [np.bincount(place, weights, minlength=bins)[kept] / counts[kept] for weights in (values, labels)]
    return means[0], means[1], counts[kept]


def plot_abstention(curves: dict[str, AbstentionCurves]) -> Any:
    """Accuracy and AUC of the answers given against the share of questions not answered (paper A, figure 5).

    Args:
        curves: label -> what :func:`torchgpmc.scores.abstention_curves` returned, one line each.

    Returns:
        A matplotlib ``Figure``.
    """
    figure, axes = _figure(1, 2, 4.0)
    for axis, score in zip(axes[0], ("accuracy", "auc"), strict=True):
        for label, curve in curves.items():
            axis.plot(curve.abstention.numpy(), getattr(curve, score).numpy(), label=label)
        axis.set_xlabel("degree of abstention")
        axis.set_ylabel(score)
    axes[0, 0].legend()
    return figure


def plot_intensity(
    intensity: Intensity,
    x: Tensor,
    *,
    events: Tensor | None = None,
    binned: BinnedEvents | None = None,
    levels: tuple[float, ...] = (0.5, 0.95),
) -> Any:
    """An intensity with its bands in one dimension; in two, maps of its mean and of both ends of its widest band.

    Args:
        intensity: ``prediction.intensity``.
        x: the test inputs it was predicted at, ``(T,)``, ``(T, 1)`` or ``(T, 2)``; in two dimensions all points of a grid.
        events: of the point pattern, ``(N,)`` or ``(N, d)``: ticks below the curve, dots on the maps.
        binned: what :func:`torchgpmc.bin_events` made of them, shown as counts per unit length; in one dimension.
        levels: probabilities of the bands.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: more than two dimensions, or points in two that are not a grid.
    """
    x, events = as_tensor("x", x), None if events is None else as_tensor("events", events)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.shape[-1] > 2:
        raise ValueError(f"x has {x.shape[-1]} columns. Expected one or two: an intensity over more has no picture.")
    draw = _plot_curve if x.shape[-1] == 1 else _plot_maps
    return draw(intensity, x.detach().cpu(), None if events is None else events.detach().cpu(), binned, sorted(levels))


def plot_fit(posterior: Posterior, *, num_points: int = 200, levels: tuple[float, ...] = (0.5, 0.95)) -> Any:
    """The response over the range of the data: its mean with bands in one dimension; its surface and maps in two.

    Of a binary response, whose bands would say nothing, the mean is the probability of class 1; of counts with exposures of their
    own all is of the rate, per unit of exposure.

    Args:
        posterior: of a model with one or two input columns and a response that is one number.
        num_points: in one dimension, how many; in two, about so many times 10.
        levels: probabilities of the bands.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: more than two input columns, or several classes.
    """
    model = posterior.model
    x, y = model.train_x.cpu(), model.train_y.cpu()
    if x.shape[1] > 2:
        raise ValueError(f"the model has {x.shape[1]} input columns. Expected one or two: a fit over more has no picture.")
    ends = [(column.min(), column.max()) for column in x.unbind(-1)]
    side = num_points if x.shape[1] == 1 else max(2, round((10 * num_points) ** 0.5))
    lines = [torch.linspace(float(low), float(high), side, dtype=x.dtype) for low, high in ends]
    likelihood = as_likelihood(model.likelihood)
    is_binary, is_rate = likelihood.is_classification, likelihood.needs_exposure
    if is_binary and (shape := posterior.predict(x[:1], num_draws=1).probs.shape)[1:]:
        raise ValueError(f"the response is one of {shape[1]} classes. Expected one number a point.")
    prediction = posterior.predict(lines[0] if x.shape[1] == 1 else torch.cartesian_prod(*lines))
    response = prediction.intensity if is_rate else prediction
    y = y / model.likelihood.exposure.cpu() if is_rate else y
    first = "probability of class 1" if is_binary else "rate" if is_rate else "mean"
    if x.shape[1] == 1:
        figure, axes = _figure(1, 1, 4.0)
        figure.set_size_inches(8, 3.6)
        axis, at = axes[0, 0], lines[0].numpy()
        for level in () if is_binary else sorted(levels, reverse=True):
            lower, upper = (end.cpu().numpy() for end in response.interval(level))
            axis.fill_between(at, lower, upper, color="C0", alpha=0.15 + 0.3 * (1 - level), linewidth=0, label=f"{level:.0%} band")
        axis.plot(at, response.mean.cpu().numpy(), color="C0", label=first)
        axis.plot(x[:, 0].numpy(), y.numpy(), ".", color="black", markersize=4, label="data")
        axis.legend(fontsize=8)
        return figure
    # Of several functions the first is the one whose mean is shown.
    shown = {first: response.mean, "deviation of f": prediction.latent_variance.view(side * side, -1)[:, 0].sqrt()}
    figure, axes = _figure(1, 3, 4.0)
    surface, heights = _surface(figure, axes[0, 0]), shown[first].cpu().view(side, side).T.numpy()
    surface.plot_surface(*np.meshgrid(*(line.numpy() for line in lines)), heights, cmap="viridis", linewidth=0)
    surface.tick_params(labelsize=7)
    surface.set_box_aspect(None, zoom=0.85)  # or numbers on its axes run into the map beside it
    surface.set_title(first, fontsize=10)
    for axis, (title, values) in zip(axes[0, 1:], shown.items(), strict=True):
        image = values.cpu().view(side, side).T.numpy()
        mesh = axis.pcolormesh(*(line.numpy() for line in lines), image, shading="nearest", cmap="viridis")
        figure.colorbar(mesh, ax=axis, shrink=0.8)
        axis.scatter(*x.T.numpy(), c=y.numpy(), s=10, cmap="viridis", edgecolors="white", linewidths=0.4)
        axis.set_title(title, fontsize=10)
    return figure


def _surface(figure: Any, axis: Any) -> Any:
    """An axis with three dimensions in the place of ``axis``."""
    place = axis.get_subplotspec()
    axis.remove()
    return figure.add_subplot(place, projection="3d")


def _plot_curve(intensity: Intensity, x: Tensor, events: Tensor | None, binned: BinnedEvents | None, levels: list[float]) -> Any:
    figure, axes = _figure(1, 1, 4.0)
    figure.set_size_inches(8, 3.6)
    axis = axes[0, 0]
    order = x.squeeze(-1).argsort()
    at = x.squeeze(-1)[order].numpy()
    if binned is not None:
        rate = (binned.counts / binned.area).cpu().numpy()
        axis.step(binned.centres.squeeze(-1).cpu().numpy(), rate, where="mid", color="0.75", linewidth=0.8, label="counts")
    for level in reversed(levels):
        lower, upper = (end.cpu()[order].numpy() for end in intensity.interval(level))
        shade = 0.15 + 0.3 * (1 - level)  # narrower bands are darker, also where they lie on wider ones
        axis.fill_between(at, lower, upper, color="C0", alpha=shade, linewidth=0, label=f"{level:.0%} band")
    axis.plot(at, intensity.mean.cpu()[order].numpy(), color="C0", label="mean")
    if events is not None:
        axis.plot(events.reshape(-1).numpy(), np.zeros(events.numel()), "|", color="black", markersize=7, alpha=0.6, label="events")
    axis.set_ylim(bottom=0)
    axis.set_xlim(at[0], at[-1])
    axis.set_ylabel("intensity")
    axis.legend(fontsize=8)
    return figure


def _plot_maps(intensity: Intensity, x: Tensor, events: Tensor | None, binned: BinnedEvents | None, levels: list[float]) -> Any:
    columns, rows = (column.unique() for column in x.unbind(-1))
    grid = torch.stack([torch.searchsorted(rows, x[:, 1].contiguous()), torch.searchsorted(columns, x[:, 0].contiguous())], -1)
    if len(x) != len(rows) * len(columns) or len(grid.unique(dim=0)) != len(x):
        raise ValueError(
            f"x has {len(x)} points, of {len(columns)} first and {len(rows)} second coordinates. Expected all points of a grid, "
            f"for instance torch.cartesian_prod(a, b), or the centres that bin_events gives."
        )
    lower, upper = intensity.interval(levels[-1])
    tail = 0.5 * (1 - levels[-1])
    shown = {f"{tail:.3g} quantile": lower, "mean": intensity.mean, f"{1 - tail:.3g} quantile": upper}
    figure, axes = _figure(1, 3, 3.6)
    figure.set_size_inches(11, 3.6)
    for axis, (title, values) in zip(axes[0], shown.items(), strict=True):
        image = torch.empty(len(rows), len(columns), dtype=values.dtype)
        image[grid[:, 0], grid[:, 1]] = values.cpu()
        # A colour scale of its own: the ends of a band may lie decades apart.
        mesh = axis.pcolormesh(columns.numpy(), rows.numpy(), image.numpy(), shading="nearest", cmap="viridis")
        figure.colorbar(mesh, ax=axis, shrink=0.8)
        if events is not None:
            axis.plot(*events.numpy().T, "o", color="white", markersize=3, markeredgecolor="black", markeredgewidth=0.5)
        axis.set_title(title, fontsize=10)
        axis.set_aspect("equal")
    return figure
