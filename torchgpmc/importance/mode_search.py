"""Modes of a log density with their curvature, by L-BFGS from several starts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.ascent import ascend
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.types import LogDensity, Resolution

_SAME_MODE = 0.5  # distance in standard deviations
_FAR_BELOW = 12.0  # a mode this much lower in log density holds no mass worth a component
_USUAL = Resolution()  # a proposal's centre needs no more


class Mode(NamedTuple):
    """A local maximum.

    Example:
        >>> import torch
        >>> narrow = Mode(torch.zeros(1), torch.tensor(0.0), torch.tensor([[1.0]]))
        >>> wide = Mode(torch.ones(1), torch.tensor(0.0), torch.tensor([[4.0]]))  # as high, of twice the deviation
        >>> (wide.log_mass - narrow.log_mass).exp().round()
        tensor(2.)
    """

    position: Tensor  # (D,)
    log_density: Tensor  # ()
    covariance: Tensor  # (D, D), the inverse of minus the Hessian

    @property
    def log_mass(self) -> Tensor:
        """By Laplace's integral, but for a constant, ``()``."""
        return self.log_density + 0.5 * torch.logdet(self.covariance)


def find_modes(
    density: LogDensity, starts: Tensor, *, bound: float = 15.0, max_iterations: int = 200, resolution: Resolution = _USUAL
) -> list[Mode]:
    """Distinct modes, best first; empty where none was found with a negative definite Hessian.

    Args:
        density: with a gradient, on ``(C, D)``.
        starts: ``(number, D)``.
        bound: of every coordinate's absolute value.
        max_iterations: of each run of L-BFGS-B (scipy).
        resolution: of the gradient: where searches end, and the step of curvatures' differences.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> def two_humps(x):  # of deviations 1 and 1/2, the second twice as high
        ...     return torch.logaddexp(-0.5 * (x - 5).square(), -2 * (x + 5).square() + torch.tensor(2.0).log()).sum(-1)
        >>> found = find_modes(AutogradDensity(two_humps), torch.tensor([[-3.0], [3.0], [4.0]]).double())
        >>> [(round(float(mode.position), 3), round(float(mode.covariance), 3)) for mode in found]
        [(-5.0, 0.25), (5.0, 1.0)]
    """
    found: list[Mode] = []
    for start in starts:
        ascent = ascend(density, start, bound=bound, max_iterations=max_iterations, slope=resolution.slope)
        if ascent is None:
            continue
        position = ascent.position
        if not any(_same(position, other) for other in found):
            mode = _mode_at(density, position, resolution.step)
            if mode is not None:
                found.append(mode)
    found.sort(key=lambda mode: -float(mode.log_density))
    return [mode for mode in found if float(found[0].log_density - mode.log_density) < _FAR_BELOW]


def _mode_at(density: LogDensity, position: Tensor, step: float) -> Mode | None:
    """The mode with its Hessian by central differences of the gradient, all in one batch."""
    size = len(position)
    steps = step * identity_matrix(size, position)
    value, gradient = density.value_and_grad(torch.cat([position[None], position + steps, position - steps]))
    if not bool(torch.isfinite(value).all()):
        return None
    hessian = (gradient[1 : size + 1] - gradient[size + 1 :]) / (2 * step)
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
