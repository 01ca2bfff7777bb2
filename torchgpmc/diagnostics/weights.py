"""Statistics of importance weights: effective sizes, the shape of their tail, smoothing."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchgpmc.diagnostics import chain_statistics

MIN_DRAWS_FOR_KHAT = 25  # a fifth of them are its tail
MAX_KHAT = 0.7  # Vehtari et al. 2024
# Log weights that differ by rounding alone have no tail.
_EQUAL_WEIGHTS = 1e-10


def kish_effective_size(log_weights: Tensor) -> float:
    """(sum w)^2 / sum w^2.

    Example:
        >>> import torch
        >>> kish_effective_size(torch.tensor([0.0, 0.0, -torch.inf]))
        2.0
    """
    weights = torch.softmax(log_weights.double().flatten(), 0)
    return float(1 / weights.square().sum())


def pareto_khat(log_weights: Tensor) -> float:
    """Shape of the tail of importance weights; above 0.7 their means are not to be trusted (Vehtari et al. 2024).

    NaN for fewer than 25 weights, too few to have a tail.

    Example:
        >>> import torch
        >>> normal = torch.randn(4000, generator=torch.Generator().manual_seed(0))
        >>> pareto_khat(normal) < 0.7 < pareto_khat(5 * normal)
        True
    """
    if log_weights.numel() < MIN_DRAWS_FOR_KHAT:
        return math.nan
    if float(log_weights.max() - log_weights.min()) < _EQUAL_WEIGHTS:
        return -math.inf
    return _tail_fit(log_weights)[1]


def _tail_fit(log_weights: Tensor) -> tuple[Tensor, float]:
    """Smoothed log weights and k-hat; as they are and -inf where many at the foot of the tail, or all in it, are the same.

    Where they are the same for being nothing beside one weight that carries everything, k-hat is inf.
    Such a tail has no shape: versions of arviz-stats raise, return NaN, or the mean of their prior with weights that are NaN.
    """
    shapeless = math.inf if kish_effective_size(log_weights) < 2 else -math.inf
    try:
        with np.errstate(all="ignore"):  # what underflows is dealt with below
            fitted, khat = chain_statistics.psislw(log_weights.detach().double().flatten().cpu().numpy())
    except ValueError:
        return log_weights, shapeless
    smoothed = torch.as_tensor(fitted).to(log_weights).view_as(log_weights)
    if math.isnan(khat) or bool(smoothed.isnan().any()):
        return log_weights, shapeless
    return smoothed, khat


def log_contributions(values: Tensor, log_weights: Tensor) -> Tensor:
    """log(w |h - mean|) of each weighted draw: what the error of the mean of ``values`` is made of (Vehtari et al. 2024)."""
    log_weights = log_weights.double().flatten()
    gap = values.double().flatten()
    gap = gap - (torch.softmax(log_weights, 0) * gap).sum()
    return log_weights + gap.abs().log()


def is_heavy_tailed(log_weights: Tensor, khat: float) -> bool:
    """Whether weights have a tail that makes their means unreliable: a k-hat above 0.7, and a largest weight to match.

    Of S weights with tail shape k the largest has a share of about S^(k - 1). Where it has not a fifth of that of k = 1/2, as on a
    bounded hump of weights, the fit of the tail has misled: a tail of 0.7 looks so less than once in a hundred thousand times (at
    1000 weights, by the limit law of the largest; once in a hundred at 25).
    """
    count = log_weights.numel()
    largest = float((log_weights.max() - torch.logsumexp(log_weights.flatten(), 0)).exp())
    return khat > MAX_KHAT and largest > 0.2 * count**-0.5


def smoothed_log_weights(log_weights: Tensor) -> Tensor:
    """Pareto-smoothed log weights (Vehtari et al. 2024), of the same sum; as they are for fewer than 25, too few to have a tail.

    Example:
        >>> import torch
        >>> weights = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 2
        >>> smoothed = smoothed_log_weights(weights)
        >>> kish_effective_size(smoothed) > kish_effective_size(weights)  # the largest have come down
        True
    """
    if log_weights.numel() < MIN_DRAWS_FOR_KHAT:
        return log_weights
    smoothed = _tail_fit(log_weights)[0]
    return smoothed + torch.logsumexp(log_weights.flatten(), 0) - torch.logsumexp(smoothed.flatten(), 0)


def weighted_effective_size(values: Tensor, log_weights: Tensor) -> float:
    """Effective size of independent weighted draws for the mean of ``values``: its variance over that of the estimate.

    Example:
        >>> import torch
        >>> values = torch.tensor([0.0, 1.0, 0.0, 1.0])
        >>> weighted_effective_size(values, torch.zeros(4)), weighted_effective_size(values, torch.tensor([0.0, 0.0, -50.0, -50.0]))
        (4.0, 2.0)
    """
    weights = torch.softmax(log_weights.double().flatten(), 0)
    gap = values.double().flatten()
    gap = gap - (weights * gap).sum()
    error = (weights * gap).square().sum()
    return float((weights * gap.square()).sum() / error) if float(error) > 0 else float(len(gap))


def effective_size_of_chains(values: Tensor, log_weights: Tensor) -> float:
    r"""Effective size of chains of weighted draws for the mean of ``values``, each ``(C, S)``.

    .. math:: \frac{E_w[(h - \bar h)^2]}{\mathrm{var}(r) / n_r}, \quad r_{cs} = w_{cs} (h_{cs} - \bar h)

    of weights with mean one: the variance of h over that of the estimate, n_r being the effective size of the chains r. Draws of a
    chain that weigh much come together, which the size of h times Kish's fraction does not see.

    Example:
        >>> import torch
        >>> heavy = torch.zeros(4, 400)
        >>> heavy[:, 100:110] = 3.0  # ten draws that come together
        >>> h = torch.randn(4, 400, generator=torch.Generator().manual_seed(0)) + heavy
        >>> effective_size_of_chains(h, heavy) < 0.5 * weighted_effective_size(h, heavy)
        True
    """
    weights = torch.softmax(log_weights.double().flatten(), 0).view_as(log_weights)
    gap = values.double() - (weights * values.double()).sum()
    contributions = weights * gap
    variance, spread = float((weights * gap.square()).sum()), float(contributions.var())
    if not spread > 0:
        return float(gap.numel())
    size = chain_statistics.ess(contributions.cpu().numpy(), "mean")
    return variance * size / (spread * gap.numel() ** 2)


def error_by_runs(values: Tensor, log_weights: Tensor, runs: Tensor) -> float:
    r"""The error of a weighted mean that independent runs show by how they differ, in standard deviations within a run.

    .. math:: \Big(\frac{n}{n - 1} \sum_r p_r^2 (\bar h_r - \bar h)^2 \Big/ \sum_r p_r s_r^2\Big)^{1/2}

    of n runs, each with mean, variance and its share of all weight: a run counts by its estimate of the evidence. What all runs
    miss does not show.

    Args:
        values: h of each draw.
        log_weights: of each, their mean in a run being its estimate of the evidence.
        runs: the number of the run that each comes from.

    Example:
        >>> import torch
        >>> values, runs = torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1])
        >>> error_by_runs(values, torch.zeros(4), runs)  # means 1 and 2, variances 1
        0.5
    """
    weights = torch.softmax(log_weights.double().flatten(), 0)
    values = torch.where(weights > 0, values.double().flatten(), 0.0)
    gap = values - (weights * values).sum()
    sums, shares = _by_run(weights * gap, runs), _by_run(weights, runs)
    within = float((weights * gap.square()).sum() - (sums.square() / shares.clamp_min(1e-300)).sum())
    error = _error_of_sum(sums)
    return error / math.sqrt(within) if within > 0 else (math.inf if error > 0 else 0.0)


def evidence_error_by_runs(log_weights: Tensor, runs: Tensor) -> float:
    """The same of the evidence, relative: what the mean weights of runs differ by.

    Example:
        >>> import torch
        >>> round(evidence_error_by_runs(torch.tensor([1.0, 1.0, 3.0, 3.0]).log(), torch.tensor([0, 0, 1, 1])), 3)
        0.5
    """
    weights = torch.softmax(log_weights.double().flatten(), 0)
    return _error_of_sum(_by_run(weights - 1 / len(weights), runs))


def _by_run(parts: Tensor, runs: Tensor) -> Tensor:
    """Sums over each run's draws."""
    present, index = torch.unique(runs.flatten(), return_inverse=True)
    return parts.new_zeros(len(present)).index_add_(0, index, parts)


def _error_of_sum(sums: Tensor) -> float:
    """Of a sum of independent terms whose total is known to be zero."""
    return math.sqrt(len(sums) / (len(sums) - 1) * float(sums.square().sum()))
