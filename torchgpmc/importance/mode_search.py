"""Modes of a log density with their curvature, by L-BFGS from several starts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.ascent import ascend
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.types import LogDensity, Resolution

_SAME_MODE = 0.5  # distance in standard deviations
_FAR_BELOW = 12.0  # a mode this much lower in log density holds no mass worth a component
_LINE_STEP, _AT_ONCE = 0.5, 50  # of lines: between points, and how many are evaluated at once
_VALLEY = 0.5  # nats below a bump, more than values are off where approximations are found roughly
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
        ascent = ascend(density, start, bound=bound, max_iterations=max_iterations, slope=resolution.slope, gain=resolution.gain)
        if ascent is None:
            continue
        position = ascent.position
        if not any(_same(position, other) for other in found):
            mode = _mode_at(density, position, resolution.step)
            if mode is not None:
                found.append(mode)
    return _that_matter(found)


def further_modes(
    density: LogDensity, modes: list[Mode], *, reach: float, through: Tensor | None = None, resolution: Resolution = _USUAL
) -> list[Mode]:
    """``modes``, and those that searches from bumps on lines through the best along each coordinate end at, best first.

    Searches from the best of many draws may all end in one lobe: of 200 counts, many of the same inputs, one of short lengthscales
    had a sixth of the mass, three deviations from the prior's median, and no draw near it.

    Args:
        density: with a gradient, on ``(C, D)``.
        modes: as :func:`find_modes` has them.
        reach: how far lines go, from -reach to reach of a coordinate.
        through: points ``(number, D)``, all bumps on lines through which count, too; they need not be modes.
        resolution: as of :func:`find_modes`.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> def two_humps(x):
        ...     return torch.logaddexp(-0.5 * (4 * (x - 1)).square(), -0.5 * (4 * (x + 2)).square()).sum(-1)
        >>> density = AutogradDensity(two_humps)
        >>> one = find_modes(density, torch.tensor([[0.5]]).double())
        >>> sorted(round(float(mode.position), 2) for mode in further_modes(density, one, reach=4.0))
        [-2.0, 1.0]
    """
    best = modes[0]
    line = torch.arange(-reach, reach + _LINE_STEP / 2, _LINE_STEP).to(best.position)
    starts: list[Tensor] = []
    for number, centre in enumerate([best.position, *([] if through is None else through)]):
        points = _on_lines(centre, line)
        value = torch.cat([density(part) for part in points.flatten(0, 1).split(_AT_ONCE)]).view(len(centre), -1)
        for coordinate, along in enumerate((value - best.log_density).tolist()):
            middle = int((line - centre[coordinate]).abs().argmin()) if number == 0 else None
            starts += [points[coordinate, place] for place in _bumps(along, middle)]
    if not starts:
        return modes
    others = find_modes(density, torch.stack(starts), resolution=resolution)
    return _that_matter([*modes, *(mode for mode in others if not any(_same(mode.position, known) for known in modes))])


def _on_lines(centre: Tensor, line: Tensor) -> Tensor:
    """Points ``(D, number, D)``: one coordinate after another takes the values of ``line``, the others are the centre's."""
    size = len(centre)
    points = centre.repeat(size, len(line), 1)
    points[torch.arange(size), :, torch.arange(size)] = line
    return points


def _bumps(along: list[float], middle: int | None) -> list[int]:
    """Places of maxima of a line that are not too low to matter and, if it has a ``middle``, that a valley parts from that."""
    found = []
    for place in range(len(along)):
        neighbours = along[max(0, place - 1) : place + 2]
        valley = -math.inf if middle is None else min(along[min(place, middle) : max(place, middle) + 1])
        if along[place] == max(neighbours) and along[place] > max(valley + _VALLEY, -_FAR_BELOW):
            found.append(place)
    return found


def _that_matter(modes: list[Mode]) -> list[Mode]:
    found = sorted(modes, key=lambda mode: -float(mode.log_density))
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
