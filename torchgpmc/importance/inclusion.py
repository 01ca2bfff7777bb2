"""Which of many candidates are worth an exact estimate: unequal-probability sampling by approximate weights.

Each estimated candidate counts for one over its inclusion probability, so sums over all candidates are estimated without bias
whatever the approximation is; where that is good, those estimated weigh about the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.numerics.random import uniform

_NEGLIGIBLE = 50.0  # nats below the highest log weight
_HALVINGS = 60


def inclusion_probabilities(log_weights: Tensor, count: int, least_share: float = 0.1) -> Tensor:
    r"""Probabilities :math:`\pi_i = \min(1, \max(w_i / c, \epsilon))` ``(S,)`` that sum to ``count``.

    As in rejection control (Liu, Chen & Wong 1998, "Rejection control and sequential importance sampling"), but for the floor
    :math:`\epsilon`, without which what the approximation misses would be missed without a trace.

    Args:
        log_weights: approximate ones ``(S,)``; what is NaN, unknown, counts as the mean weight.
        count: how many are to be included, at most S.
        least_share: of ``count``, what the floor alone would come to.

    Example:
        >>> import torch
        >>> inclusion_probabilities(torch.tensor([4.0, 2.0, 1.0, 1.0]).log(), 2)
        tensor([1.0000, 0.5000, 0.2500, 0.2500])
        >>> inclusion_probabilities(torch.tensor([9.0, -200.0, -200.0, -torch.inf]), 2)  # of the negligible any
        tensor([1.0000, 0.3333, 0.3333, 0.3333])
    """
    size = len(log_weights)
    known = log_weights[~log_weights.isnan()]
    mean = torch.logsumexp(known, 0) - known.new_tensor(float(max(len(known), 1))).log()
    log_weights = torch.where(log_weights.isnan(), mean, log_weights)
    if not bool(torch.isfinite(log_weights.max())):
        return torch.full_like(log_weights, count / size)
    log_weights = log_weights - log_weights.max()
    log_weights = log_weights.clamp_min(-_NEGLIGIBLE)
    least = least_share * count / size
    low, high = -_NEGLIGIBLE, -torch.tensor(least).log().item()  # of log c, where all are included, and all by the floor
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if float(_clamped(log_weights - middle, least).sum()) > count:
            low = middle
        else:
            high = middle
    return _clamped(log_weights - high, least)


def _clamped(log_ratio: Tensor, least: float) -> Tensor:
    return log_ratio.exp().clamp(least, 1.0)


def included(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices ``(count,)``, in order, each included with its probability: a systematic sample (Madow 1949).

    Args:
        probabilities: ``(S,)``, which sum to ``count``.
        count: how many.
        generator: of the one number that decides.

    Example:
        >>> import torch
        >>> probabilities = torch.tensor([1.0, 0.5, 0.25, 0.25])
        >>> draws = [included(probabilities, 2, torch.Generator().manual_seed(seed)) for seed in range(400)]
        >>> frequencies = torch.bincount(torch.cat(draws)) / 400
        >>> bool((frequencies - probabilities).abs().max() < 0.1), bool(frequencies[0] == 1)
        (True, True)
    """
    ends = probabilities.double().cumsum(0)
    points = (torch.arange(count, device=ends.device) + uniform((1,), ends, generator)) * (ends[-1] / count)
    return torch.searchsorted(ends, points, right=True).clamp_max(len(ends) - 1)
