"""The posterior in coordinates that a fixed affine map makes white: those of a Gaussian approximation, whatever made it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.linalg import inverse_lower, times_blocks
from torchgpmc.models.gp_model import LatentsAt
from torchgpmc.models.whitening import GaussianSites, root_and_shift


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

    @property
    def log_volume(self) -> Tensor:
        """log |dv / dw| ``()``."""
        return self.scale.diagonal(dim1=-2, dim2=-1).log().sum()

    def latents(self, theta: Tensor, white: Tensor) -> Tensor:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``."""
        return self.centre.flatten() + (theta - self.origin) @ self.slope.mT + self._turned(white, self.scale.mT)

    def white_slopes(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives in theta ``(C, P)`` and w ``(C, V)`` of what has ``gradient`` ``(C, V)`` in v."""
        return gradient @ self.slope, self._turned(gradient, self.scale)

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
        coordinates: the map from w to v.
    """

    def __init__(self, joint: Any, coordinates: AffineMap):
        self.joint = joint
        self.coordinates = coordinates
        self._size = joint.model.layout.size

    def whitened(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` at ``position``, and log |dv / dw| ``(C,)``."""
        v = self.coordinates.latents(*position.tensor_split([self._size], -1))
        return v, self.coordinates.log_volume.expand(len(position))

    def _original(self, position: Tensor) -> Tensor:
        return torch.cat([position[:, : self._size], self.whitened(position)[0]], -1)

    def __call__(self, position: Tensor) -> Tensor:
        return self.joint(self._original(position)) + self.coordinates.log_volume

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.joint.value_and_grad(self._original(position))
        theta_slope, white_slope = self.coordinates.white_slopes(gradient[:, self._size :])
        return value + self.coordinates.log_volume, torch.cat([gradient[:, : self._size] + theta_slope, white_slope], -1)

    def select(self, rows: Tensor) -> AffineJointLogDensity:
        return AffineJointLogDensity(self.joint.select(rows), self.coordinates)
