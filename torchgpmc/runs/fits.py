"""Where chains of [theta, v] begin around a variational fit: at each of its optima some, in the coordinates of the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.affine import AffineJointLogDensity
from torchgpmc.models.ridges import Ridges
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.runs.starts import positions_around
from torchgpmc.variational import Start


def around_fit(fit: Start, straight: Any, ridges: Ridges | None) -> AffineJointLogDensity:
    """The density ``straight`` of [theta, v], or of [z, v] with ridges, in coordinates that are white under a fit."""
    coordinates = fit.white_coordinates()
    return AffineJointLogDensity(straight, coordinates if ridges is None else ridges.straight_map(coordinates))


class Fits(NamedTuple):
    """The optima of a fit, around which chains begin.

    Args:
        fit: the best, in whose coordinates chains move.
        straight: the log density of [theta, v], or of [z, v].
        ridges: what z is, if it is.
        shared: a density as it is evaluated for so many chains.
    """

    fit: Start
    straight: Any
    ridges: Ridges | None
    shared: Callable[[Any, int], Any]

    def positions(self, num_chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions [theta, w] ``(C, P + V)``, those of the best optimum first, and the best fit's covariance."""
        parts = [
            self._around(optimum, count, generator)
            for optimum, count in zip(self.fit.optima, self.fit.chains_at(num_chains), strict=True)
            if count
        ]
        return torch.cat(parts), self._normal(self.fit)[1]

    def _around(self, optimum: Start, num_chains: int, generator: torch.Generator) -> Tensor:
        """Of the chains that begin at one optimum, spread in its own coordinates and mapped into the best one's."""
        density = around_fit(optimum, self.straight, self.ridges)
        shared, size = self.shared(density, num_chains), len(optimum.theta)
        position = positions_around(*self._normal(optimum), size, shared, num_chains, generator)
        if optimum is self.fit:
            return position
        theta, w = position.tensor_split([size], -1)
        best = around_fit(self.fit, self.straight, self.ridges)
        w = best.coordinates.white(theta, density.coordinates.whitened(theta, w)[0])
        return torch.cat([theta, w], -1)

    def _normal(self, optimum: Start) -> tuple[Tensor, Tensor]:
        """Centre and covariance of [theta, w], or of [z, w]."""
        like = optimum.model.train_x
        theta, covariance = optimum.theta.to(like), optimum.theta_covariance.to(like)
        if self.ridges is not None:
            theta = self.ridges.straight(theta.unsqueeze(0)).squeeze(0)
            inverse = torch.linalg.inv(self.ridges.slope(theta))
            covariance = inverse @ covariance @ inverse.mT
        centre = torch.cat([theta, torch.zeros_like(optimum.mean).flatten().to(theta)])
        return centre, torch.block_diag(covariance, identity_matrix(optimum.mean.numel(), centre))
