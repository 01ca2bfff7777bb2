"""Where a density holds more mass far from its mode than the mode's curvature says, coordinate by coordinate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.importance.mode_search import Mode
from torchgpmc.numerics.joint_ascent import ascend_together
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.types import LogDensity

_REACHES = (4.0, 8.0, 16.0)  # deviations of the mode's curvature; nearer, its own component has draws
_TETHER = 0.125  # deviation of a tether, of its reach: a mode between two reaches draws either of them
_EXCESS = 2.0  # nats above what the curvature predicts
_NEGLIGIBLE = 10.0  # nats of mass below the mode's
_SAME = 1.0  # distance of components that are one, in deviations of either
_STEP = 1e-4


class TetheredDensity(NamedTuple):
    """A log density plus, for each row, a normal one of one coordinate."""

    density: LogDensity
    coordinate: Tensor  # (C,), whole
    centre: Tensor  # (C,)
    deviation: Tensor  # (C,)

    def __call__(self, position: Tensor) -> Tensor:
        return self.density(position) - 0.5 * self._gap(position).square()

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and its gradient ``(C, D)``."""
        value, gradient = self.density.value_and_grad(position)
        gap = self._gap(position)
        pull = torch.where(torch.isfinite(value), gap / self.deviation, 0.0)
        return value - 0.5 * gap.square(), gradient.scatter_add(-1, self.coordinate.unsqueeze(-1), -pull.unsqueeze(-1))

    def select(self, rows: Tensor) -> TetheredDensity:
        """The same for some of the rows."""
        return TetheredDensity(self.density.select(rows), self.coordinate[rows], self.centre[rows], self.deviation[rows])

    def _gap(self, position: Tensor) -> Tensor:
        return (position.gather(-1, self.coordinate.unsqueeze(-1)).squeeze(-1) - self.centre) / self.deviation


def search_tails(density: LogDensity, mode: Mode, *, bound: float = 4.0) -> list[Mode]:
    r"""Places that hold mass of which the normal approximation at a mode does not tell, largest mass first; maybe none.

    Each coordinate in turn is tethered 4, 8 and 16 of its deviations above the mode, and below, by a normal density
    :math:`N(x_d; m_d \pm k s_d, (k s_d / 8)^2)`, the others free to follow: the maximum then lies on the density's profile along
    that coordinate, wherever that bends, or in another lobe. Where its log density is 2 nats or more above the quadratic around the
    mode, the approximation is wrong, and the place is a component's centre.

    Args:
        density: with a gradient, on ``(C, D)``.
        mode: where the searches begin.
        bound: of every tether's absolute value.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> lobes = AutogradDensity(lambda x: torch.logaddexp(-50 * x.square().sum(-1), -1 - 50 * (x - 0.6).square().sum(-1)))
        >>> mode = Mode(torch.zeros(2).double(), torch.zeros(()).double(), 0.01 * torch.eye(2).double())
        >>> print([round(value, 1) for value in search_tails(lobes, mode)[0].position.tolist()])
        [0.7, 0.6]
    """
    centre, size = mode.position, len(mode.position)
    precision = torch.linalg.inv(mode.covariance)
    coordinate = torch.arange(size, device=centre.device).repeat(2)
    sign = torch.ones_like(centre).repeat(2)
    sign[size:] = -1.0
    deviation = mode.covariance.diagonal().sqrt()[coordinate]
    position, found = centre.repeat(2 * size, 1), []
    for reach in _REACHES:
        tether = TetheredDensity(density, coordinate, centre[coordinate] + sign * reach * deviation, _TETHER * reach * deviation)
        within = (tether.centre.abs() <= bound).nonzero().squeeze(-1)
        # Past the bound nothing is looked for; what has been found nearer is where the next search along a coordinate begins.
        tether = tether.select(within)
        held = torch.diag_embed(torch.nn.functional.one_hot(tether.coordinate, size) / tether.deviation.square().unsqueeze(-1))
        covariance = torch.linalg.inv(precision + held)
        start = _on_tether(position[within], mode.covariance, tether)
        ascent = ascend_together(tether, start, covariance)
        position[within] = ascent.position
        found += _unexpected(tether, ascent.position, mode, precision)
    return _apart(found)


def _on_tether(position: Tensor, covariance: Tensor, tether: TetheredDensity) -> Tensor:
    """Moved to the tether's centre, the other coordinates as far as the mode's curvature has them follow."""
    column = covariance[tether.coordinate]
    moved = tether.centre - position.gather(-1, tether.coordinate.unsqueeze(-1)).squeeze(-1)
    return position + column * (moved / column.gather(-1, tether.coordinate.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)


def _unexpected(tether: TetheredDensity, position: Tensor, mode: Mode, precision: Tensor) -> list[Mode]:
    """Those of the searches' ends that the mode's curvature does not explain, with the curvature there, tether included."""
    value = tether.density(position)
    gap = position - mode.position
    drop = value - mode.log_density
    keep = (drop > -_NEGLIGIBLE) & (drop + 0.5 * ((gap @ precision) * gap).sum(-1) > _EXCESS)
    found = []
    for row in keep.nonzero().squeeze(-1):
        # A component that is narrower than the tethers are apart would leave gaps between two of them.
        there = tether.select(row[None])
        there = there._replace(deviation=4 * there.deviation)
        covariance = _covariance_at(there, position[row])
        mass = drop[row] + 0.5 * (torch.logdet(covariance) - torch.logdet(mode.covariance))
        if mass > -_NEGLIGIBLE:
            found.append(Mode(position[row], value[row], covariance))
    return found


def _covariance_at(tether: TetheredDensity, position: Tensor) -> Tensor:
    """Inverse of minus the Hessian, by forward differences of gradients; where that is flat or hollow, as under N(0, I)."""
    size = len(position)
    points = torch.cat([position[None], position + _STEP * identity_matrix(size, position)])
    rows = torch.zeros(size + 1, dtype=torch.long, device=position.device)
    _, gradient = tether.select(rows).value_and_grad(points)
    precision = -(gradient[1:] - gradient[0]) / _STEP
    level, axes = torch.linalg.eigh(torch.nan_to_num(0.5 * (precision + precision.mT)))
    return (axes / level.clamp_min(1.0)) @ axes.mT


def _apart(found: list[Mode]) -> list[Mode]:
    """Without those that lie within one deviation of another with more mass."""
    found = sorted(found, key=lambda arm: -float(arm.log_density + 0.5 * torch.logdet(arm.covariance)))
    kept: list[Mode] = []
    for arm in found:
        gaps = [arm.position - other.position for other in kept]
        near = (
            float(gap @ torch.linalg.solve(place.covariance, gap)) < _SAME**2
            for gap, other in zip(gaps, kept, strict=True)
            for place in (arm, other)
        )
        if not any(near):
            kept.append(arm)
    return kept
