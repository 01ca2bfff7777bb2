"""Tables of posterior quantities: mean, sd, quantiles, bulk and tail effective sizes, rank R-hat and k-hat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgpmc.diagnostics import chain_statistics
from torchgpmc.diagnostics.weights import (
    effective_size_of_chains,
    is_heavy_tailed,
    kish_effective_size,
    log_contributions,
    pareto_khat,
    weighted_effective_size,
)

MIN_EVEN_DRAWS = 2.0  # by Kish's size; one draw has no spread
_STANDS_STILL = 1e-12  # of the mean: the spread that rounding gives to draws that are all the same


class Row(NamedTuple):
    """Summary of one scalar quantity.

    Example:
        >>> import torch
        >>> row = summarise({"a": torch.arange(400.0)[None]}, torch.zeros(1, 400))["a"]
        >>> row.mean, round(row.sd, 1), round(row.ess_bulk)  # of 0 to 399, which weigh the same
        (199.5, 115.5, 400)
    """

    name: str
    mean: float
    sd: float
    q5: float
    q95: float
    ess_bulk: float
    ess_tail: float
    rhat: float
    khat: float  # of the weights, or of what the mean's error is made of if that is larger; NaN for draws of equal weight
    is_heavy_tailed: bool  # whether what the mean's error is made of has a tail that makes it unreliable

    @property
    def stands_still(self) -> bool:
        """Whether enough draws to tell are all the same; never of ``lp``, since a density may be flat."""
        spread = self.q95 - self.q5, self.sd - _STANDS_STILL * abs(self.mean)
        return self.name != "lp" and math.isfinite(self.ess_bulk) and max(spread) <= 0


class Summary:
    """A table of posterior summaries: ``print`` it, go through its rows, or take one row by its name, ``summary["lp"]``.

    Attributes:
        rows: one a scalar quantity.
        verdict: whether to trust the draws, in a line above the table; ``None`` for none.

    Raises:
        KeyError: by ``summary[name]``, if no row has this name.

    Example:
        >>> import torch
        >>> summary = summarise({"a": torch.randn(4, 500, 2, generator=torch.Generator().manual_seed(0))})
        >>> [row.name for row in summary], abs(summary["a[0]"].mean) < 0.1
        (['a[0]', 'a[1]'], True)
    """

    def __init__(self, rows: list[Row], verdict: str | None = None):
        self.rows = rows
        self.verdict = verdict

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row is called {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [4])
        weighted = any(not math.isnan(row.khat) for row in self.rows)
        header = f"{'':{width}} {'mean':>10} {'sd':>10} {'5%':>10} {'95%':>10} {'ess_bulk':>9} {'ess_tail':>9} {'r_hat':>7}"
        header += f" {'k_hat':>7}" if weighted else ""
        lines = [
            f"{r.name:{width}} {r.mean:10.4g} {r.sd:10.4g} {r.q5:10.4g} {r.q95:10.4g} "
            f"{r.ess_bulk:9.0f} {r.ess_tail:9.0f} {r.rhat:7.3f}" + (f" {r.khat:7.2f}" if weighted else "")
            for r in self.rows
        ]
        return "\n".join([*([] if self.verdict is None else [self.verdict]), header, *lines])


class Source(NamedTuple):
    """What is known of weighted draws from which others, of equal weight, were chosen: these cannot be worth more."""

    rows: list[Row]
    complaints: list[str]

    def judged(self, rows: list[Row], num_draws: int) -> list[Row]:
        """Rows of ``num_draws`` chosen draws, whose own repeats and order tell nothing, with sizes and k-hat from the source.

        A choice with replacement adds its variance to the source's: 1 / size = 1 / size of the source + 1 / ``num_draws``.

        Example:
            >>> import torch
            >>> weighted = summarise({"a": torch.arange(400.0)[None]}, torch.zeros(1, 400))
            >>> chosen = summarise({"a": torch.arange(400.0)[None]})
            >>> round(Source(weighted.rows, []).judged(chosen.rows, 400)[0].ess_bulk)
            200
        """
        return [self._judged(row, source, num_draws) for row, source in zip(rows, self.rows, strict=True)]

    def _judged(self, row: Row, source: Row, num_draws: int) -> Row:
        bulk, tail = (1 / (1 / size + 1 / num_draws) for size in (source.ess_bulk, source.ess_tail))
        if math.isnan(source.sd):  # draws without a spread to speak of
            return source._replace(mean=row.mean, ess_bulk=bulk, ess_tail=tail)
        return source._replace(mean=row.mean, sd=row.sd, q5=row.q5, q95=row.q95, ess_bulk=bulk, ess_tail=tail)


def scalar_columns(samples: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every scalar in ``{name: (C, S, *shape)}`` as ``(name[i, j], (C, S))``."""
    for name, values in samples.items():
        chains, draws = values.shape[:2]
        for index in np.ndindex(*values.shape[2:]):
            label = f"{name}[{', '.join(map(str, index))}]" if math.prod(values.shape[2:]) > 1 else name
            yield label, values[(slice(None), slice(None), *index)].reshape(chains, draws)


def effective_sizes(values: Tensor) -> tuple[float, float, float]:
    """Bulk and tail effective sizes and rank R-hat of ``(C, S)`` (Vehtari et al. 2021); NaN where there are too few draws."""
    array = values.double().numpy()
    if array.shape[1] < 4 or not np.isfinite(array).all():
        return math.nan, math.nan, math.nan
    bulk = chain_statistics.ess(array, "bulk")
    return bulk, chain_statistics.ess(array, "tail", (0.05, 0.95)), chain_statistics.rhat(array)


def _normal_scores(values: Tensor, weights: Tensor) -> Tensor:
    """Phi^-1 of each value's place in the weighted distribution of all, ``(S,)``, so that a heavy tail weighs as a normal one.

    Args:
        values: ``(S,)``; equal ones share a place.
        weights: ``(S,)``, of sum one.
    """
    distinct, place = values.unique(return_inverse=True)
    mass = torch.zeros_like(distinct).scatter_add_(0, place, weights)
    smallest = torch.finfo(mass.dtype).eps
    return torch.special.ndtri((mass.cumsum(0) - mass / 2).clamp(smallest, 1 - smallest))[place]


def nested_rhat(values: Tensor, superchain_ids: list[int]) -> float:
    """R-hat of many short chains ``(C, S)`` in groups that share a start (Margossian et al. 2024).

    Raises:
        NotImplementedError: on Python 3.10, which arviz-stats does not serve.

    Args:
        values: ``(C, S)``.
        superchain_ids: of each chain, the number of its group; all groups are of one size, and of two chains at least.
    """
    return chain_statistics.rhat_nested(values.double().numpy(), superchain_ids)


def summarise(samples: Mapping[str, Tensor], log_weights: Tensor | None = None) -> Summary:
    """Mean, sd, quantiles, effective sizes and R-hat of every scalar.

    Args:
        samples: ``{name: (C, S, *shape)}``.
        log_weights: ``(C, S)`` for weighted draws. One chain of them is taken as independent: ``ess_bulk`` is that of the mean of
            the quantity's normal scores, as it is of chains, at most Kish's size, ``ess_tail`` is Kish's size, and there is no
            R-hat. Of several chains R-hat is that of the draws, and sizes are at most those of the draws times Kish's fraction, and
            those of the weighted means of normal scores and tails.
            ``khat`` is the larger of those of the weights and of :func:`log_contributions`, which is about the mean itself. Draws
            worth less than two have no spread to speak of: sd, quantiles and R-hat are then NaN, and ``khat`` is infinite.

    Example:
        >>> import torch
        >>> values = torch.tensor([[0.0, 0.0, 3.0, 3.0]])
        >>> summary = summarise({"a": values}, torch.tensor([[1.0, 1.0, 0.5, 0.5]]).log())
        >>> round(summary["a"].mean, 6)  # the threes count half
        1.0
    """
    kish = math.inf if log_weights is None else kish_effective_size(log_weights)
    collapsed = kish < MIN_EVEN_DRAWS
    weights_khat = math.nan if log_weights is None else pareto_khat(log_weights)
    rows = []
    for name, values in scalar_columns(samples):
        weights = torch.full((values.numel(),), 1 / values.numel(), dtype=torch.float64)
        if log_weights is not None:
            weights = torch.softmax(log_weights.double().flatten(), 0)
            # The lp of a draw of weight zero may be -inf, and their product is NaN: another's value stands there.
            values = torch.where(weights.view_as(values) > 0, values, values.flatten()[weights.argmax()])
        flat = values.double().flatten()
        mean = (weights * flat).sum()
        variance = (weights * (flat - mean).square()).sum()
        order = flat.argsort()
        cumulative = weights[order].cumsum(0)
        low, high = (float(flat[order][(cumulative < p).sum().clamp_max(len(flat) - 1)]) for p in (0.05, 0.95))
        if log_weights is not None and len(values) == 1:
            # A score's own size rests on the spread that was seen, which few draws decide where the weights are uneven.
            scores = _normal_scores(flat, weights)
            bulk, tail, rhat = min(weighted_effective_size(scores, log_weights), kish), kish, math.nan
        else:
            bulk, tail, rhat = effective_sizes(values)
            if log_weights is not None:
                kept = kish / log_weights.numel()
                scores = _normal_scores(flat, weights).view_as(values)
                tails = [effective_size_of_chains((values <= end).double(), log_weights) for end in (low, high)]
                bulk, tail = min(bulk * kept, effective_size_of_chains(scores, log_weights)), min(tail * kept, *tails)
        khat, heavy = math.nan, False
        if log_weights is not None:
            contributions = log_contributions(values, log_weights)
            own_khat = pareto_khat(contributions)
            khat, heavy = max(own_khat, weights_khat), is_heavy_tailed(contributions, own_khat)
        sd = math.sqrt(float(variance))
        if collapsed:
            sd = low = high = rhat = math.nan
            khat = math.inf
        rows.append(Row(name, float(mean), sd, low, high, bulk, tail, rhat, khat, heavy))
    return Summary(rows)
