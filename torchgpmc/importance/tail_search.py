"""Where a density holds more mass far from its mode than the mode's curvature says, coordinate by coordinate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.importance.mode_search import Mode
from torchgpmc.numerics.joint_ascent import JointAscent, ascend_together
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.types import LogDensity, Resolution

_REACHES = (4.0, 8.0, 16.0)  # deviations of the mode's curvature; nearer, its own component has draws
_TETHER = 0.125  # deviation of a tether, of its reach: a mode between two reaches draws either of them
_WIDER = 4.0  # of a component, than the tether
_EXCESS = 2.0  # nats above what the curvature predicts
_NEGLIGIBLE = 10.0  # nats of mass below the mode's
_SAME = 1.0  # distance of components that are one, in deviations of either
_USUAL = Resolution()


class TetheredDensity(NamedTuple):
    """A log density plus, for each row, a normal one of one coordinate."""

    density: LogDensity
    coordinate: Tensor  # (C,), whole
    centre: Tensor  # (C,)
    deviation: Tensor  # (C,)

    def __call__(self, position: Tensor) -> Tensor:
        return self.density(position) - 0.5 * self.gap(position).square()

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and its gradient ``(C, D)``."""
        value, gradient = self.density.value_and_grad(position)
        gap = self.gap(position)
        pull = torch.where(torch.isfinite(value), gap / self.deviation, 0.0)
        return value - 0.5 * gap.square(), gradient.scatter_add(-1, self.coordinate.unsqueeze(-1), -pull.unsqueeze(-1))

    def select(self, rows: Tensor) -> TetheredDensity:
        """The same for some of the rows."""
        return TetheredDensity(self.density.select(rows), self.coordinate[rows], self.centre[rows], self.deviation[rows])

    def gap(self, position: Tensor) -> Tensor:
        """Of each row from its tether's centre ``(C,)``, in deviations."""
        return (position.gather(-1, self.coordinate.unsqueeze(-1)).squeeze(-1) - self.centre) / self.deviation


def search_tails(density: LogDensity, mode: Mode, *, bound: float = 4.0, resolution: Resolution = _USUAL) -> list[Mode]:
    r"""Places that hold mass of which the normal approximation at a mode does not tell, largest mass first; maybe none.

    Each coordinate in turn is tethered 4, 8 and 16 of its deviations above the mode, and below, by a normal density
    :math:`N(x_d; m_d \pm k s_d, (k s_d / 8)^2)`, the others free to follow: the maximum then lies on the density's profile along
    that coordinate, wherever that bends, or in another lobe. Where its log density is 2 nats or more above the quadratic around the
    mode, the approximation is wrong, and the place is a component's centre.

    Args:
        density: with a gradient, on ``(C, D)``.
        mode: where the searches begin.
        bound: of every tether's absolute value.
        resolution: of the gradient: the step of curvatures' differences.

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
    position = centre.repeat(2 * size, 1)
    found: list[_Place] = []
    for reach in _REACHES:
        tether = TetheredDensity(density, coordinate, centre[coordinate] + sign * reach * deviation, _TETHER * reach * deviation)
        within = (tether.centre.abs() <= bound).nonzero().squeeze(-1)
        if not len(within):
            break
        # Past the bound nothing is looked for; what has been found nearer is where the next search along a coordinate begins.
        tether = tether.select(within)
        held = torch.diag_embed(torch.nn.functional.one_hot(tether.coordinate, size) / tether.deviation.square().unsqueeze(-1))
        ascent = ascend_together(tether, _on_tether(position[within], mode.covariance, tether), torch.linalg.inv(precision + held))
        position[within] = ascent.position
        found += _unexpected(tether, ascent, mode, precision)
    # Curvatures cost more than all searches, so the lowest of many go without.
    found = sorted(found, key=lambda place: -place.drop)[: 2 * size]
    arms = [Mode(place.position, mode.log_density + place.drop, _covariance_at(place, resolution.step)) for place in found]
    return _apart([arm for arm in arms if float(arm.log_mass - mode.log_mass) > -_NEGLIGIBLE])


class _Place(NamedTuple):
    """Where a search ended."""

    position: Tensor  # (D,)
    drop: float  # of the log density, from the mode's
    tether: TetheredDensity  # of one row


def _on_tether(position: Tensor, covariance: Tensor, tether: TetheredDensity) -> Tensor:
    """Moved to the tether's centre, the other coordinates as far as the mode's curvature has them follow."""
    column = covariance[tether.coordinate]
    moved = tether.centre - position.gather(-1, tether.coordinate.unsqueeze(-1)).squeeze(-1)
    return position + column * (moved / column.gather(-1, tether.coordinate.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)


def _unexpected(tether: TetheredDensity, ascent: JointAscent, mode: Mode, precision: Tensor) -> list[_Place]:
    """Those of the searches' ends that the mode's curvature does not explain."""
    position, gap = ascent.position, ascent.position - mode.position
    drop = ascent.log_density + 0.5 * tether.gap(position).square() - mode.log_density
    keep = (drop > -_NEGLIGIBLE) & (drop + 0.5 * ((gap @ precision) * gap).sum(-1) > _EXCESS)
    # A component that is narrower than the tethers are apart would leave gaps between two of them.
    wide = tether._replace(deviation=_WIDER * tether.deviation)
    return [_Place(position[row], float(drop[row]), wide.select(row[None])) for row in keep.nonzero().squeeze(-1)]


def _covariance_at(place: _Place, step: float) -> Tensor:
    """Inverse of minus the Hessian, tether included, by forward differences; where that is flat or hollow, as under N(0, I)."""
    position, size = place.position, len(place.position)
    points = torch.cat([position[None], position + step * identity_matrix(size, position)])
    rows = torch.zeros(size + 1, dtype=torch.long, device=position.device)
    _, gradient = place.tether.select(rows).value_and_grad(points)
    precision = -(gradient[1:] - gradient[0]) / step
    level, axes = torch.linalg.eigh(torch.nan_to_num(0.5 * (precision + precision.mT)))
    return (axes / level.clamp_min(1.0)) @ axes.mT


def _apart(found: list[Mode]) -> list[Mode]:
    """Without those that lie within one deviation of another with more mass."""
    kept: list[Mode] = []
    for arm in sorted(found, key=lambda arm: float(arm.log_mass), reverse=True):
        gaps = [arm.position - other.position for other in kept]
        near = (
            float(gap @ torch.linalg.solve(place.covariance, gap)) < _SAME**2
            for gap, other in zip(gaps, kept, strict=True)
            for place in (arm, other)
        )
        if not any(near):
            kept.append(arm)
    return kept
