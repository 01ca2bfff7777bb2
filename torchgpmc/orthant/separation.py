"""The separated variables: a box probability as a sequence of one-dimensional ones, each given those before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.special import SQRT_HALF, interval_quantile, log_ndtr_interval
from torchgpmc.orthant.problem import Problem

# Rows whose conditional means come from one matrix product; within a panel they come row by row.
PANEL = 32
# Below this a probability is near underflow, and the slower code that keeps logarithms takes over.
SMALLEST = 1e-290


class Separated(NamedTuple):
    r"""Independent standard normals z with x = L z, each limited given those before it.

    With c = (L / diag L - I) z, the limits of z_i are lower_i - c_i and upper_i - c_i.
    """

    rows: Tensor  # (B, N, N), L with its rows divided by its diagonal, less the identity: strictly lower
    lower: Tensor  # (B, N), divided by the diagonal too
    upper: Tensor


class SeparatedProposal(NamedTuple):
    r"""A density that draws the variables one after another, each a truncated normal whose mean is linear in those before it.

    With :math:`h = R e`, :math:`r_i` a standard normal between :math:`l_i - h_i` and :math:`u_i - h_i`:

    .. math::
        e_i = \text{shift}_i + \text{slope}_i h_i + \text{scale}_i r_i, \qquad x = \text{centre} + \text{factor} \; e

        \log w = \text{constant} + \sum_i \log P(l_i - h_i < N(0, 1) < u_i - h_i) + \text{linear}_i h_i
            + \text{quadratic}_i h_i^2 + \text{along}_i e_i
    """

    rows: Tensor  # (B, N, N), R, strictly lower
    lower: Tensor  # (B, N)
    upper: Tensor
    shift: Tensor
    slope: Tensor
    scale: Tensor
    constant: Tensor  # (B,)
    linear: Tensor  # (B, N)
    quadratic: Tensor
    along: Tensor
    centre: Tensor
    factor: Tensor  # (B, N, N), lower

    def variables(self, points: Tensor) -> Tensor:
        """x ``(B, N, P)`` of points e ``(B, N, P)``."""
        return self.centre.unsqueeze(-1) + self.factor @ points


def separate(problem: Problem) -> Separated:
    """The problem in terms of independent normals; differentiable."""
    diagonal = problem.factor.diagonal(dim1=-2, dim2=-1)
    rows = (problem.factor / diagonal.unsqueeze(-1)).tril(-1)
    return Separated(rows, scaled_limit(problem.lower, diagonal), scaled_limit(problem.upper, diagonal))


def scaled_limit(limit: Tensor, scale: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """limit / scale + shift; an infinite limit stays so and has no derivative, where plain arithmetic would have NaN."""
    finite = torch.isfinite(limit)
    return torch.where(finite, torch.where(finite, limit, 0.0) / scale + shift, limit)


def tilted(problem: Problem, tilt: Tensor) -> SeparatedProposal:
    r"""Normals of variance one around ``tilt`` ``(B, N)`` for the independent z, each within its limits.

    .. math:: \log w = \sum_i \tfrac12 \mu_i^2 - \mu_i z_i + \log P(l_i - c_i - \mu_i < N(0, 1) < u_i - c_i - \mu_i)

    (Genz 1992 for mu = 0; Botev 2016, section 3). Differentiable in the problem at a fixed tilt.
    """
    rows, lower, upper = separate(problem)
    zero = torch.zeros_like(tilt)
    return SeparatedProposal(
        rows=rows,
        lower=lower - tilt,
        upper=upper - tilt,
        shift=tilt,
        slope=zero,
        scale=torch.ones_like(tilt),
        constant=0.5 * tilt.square().sum(-1),
        linear=zero,
        quadratic=zero,
        along=-tilt,
        centre=zero,
        factor=problem.factor,
    )


def log_weights(proposal: SeparatedProposal, uniforms: Tensor) -> Tensor:
    """Log weights ``(B, P)`` of points; their mean weight is the probability.

    Args:
        proposal: of B problems.
        uniforms: ``(B, N - 1, P)`` in (0, 1); the last variable is never drawn.

    Returns:
        Differentiable in ``proposal`` while gradients are recorded.
    """
    return draw(proposal, uniforms)[0]


def log_weights_at(proposal: SeparatedProposal, x: Tensor) -> Tensor:
    """Log weights ``(B, P)`` that x ``(B, N, P)`` would have, had this proposal drawn it; the last variable does not matter."""
    p = proposal
    e = torch.linalg.solve_triangular(p.factor, x - p.centre.unsqueeze(-1), upper=False)
    h = p.rows @ e
    log_probability = log_ndtr_interval(p.lower.unsqueeze(-1) - h, p.upper.unsqueeze(-1) - h)
    polynomial = (p.linear.unsqueeze(-1) + p.quadratic.unsqueeze(-1) * h) * h + p.along.unsqueeze(-1) * e
    return p.constant.unsqueeze(-1) + (log_probability + polynomial).sum(1)


def draw(proposal: SeparatedProposal, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`log_weights` ``(B, P)`` and the points e, as many variables as ``uniforms`` ``(B, N - 1 or N, P)`` has."""
    if not torch.is_grad_enabled() and bool((proposal.upper == torch.inf).all()):
        fast = _draw_above_lower_limits(proposal, uniforms)
        if fast is not None:
            return fast
    return _draw_in_logarithms(proposal, uniforms)


def _draw_in_logarithms(proposal: SeparatedProposal, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """In logarithms, for any limits and with gradients; draws as many leading variables as there are uniforms."""
    p = proposal
    size, (drawn, count) = p.rows.shape[-1], uniforms.shape[-2:]
    panels: list[Tensor] = []
    log_weight = p.constant.unsqueeze(-1).expand(-1, count)
    for begin in range(0, size, PANEL):
        end = min(begin + PANEL, size)
        means = p.rows[:, begin:end, :begin] @ torch.cat(panels, 1) if panels else None
        points: list[Tensor] = []
        for i in range(begin, end):
            h = uniforms.new_zeros(1, 1).expand(len(p.rows), count) if means is None else means[:, i - begin]
            if points:
                h = h + (p.rows[:, i : i + 1, begin:i] @ torch.stack(points, 1)).squeeze(1)
            below, above = p.lower[:, i, None] - h, p.upper[:, i, None] - h
            log_weight = log_weight + log_ndtr_interval(below, above) + (p.linear[:, i, None] + p.quadratic[:, i, None] * h) * h
            if i < drawn:
                residual = interval_quantile(uniforms[:, i], below, above)
                point = p.shift[:, i, None] + p.slope[:, i, None] * h + p.scale[:, i, None] * residual
                log_weight = log_weight + p.along[:, i, None] * point
                points.append(point)
        if points:
            panels.append(torch.stack(points, 1))
    return log_weight, torch.cat(panels, 1) if panels else uniforms[:, :0]


def _draw_above_lower_limits(proposal: SeparatedProposal, uniforms: Tensor) -> tuple[Tensor, Tensor] | None:
    """:func:`draw` where no upper limit is finite, in few passes over memory; ``None`` where a probability underflows."""
    p = proposal
    batch, size, _ = p.rows.shape
    drawn, count = uniforms.shape[-2:]
    points = uniforms.new_empty(batch, drawn, count)
    # Scaled for erfc: torch.special.ndtr loses the lower tail to cancellation.
    offsets = p.lower * SQRT_HALF
    log_weight = p.constant.unsqueeze(-1).expand(-1, count).contiguous()
    for begin in range(0, size, PANEL):
        end = min(begin + PANEL, size)
        h = p.rows[:, begin:end, :begin] @ points[:, :begin]
        tails = torch.empty_like(h)
        for i in range(begin, end):
            row, tail = h[:, i - begin : i - begin + 1], tails[:, i - begin]
            if i > begin:
                row.baddbmm_(p.rows[:, i : i + 1, begin:i], points[:, begin:i])
            torch.sub(offsets[:, i, None], row[:, 0], alpha=SQRT_HALF, out=tail).erfc_().mul_(0.5)
            if i < drawn:
                point = torch.addcmul(tail, tail, uniforms[:, i], value=-1, out=points[:, i])
                torch.special.ndtri(point, out=point)
                point.mul_(-p.scale[:, i, None]).add_(p.shift[:, i, None]).addcmul_(row[:, 0], p.slope[:, i, None])
        if not float(tails.amin()) >= SMALLEST:  # NaN after a zero
            return None
        log_weight += tails.log_().sum(1)
        last = min(end, drawn)
        log_weight += (p.along[:, None, begin:last] @ points[:, begin:last]).squeeze(1)
        log_weight += (p.linear[:, None, begin:end] @ h + p.quadratic[:, None, begin:end] @ h.square_()).squeeze(1)
    return log_weight, points
