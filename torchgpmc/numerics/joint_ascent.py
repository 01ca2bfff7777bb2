"""Many searches for a maximum at once, as rows of one batch, each by a quasi-Newton method that begins with a known curvature."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.types import LogDensity

_ENOUGH_RISE = 1e-4  # of what the slope promises, for a step to be taken (Nocedal & Wright 2006, section 3.1)
_SHORTER = 0.3
_SHORTEST = 1e-4
_LEAST_CURVATURE = 0.2  # of that before
_LONGEST = 4.0  # deviations, by the curvature so far: the quadratic is not believed further


class JointAscent(NamedTuple):
    """Where searches ended."""

    position: Tensor  # (C, D)
    log_density: Tensor  # (C,)
    num_gradients: int  # of single rows


def ascend_together(
    density: LogDensity, start: Tensor, covariance: Tensor, *, rise: float = 0.02, max_iterations: int = 30
) -> JointAscent:
    """Local maxima near ``start``, by BFGS; a search that has ended leaves the batch.

    Where the inverse of minus the Hessian is known nearly, a search takes three to ten gradients.

    Args:
        density: with a gradient, on ``(C, D)``.
        start: ``(C, D)``; a search that begins where the density is zero stays there.
        covariance: first inverses of minus the Hessian ``(C, D, D)``, positive definite.
        rise: in nats; a search ends where Newton's step promises less.
        max_iterations: gradients of a row after the first.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> normal = AutogradDensity(lambda x: -0.5 * (x - 1).square().sum(-1))
        >>> found = ascend_together(normal, torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2))
        >>> found.position[0], found.num_gradients
        (tensor([1., 1.]), 6)
    """
    position, inverse = start.clone(), covariance.clone()
    value, gradient = density.value_and_grad(position)
    count, length = len(start), torch.ones_like(value)
    active = torch.isfinite(value)
    for _ in range(max_iterations):
        direction = (inverse @ gradient.unsqueeze(-1)).squeeze(-1)
        promised = (direction * gradient).sum(-1)  # twice Newton's rise
        active = active & (promised > 2 * rise) & (length > _SHORTEST)
        rows = active.nonzero().squeeze(-1)
        if not len(rows):
            break
        share = length[rows] * (_LONGEST / promised[rows].sqrt()).clamp_max(1.0)
        step = share.unsqueeze(-1) * direction[rows]
        new_value, new_gradient = density.select(rows).value_and_grad(position[rows] + step)
        count += len(rows)
        possible = torch.isfinite(new_value)
        taken = possible & (new_value >= value[rows] + _ENOUGH_RISE * share * promised[rows])
        # Steps that are refused tell of the curvature as well.
        learned = _learned(inverse[rows], step, gradient[rows] - new_gradient)
        inverse[rows] = torch.where(possible[:, None, None], learned, inverse[rows])
        position[rows] += torch.where(taken.unsqueeze(-1), step, 0.0)
        gradient[rows] = torch.where(taken.unsqueeze(-1), new_gradient, gradient[rows])
        value[rows] = torch.where(taken, new_value, value[rows])
        length[rows] = torch.where(taken, torch.ones_like(share), _SHORTER * length[rows])
    return JointAscent(position, value, count)


def _learned(inverse: Tensor, step: Tensor, fall: Tensor) -> Tensor:
    """The update of BFGS (Nocedal & Wright 2006, eq. 6.17), damped where the density curves less than a fifth as much as it did.

    So the inverse stays positive definite where the density curves upwards, and steps grow there (Powell's damping, ibid., 18.3).
    """
    expected = torch.linalg.solve(inverse, step.unsqueeze(-1)).squeeze(-1)
    along, before = (step * fall).sum(-1, keepdim=True), (step * expected).sum(-1, keepdim=True)
    share = torch.where(along < _LEAST_CURVATURE * before, (1 - _LEAST_CURVATURE) * before / (before - along), 1.0)
    fall = share * fall + (1 - share) * expected
    ratio = (1 / (step * fall).sum(-1))[:, None, None]
    unit = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
    left = unit - ratio * step.unsqueeze(-1) * fall.unsqueeze(-2)
    return left @ inverse @ left.mT + ratio * step.unsqueeze(-1) * step.unsqueeze(-2)
