r"""Latents of several classes in coordinates that are white under the posterior which Gaussian sites give, at every theta.

Data see differences of functions alone, and so do sites, in all differences alike: with f_k - m = L v_k, all with one L, and
:math:`\tilde f_k = f_k - \bar f`,

.. math:: \tilde f_k - \tilde m \sim N(S b_k, S), \quad S = (K^{-1} + A)^{-1} = G G^T, \quad
    \tilde f_k = G (\tilde w_k + G^T b_k), \quad \bar v = \bar w

given theta, where alpha, the diagonal of A, is a site's precision and b its shift: one matrix, whatever the number of functions. As
in :mod:`torchgpmc.models.whitening`, w is standard normal where the sites are the likelihood, and [theta, w] has exactly the
density of [theta, v] times the volume, whatever the sites: they may change with theta too. With :math:`u_k = w_k + G^T b_k` the
prior is :math:`|\tilde v_k|^2 = |\tilde u_k|^2 - \sum_n \alpha_n (\tilde f_{kn} - m)^2`: a density and its gradient in w take two
products. G is there in single precision, too, for what only leads somewhere (trajectories, proposals): such products take a quarter
of the time.

**Which root of S.** Any is white; but functions move when theta does and w stays, and the less they move the less theta is held by
w where the likelihood is not normal. Least of all they move under the symmetric root, nearly (between covariances that commute it
is the optimal transport), which takes an eigendecomposition a theta. The lower one moves them by half as much again (of six classes
and ten hyperparameters 0.29 of S's variance for 0.17; :math:`L R^{-T}`, :math:`R R^T = I + L^T A L`, by 0.42), and is there at
once, :math:`G = L \Gamma^{-1}`, :math:`\Gamma^T \Gamma = I + L^T A L`. The lower one *in another basis*, which stays the same for
all thetas, is nearly as good as the symmetric one if the basis is of eigenvectors of K at one of them, largest eigenvalue first:
its parts are nearly independent at the thetas around, of which a triangular and a symmetric root are the same. That is
:math:`G = U C`, :math:`C C^T = U^T S U`: three products and a factorisation more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import (
    cholesky_in_place,
    divided_by_root,
    outer_square,
    root_under_sites,
    solve_lower,
    times_blocks,
    times_lower,
    triangular_log_determinant,
)
from torchgpmc.numerics.special import log_standard_normal


class ClassMap(NamedTuple):
    """v from w and back, for C thetas, or for one that serves all rows. ``factor`` is L ``(C, N, N)``.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1).double()  # two functions of one datum, whose difference the site knows
        >>> found = class_map(one, 1e8 * one[0], torch.tensor([[[1e8], [-1e8]]]).double())
        >>> v = found.latents(torch.zeros(1, 2).double(), one)
        >>> [round(float(number), 3) for number in v.flatten()]  # the difference is what the sites say, the sum the prior's
        [1.0, -1.0]
    """

    spread: Tensor  # G, (C, N, N), lower triangular unless in a basis
    near: Tensor  # G', in single precision
    precision: Tensor  # alpha, (C, N)
    explained: Tensor  # G' b, (C, K N)
    log_volume: Tensor  # (C,), log |dv / dw|; NaN where something does not factorise

    def latents(self, white: Tensor, factor: Tensor) -> Tensor:
        """v ``(C, V)`` from w ``(C, V)``."""
        shared = self._parts(white)[1]
        return (solve_lower(factor, self.differences(white).mT).mT + shared).flatten(1)

    def white(self, v: Tensor, factor: Tensor) -> Tensor:
        """w ``(C, V)`` from v ``(C, V)``."""
        apart, shared = self._parts(v)
        rows = torch.linalg.solve_triangular(factor.mT, apart.mT, upper=True).mT + self.precision.unsqueeze(1) * (apart @ factor.mT)
        return (rows @ self.spread - self.explained.view(-1, *apart.shape[1:]) + shared).flatten(1)

    def differences(self, white: Tensor) -> Tensor:
        """Functions less their mean over functions and less m, ``(C, K, N)``."""
        return self.apart(white) @ self.spread.mT

    def near_differences(self, white: Tensor) -> Tensor:
        """The same to six digits, and sooner."""
        return self._near(self.apart(white), self.near)

    def log_prior(self, white: Tensor, differences: Tensor) -> Tensor:
        """log N(v; 0, I) + log |dv / dw| ``(C,)`` at w, whose ``differences`` are at hand."""
        apart, shared = self._parts(white)
        u = (self._moved(apart) + shared).flatten(1)
        return log_standard_normal(u) + 0.5 * (self.precision.unsqueeze(1) * differences.square()).sum((-2, -1)) + self.log_volume

    def gradient(self, white: Tensor, differences: Tensor, slope: Tensor) -> Tensor:
        """Of :meth:`log_prior` and of what has ``slope`` ``(C, K, N)`` in the functions, in w ``(C, V)``, to six digits."""
        back = self._near(self.of_differences(differences, slope), self.near.mT)
        return back.flatten(1) - white - self.explained

    def of_differences(self, differences: Tensor, slope: Tensor) -> Tensor:
        """Derivatives in differences ``(C, K, N)`` of what has ``slope`` in functions and of the prior but for u's square."""
        return slope - slope.mean(1, keepdim=True) + self.precision.unsqueeze(1) * differences

    def apart(self, white: Tensor) -> Tensor:
        """u less its mean over functions ``(C, K, N)``, which G makes differences of."""
        return self._moved(self._parts(white)[0])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Functions less their mean ``(C, K, N)``, and that ``(C, 1, N)``."""
        parts = rows.view(len(rows), -1, self.spread.shape[-1])
        shared = parts.mean(1, keepdim=True)
        return parts - shared, shared

    def _moved(self, apart: Tensor) -> Tensor:
        return apart + self.explained.view(-1, *apart.shape[1:])

    def _near(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return times_blocks(rows.to(matrix).flatten(1), matrix).view_as(rows).to(rows)


def class_map(factor: Tensor, precision: Tensor, shift: Tensor, basis: Tensor | None = None) -> ClassMap:
    """The coordinates of C thetas.

    Args:
        factor: lower Cholesky factor L of one function's covariance ``(C, N, N)``.
        precision: alpha ``(C, N)``, positive.
        shift: b ``(C, K, N)``, whose sum over functions is zero.
        basis: U ``(N, N)``, orthonormal, in which G is triangular; the data's own where it is left out.
    """
    root, ok = root_under_sites(factor, precision)
    spread = divided_by_root(factor, root)
    if basis is not None:
        turned, fine = cholesky_in_place(outer_square(times_lower(basis.mT, spread)))
        spread, ok = times_lower(basis, turned), ok & fine
    log_volume = torch.where(ok, (1 - shift.shape[1]) * triangular_log_determinant(root), torch.nan)
    return ClassMap(spread, spread.mT.float(), precision, torch.bmm(shift, spread).flatten(1), log_volume)
