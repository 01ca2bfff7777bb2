"""Mass matrices: a linear map that makes a position's coordinates roughly independent and of unit scale."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import identity_matrix, solve_lower


class MassMatrix(Enum):
    """Which covariances of the position warm-up estimates; the inverse mass matrix is that estimate.

    Example:
        >>> [MassMatrix.BLOCK.dense_size(3, 100), MassMatrix.DENSE.dense_size(3, 100), MassMatrix.DIAGONAL.dense_size(3, 100)]
        [3, 100, 0]
        >>> import torchgpmc as tg
        >>> tg.HMC(mass_matrix=tg.MassMatrix.DENSE).mass_matrix
        <MassMatrix.DENSE: 'dense'>
    """

    IDENTITY = "identity"
    DIAGONAL = "diagonal"
    BLOCK = "dense among hyperparameters, diagonal among latents"
    DENSE = "dense"

    def dense_size(self, num_hyperparameters: int, dimension: int) -> int:
        """How many leading coordinates share a dense block."""
        return {MassMatrix.BLOCK: num_hyperparameters, MassMatrix.DENSE: dimension}.get(self, 0)


class Preconditioner(NamedTuple):
    """S = blockdiag(factor, diag(deviation)), with S S' the inverse mass matrix; momenta are S'^-1 times standard normals.

    Working with the standard normal rho = S' p throughout, Hamilton's equations are x' = S rho, rho' = S' grad log p(x), and the
    kinetic energy is ``|rho|^2 / 2``.

    Example:
        >>> import torch
        >>> preconditioner = Preconditioner(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([3.0]))  # 2 + 1
        >>> preconditioner.apply(torch.ones(1, 3)), preconditioner.solve(torch.tensor([[2.0, 2.0, 3.0]]))
        (tensor([[2., 2., 3.]]), tensor([[1., 1., 1.]]))
    """

    factor: Tensor  # (B, B), lower Cholesky factor of the covariance of the leading B coordinates; B may be 0
    deviation: Tensor  # (D - B,), standard deviations of the others

    def apply(self, rho: Tensor) -> Tensor:
        """S rho for each row of ``(C, D)``."""
        size = len(self.factor)
        if size == 0:
            return rho * self.deviation
        return torch.cat([rho[:, :size] @ self.factor.mT, rho[:, size:] * self.deviation], -1)

    def apply_transpose(self, gradient: Tensor) -> Tensor:
        """S' gradient for each row of ``(C, D)``."""
        size = len(self.factor)
        if size == 0:
            return gradient * self.deviation
        return torch.cat([gradient[:, :size] @ self.factor, gradient[:, size:] * self.deviation], -1)

    def solve(self, displacement: Tensor) -> Tensor:
        """S^-1 displacement for each row of ``(C, D)``."""
        size = len(self.factor)
        tail = displacement[:, size:] / self.deviation
        if size == 0:
            return tail
        return torch.cat([solve_lower(self.factor, displacement[:, :size].mT).mT, tail], -1)

    def standard_deviation(self) -> Tensor:
        """Marginal standard deviations of S S', ``(D,)``."""
        return torch.cat([self.factor.square().sum(-1).sqrt(), self.deviation])


def identity_preconditioner(dense_size: int, dimension: int, like: Tensor) -> Preconditioner:
    """S = I, with room for a dense block of ``dense_size``; dtype and device of ``like``."""
    factor = identity_matrix(dense_size, like)
    return Preconditioner(factor, torch.ones(dimension - dense_size, dtype=like.dtype, device=like.device))
