"""A batch of Gaussian box probabilities in one form: checked, centred, mirrored where that leaves lower limits alone."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.numerics.linalg import cholesky


class Problem(NamedTuple):
    """P(lower < x < upper) for x ~ N(0, covariance), B problems of N variables."""

    covariance: Tensor  # (B, N, N)
    factor: Tensor  # (B, N, N), its lower Cholesky factor
    lower: Tensor  # (B, N), -inf for none
    upper: Tensor  # (B, N), inf for none


class OrthantEstimate(NamedTuple):
    """Estimates of B probabilities, with what tells whether to trust them.

    Example:
        >>> import torch, torchgpmc as tg
        >>> covariance = torch.full((20, 20), 0.5, dtype=torch.float64) + 0.5 * torch.eye(20)
        >>> found = tg.orthant.log_probability(covariance, lower=0.0, generator=torch.Generator().manual_seed(0))  # of 1 / 21
        >>> bool((found.value.exp() * 21 - 1).abs() < 5 * found.variance.sqrt()), bool(found.effective_size > 100)
        (True, True)
    """

    value: Tensor  # (B,), log of an unbiased estimate
    variance: Tensor  # (B,), relative variance of that estimate; NaN where the method cannot tell
    effective_size: Tensor  # (B,), Kish's, of the weighted points or particles
    pareto_khat: Tensor  # (B,), of the weights; NaN where there are none
    spread: Tensor  # (B,), standard deviation of the weights over their mean; where it is tiny k-hat does not matter


class OrthantMethod(Protocol):
    """How to estimate; the methods of this module are such."""

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """Estimates with about ``num_points`` points a problem."""
        ...


class Prepared(NamedTuple):
    """A checked problem and how to go back to what the caller gave."""

    problem: Problem
    mean: Tensor  # (B, N)
    sign: Tensor  # (B, N), -1 where a variable was mirrored
    batched: bool  # whether the caller gave a batch


def _limit(name: str, value: Any, covariance: Tensor) -> Tensor:
    limit = as_tensor(name, value, covariance.device).to(covariance.dtype)
    if limit.device != covariance.device:
        raise ValueError(f"{name} is on {limit.device}, covariance on {covariance.device}. Expected one device.")
    if limit.dim() > 2 or (limit.dim() >= 1 and limit.shape[-1] not in (1, covariance.shape[-1])):
        raise ValueError(
            f"{name} has shape {tuple(limit.shape)}. Expected a number, (N,) or (B, N) with N = {covariance.shape[-1]}."
        )
    if bool(torch.isnan(limit).any()):
        raise ValueError(f"{name} has NaN. Expected numbers, or infinities for no limit.")
    return limit


def _refuse(bad: Tensor, what: str) -> None:
    """Raises for the first batch entry flagged in ``bad`` ``(B,)``."""
    if bool(bad.any()):
        entries = bad.nonzero().flatten().tolist()
        raise ValueError(f"batch entry {entries[0]}: {what} ({len(entries)} of {len(bad)} entries are so).")


def prepare(covariance: Any, mean: Any, lower: Any, upper: Any) -> Prepared:
    """Checks a caller's problem and brings it into standard form.

    Args:
        covariance: ``(N, N)`` or ``(B, N, N)``.
        mean: a number, ``(N,)`` or ``(B, N)``.
        lower: the same; -inf for no limit.
        upper: the same; inf for no limit.

    Raises:
        TypeError: covariance is not numbers.
        ValueError: shapes, NaN, a matrix that is not symmetric or not positive definite, limits that cross; the message names the
            batch entry.
    """
    covariance = as_tensor("covariance", covariance)
    covariance = covariance if covariance.is_floating_point() else covariance.double()
    if covariance.dim() not in (2, 3) or covariance.shape[-1] != covariance.shape[-2] or covariance.shape[-1] == 0:
        raise ValueError(f"covariance has shape {tuple(covariance.shape)}. Expected square matrices, (N, N) or (B, N, N).")
    batched = covariance.dim() == 3
    matrix = covariance if batched else covariance.unsqueeze(0)
    limits = [_limit(name, value, matrix) for name, value in (("mean", mean), ("lower", lower), ("upper", upper))]
    try:
        shape = torch.broadcast_shapes(matrix.shape[:2], *(limit.shape for limit in limits))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(limit.shape)) for limit in limits)
        raise ValueError(
            f"mean, lower and upper have shapes {shapes}. Expected all to broadcast to {tuple(matrix.shape[:2])}."
        ) from error
    batched = batched or shape[0] > 1
    matrix = matrix.expand(shape[0], -1, -1)
    centre, low, high = (limit.expand(shape) for limit in limits)
    _refuse(~torch.isfinite(matrix).all(-1).all(-1), "covariance has NaN or infinite elements. Expected finite numbers")
    _refuse(~torch.isfinite(centre).all(-1), "mean is infinite. Expected finite numbers")
    gap = (matrix - matrix.mT).detach().abs().amax((-2, -1))
    _refuse(gap > 1e-6 * matrix.detach().abs().amax((-2, -1)), "covariance is not symmetric. Expected a symmetric matrix")
    _refuse(~(low < high).all(-1), "lower is not below upper. Expected lower < upper for every variable")
    sign = torch.where(torch.isinf(low) & torch.isfinite(high), -1.0, 1.0).to(matrix)
    mirrored = matrix * (sign.unsqueeze(-1) * sign.unsqueeze(-2))
    below, above = torch.where(sign < 0, -(high - centre), low - centre), torch.where(sign < 0, -(low - centre), high - centre)
    factor, ok = cholesky(mirrored)
    _refuse(~ok, "covariance is not positive definite. Expected a positive definite matrix; add a small variance to its diagonal")
    return Prepared(Problem(mirrored, factor, below, above), centre, sign, batched)


def select(problem: Problem, rows: slice) -> Problem:
    """The given problems alone."""
    return Problem(*(part[rows] for part in problem))


def detached(problem: Problem) -> Problem:
    """The same without gradients."""
    return Problem(*(part.detach() for part in problem))


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
