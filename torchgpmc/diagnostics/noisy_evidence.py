"""Whether the evidence estimates that draws rest on are too noisy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

MAX_ESTIMATE_VARIANCE = 0.5  # relative: that of a mean of n weights with fewer than two effective ones, and 1 is the most it can be
_LESS_NOISE = "use more importance samples (num_importance), EP() in place of Laplace()"


def estimate_noise(stats: Mapping[str, Tensor], log_weights: Tensor | None) -> float:
    """Relative variance of the evidence estimates that the draws rest on, zero where the evidence is exact.

    It is estimated from the weights whose mean an estimate is, and one that misses most of p(f | y, theta) looks small; those that
    hit what the others miss are kept for long, or weigh much. So the average is that over the posterior draws.

    Args:
        stats: per-draw statistics ``(C, S)``; ``log_evidence_variance`` among them is relative variances of estimates.
        log_weights: ``(C, S)`` for weighted draws.

    Example:
        >>> stats = {"log_evidence_variance": torch.tensor([[0.1, 0.3, torch.nan]])}  # the third rests on a single weight
        >>> round(estimate_noise(stats, None), 3), round(estimate_noise(stats, torch.tensor([[0.0, -50.0, 0.0]])), 3)
        (0.2, 0.1)
    """
    if "log_evidence_variance" not in stats:
        return 0.0
    variance = stats["log_evidence_variance"].double().flatten()
    known = torch.isfinite(variance)  # not where an estimate is a single weight
    weights = torch.ones_like(variance) if log_weights is None else torch.softmax(log_weights.double().flatten(), 0)
    total = float(weights[known].sum())
    return float((weights * variance)[known].sum()) / total if total > 0 else 0.0


def complaints_about_noise(stats: Mapping[str, Tensor], log_weights: Tensor | None) -> list[str]:
    """That draws rest on evidence estimates which came out high by one lucky importance sample."""
    average = estimate_noise(stats, log_weights)
    if average <= MAX_ESTIMATE_VARIANCE:
        return []
    return [
        f"the evidence estimates have relative variance {average:.2g} (at most {MAX_ESTIMATE_VARIANCE:g} is reliable: two samples "
        f"decide each): most may have missed a part of p(f | y, theta), and chains stick, or a few draws weigh much, where one hit "
        f"it: {_LESS_NOISE}, or NUTS()."
    ]


def complaints_about_stays(stats: Mapping[str, Tensor]) -> list[str]:
    """That a pseudo-marginal chain sat on one estimate."""
    if not ("n_factorizations" in stats and "log_evidence" in stats):
        return []
    longest, expected = _longest_stay(stats["log_evidence"])
    if longest <= 5 * expected + 20:
        return []
    return [
        f"a chain stayed at one draw for {longest} transitions, where about {expected:.0f} is the most to expect at its "
        f"acceptance rate: its evidence estimate there came out far too high; {_LESS_NOISE}, or correlation=0.99."
    ]


def _longest_stay(values: Tensor) -> tuple[int, float]:
    """Most successive draws ``(C, S)`` of one value in a chain, and about the most to expect from the overall rate of change."""
    changed = values[:, 1:] != values[:, :-1]
    draws = values.numel()
    rate = max(float(changed.double().mean()), 1 / draws) if changed.numel() else 1.0
    longest = 0
    for chain in changed:
        places = torch.cat([torch.tensor([-1]), chain.nonzero().squeeze(-1), torch.tensor([len(chain)])])
        longest = max(longest, int(places.diff().max()))
    return longest, math.log(max(math.e, rate * draws)) / rate
