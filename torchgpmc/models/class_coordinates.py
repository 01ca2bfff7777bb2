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
is the optimal transport), which takes an eigendecomposition a theta. In a fixed basis U in which S is about diagonal at some theta,
variances falling, its Cholesky factor is about the symmetric root near there: G = U chol(U^T S U) U^T moves functions by half the
variance that :math:`L R^{-T}` does, :math:`R R^T = I + L^T A L`, which is there at once (of six classes and ten hyperparameters
0.21 of S's for 0.42, the symmetric root 0.17), and takes 8 N^3 operations more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky_in_place, solve_lower, times_blocks, triangular_log_determinant, weighed_square
from torchgpmc.numerics.special import log_standard_normal

_BETWEEN_EQUALS = 1e-8  # of the largest variance: tells apart those that are equal but for rounding


class ClassMap(NamedTuple):
    """v from w and back, for C thetas, or for one that serves all rows. ``factor`` is L ``(C, N, N)``.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1).double()  # two functions of one datum, whose difference the site knows
        >>> found = class_map(one, one[0], 1e8 * one[0], torch.tensor([[[1e8], [-1e8]]]).double())
        >>> v = found.latents(torch.zeros(1, 2).double(), one)
        >>> [round(float(number), 3) for number in v.flatten()]  # the difference is what the sites say, the sum the prior's
        [1.0, -1.0]
    """

    spread: Tensor  # G, (C, N, N)
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
        apart, shared = self._parts(white)
        back = self._near(self.of_differences(differences, slope), self.near.mT)
        return (back - self._moved(apart) - shared).flatten(1)

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


def class_map(factor: Tensor, basis: Tensor, precision: Tensor, shift: Tensor) -> ClassMap:
    """The coordinates of C thetas.

    Args:
        factor: lower Cholesky factor L of one function's covariance ``(C, N, N)``.
        basis: U, orthonormal, ``(N, N)``; ``(0, 0)`` for the root that is there at once.
        precision: alpha ``(C, N)``, positive.
        shift: b ``(C, K, N)``, whose sum over functions is zero.
    """
    return class_root(factor, basis, precision).coordinates(precision, shift)


class ClassRoot(NamedTuple):
    """G for C thetas, and what it was made of."""

    spread: Tensor  # (C, N, N)
    log_narrowing: Tensor  # (C,), log |L| - log |G|
    ok: Tensor
    covariance: Tensor  # U' S U, (C, N, N); without a basis empty
    factor: Tensor  # of that, lower

    def coordinates(self, precision: Tensor, shift: Tensor) -> ClassMap:
        """Of these sites, as of :func:`class_map`."""
        log_volume = torch.where(self.ok, (1 - shift.shape[1]) * self.log_narrowing, torch.nan)
        near = self.spread.mT.float()
        return ClassMap(self.spread, near, precision, torch.bmm(shift, self.spread).flatten(1), log_volume)


def class_root(factor: Tensor, basis: Tensor, precision: Tensor) -> ClassRoot:
    """From L ``(C, N, N)``, U ``(N, N)`` or empty, and alpha ``(C, N)``."""
    inner = weighed_square(factor, precision)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    narrowing, ok = cholesky_in_place(inner)
    half, log_narrowing = solve_lower(narrowing, factor.mT), triangular_log_determinant(narrowing)
    if len(basis) == 0:
        return ClassRoot(half.mT, log_narrowing, ok, basis, basis)
    half = half @ basis
    covariance = half.mT @ half
    lower, positive = cholesky_in_place(covariance.clone())
    return ClassRoot(basis @ lower @ basis.mT, log_narrowing, ok & positive, covariance, lower)


def class_basis(factor: Tensor, precision: Tensor) -> Tensor:
    """U ``(N, N)``: principal axes of S at one theta, variances falling; their signs make no difference to G.

    Where variances are equal but for rounding, those of a smooth kernel's jitter, for instance, any axes would do; data in their
    order decide, so that rounding does not.

    Args:
        factor: L ``(1, N, N)``.
        precision: alpha ``(1, N)``.
    """
    size = factor.shape[-1]
    root = class_root(factor, factor.new_zeros(0, 0), precision).spread[0]
    covariance = root @ root.mT
    order = torch.linspace(1.0, 0.0, size, dtype=factor.dtype, device=factor.device)
    covariance.diagonal().add_(_BETWEEN_EQUALS * covariance.diagonal().max() * order)
    return torch.linalg.eigh(covariance).eigenvectors.flip(-1)
