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

_IMPOSSIBLE = 1e3  # nats below the start: a line search that fits a polynomial to a larger number moves no more


class Ascent(NamedTuple):
    """Where a search ended."""

    position: Tensor  # (D,), within the bounds
    log_density: float
    converged: bool


def ascend(density: LogDensity, start: Tensor, *, bound: float, max_iterations: int, slope: float | None = None) -> Ascent | None:
    """A local maximum of a log density near ``start`` ``(D,)``; ``None`` where its value there is not finite.

    Args:
        density: with a gradient, on ``(C, D)``.
        start: moved within the bounds.
        bound: of every coordinate's absolute value; beyond it the density is that at the bound, less a parabola that leads back.
        max_iterations: of L-BFGS-B.
        slope: the search ends where no partial derivative is larger; scipy's own by default.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> normal = AutogradDensity(lambda x: -0.5 * (x - 1).square().sum(-1))
        >>> found = ascend(normal, torch.zeros(2).double(), bound=5.0, max_iterations=50)
        >>> found.position.round(decimals=4), found.converged
        (tensor([1., 1.], dtype=torch.float64), True)
    """
    objective = _Objective(density, start, bound)
    begin = start.clamp(-bound, bound).double().cpu().numpy()
    first, _ = objective(begin)
    if not math.isfinite(first):
        return None
    options = {"maxiter": max_iterations} | ({} if slope is None else {"gtol": slope})
    with one_blas_thread():
        # No bounds for scipy: given them on every side, its first step goes all the way to one of them.
        result = scipy.optimize.minimize(objective, begin, jac=True, method="L-BFGS-B", options=options)
    return Ascent(torch.as_tensor(result.x).to(start).clamp(-bound, bound), -float(result.fun), bool(result.success))


class _Objective:
    """Minus the log density, for scipy: infinite where the first evaluation fails, where a later one does far above the first."""

    def __init__(self, density: LogDensity, like: Tensor, bound: float):
        self._density, self._like, self._bound = density, like, bound
        self._impossible = math.inf

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        inside = x.clip(-self._bound, self._bound)
        value, gradient = self._density.value_and_grad(torch.as_tensor(inside).to(self._like)[None])
        if not bool(torch.isfinite(value)):
            return self._impossible, np.zeros_like(x)
        if math.isinf(self._impossible):
            self._impossible = _IMPOSSIBLE - float(value)
        beyond = x - inside
        slope = np.where(beyond == 0, -gradient[0].double().cpu().numpy(), beyond)
        return -float(value) + 0.5 * float(beyond @ beyond), slope
