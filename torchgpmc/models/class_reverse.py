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


class AtWhite(NamedTuple):
    """What these derivatives take from a w, of which sums over several w at the same K and sites are sums."""

    u: Tensor  # (C, K, N)
    back: Tensor  # (C, K, N), slopes in the functions and of the prior but for u's square, times G
    square: Tensor  # (C, N), of the functions' differences


def at_white(coordinates: ClassMap, white: Tensor, differences: Tensor, slope: Tensor) -> AtWhite:
    """From w ``(C, V)``, the functions' differences there and the log likelihood's slope in the functions ``(C, K, N)``."""
    back = coordinates.of_differences(differences, slope) @ coordinates.spread
    return AtWhite(coordinates.apart(white), back, differences.square().sum(1))


class ClassSlopes(NamedTuple):
    """Derivatives of a log density given w."""

    covariance: Tensor  # in K, (C, N, N), symmetric
    log_precision: Tensor  # in log alpha, (C, N)
    shift: Tensor  # in b, (C, K, N)


def class_slopes(coordinates: ClassMap, points: list[AtWhite], weights: list[float]) -> ClassSlopes:
    """Derivatives, w held, of log N(v; 0, I) + log |dv / dw| and of what has a slope in the functions: a sum over several w.

    Args:
        coordinates: at C thetas, in the data's own basis.
        points: what each w is like.
        weights: of each.
    """
    precision, spread = coordinates.precision, coordinates.spread
    # Of the log volume, -(K - 1) log |I + K A| / 2.
    less = 0.5 * (points[0].u.shape[1] - 1) * sum(weights)
    pulled = coordinates.explained.view_as(points[0].u)
    of_u = weighted_sum([point.back - point.u for point in points], weights)
    left = torch.cat([*(weight * point.back for point, weight in zip(points, weights, strict=True)), pulled], 1)
    half = (left.mT @ torch.cat([*(point.u for point in points), of_u], 1)).tril()
    inner = 0.5 * (half + half.mT)
    inner.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    column = precision.unsqueeze(-1)
    moved, weighed = spread @ inner, column * spread
    turned = inverse_lower(spread).mT - weighed
    # A - A S A = A G H'.
    covariance = torch.baddbmm(weighed, turned, inner, beta=-less) @ turned.mT
    square = weighted_sum([point.square for point in points], weights)
    of_precision = 0.5 * square - (moved * spread).sum(-1) - less * spread.square().sum(-1)
    return ClassSlopes(covariance, of_precision * precision, of_u @ spread.mT)


def weighted_sum(parts: list[Tensor], weights: list[float]) -> Tensor:
    """Of tensors of one shape, at least one."""
    total = weights[0] * parts[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = torch.add(total, part, alpha=weight)
    return total
