r"""Latents of several classes in coordinates that are white under the posterior which Gaussian sites give, at every theta.

Data see differences of functions alone, and so do sites, in all differences alike: with f_k - m = L v_k, all with one L, and
:math:`\tilde v_k = v_k - \bar v`,

.. math:: \tilde v_k \sim N(P^{-1} L^T b_k, P^{-1}), \quad P = I + L^T A L = R R^T, \quad
    \tilde v_k = R^{-T} (\tilde w_k + R^{-1} L^T b_k), \quad \bar v = \bar w

given theta, where alpha, the diagonal of A, is a site's precision and b its shift: one factorisation, whatever the number of
functions. As in :mod:`torchgpmc.models.whitening`, w is standard normal where the sites are the likelihood, and [theta, w] has
exactly the density of [theta, v] times the volume, whatever the sites: they may change with theta too.

With :math:`G = L R^{-T}` functions are :math:`\tilde f_k = m + G \tilde u_k`, :math:`u_k = w_k + R^{-1} L^T b_k`, and the prior is
:math:`|\tilde v_k|^2 = |\tilde u_k|^2 - \sum_n \alpha_n (\tilde f_{kn} - m)^2`: a density and its gradient in w take two products.
G is in single precision, for what only leads somewhere (trajectories, proposals): such products take a quarter of the time. What
draws are accepted by goes through L and R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky_in_place, solve_lower, times_blocks, triangular_log_determinant, weighed_square
from torchgpmc.numerics.special import log_standard_normal


class ClassMap(NamedTuple):
    """v from w and back, for C thetas, or for one that serves all rows.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1).double()  # two functions of one datum, whose difference the site knows
        >>> found = class_map(one, 1e8 * one[0], torch.tensor([[[1e8], [-1e8]]]).double())
        >>> v = found.latents(torch.zeros(1, 2).double())
        >>> [round(float(number), 3) for number in v.flatten()]  # the difference is what the sites say, the sum the prior's
        [1.0, -1.0]
    """

    root: Tensor  # R, (C, N, N)
    spread: Tensor  # G', (C, N, N), in single precision
    precision: Tensor  # alpha, (C, N)
    explained: Tensor  # R^-1 L' b, (C, K N)
    log_volume: Tensor  # (C,), log |dv / dw|; NaN where something does not factorise

    def latents(self, white: Tensor) -> Tensor:
        """v ``(C, V)`` from w ``(C, V)``."""
        apart, shared = self._parts(white)
        return (self._whitened(apart) + shared).flatten(1)

    def white(self, v: Tensor) -> Tensor:
        """w ``(C, V)`` from v ``(C, V)``."""
        apart, shared = self._parts(v)
        return (apart @ self.root - self.explained.view(-1, *apart.shape[1:]) + shared).flatten(1)

    def differences(self, white: Tensor, factor: Tensor) -> Tensor:
        """Functions less their mean over functions and less m, ``(C, K, N)``; ``factor`` is L ``(C, N, N)``."""
        return self._whitened(self._parts(white)[0]) @ factor.mT

    def near_differences(self, white: Tensor) -> Tensor:
        """The same to six digits, and sooner."""
        moved = self._moved(self._parts(white)[0])
        return self._near(moved, self.spread)

    def log_prior(self, white: Tensor, differences: Tensor) -> Tensor:
        """log N(v; 0, I) + log |dv / dw| ``(C,)`` at w, whose ``differences`` are at hand."""
        apart, shared = self._parts(white)
        u = (self._moved(apart) + shared).flatten(1)
        return log_standard_normal(u) + 0.5 * (self.precision.unsqueeze(1) * differences.square()).sum((-2, -1)) + self.log_volume

    def gradient(self, white: Tensor, differences: Tensor, slope: Tensor) -> Tensor:
        """Of :meth:`log_prior` and of what has ``slope`` ``(C, K, N)`` in the functions, in w ``(C, V)``, to six digits."""
        apart, shared = self._parts(white)
        of_differences = slope - slope.mean(1, keepdim=True) + self.precision.unsqueeze(1) * differences
        back = self._near(of_differences, self.spread.mT)
        return (back - self._moved(apart) - shared).flatten(1)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Functions less their mean ``(C, K, N)``, and that ``(C, 1, N)``."""
        parts = rows.view(len(rows), -1, self.root.shape[-1])
        shared = parts.mean(1, keepdim=True)
        return parts - shared, shared

    def _moved(self, apart: Tensor) -> Tensor:
        return apart + self.explained.view(-1, *apart.shape[1:])

    def _whitened(self, apart: Tensor) -> Tensor:
        """v, less what functions share."""
        return torch.linalg.solve_triangular(self.root.mT, self._moved(apart).mT, upper=True).mT

    def _near(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return times_blocks(rows.to(matrix).flatten(1), matrix).view_as(rows).to(rows)


def class_map(factor: Tensor, precision: Tensor, shift: Tensor) -> ClassMap:
    """The coordinates of C thetas.

    Args:
        factor: lower Cholesky factor L of one function's covariance ``(C, N, N)``.
        precision: alpha ``(C, N)``, positive.
        shift: b ``(C, K, N)``, whose sum over functions is zero.
    """
    matrix = weighed_square(factor, precision)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root, ok = cholesky_in_place(matrix)
    spread = solve_lower(root.float(), factor.mT.float())
    explained = solve_lower(root, torch.bmm(shift, factor).mT).mT.flatten(1)
    log_volume = (1 - shift.shape[1]) * triangular_log_determinant(root)
    return ClassMap(root, spread, precision, explained, torch.where(ok, log_volume, torch.nan))
