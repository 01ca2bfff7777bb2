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
# Bumps of a line, at any height, from which on it is looked at by finer steps, while these find more and down to the finest. With a
# period among the hyperparameters peaks are narrow: of 150 years, period 10.9, a tenth of a deviation of a prior from 2 to 40.
_ROUGH, _FINEST = 3, 2.0**-7
# Of such a line's bumps as many of the highest begin searches, which may gain much: one of 13 nats below the best gained nine.
_MOST_BUMPS, _FAR_BELOW_ROUGH = 8, 30.0
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
    density: LogDensity,
    modes: list[Mode],
    *,
    reach: float,
    through: Tensor | None = None,
    rough_alone: bool = False,
    resolution: Resolution = _USUAL,
) -> list[Mode]:
    """``modes``, and those that searches from bumps on lines through the best along each coordinate end at, best first.

    Searches from the best of many draws may all end in one lobe: of 200 counts, many of the same inputs, one of short lengthscales
    had a sixth of the mass, three deviations from the prior's median, and no draw near it. A period's lobes, among them those of
    its multiples, are so narrow that lines with many bumps are looked at by finer steps.

    Args:
        density: with a gradient, on ``(C, D)``.
        modes: as :func:`find_modes` has them.
        reach: how far lines go, from -reach to reach of a coordinate.
        through: points ``(number, D)``, all bumps on lines through which count, too; they need not be modes.
        rough_alone: search from bumps of lines that have many, and no others.
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
        values = _valued(density, _on_lines(centre, line)) - best.log_density
        for coordinate, value in enumerate(values):
            along = _Line(centre, coordinate, line, value)
            places = [] if rough_alone else along.bumps(_FAR_BELOW, parted=number == 0)
            if number == 0 and len(along.heights()) >= _ROUGH:
                along = _resolved(density, along, best.log_density)
                places = sorted(along.bumps(_FAR_BELOW_ROUGH), key=lambda place: -float(along.value[place]))[:_MOST_BUMPS]
            starts += list(along.points()[places])
    return modes_from(density, modes, torch.stack(starts), resolution=resolution) if starts else modes


def modes_from(density: LogDensity, modes: list[Mode], starts: Tensor, *, resolution: Resolution = _USUAL) -> list[Mode]:
    """``modes``, and those that searches from further starts end at, best first.

    Args:
        density: with a gradient, on ``(C, D)``.
        modes: as :func:`find_modes` has them.
        starts: ``(number, D)``.
        resolution: as of :func:`find_modes`.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> density = AutogradDensity(lambda x: torch.logaddexp(-8 * (x - 1).square(), -8 * (x + 2).square()).sum(-1))
        >>> one = find_modes(density, torch.tensor([[0.5]]).double())
        >>> sorted(round(float(mode.position), 2) for mode in modes_from(density, one, torch.tensor([[0.9], [-1.7]]).double()))
        [-2.0, 1.0]
    """
    others = find_modes(density, starts, resolution=resolution)
    return _that_matter([*modes, *(mode for mode in others if not any(_same(mode.position, known) for known in modes))])


def _valued(density: LogDensity, points: Tensor) -> Tensor:
    """The density at ``(..., D)``, some points at once: ``(...)``."""
    return torch.cat([density(part) for part in points.flatten(0, -2).split(_AT_ONCE)]).view(points.shape[:-1])


def _on_lines(centre: Tensor, line: Tensor) -> Tensor:
    """Points ``(D, number, D)``: one coordinate after another takes the values of ``line``, the others are the centre's."""
    return torch.stack([_on_line(centre, coordinate, line) for coordinate in range(len(centre))])


def _on_line(centre: Tensor, coordinate: int, line: Tensor) -> Tensor:
    points = centre.repeat(len(line), 1)
    points[:, coordinate] = line
    return points


class _Line(NamedTuple):
    """The density along one coordinate, through a centre."""

    centre: Tensor  # (D,)
    coordinate: int
    line: Tensor  # (number,), values of the coordinate
    value: Tensor  # (number,), log density over the best mode's

    def points(self) -> Tensor:
        """``(number, D)``."""
        return _on_line(self.centre, self.coordinate, self.line)

    def bumps(self, far_below: float, parted: bool = True) -> list[int]:
        """Places of maxima, as :func:`_bumps`; ``parted`` from the centre, which is a mode then."""
        middle = int((self.line - self.centre[self.coordinate]).abs().argmin()) if parted else None
        return _bumps(self.value.tolist(), middle, far_below)

    def heights(self) -> list[float]:
        """Of all bumps, the highest first."""
        return self.value[self.bumps(math.inf)].sort(descending=True).values.tolist()


def _resolved(density: LogDensity, along: _Line, height: Tensor) -> _Line:
    """The line by steps half as long, and so on, while these show more bumps, or higher ones."""
    found, known = along.heights(), [-math.inf]
    while _shows_more(found, known) and float(along.line[1] - along.line[0]) > _FINEST:
        between = along._replace(line=0.5 * (along.line[1:] + along.line[:-1]))
        value = _valued(density, between.points()) - height
        line, order = torch.cat([along.line, between.line]).sort()
        along = along._replace(line=line, value=torch.cat([along.value, value])[order])
        found, known = along.heights(), found
    return along


def _shows_more(heights: list[float], before: list[float]) -> bool:
    """Whether there are more of them, or one of the highest is higher by what matters."""
    highest = zip(heights[:_MOST_BUMPS], before, strict=False)
    return len(heights) > len(before) or any(height > known + _VALLEY for height, known in highest)


def _bumps(along: list[float], middle: int | None, far_below: float = _FAR_BELOW) -> list[int]:
    """Places of maxima of a line that are not too low to matter and, if it has a ``middle``, that a valley parts from that."""
    found = []
    for place in range(len(along)):
        neighbours = along[max(0, place - 1) : place + 2]
        valley = -math.inf if middle is None else min(along[min(place, middle) : max(place, middle) + 1])
        if along[place] == max(neighbours) and along[place] > max(valley + _VALLEY, -far_below):
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
