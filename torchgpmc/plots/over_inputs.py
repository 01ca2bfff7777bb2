"""Curves and maps over inputs: fits, and intensities of counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.arrays import as_tensor
from torchgpmc.intensity import Intensity
from torchgpmc.plots.figures import new_figure
from torchgpmc.point_process import BinnedEvents
from torchgpmc.posterior import Posterior


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

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
        >>> axis = tg.plots.plot_fit(posterior).axes[0]
        >>> [text.get_text() for text in axis.get_legend().get_texts()]
        ['probability of class 1', 'data']
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
        figure, axes = new_figure(1, 1, 4.0)
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
    figure, axes = new_figure(1, 3, 4.0)
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

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> events = torch.tensor([0.1, 0.2, 0.25, 0.7, 0.8])
        >>> binned = tg.bin_events(events, (0.0, 1.0), 10)
        >>> kernel, likelihood = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Poisson(exposure=binned.area)
        >>> model = tg.GP(binned.centres, binned.counts, kernel, likelihood)
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
        >>> x = torch.linspace(0, 1, 20)
        >>> axis = tg.plots.plot_intensity(posterior.predict(x).intensity, x, events=events).axes[0]
        >>> [text.get_text() for text in axis.get_legend().get_texts()]
        ['95% band', '50% band', 'mean', 'events']
    """
    x, events = as_tensor("x", x), None if events is None else as_tensor("events", events)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.shape[-1] > 2:
        raise ValueError(f"x has {x.shape[-1]} columns. Expected one or two: an intensity over more has no picture.")
    draw = _plot_curve if x.shape[-1] == 1 else _plot_maps
    return draw(intensity, x.detach().cpu(), None if events is None else events.detach().cpu(), binned, sorted(levels))


def _surface(figure: Any, axis: Any) -> Any:
    """An axis with three dimensions in the place of ``axis``."""
    place = axis.get_subplotspec()
    axis.remove()
    return figure.add_subplot(place, projection="3d")


def _plot_curve(intensity: Intensity, x: Tensor, events: Tensor | None, binned: BinnedEvents | None, levels: list[float]) -> Any:
    figure, axes = new_figure(1, 1, 4.0)
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
    figure, axes = new_figure(1, 3, 3.6)
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
