"""Modes of a log density with their curvature, by L-BFGS from several starts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from torchgpmc.threads import one_blas_thread
from torchgpmc.types import LogDensity

_IMPOSSIBLE = 1e3  # nats below the start: a line search that fits a polynomial to a larger number moves no more
_SAME_MODE = 0.5  # distance in standard deviations
_FAR_BELOW = 12.0  # a mode this much lower in log density holds no mass worth a component
_STEP = 1e-4
_SLOPE = 1e-3  # of the log density, where a search may end: a proposal's centre needs no more


class Mode(NamedTuple):
    """A local maximum."""

    position: Tensor  # (D,)
    log_density: Tensor  # ()
    covariance: Tensor  # (D, D), the inverse of minus the Hessian


def find_modes(density: LogDensity, starts: Tensor, *, bound: float = 15.0, max_iterations: int = 200) -> list[Mode]:
    """Distinct modes, best first; empty where none was found with a negative definite Hessian.

    Args:
        density: with a gradient, on ``(C, D)``.
        starts: ``(number, D)``.
        bound: of every coordinate's absolute value.
        max_iterations: of each run of L-BFGS-B (scipy).
    """
    found: list[Mode] = []
    for start in starts:
        objective = _Objective(density, start, bound)
        if not objective.is_possible:
            continue
        with one_blas_thread():
            # Given bounds on every side, scipy's first step goes all the way to one of them; without, it has length one.
            result = scipy.optimize.minimize(
                objective,
                start.clamp(-bound, bound).cpu().numpy().astype(np.float64),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": max_iterations, "gtol": _SLOPE},
            )
        position = torch.as_tensor(result.x).to(start)
        if not any(_same(position, other) for other in found):
            mode = _mode_at(density, position)
            if mode is not None:
                found.append(mode)
    found.sort(key=lambda mode: -float(mode.log_density))
    return [mode for mode in found if float(found[0].log_density - mode.log_density) < _FAR_BELOW]


class _Objective:
    """Minus the log density, for scipy; where that is infinite or out of bounds, a value far above that of the start."""

    def __init__(self, density: LogDensity, start: Tensor, bound: float):
        self._density = density
        self._like = start
        self._bound = bound
        first = density(start.clamp(-bound, bound)[None])
        self.is_possible = bool(torch.isfinite(first))
        self._impossible = _IMPOSSIBLE - float(first)

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        if np.abs(x).max() > self._bound:
            return self._impossible, np.zeros_like(x)
        value, gradient = self._density.value_and_grad(torch.as_tensor(x).to(self._like)[None])
        if not bool(torch.isfinite(value)):
            return self._impossible, np.zeros_like(x)
        return -float(value), -gradient[0].double().cpu().numpy()


def _mode_at(density: LogDensity, position: Tensor) -> Mode | None:
    """The mode with its Hessian by central differences of the gradient, all in one batch."""
    size = len(position)
    step = _STEP * torch.eye(size).to(position)
    value, gradient = density.value_and_grad(torch.cat([position[None], position + step, position - step]))
    if not bool(torch.isfinite(value).all()):
        return None
    hessian = (gradient[1 : size + 1] - gradient[size + 1 :]) / (2 * _STEP)
    precision = -0.5 * (hessian + hessian.mT)
    smallest = torch.linalg.eigvalsh(precision).min()
    if not float(smallest) > 1e-6:
        return None
    covariance = torch.linalg.inv(precision)
    if (
        float(gradient[0] @ covariance @ gradient[0]) > _SAME_MODE**2
    ):  # Newton's step would lead elsewhere: the search was cut short
        return None
    return Mode(position, value[0], covariance)


def _same(position: Tensor, mode: Mode) -> bool:
    gap = position - mode.position
    return float(gap @ torch.linalg.solve(mode.covariance, gap)) < _SAME_MODE**2
