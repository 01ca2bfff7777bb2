"""L-BFGS (scipy) on log densities: the one objective that fits and searches for modes share."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from torchgpmc.numerics.threads import one_blas_thread
from torchgpmc.types import LogDensity

_ALIKE = 3  # evaluations in a row: of two the second may be a small first step
_IMPOSSIBLE = 1e3  # nats below the start: a line search that fits a polynomial to a larger number moves no more


class Ascent(NamedTuple):
    """Where a search ended."""

    position: Tensor  # (D,), within the bounds
    log_density: float
    converged: bool


def ascend(
    density: LogDensity,
    start: Tensor,
    *,
    bound: float,
    max_iterations: int,
    slope: float | None = None,
    gain: float | None = None,
) -> Ascent | None:
    """A local maximum of a log density near ``start`` ``(D,)``; ``None`` where its value there is not finite.

    Args:
        density: with a gradient, on ``(C, D)``.
        start: moved within the bounds.
        bound: of every coordinate's absolute value; beyond it the density is that at the bound, less a parabola that leads back.
        max_iterations: of L-BFGS-B.
        slope: the search ends where no partial derivative is larger; scipy's own by default.
        gain: in log density, what can be told from nothing: the search ends where three evaluations in a row differ by less.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> normal = AutogradDensity(lambda x: -0.5 * (x - 1).square().sum(-1))
        >>> found = ascend(normal, torch.zeros(2).double(), bound=5.0, max_iterations=50)
        >>> found.position.round(decimals=4), found.converged
        (tensor([1., 1.], dtype=torch.float64), True)
    """
    objective = _Objective(density, start, bound, gain)
    begin = start.clamp(-bound, bound).double().cpu().numpy()
    first, _ = objective(begin)
    if not math.isfinite(first):
        return None
    options = {"maxiter": max_iterations} | ({} if slope is None else {"gtol": slope})
    try:
        with one_blas_thread():
            # No bounds for scipy: given them on every side, its first step goes all the way to one of them.
            result = scipy.optimize.minimize(objective, begin, jac=True, method="L-BFGS-B", options=options)
        end, value, converged = result.x, -float(result.fun), bool(result.success)
    except _Settled:
        end, value, converged = *objective.best, True
    return Ascent(torch.as_tensor(end).to(start).clamp(-bound, bound), value, converged)


class _Settled(Exception):  # noqa: N818 (no error)
    """No evaluation of late differed from the best by what can be told. scipy's line search would try twenty, and twenty again."""


class _Objective:
    """Minus the log density, for scipy: infinite where the first evaluation fails, where a later one does far above the first."""

    def __init__(self, density: LogDensity, like: Tensor, bound: float, gain: float | None):
        self._density, self._like, self._bound, self._gain = density, like, bound, gain
        self._impossible = math.inf
        self._first: tuple[np.ndarray, tuple[float, np.ndarray]] | None = None
        self._alike = 0  # evaluations in a row that are as high as the best
        self.best = (np.empty(0), -math.inf)  # position and log density

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        if self._first is not None and np.array_equal(x, self._first[0]):
            return self._first[1]  # scipy begins with what the caller has looked at
        inside = x.clip(-self._bound, self._bound)
        value, gradient = self._density.value_and_grad(torch.as_tensor(inside).to(self._like)[None])
        if not bool(torch.isfinite(value)):
            return self._impossible, np.zeros_like(x)
        if math.isinf(self._impossible):
            self._impossible = _IMPOSSIBLE - float(value)
        beyond = x - inside
        slope = np.where(beyond == 0, -gradient[0].double().cpu().numpy(), beyond)
        height = float(value) - 0.5 * float(beyond @ beyond)
        self._note(x, height)
        if self._first is None:
            self._first = x.copy(), (-height, slope)
        return -height, slope

    def _note(self, x: np.ndarray, height: float) -> None:
        best = self.best[1]
        self._alike = self._alike + 1 if self._gain is not None and abs(height - best) < self._gain else 0
        if height > best:
            self.best = x.copy(), height
        if self._alike == _ALIKE:
            raise _Settled
