"""Minimax exponential tilting: the shift of the separated variables that makes their weights nearly even (Botev 2016)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky, identity_matrix
from torchgpmc.numerics.special import interval_densities, log_ndtr_interval
from torchgpmc.orthant.separation import Separated

_MAX_ITERATIONS = 60
# Of the root mean square of the gradient: where iterations end, and up to where a saddle point counts as found.
_TOLERANCE, _CONVERGED = 1e-9, 1e-6
_SHORTEST_STEP = 1e-4  # share of a Newton step, below which no descent is looked for
_LEAST_DESCENT = 1e-4  # share of the gradient's norm that a whole step has to take away


class Tilt(NamedTuple):
    """The saddle point of the log weight: least in the tilt, greatest in the point."""

    shift: Tensor  # (B, N), mu of the proposal; the last is 0
    point: Tensor  # (B, N), where the log weight under that tilt is greatest
    log_bound: Tensor  # (B,), its value there: no log weight exceeds it
    converged: Tensor  # (B,)


class _Slopes(NamedTuple):
    of_point: Tensor  # (B, N - 1), derivative of the log weight
    of_shift: Tensor  # (B, N - 1)
    curvature: Tensor  # (B, N), derivative of the mean of each truncated normal in its location, less one; in (-1, 0)
    log_weight: Tensor  # (B,)

    def size(self) -> Tensor:
        """Norm of the gradient ``(B,)``."""
        return (self.of_point.square().sum(-1) + self.of_shift.square().sum(-1)).sqrt()


def _slopes(separated: Separated, point: Tensor, shift: Tensor) -> _Slopes:
    rows, lower, upper = separated
    moved = (rows @ point.unsqueeze(-1)).squeeze(-1) + shift
    below, above = lower - moved, upper - moved
    log_probability = log_ndtr_interval(below, above)
    at_lower, at_upper = interval_densities(below, above, log_probability)
    pull = at_lower - at_upper  # mean of the truncated standard normal
    ends = torch.where(torch.isinf(below), 0.0, below) * at_lower - torch.where(torch.isinf(above), 0.0, above) * at_upper
    of_point = (pull.unsqueeze(-2) @ rows).squeeze(-2) - shift
    of_shift = shift - point + pull
    value = (0.5 * shift.square() - shift * point + log_probability).sum(-1)
    return _Slopes(of_point[:, :-1], of_shift[:, :-1], ends - pull.square(), value)


def minimax_tilt(separated: Separated) -> Tilt:
    r"""Solves for the saddle point by Newton's method with step halving, each problem on its own.

    With U = L / diag L and gamma = -kappa / (1 + kappa), kappa the curvature, eliminating the tilt leaves one system of the size of
    the problem, (U' diag(gamma) U + I) step = gradient, which is positive definite because the log weight is concave in the point
    and convex in the tilt (Botev 2016, section 4).

    A tilt that has not converged still gives unbiased estimates, only less even weights.

    Args:
        separated: B problems.
    """
    with torch.no_grad():
        rows = separated.rows
        size = rows.shape[-1]
        unit = (rows + identity_matrix(size, rows))[..., :-1]
        eye = identity_matrix(size - 1, rows)
        point, shift = torch.zeros_like(separated.lower), torch.zeros_like(separated.lower)
        slopes = _slopes(separated, point, shift)
        for _ in range(_MAX_ITERATIONS if size > 1 else 0):
            going = slopes.size() > _TOLERANCE * size**0.5
            if not bool(going.any()):
                break
            kappa = slopes.curvature.clamp(-1 + 1e-12, 0.0)
            gamma = torch.cat([-kappa[:, :-1] / (1 + kappa[:, :-1]), -kappa[:, -1:]], 1)
            scaled = unit * gamma.sqrt().unsqueeze(-1)
            factor, _ = cholesky(scaled.mT @ scaled + eye)
            head = kappa[:, :-1]

            def apply(vector: Tensor, head: Tensor = head) -> Tensor:  # (diag(kappa) L - I) vector, L the strictly lower rows
                return head * (rows[:, :-1, :-1] @ vector.unsqueeze(-1)).squeeze(-1) - vector

            weighted = slopes.of_shift / (1 + head)
            transposed = ((head * weighted).unsqueeze(-2) @ rows[:, :-1, :-1]).squeeze(-2) - weighted
            right = slopes.of_point - transposed
            along_point = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
            along_shift = -(slopes.of_shift + apply(along_point)) / (1 + head)
            step = torch.where(going, 1.0, 0.0).to(point)
            while True:
                moved_point = point + torch.nn.functional.pad(step[:, None] * along_point, (0, 1))
                moved_shift = shift + torch.nn.functional.pad(step[:, None] * along_shift, (0, 1))
                moved = _slopes(separated, moved_point, moved_shift)
                worse = ~(moved.size() <= (1 - _LEAST_DESCENT * step) * slopes.size()) & (step > 0)
                if not bool(worse.any()):
                    break
                step = torch.where(worse, 0.5 * step, step)
                step = torch.where(step < _SHORTEST_STEP, 0.0, step)
            if not bool((step > 0).any()):
                break
            point, shift, slopes = moved_point, moved_shift, moved
        return Tilt(shift, point, slopes.log_weight, slopes.size() <= _CONVERGED * size**0.5)
