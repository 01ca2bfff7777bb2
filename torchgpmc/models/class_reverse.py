r"""Derivatives in K and in sites of functions of several classes, in coordinates of :mod:`torchgpmc.models.class_coordinates`.

With w held, :math:`\tilde f_k = m + G u_k`, :math:`u_k = w_k + G^T b_k`, :math:`S = G G^T` and
:math:`dS = (I - S A)\, dK\, (I - A S) - S\, dA\, S`. The adjoint of G becomes that of S, :math:`G^{-T} Y G^{-1}` (Murray 2016), and
this K's and alpha's,

.. math:: \bar K = H Y H^T, \quad H = (I - A S) G^{-T} = G^{-T} - A G, \quad \bar \alpha = -\mathrm{diag}(G Y G^T)

where Y takes products of K rows alone, since the adjoint of G is a sum of 2 K outer products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.class_coordinates import ClassMap
from torchgpmc.numerics.linalg import inverse_lower


class ClassSlopes(NamedTuple):
    """Derivatives of a log density given w."""

    covariance: Tensor  # in K, (C, N, N), symmetric
    log_precision: Tensor  # in log alpha, (C, N)
    shift: Tensor  # in b, (C, K, N)


def class_slopes(coordinates: ClassMap, white: Tensor, differences: Tensor, slope: Tensor) -> ClassSlopes:
    """Derivatives, w held, of log N(v; 0, I) + log |dv / dw| and of what has ``slope`` ``(C, K, N)`` in the functions.

    Args:
        coordinates: at C thetas, in the data's own basis.
        white: w ``(C, V)``.
        differences: of the functions at w ``(C, K, N)``.
        slope: ``(C, K, N)``.
    """
    precision, spread = coordinates.precision, coordinates.spread
    less = slope.shape[1] - 1  # of the log volume, -less log |I + K A| / 2
    u, pulled = coordinates.apart(white), coordinates.explained.view_as(slope)
    back = coordinates.of_differences(differences, slope) @ spread
    of_u = back - u
    half = (torch.cat([back, pulled], 1).mT @ torch.cat([u, of_u], 1)).tril()
    inner = 0.5 * (half + half.mT)
    inner.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    column = precision.unsqueeze(-1)
    moved, inverse = spread @ inner, inverse_lower(spread).mT
    weighed = column * spread
    covariance = (inverse @ inner - column * moved) @ (inverse - weighed).mT + (0.5 * less) * weighed @ weighed.mT
    covariance.diagonal(dim1=-2, dim2=-1).sub_(0.5 * less * precision)
    of_precision = 0.5 * differences.square().sum(1) - (moved * spread).sum(-1) - 0.5 * less * spread.square().sum(-1)
    return ClassSlopes(covariance, of_precision * precision, of_u @ spread.mT)
