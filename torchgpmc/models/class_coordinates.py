r"""Latents of several classes in coordinates that are white under the posterior which Gaussian sites give, at every theta.

Sites of a datum have the precision :math:`W_n = \mathrm{diag}(d_n) - d_n d_n^T / \sum_k d_{nk}` in the K functions. With
f - m = L v in each, all with one L, v given theta and the sites is normal with precision

.. math:: P = A - B S^{-1} B^T, \quad A = \mathrm{blockdiag}_k(I + L^T D_k L), \quad B_k = L^T D_k, \quad S = \sum_k D_k

so that K + 1 factorisations of N x N matrices do. With :math:`A = R R^T`, :math:`C = R^{-1} B S^{-1/2}` and
:math:`I - C^T C = M M^T`,

.. math:: P = (R Q) (R Q)^T, \quad Q = I - C (I + M)^{-1} C^T, \quad v = (R Q)^{-T} ((R Q)^{-1} b + w)

since :math:`X + X^T - X C^T C X^T = I` for :math:`X = (I + M)^{-1}`. Here b holds the sites' shifts, in v. As in
:mod:`torchgpmc.models.whitening`, w is standard normal where the sites are the likelihood, and [theta, w] has exactly the
density of [theta, v] times the volume, whatever the sites: they may change with theta too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import (
    cholesky,
    identity_matrix,
    inverse_lower,
    times_blocks,
    triangular_log_determinant,
)


class ClassMap(NamedTuple):
    """v from w and back, for C thetas, or for one that serves all rows.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 2, 1).double()  # two functions of one datum, whose difference has the precision 1 / 2
        >>> found = class_map(one[:, :1], 1e8 * one, torch.tensor([[[1e8], [-1e8]]]).double())
        >>> v = found.latents(torch.zeros(1, 2).double())
        >>> [round(float(number), 3) for number in v.flatten()]  # the difference is what the sites say, the sum the prior's
        [1.0, -1.0]
    """

    inverse: Tensor  # R^-1 of each function, (C, K, N, N)
    shared: Tensor  # C, (C, K, N, N)
    inner: Tensor  # M, (C, N, N)
    bridge: Tensor  # ((I + M) M')^-1, (C, N, N)
    explained: Tensor  # (R Q)^-1 b, (C, V)
    log_volume: Tensor  # (C,), log |dv / dw|; NaN where something does not factorise

    def latents(self, white: Tensor) -> Tensor:
        """v ``(C, V)`` from w ``(C, V)``."""
        return _times(self._turned(white + self.explained, self.bridge.mT), self.inverse)

    def white(self, v: Tensor) -> Tensor:
        """w ``(C, V)`` from v ``(C, V)``."""
        _, functions, size, _ = self.inverse.shape
        column = v.view(len(v), functions, size, 1)
        turned = torch.linalg.solve_triangular(self.inverse.mT, column, upper=True).view(v.shape)
        unit = identity_matrix(size, v)
        seen = _times(turned, self.shared).view(len(v), functions, size).sum(1)
        taken = torch.linalg.solve_triangular((unit + self.inner).mT, seen.view(len(v), size, 1), upper=True).view(len(v), 1, size)
        back = taken.expand(-1, functions, -1).reshape(v.shape)
        return turned - _times(back, self.shared.mT) - self.explained

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """The gradient in w ``(C, V)`` of what has ``gradient`` ``(C, V)`` in v."""
        return self._turned(_times(gradient, self.inverse.mT), self.bridge)

    def _turned(self, rows: Tensor, bridge: Tensor) -> Tensor:
        """Rows ``(C, V)`` plus C times the bridge times C' of them."""
        functions = self.inverse.shape[1]
        seen = _times(rows, self.shared).view(len(rows), functions, -1).sum(1)
        back = times_blocks(seen, bridge).unsqueeze(1).expand(-1, functions, -1).reshape(rows.shape)
        return rows + _times(back, self.shared.mT)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Rows ``(C, K N)``, each function's part times its matrix ``(C, K, N, N)`` or ``(1, K, N, N)`` from the right."""
    count, functions, size, _ = matrices.shape
    parts = rows.view(count, -1, functions, size).transpose(1, 2).reshape(count * functions, -1, size)
    found = torch.bmm(parts, matrices.reshape(count * functions, size, size))
    return found.view(count, functions, -1, size).transpose(1, 2).reshape(rows.shape)


def class_map(factor: Tensor, weight: Tensor, shift: Tensor) -> ClassMap:
    """The coordinates of C thetas.

    Args:
        factor: lower Cholesky factor L of one function's covariance ``(C, N, N)``.
        weight: d ``(C, K, N)``, positive.
        shift: of sites exp(b'g - g'W g / 2) in g = f - m, ``(C, K, N)``.
    """
    count, functions, size = weight.shape
    own = factor.unsqueeze(1)
    scaled = own * weight.sqrt().unsqueeze(-1)
    own_precision = scaled.mT @ scaled
    own_precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root, root_ok = cholesky(own_precision)
    inverse = inverse_lower(root)
    shared = inverse @ (own * (weight * weight.sum(1, keepdim=True).rsqrt()).unsqueeze(-1)).mT
    stacked = shared.reshape(count, functions * size, size)
    left = -(stacked.mT @ stacked)
    left.diagonal(dim1=-2, dim2=-1).add_(1.0)
    inner, inner_ok = cholesky(left)
    half = inverse_lower(identity_matrix(size, factor) + inner)
    bridge = torch.linalg.solve_triangular(inner.mT, half, upper=True)
    log_volume = -triangular_log_determinant(root).sum(-1) - triangular_log_determinant(inner)
    log_volume = torch.where(root_ok.all(-1) & inner_ok, log_volume, torch.nan)
    found = ClassMap(inverse, shared, inner, bridge, torch.zeros_like(shift).flatten(1), log_volume)
    linear = times_blocks(shift.flatten(1), factor)
    return found._replace(explained=found._turned(_times(linear, inverse.mT), bridge))
