"""Box probabilities of up to three variables by nested quadrature: no random numbers, and errors at rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchgpmc.numerics.special import LOG_SQRT_2PI, log_ndtr_interval
from torchgpmc.numerics.threads import slices
from torchgpmc.orthant.problem import OrthantEstimate, Problem, select
from torchgpmc.orthant.separation import separate
from torchgpmc.orthant.weighting import check_points

MAX_VARIABLES = 3
# Of the log of a probability; what the tests hold the rule to.
ERROR = 1e-9

_SPACING, _REACH = 1 / 10, 3.2  # of the double exponential rule
_DROPS = (1.0, 42.0)  # nats below the highest point where pieces end; what lies beyond the last is negligible
_DOUBLINGS = 24  # of steps away from the mode, the first of 0.5
_SECTIONS = 8  # into which a round cuts a bracket
_MODE_ROUNDS, _END_ROUNDS = 9, 6  # to some 1e-5 of the width
_CHUNK_ELEMENTS = 2**21  # nodes at once, over all problems


@dataclass(frozen=True)
class Quadrature:
    r"""Of up to three variables, each integrated given those before it.

    .. math:: P(l < x < u) = \int_{l_1}^{u_1} N(x_1) \, P(l_{2:} < x_{2:} < u_{2:} \mid x_1) \, dx_1

    The integrand is log-concave (Prekopa 1973), so it has one mode, and where it falls steeply it soon ends: what needs fine nodes
    is near the mode, near the ends, and where falling begins. The double exponential rule (Takahasi & Mori 1974) has them near the
    ends of pieces, which meet at the mode and at the points a nat below it. In logarithms throughout, so that tails keep their
    relative accuracy; correlations within 1e-7 of one cost digits. Two variables take milliseconds, three a tenth of a second a
    problem. ``num_points`` and ``generator`` do not matter.

    Example:
        >>> import torch
        >>> from torchgpmc.orthant import log_probability
        >>> covariance = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
        >>> round(float(log_probability(covariance, lower=0.0, method=Quadrature()).value.exp()), 10)  # 1/4 + asin(1/2) / (2 pi)
        0.3333333333
    """

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """The logs of the probabilities, to about 1e-9."""
        check_points(num_points, 2)
        size = problem.lower.shape[-1]
        if size > MAX_VARIABLES:
            raise ValueError(
                f"Quadrature serves up to {MAX_VARIABLES} variables and the problem has {size}. Expected fewer; use "
                f"SeparationOfVariables()."
            )
        at_once = max(1, _CHUNK_ELEMENTS // (4 * len(_rule()[0])) ** (size - 1))
        value = torch.cat([_value(select(problem, rows)) for rows in slices(len(problem.lower), at_once)])
        none = torch.full_like(value.detach(), torch.nan)
        return OrthantEstimate(value, torch.full_like(none, ERROR**2), none, none, torch.zeros_like(none))


def _value(problem: Problem) -> Tensor:
    """Logs of probabilities ``(B,)``, derivatives worked out at once so that no graph of all nodes is kept."""
    parts = separate(problem)
    wanted = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    leaves = [part.detach().double().requires_grad_(wanted) for part in parts]
    with torch.set_grad_enabled(wanted):
        found = _log_probability(*leaves)
    value = found.detach().to(problem.lower.dtype)
    if not wanted:
        return value
    linear = torch.zeros_like(value)
    for part, slope in zip(parts, torch.autograd.grad(found.sum(), leaves, allow_unused=True), strict=True):
        if slope is not None:  # the rows of a single variable
            linear = linear + torch.where(torch.isfinite(part.detach()), part * slope.to(part), 0.0).flatten(1).sum(-1)
    return value + (linear - linear.detach())


def _log_probability(rows: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Log probability ``(B,)`` that standard normal z hold their limits; arguments as in ``separation.Separated``."""
    low, high = lower[:, 0], upper[:, 0]
    if lower.shape[-1] == 1:
        return log_ndtr_interval(low, high)
    rest, slope = rows[:, 1:, 1:], rows[:, 1:, 0]

    def log_density(z: Tensor) -> Tensor:
        """Of z_1 ``(B, Q)`` together with the other limits' holding."""
        shift = z.unsqueeze(-1) * slope.unsqueeze(1)
        below, above = lower[:, None, 1:] - shift, upper[:, None, 1:] - shift
        count = z.shape[-1]
        inner = _log_probability(rest.repeat_interleave(count, 0), below.flatten(0, 1), above.flatten(0, 1))
        return inner.view(z.shape) - 0.5 * z.square() - LOG_SQRT_2PI

    with torch.no_grad():
        ends = _pieces(log_density, low, high)
    # Where an end is a limit it moves with it.
    ends = torch.where(
        ends == low.unsqueeze(-1), low.unsqueeze(-1), torch.where(ends == high.unsqueeze(-1), high.unsqueeze(-1), ends)
    )
    begin, width = ends[:, :-1].unsqueeze(-1), ends.diff(dim=-1).unsqueeze(-1)
    share, log_weight = (torch.as_tensor(part, dtype=low.dtype, device=low.device) for part in _rule())
    # An empty piece has log width -inf, and no derivative.
    log_width = torch.where(width > 0, width.clamp_min(1e-300).log(), -torch.inf)
    value = log_density((begin + width * share).flatten(1)) + (log_width + log_weight).flatten(1)
    return torch.logsumexp(value, -1)


@lru_cache(maxsize=1)
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Nodes on (0, 1) and logs of weights of the double exponential rule."""
    t = np.arange(-_REACH, _REACH + _SPACING / 2, _SPACING)
    inner = 0.5 * math.pi * np.sinh(t)
    weight = _SPACING * 0.25 * math.pi * np.cosh(t) / np.cosh(inner) ** 2
    return 1 / (1 + np.exp(-2 * inner)), np.log(weight / weight.sum())


def _pieces(log_density: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Of B concave functions on (low, high), each ``(B,)``: where pieces of them begin and end, ``(B, 5)``.

    The mode in the middle, beside it where a function is a nat lower, and outermost where it is negligible. Many points at once and
    few rounds, since functions may themselves be integrals.
    """
    low, high = low.unsqueeze(-1), high.unsqueeze(-1)
    steps = 2.0 ** torch.arange(-1, _DOUBLINGS, dtype=low.dtype, device=low.device)
    away = torch.cat([-steps.flip(0), steps.new_zeros(1), steps])
    share = torch.linspace(0, 1, _SECTIONS + 1, dtype=low.dtype, device=low.device)
    points = (torch.zeros_like(low).clamp(low, high) + away).clamp(low, high)
    for _ in range(_MODE_ROUNDS):
        value = log_density(points)
        mode, top = points.gather(1, value.argmax(1, keepdim=True)), value.amax(1, keepdim=True)
        left = torch.where(points < mode, points, -torch.inf).amax(1, keepdim=True).maximum(points[:, :1])
        right = torch.where(points > mode, points, torch.inf).amin(1, keepdim=True).minimum(points[:, -1:])
        points = left + (right - left) * share
    levels = top.unsqueeze(-1) - torch.tensor(_DROPS, dtype=low.dtype, device=low.device).view(1, -1, 1)
    # Outwards on both sides: (B, 4, points), the left ones first; within a level until the first point that is not.
    outwards = (mode.unsqueeze(-1) + torch.stack([-steps, steps])).clamp(low.unsqueeze(-1), high.unsqueeze(-1))
    points = torch.cat([mode.unsqueeze(-1).expand(-1, 2, 1), outwards], -1).repeat_interleave(len(_DROPS), 1)
    levels = levels.repeat(1, 2, 1)
    for _ in range(_END_ROUNDS):
        last = points.shape[-1] - 1
        count = (log_density(points.flatten(1)).view_as(points) >= levels).sum(-1, keepdim=True).clamp_min(1)
        inside, outside = points.gather(-1, count - 1), points.gather(-1, count.clamp_max(last))
        points = inside + (outside - inside) * share
    return torch.cat([outside.squeeze(-1), mode], 1).sort(dim=1).values
