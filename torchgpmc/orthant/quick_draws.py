r"""Weighted draws above lower limits whose guide is worked out in single precision, in two thirds of the time, and as exact.

Variables are drawn one after another, each given those before it and what sites say of those after it,

.. math:: x_i = \mu_i + s_i (h_i + r_i), \qquad r_i \sim N(0, 1) \text{ above } (l_i - \mu_i) / s_i - h_i

with h_i linear in the variables before. Whatever mu, s and h are, rounded or not, that density is known, and so is the normal's:

.. math:: \log w = \log N(x; 0, \Sigma) - \sum_i \left(\log N(r_i; 0, 1) - \log s_i - \log P_i\right)

P_i being the probability that r_i was drawn within. :func:`torchgpmc.orthant.matching.guided` has them without rounding; there the
weights are worked out from the h alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import (
    cholesky_in_place,
    divided_by_root,
    in_single_precision,
    root_under_sites,
    solve_lower,
    triangular_log_determinant,
)
from torchgpmc.numerics.special import SQRT_HALF
from torchgpmc.orthant.matching import Sites
from torchgpmc.orthant.problem import Problem
from torchgpmc.orthant.separation import PANEL, SMALLEST

_SEEN = 0.01  # by how much the largest eigenvalue may be off, of a covariance whose limits matter by variances of one


class QuickGuide(NamedTuple):
    r"""The numbers of the density, variables in the order in which they are drawn.

    h = R e, with :math:`e_i = \text{slope}_i h_i + \text{scale}_i (r_i - \text{push}_i)`.
    """

    order: Tensor  # (B, N)
    rows: Tensor  # (B, N, N), R in single precision; what is not below the diagonal is not looked at
    mean: Tensor  # (B, N), mu
    sd: Tensor  # (B, N), s
    limit: Tensor  # (B, N), (l - mu) / s
    push: Tensor  # (B, N)
    slope: Tensor  # (B, N)
    scale: Tensor  # (B, N)
    ok: Tensor  # (B,), whether single precision served


def quick_guide(problem: Problem, sites: Sites, order: Tensor) -> QuickGuide:
    """From sites of B problems without upper limits, variables drawn in ``order`` ``(B, N)``."""
    centre = (problem.factor @ sites.whitened_mean.unsqueeze(-1)).squeeze(-1)
    slope = torch.linalg.solve_triangular(problem.factor.mT, sites.whitened_mean.unsqueeze(-1), upper=True).squeeze(-1)
    centre, slope, precision, lower = (part.gather(1, order) for part in (centre, slope, sites.precision, problem.lower))
    covariance = in_single_precision(problem.covariance)
    seen = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) * torch.finfo(covariance.dtype).eps > _SEEN
    moved = torch.stack([matrix[rows][:, rows] for matrix, rows in zip(covariance, order, strict=True)])
    plain, fine = cholesky_in_place(moved)
    root, found = root_under_sites(plain, precision.to(plain))
    factor = divided_by_root(plain, root)
    plain_diagonal, root_diagonal, diagonal = (part.diagonal(dim1=-2, dim2=-1).to(centre) for part in (plain, root, factor))
    # As of `guided`; the mean of a variable is that of the normal and all sites, less what its own site has pushed.
    sd = plain_diagonal * (root_diagonal.square() - precision * plain_diagonal.square()).clamp_min(1.0).rsqrt()
    ratio, push = diagonal / sd, sd * slope
    mean = centre - sd * push
    return QuickGuide(
        order=order,
        rows=factor.mul_((sd / diagonal.square()).to(factor).unsqueeze(-1)),
        mean=mean,
        sd=sd,
        limit=(lower - mean) / sd,
        push=push,
        slope=1 / ratio - ratio,
        scale=1 / ratio,
        ok=fine & found & ~seen,
    )


def quick_draws(problem: Problem, guide: QuickGuide, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log weights ``(B, P)``, x ``(B, P, N)`` in the order of the problem, and where no probability underflowed ``(B,)``.

    Args:
        problem: B problems without upper limits.
        guide: of these.
        uniforms: ``(B, N, P)`` in (0, 1).
    """
    residual, probability, moved = torch.empty_like(uniforms), torch.empty_like(uniforms), torch.empty_like(uniforms)
    rows, offsets = guide.rows, guide.limit * SQRT_HALF
    slope, scale, shift = (part.to(rows).unsqueeze(-1) for part in (guide.slope, guide.scale, -guide.scale * guide.push))
    points = rows.new_empty(uniforms.shape)
    size = uniforms.shape[1]
    # Views of all variables at once: made one by one they took 18 of 306 ms, of eight problems of 500 variables.
    each = (moved, probability, uniforms, residual, points, offsets.unsqueeze(-1), shift, slope, scale)
    of_variables = list(zip(*(part.unbind(1) for part in each), strict=True))
    for begin in range(0, size, PANEL):
        end = min(begin + PANEL, size)
        panel = (rows[:, begin:end, :begin] @ points[:, :begin]).unsqueeze(2).unbind(1)
        for i in range(begin, end):
            h, tail, uniform, drawn, point, offset, own_shift, own_slope, own_scale = of_variables[i]
            row = panel[i - begin]
            if i > begin:
                row.baddbmm_(rows[:, i : i + 1, begin:i], points[:, begin:i])
            row = row[:, 0]
            # Scaled for erfc: torch.special.ndtr loses the lower tail to cancellation.
            torch.sub(offset, h.copy_(row), alpha=SQRT_HALF, out=tail).erfc_().mul_(0.5)
            torch.addcmul(tail, tail, uniform, value=-1, out=drawn)
            torch.special.ndtri(drawn, out=drawn).neg_()
            torch.addcmul(own_shift, row, own_slope, out=point).addcmul_(drawn.to(point), own_scale)
    sound = guide.ok & (probability.flatten(1).amin(-1) >= SMALLEST)  # not so where it is NaN, either
    x = moved.add_(residual).mul_(guide.sd.unsqueeze(-1)).add_(guide.mean.unsqueeze(-1))
    of_draws = probability.log_().add_(residual.square_(), alpha=0.5).sum(1) + guide.sd.log().sum(-1, keepdim=True)
    x = torch.empty_like(x).scatter_(1, guide.order.unsqueeze(-1).expand_as(x), x)
    white = solve_lower(problem.factor, x)
    of_normal = -0.5 * white.square_().sum(1) - triangular_log_determinant(problem.factor).unsqueeze(-1)
    return of_normal + of_draws, torch.maximum(x, problem.lower.unsqueeze(-1)).mT, sound
