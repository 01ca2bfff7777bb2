r"""Derivatives in K and in sites of functions of several classes, in coordinates of :mod:`torchgpmc.models.class_coordinates`.

With w held, :math:`\tilde f_k = m + G u_k`, :math:`u_k = w_k + G^T b_k`, :math:`G = U C U^T`, :math:`C C^T = U^T S U` and
:math:`dS = (I - S A)\, dK\, (I - A S) - S\, dA\, S`: the adjoint of C becomes that of S (Murray 2016), and this K's and alpha's.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchgpmc.models.class_coordinates import ClassMap, ClassRoot
from torchgpmc.numerics.linalg import factor_adjoint


class ClassSlopes(NamedTuple):
    """Derivatives of a log density given w."""

    covariance: Tensor  # in K, (C, N, N), symmetric
    log_precision: Tensor  # in log alpha, (C, N)
    shift: Tensor  # in b, (C, K, N)


def class_slopes(
    found: ClassRoot, basis: Tensor, coordinates: ClassMap, shift: Tensor, white: Tensor, differences: Tensor, slope: Tensor
) -> ClassSlopes:
    """Derivatives, w held, of log N(v; 0, I) + log |dv / dw| and of what has ``slope`` ``(C, K, N)`` in the functions.

    Args:
        found: the root at C thetas.
        basis: U ``(N, N)``.
        coordinates: of that root.
        shift: b ``(C, K, N)``.
        white: w ``(C, V)``.
        differences: of the functions at w ``(C, K, N)``.
        slope: ``(C, K, N)``.
    """
    precision, spread, root = coordinates.precision, found.spread, found.factor
    less = shift.shape[1] - 1  # of the log volume, -less log |I + K A| / 2
    u = coordinates.apart(white)
    of_functions = coordinates.of_differences(differences, slope)
    of_u = of_functions @ spread - u
    of_root = (of_functions @ basis).mT @ (u @ basis) + (shift @ basis).mT @ (of_u @ basis)
    half = factor_adjoint(root, root.mT @ of_root.tril())
    inner = 0.5 * (half + half.mT)  # of U' S U
    turned = basis @ found.covariance  # S U
    moved = turned @ inner
    square = turned @ basis.mT  # S
    column, row = precision.unsqueeze(-1), precision.unsqueeze(-2)
    left = basis - column * turned  # (I - A S) U
    covariance = (basis @ inner - column * moved) @ left.mT + 0.5 * less * column * row * square
    covariance.diagonal(dim1=-2, dim2=-1).sub_(0.5 * less * precision)
    of_precision = 0.5 * differences.square().sum(1) - (moved * turned).sum(-1)
    of_precision = of_precision - 0.5 * less * square.diagonal(dim1=-2, dim2=-1)
    return ClassSlopes(covariance, of_precision * precision, of_u @ spread.mT)
