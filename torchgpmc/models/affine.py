"""The posterior in coordinates that a Gaussian approximation makes white, whatever made it; a map that is fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.density import mask_failures
from torchgpmc.models.latents import LatentsAt
from torchgpmc.models.whitening import GaussianSites, root_and_shift
from torchgpmc.numerics.linalg import inverse_lower, times_blocks


class Mapped(NamedTuple):
    """Latents from white coordinates, without graph."""

    v: Tensor  # (C, V)
    log_volume: Tensor  # (C,), log |dv / dw|
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]  # of what has a gradient (C, V) in v, and of the volume: in theta and in w


class WhiteCoordinates(Protocol):
    """A map from [theta, w] to v, one to one at every theta."""

    def whitened(self, theta: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``, and log |dv / dw| ``(C,)``; differentiable."""

    def mapped(self, theta: Tensor, white: Tensor) -> Mapped:
        """The same with slopes."""

    def white(self, theta: Tensor, v: Tensor) -> Tensor:
        """w ``(C, V)`` from theta ``(C, P)`` and v ``(C, V)``."""


class CoordinatesOfAFit(WhiteCoordinates, Protocol):
    """A map around a fit."""

    @property
    def origin(self) -> Tensor:
        """The fit's theta ``(P,)``, as positions have it."""

    def latents(self, theta: Tensor, white: Tensor) -> Tensor:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``."""

    def moved(self, origin: Tensor, jacobian: Tensor) -> CoordinatesOfAFit:
        """With other numbers in theta's place, to first order: these at the fit, and theta's derivatives in them ``(P, P)``."""


class AffineMap(NamedTuple):
    r"""v = centre + slope (theta - origin) + scale w, for every latent function.

    The map does not depend on what is sampled, so its volume is a constant and [theta, w] has exactly the density of [theta, v],
    however good the approximation: that decides the speed alone.

    Example:
        >>> import torch
        >>> zero, two = torch.zeros(1), 2 * torch.eye(3)[None]
        >>> white = AffineMap(zero, torch.ones(1, 3), torch.zeros(3, 1), two)
        >>> white.latents(torch.zeros(1, 1), torch.ones(1, 3))
        tensor([[3., 3., 3.]])
    """

    origin: Tensor  # (P,), a theta
    centre: Tensor  # (K, M), the mean of v there
    slope: Tensor  # (V, P), the derivative of that mean in theta
    scale: Tensor  # (K, M, M), triangular roots of the covariances of v given theta

    def latents(self, theta: Tensor, white: Tensor) -> Tensor:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``."""
        return self.centre.flatten() + (theta - self.origin) @ self.slope.mT + self._turned(white, self.scale.mT)

    def whitened(self, theta: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """v, and log |dv / dw| ``(C,)``, a constant."""
        log_volume = self.scale.diagonal(dim1=-2, dim2=-1).log().sum()
        return self.latents(theta, white), log_volume.expand(len(white))

    def mapped(self, theta: Tensor, white: Tensor) -> Mapped:
        """The same with slopes."""
        return Mapped(*self.whitened(theta, white), lambda gradient: (gradient @ self.slope, self._turned(gradient, self.scale)))

    def white(self, theta: Tensor, v: Tensor) -> Tensor:
        """w ``(C, V)`` from theta and v: what :meth:`latents` undoes."""
        rest = v - self.centre.flatten() - (theta - self.origin) @ self.slope.mT
        parts = rest.view(len(rest), *self.centre.shape).transpose(0, 1)
        return torch.linalg.solve_triangular(self.scale.mT, parts, upper=True, left=False).transpose(0, 1).flatten(1)

    def moved(self, origin: Tensor, jacobian: Tensor) -> AffineMap:
        """With other numbers in theta's place, to first order: these at the fit, and theta's derivatives in them ``(P, P)``."""
        return self._replace(origin=origin, slope=self.slope @ jacobian)

    def _turned(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows ``(C, V)``, each latent's part times its matrix: one product for all chains, which reads the matrix once."""
        parts = rows.view(len(rows), *self.centre.shape).transpose(0, 1)
        return (parts @ matrices).transpose(0, 1).flatten(1)


def white_at_fixed_theta(at: LatentsAt, sites: GaussianSites) -> AffineMap:
    """Coordinates that are white under the posterior which sites give, where no theta moves: factorised once for all positions.

    Args:
        at: f at the data, of the one theta.
        sites: of one data set and one latent function.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.zeros(1), torch.ones(1), kernel, tg.likelihoods.Bernoulli(), jitter=1e-9)
        >>> at = model.at(model.prior(torch.zeros(1, 0, dtype=torch.float64)))
        >>> sites = GaussianSites(torch.tensor([3.0]).double(), torch.tensor([6.0]).double())  # N(2, 1 / 3) beside N(0, 1)
        >>> coordinates = white_at_fixed_theta(at, sites)
        >>> coordinates.latents(torch.zeros(2, 0), torch.tensor([[0.0], [1.0]]).double()).flatten()
        tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    root, shift = root_and_shift(at.projection.mT, at.mean, sites)
    inverse = inverse_lower(root)
    centre = times_blocks(shift.mT, inverse).squeeze(0)
    return AffineMap(centre.new_zeros(0), centre, centre.new_zeros(centre.shape[-1], 0), inverse.mT)


class AffineJointLogDensity:
    r"""The joint log density as one of position = [theta, w]: :math:`\log p(\theta, v(\theta, w), y) + \log |dv / dw|`.

    Args:
        joint: of [theta, v], with its ``model``.
        coordinates: from w to v.
    """

    def __init__(self, joint: Any, coordinates: WhiteCoordinates):
        self.joint = joint
        self.coordinates = coordinates
        self._size = joint.model.layout.size

    def whitened(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` at ``position``, and log |dv / dw| ``(C,)``."""
        return self.coordinates.whitened(*position.tensor_split([self._size], -1))

    def __call__(self, position: Tensor) -> Tensor:
        v, log_volume = self.whitened(position)
        value = self.joint(torch.cat([position[:, : self._size], v], -1)) + log_volume
        return torch.where(torch.isfinite(value), value, -torch.inf)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        theta, white = position.detach().tensor_split([self._size], -1)
        mapped = self.coordinates.mapped(theta, white)
        value, gradient = self.joint.value_and_grad(torch.cat([theta, mapped.v], -1))
        of_theta, of_latents = gradient.tensor_split([self._size], -1)
        theta_slope, white_slope = mapped.slopes(of_latents)
        return mask_failures(value + mapped.log_volume, torch.cat([of_theta + theta_slope, white_slope], -1))

    def select(self, rows: Tensor) -> AffineJointLogDensity:
        return AffineJointLogDensity(self.joint.select(rows), self.coordinates)
