"""Batched Cholesky algebra in which the failure of one matrix is a value, not an exception."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cholesky(NamedTuple):
    """Lower factor ``(..., N, N)`` and whether each factorisation succeeded ``(...)``; failed factors hold garbage."""

    factor: Tensor
    ok: Tensor


def cholesky(matrix: Tensor) -> Cholesky:
    """Lower Cholesky factors of a batch of matrices; never raises, never adds to the diagonal.

    Args:
        matrix: symmetric ``(..., N, N)``.

    Returns:
        Factors and a mask. Density code turns ``~ok`` into -inf, see :func:`torchgpmc.density.mask_failures`.

    Example:
        >>> import torch
        >>> cholesky(torch.stack([torch.eye(2), -torch.eye(2)])).ok
        tensor([ True, False])
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    return Cholesky(factor, info == 0)


def add_diagonal(matrix: Tensor, value: float) -> Tensor:
    """``matrix + value I``, written into ``matrix``: call it on a tensor made for the purpose."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(value)
    return matrix


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """Solves ``factor x = right`` for lower triangular ``(..., N, N)`` and right-hand sides ``(..., N, R)``."""
    return torch.linalg.solve_triangular(factor, right, upper=False)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """``(..., M, N)`` times ``(..., N)``."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
