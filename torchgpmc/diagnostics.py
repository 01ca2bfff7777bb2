"""Whether draws are to be trusted: rank R-hat, bulk and tail effective sizes, k-hat, and warnings in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from arviz_stats.base import array_stats
from torch import Tensor

MAX_RHAT = 1.01  # Vehtari et al. 2021, section 4
MIN_ESS_PER_CHAIN = 100  # the same
MAX_KHAT = 0.7  # Vehtari et al. 2024


class SamplingWarning(UserWarning):
    """The draws may not represent the posterior; the message says why and what to do."""


class Row(NamedTuple):
    """Summary of one scalar quantity."""

    name: str
    mean: float
    sd: float
    q5: float
    q95: float
    ess_bulk: float
    ess_tail: float
    rhat: float


class Summary:
    """A table of posterior summaries: ``print`` it, read ``rows``, or take one row by its name, ``summary["lp"]``."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [4])
        header = f"{'':{width}} {'mean':>10} {'sd':>10} {'5%':>10} {'95%':>10} {'ess_bulk':>9} {'ess_tail':>9} {'r_hat':>7}"
        lines = [
            f"{r.name:{width}} {r.mean:10.4g} {r.sd:10.4g} {r.q5:10.4g} {r.q95:10.4g} "
            f"{r.ess_bulk:9.0f} {r.ess_tail:9.0f} {r.rhat:7.3f}"
            for r in self.rows
        ]
        return "\n".join([header, *lines])


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
    bulk = float(array_stats.ess(array, method="bulk"))
    tail = float(array_stats.ess(array, method="tail", prob=(0.05, 0.95)))
    return bulk, tail, float(array_stats.rhat(array, method="rank"))


def nested_rhat(values: Tensor, superchain_ids: list[int]) -> float:
    """R-hat of many short chains ``(C, S)`` in groups that share a start (Margossian et al. 2024)."""
    return float(array_stats.rhat_nested(values.double().numpy(), superchain_ids=np.asarray(superchain_ids), method="rank"))


def kish_effective_size(log_weights: Tensor) -> float:
    """(sum w)^2 / sum w^2."""
    weights = torch.softmax(log_weights.double().flatten(), 0)
    return float(1 / weights.square().sum())


def pareto_khat(log_weights: Tensor) -> float:
    """Shape of the tail of importance weights; above 0.7 their means are not to be trusted (Vehtari et al. 2024)."""
    # arviz-stats takes log likelihoods, which it negates, where we have log weights.
    _, khat = array_stats.psislw(-log_weights.detach().double().flatten().cpu().numpy())
    return float(khat)


def summarise(samples: Mapping[str, Tensor], log_weights: Tensor | None = None) -> Summary:
    """Mean, sd, quantiles, effective sizes and R-hat of every scalar.

    Args:
        samples: ``{name: (C, S, *shape)}``.
        log_weights: ``(C, S)`` for weighted draws. One chain of them is taken as independent, with Kish's effective size and no
            R-hat; the sizes of several chains are those of the draws times Kish's fraction, and R-hat is that of the draws.
    """
    rows = []
    for name, values in scalar_columns(samples):
        flat = values.double().flatten()
        weights = torch.full_like(flat, 1 / len(flat)) if log_weights is None else torch.softmax(log_weights.double().flatten(), 0)
        mean = (weights * flat).sum()
        variance = (weights * (flat - mean).square()).sum()
        order = flat.argsort()
        cumulative = weights[order].cumsum(0)
        low, high = (float(flat[order][(cumulative < p).sum().clamp_max(len(flat) - 1)]) for p in (0.05, 0.95))
        if log_weights is not None and len(values) == 1:
            bulk = tail = kish_effective_size(log_weights)
            rhat = math.nan
        else:
            bulk, tail, rhat = effective_sizes(values)
            kept = 1.0 if log_weights is None else kish_effective_size(log_weights) / log_weights.numel()
            bulk, tail = bulk * kept, tail * kept
        rows.append(Row(name, float(mean), math.sqrt(float(variance)), low, high, bulk, tail, rhat))
    return Summary(rows)


def complaints(summary: Summary, stats: Mapping[str, Tensor], num_chains: int, log_weights: Tensor | None) -> list[str]:
    """What speaks against trusting these draws, one sentence each, with the remedy; empty if nothing does."""
    found = []
    if log_weights is not None:
        khat = pareto_khat(log_weights)
        if not khat <= MAX_KHAT:
            found.append(
                f"the importance weights have k-hat {khat:.2f} (at most {MAX_KHAT} is reliable): "
                f"draw more, use heavier tails, or NUTS."
            )
        return found
    rhats = [(row.rhat, row.name) for row in summary.rows if math.isfinite(row.rhat)]
    if rhats and max(rhats)[0] > MAX_RHAT:
        worst, name = max(rhats)
        found.append(
            f"R-hat of '{name}' is {worst:.3f} (at most {MAX_RHAT} is reliable): the chains have not mixed; "
            f"run longer, with more warmup_steps or num_samples."
        )
    sizes = [(min(row.ess_bulk, row.ess_tail), row.name) for row in summary.rows if math.isfinite(row.ess_bulk)]
    wanted = MIN_ESS_PER_CHAIN * num_chains
    if sizes and min(sizes)[0] < wanted:
        least, name = min(sizes)
        found.append(
            f"'{name}' has {least:.0f} effective draws (at least {wanted} for {num_chains} chains is reliable): "
            f"increase num_samples."
        )
    divergences = int(stats["diverging"].sum()) if "diverging" in stats else 0
    if divergences:
        found.append(
            f"{divergences} of {stats['diverging'].numel()} transitions diverged (stats['diverging'] says which): the draws may "
            f"miss a region; raise target_accept_prob, or use stronger priors."
        )
    failures = int(stats["n_failures"].sum()) if "n_failures" in stats else 0
    if failures:
        found.append(
            f"{failures} density evaluations failed (a Cholesky factorisation, or overflow) and counted as density zero: "
            f"if they are many, raise the model's jitter or use stronger priors."
        )
    return found
