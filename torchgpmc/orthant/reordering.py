"""An order of the variables in which the hardest come first (Gibson, Glasbey & Elston 1994; Genz & Bretz 2009, section 4.1.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.linalg import cholesky
from torchgpmc.orthant.problem import Problem
from torchgpmc.special import interval_densities, log_ndtr_interval, normal_hazard

_FAR = 1e300  # stands for a variable without a limit, which may wait but is not yet placed


def reordering(problem: Problem) -> Tensor:
    """Permutations ``(B, N)``: each next variable is the least probable given that those before lie at their truncated means."""
    with torch.no_grad():
        covariance, _, lower, upper = problem
        batch, size, _ = covariance.shape
        one_sided = bool((upper == torch.inf).all())
        factor = torch.zeros_like(covariance)  # rows by place, columns by variable
        variance = covariance.diagonal(dim1=-2, dim2=-1).clone()
        low, high = lower.clone(), upper.clone()  # less the means given the variables placed; NaN once placed
        tiny = torch.finfo(variance.dtype).tiny
        every = torch.arange(batch, device=lower.device)
        order = []
        for place in range(size):
            inverse_sd = variance.rsqrt()
            below, above = low * inverse_sd, high if one_sided else high * inverse_sd
            # With lower limits alone the least probable variable is the one whose limit is farthest up.
            improbability = below if one_sided else -log_ndtr_interval(below, above)
            chosen = improbability.nan_to_num_(-torch.inf, torch.inf, -_FAR).argmax(-1)
            order.append(chosen)
            column = covariance[every, chosen]
            if place:
                before = factor[:, :place]
                column = torch.baddbmm(column.unsqueeze(1), before[every, :, chosen].unsqueeze(1), before, alpha=-1).squeeze(1)
            column = column * inverse_sd[every, chosen].unsqueeze(1)
            factor[:, place] = column
            pull = _truncated_mean(below[every, chosen], above[every, chosen], one_sided).unsqueeze(1)
            low = torch.addcmul(low, column, pull, value=-1)
            high = high if one_sided else torch.addcmul(high, column, pull, value=-1)
            low[every, chosen] = torch.nan
            variance = torch.addcmul(variance, column, column, value=-1).clamp_min_(tiny)
        return torch.stack(order, 1)


def _truncated_mean(below: Tensor, above: Tensor, one_sided: bool) -> Tensor:
    """Mean of the standard normal within limits."""
    if one_sided:
        return normal_hazard(-below)
    at_lower, at_upper = interval_densities(below, above, log_ndtr_interval(below, above))
    return at_lower - at_upper


def reordered(problem: Problem) -> tuple[Problem, Tensor]:
    """The problem with its variables in that order, factorised anew, and the order ``(B, N)``."""
    return in_order(problem, reordering(problem))


def in_order(problem: Problem, order: Tensor) -> tuple[Problem, Tensor]:
    """The problem with its variables in the given order ``(B, N)``, and the order that was used.

    An entry so nearly singular that it only factorises as it is stays as it is.
    """
    moved, ok = _permuted(problem, order)
    if not bool(ok.all()):
        order = torch.where(ok.unsqueeze(-1), order, torch.arange(order.shape[1], device=order.device))
        moved, _ = _permuted(problem, order)
    return moved, order


def _permuted(problem: Problem, order: Tensor) -> tuple[Problem, Tensor]:
    covariance = problem.covariance.gather(1, order.unsqueeze(-1).expand_as(problem.covariance))
    covariance = covariance.gather(2, order.unsqueeze(-2).expand_as(covariance))
    factor, ok = cholesky(covariance)
    return Problem(covariance, factor, problem.lower.gather(1, order), problem.upper.gather(1, order)), ok
