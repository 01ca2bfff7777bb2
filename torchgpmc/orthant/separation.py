"""The separated variables: a box probability as a sequence of one-dimensional ones, each given those before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.orthant.problem import Problem
from torchgpmc.special import SQRT_HALF, interval_quantile, log_ndtr_interval

# Rows whose conditional means come from one matrix product; within a panel they come row by row.
_PANEL = 32
# Below this a probability is near underflow, and the slower code that keeps logarithms takes over.
_SMALLEST = 1e-290


class Separated(NamedTuple):
    r"""Independent standard normals z with x = L z, each limited given those before it.

    With c = (L / diag L - I) z, the limits of z_i are lower_i - c_i and upper_i - c_i.
    """

    rows: Tensor  # (B, N, N), L with its rows divided by its diagonal, less the identity: strictly lower
    lower: Tensor  # (B, N), divided by the diagonal too
    upper: Tensor


def separate(problem: Problem) -> Separated:
    """The problem in terms of independent normals; differentiable."""
    diagonal = problem.factor.diagonal(dim1=-2, dim2=-1)
    rows = (problem.factor / diagonal.unsqueeze(-1)).tril(-1)
    return Separated(rows, _scaled(problem.lower, diagonal), _scaled(problem.upper, diagonal))


def _scaled(limit: Tensor, diagonal: Tensor) -> Tensor:
    """limit / diagonal; an infinite limit stays so and has no derivative, where plain division would have NaN."""
    finite = torch.isfinite(limit)
    return torch.where(finite, torch.where(finite, limit, 0.0) / diagonal, limit)


def log_weights(separated: Separated, tilt: Tensor, uniforms: Tensor) -> Tensor:
    r"""Log weights of points under the tilted sequential density; their mean is the probability.

    .. math:: \log w = \sum_i \tfrac12 \mu_i^2 - \mu_i z_i + \log P(l_i - c_i - \mu_i < N(0, 1) < u_i - c_i - \mu_i)

    with :math:`z_i` drawn from N(mu_i, 1) within its limits (Genz 1992 for mu = 0; Botev 2016, section 3).

    Args:
        separated: B problems.
        tilt: mu ``(B, N)``.
        uniforms: ``(B, N - 1, P)`` in (0, 1); the last variable is never drawn.

    Returns:
        ``(B, P)``; differentiable in ``separated`` while gradients are recorded.
    """
    return draw(separated, tilt, uniforms)[0]


def draw(separated: Separated, tilt: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`log_weights` ``(B, P)`` and the points z, as many variables as ``uniforms`` ``(B, N - 1 or N, P)`` has."""
    if not torch.is_grad_enabled() and bool((separated.upper == torch.inf).all()):
        fast = _draw_above_lower_limits(separated, tilt, uniforms)
        if fast is not None:
            return fast
    return _sweep(separated, tilt, uniforms)


def _sweep(separated: Separated, tilt: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """In logarithms, for any limits and with gradients; draws as many leading variables as there are uniforms."""
    rows, lower, upper = separated
    size, drawn = rows.shape[-1], uniforms.shape[-2]
    panels: list[Tensor] = []
    log_weight = 0.5 * tilt.square().sum(-1, keepdim=True).expand(-1, uniforms.shape[-1])
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        means = rows[:, begin:end, :begin] @ torch.cat(panels, 1) if panels else None
        points: list[Tensor] = []
        for i in range(begin, end):
            shift = tilt[:, i, None].expand(-1, uniforms.shape[-1])
            if means is not None:
                shift = shift + means[:, i - begin]
            if points:
                shift = shift + (rows[:, i : i + 1, begin:i] @ torch.stack(points, 1)).squeeze(1)
            below, above = lower[:, i, None] - shift, upper[:, i, None] - shift
            log_weight = log_weight + log_ndtr_interval(below, above)
            if i < drawn:
                z = interval_quantile(uniforms[:, i], below, above) + tilt[:, i, None]
                log_weight = log_weight - tilt[:, i, None] * z
                points.append(z)
        if points:
            panels.append(torch.stack(points, 1))
    return log_weight, torch.cat(panels, 1) if panels else uniforms[:, :0]


def _draw_above_lower_limits(separated: Separated, tilt: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor] | None:
    """:func:`draw` where no upper limit is finite, in few passes over memory; ``None`` where a probability underflows."""
    rows, lower, _ = separated
    batch, size, _ = rows.shape
    drawn, count = uniforms.shape[-2:]
    points = uniforms.new_empty(batch, drawn, count)
    # Scaled for erfc: torch.special.ndtr loses the lower tail to cancellation.
    offsets, scaled = (lower - tilt).unsqueeze(-1) * SQRT_HALF, rows * -SQRT_HALF
    log_weight = 0.5 * tilt.square().sum(-1, keepdim=True).expand(-1, count).contiguous()
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        # The limit that the tilted normal has to exceed, over the square root of 2.
        above = offsets[:, begin:end].expand(-1, -1, count).contiguous()
        if begin:
            above.baddbmm_(scaled[:, begin:end, :begin], points[:, :begin])
        for i in range(begin, end):
            row = above[:, i - begin : i - begin + 1]
            if i > begin:
                row.baddbmm_(scaled[:, i : i + 1, begin:i], points[:, begin:i])
            row.erfc_().mul_(0.5)
            if i < drawn:
                point = torch.addcmul(row[:, 0], row[:, 0], uniforms[:, i], value=-1, out=points[:, i])
                torch.special.ndtri(point, out=point)
                torch.sub(tilt[:, i, None], point, out=point)
        if not float(above.amin()) >= _SMALLEST:  # NaN after a zero
            return None
        log_weight += above.log_().sum(1)
        last = min(end, drawn)
        log_weight -= (tilt[:, None, begin:last] @ points[:, begin:last]).squeeze(1)
    return log_weight, points
