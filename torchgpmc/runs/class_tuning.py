"""What chains of several classes are tuned to: where theta lies, and sites that follow it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.class_variational import SharedSites, fitted_class_sites
from torchgpmc.models.class_coordinates import ClassMap
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix, solve_lower
from torchgpmc.runs.blocks import KeptPrior
from torchgpmc.samplers.adaptation import PositionMoments

# Deviations of theta, of what has the posterior's covariance: where sites are fitted, and as far as they follow it.
_REACH, _FARTHEST = (1.0, -1.0, 2.0, -2.0), 2.5
_DEGREE = len(_REACH)


class FollowingSites(NamedTuple):
    """Sites, their precision in logarithms, as a sum of quartics, one of each standardised hyperparameter.

    So they are right at a centre and at four thetas on each axis. Of quadratics the coordinates change so fast at the ends of a
    wide posterior that the density given w is up to seventy times as curved there as in the middle (six classes, ten
    hyperparameters), and five times with quartics.
    """

    log_precision: Tensor  # (4 P + 1, N): at the centre, slopes, squares, cubes, fourth powers
    shift: Tensor  # the same, (4 P + 1, K, N)

    @classmethod
    def around(
        cls, model: GPModel, centre: Tensor, root: Tensor, num_sweeps: int, start: tuple[FollowingSites, Tensor] | None
    ) -> FollowingSites:
        """Fitted around ``centre`` ``(P,)``.

        Args:
            model: whose data they are of.
            centre: theta.
            root: of its covariance ``(P, P)``.
            num_sweeps: of :func:`fitted_class_sites`.
            start: other sites to begin from, and what standardises theta for them: the centre and the root as one ``(P + 1, P)``.
        """
        unit = identity_matrix(len(centre), centre)
        along = torch.cat([torch.zeros_like(unit[:1]), *(distance * unit for distance in _REACH)])
        theta = centre + along @ root.mT
        before = None if start is None else start[0].at(standardised(theta, start[1][0], start[1][1:]))
        sites = fitted_class_sites(model, theta, num_sweeps, before).sites
        inverse = torch.linalg.inv(_terms(along))
        return cls(*(torch.tensordot(inverse, part, 1) for part in (sites.precision.log(), sites.shift)))

    def at(self, along: Tensor) -> SharedSites:
        """At thetas so many deviations ``(C, P)`` from the centre."""
        terms = _terms(along)
        log_precision, shift = (torch.tensordot(terms, part, 1) for part in self)
        return SharedSites(log_precision.exp(), shift)

    def slopes(self, along: Tensor, of_log_precision: Tensor, of_shift: Tensor) -> Tensor:
        """Derivatives ``(C, P)`` in ``along`` of what has these in log precisions ``(C, N)`` and shifts ``(C, K, N)``."""
        of_terms = of_log_precision @ self.log_precision.mT + of_shift.flatten(1) @ self.shift.flatten(1).mT
        powers = of_terms[:, 1:].view(len(along), _DEGREE, -1)
        slopes = sum((degree + 1) * along**degree * powers[:, degree] for degree in range(_DEGREE))
        return torch.where(along.abs() <= _FARTHEST, slopes, 0.0)


def _terms(along: Tensor) -> Tensor:
    along = along.clamp(-_FARTHEST, _FARTHEST)
    return torch.cat([torch.ones_like(along[:, :1]), *(along**degree for degree in range(1, _DEGREE + 1))], -1)


def standardised(theta: Tensor, centre: Tensor, root: Tensor) -> Tensor:
    """theta ``(C, P)`` in deviations."""
    return solve_lower(root, (theta - centre).mT).mT


class ClassTuning(NamedTuple):
    """Step sizes, where theta lies, and sites."""

    step_size: Tensor  # (), of the latents
    theta_step_size: Tensor  # (), of theta, where it moves by trajectories
    centre: Tensor  # (P,)
    root: Tensor  # (P, P), lower triangular, of theta's covariance
    scale: Tensor  # (P, P), lower triangular, of theta's inverse mass matrix, in deviations
    sites: FollowingSites
    basis: Tensor  # (N, N), in which roots are triangular; (0, N) where that is the data's own
    deviation: Tensor  # (V,), of w: of some data much wider than under their sites
    moments: PositionMoments  # of [theta, w] since the last window
    held: Tensor  # (), sum of how strongly w holds theta, of as many
    slopes: Tensor  # (P, P), sums of products of the density's slopes in theta, in deviations, since then

    @property
    def coordinates(self) -> tuple[Tensor, ...]:
        """All that decides what thetas are tried, and their coordinates."""
        return self.centre, self.root, *self.sites, self.basis

    def standardised(self, theta: Tensor) -> Tensor:
        """theta ``(C, P)`` in deviations."""
        return standardised(theta, self.centre, self.root)

    def theta(self, along: Tensor) -> Tensor:
        """Back again."""
        return self.centre + along @ self.root.mT


class AtTheta(NamedTuple):
    """What depends on theta and the tuning alone."""

    kept: KeptPrior
    coordinates: ClassMap

    @property
    def factor(self) -> Tensor:
        """L ``(C, N, N)`` of one function's covariance."""
        factor: Tensor = self.kept.at.prior.factor
        return factor
