r"""Latents that are white under the prior, or under an approximate posterior with fixed Gaussian sites.

Under the prior, f = m + L v with v ~ N(0, I). With Gaussian sites N(f_n | g_n, 1 / W_n) in place of the likelihood, v given theta
and the sites is normal with precision P = I + L' W L = R R', and

.. math:: v = R^{-T} (R^{-1} L^T W (g - m) + w), \qquad \log |dv / dw| = -\log |R|

makes w white under that posterior: where the sites are close to the likelihood's own, theta and w are nearly independent and w is
nearly standard normal, which [theta, v] are far from. The sites are constants, so that [theta, w] has a density, exactly that of
[theta, v] times the volume; how good they are decides the speed alone. After Murray & Adams 2010, "Slice sampling covariance
hyperparameters of latent Gaussian models" (surrogate data), here as coordinates for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.linalg import (
    apply_factor_slopes,
    cholesky,
    factor_adjoint,
    identity_matrix,
    inverse_lower,
    solve_lower,
    triangular_log_determinant,
)


class GaussianSites(NamedTuple):
    """Gaussian sites N(f_n | shift_n / precision_n, 1 / precision_n), one a datum.

    Example:
        >>> import torch
        >>> one, other = GaussianSites(torch.ones(2, 3), torch.zeros(2, 3)), GaussianSites(torch.ones(3), torch.zeros(3))
        >>> one.select(torch.tensor([1])).precision.shape, other.select(torch.tensor([1])).precision.shape
        (torch.Size([1, 3]), torch.Size([3]))
    """

    precision: Tensor  # (N,), or (C, N) for one data set a chain; W, not negative
    shift: Tensor  # the same shape; W times the sites' centres

    def select(self, rows: Tensor) -> GaussianSites:
        """Those of some of the chains."""
        return self if self.precision.dim() == 1 else GaussianSites(self.precision[rows], self.shift[rows])


class LatentSlopes(NamedTuple):
    """Derivatives of sum(gradient * f) plus the log density of v and its volume."""

    covariance: Tensor  # (C, N, N), in K, not symmetrised
    white: Tensor  # (C, K, N)
    mean: Tensor  # (C, N)


class Latents(NamedTuple):
    """Latents from white coordinates, for the full GP, without graph."""

    centred: Tensor  # (C, K, N), f - m
    v: Tensor  # (C, K, N)
    log_volume: Tensor | float  # (C,), log |dv / dw|
    slopes: Callable[[Tensor], LatentSlopes]


def white_under_prior(factor: Tensor, white: Tensor) -> Latents:
    """f - m = L v, v itself being white.

    Args:
        factor: lower Cholesky factor L ``(C, N, N)``.
        white: ``(C, K, N)``.
    """

    def slopes(gradient: Tensor) -> LatentSlopes:
        covariance, v_slope = apply_factor_slopes(factor, white, gradient)
        return LatentSlopes(covariance, v_slope - white, gradient.sum(1))

    return Latents(white @ factor.mT, white, 0.0, slopes)


def white_under_sites(factor: Tensor, mean: Tensor, sites: GaussianSites, white: Tensor) -> Latents:
    """v from coordinates that are white under the posterior that the sites give; NaN where P does not factorise.

    Args:
        factor: lower Cholesky factor L ``(C, N, N)``.
        mean: prior mean m at the data ``(C, N)``.
        sites: of one latent function.
        white: w ``(C, 1, N)``.
    """
    root_map = factor * sites.precision.sqrt().unsqueeze(-1)
    inner = root_map.mT @ root_map
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root, ok = cholesky(inner)
    inverse = inverse_lower(root)
    shift = (sites.shift - sites.precision * mean).unsqueeze(1)
    explained = shift @ factor @ inverse.mT  # u = R^-1 L' W (g - m), as a row, like all vectors here
    total = explained + white
    v = total @ inverse

    def slopes(gradient: Tensor) -> LatentSlopes:
        f_slope = gradient @ factor
        white_slope = (f_slope - v) @ inverse.mT
        shift_slope = white_slope @ inverse
        # R-bar = -v white_slope' - shift_slope u' - diag(1 / R), so R' R-bar is of rank two but for the identity, and
        # L' W L (P-bar + P-bar') = (R^-T - R) S R^-1 with S its symmetric completion from the lower triangle, times -1.
        lower = (total.mT @ white_slope + white_slope.mT @ explained).tril_()
        symmetric = lower + lower.mT
        symmetric.diagonal(dim1=-2, dim2=-1).mul_(0.5).add_(1.0)
        half = (inverse.mT - root) @ (symmetric @ inverse)
        half += f_slope.mT @ v + (shift @ factor).mT @ shift_slope
        mean_slope = gradient - sites.precision.unsqueeze(-2) * (shift_slope @ factor.mT)
        return LatentSlopes(factor_adjoint(factor, half), white_slope, mean_slope.squeeze(1))

    log_volume = -triangular_log_determinant(root)
    return Latents(v @ factor.mT, v, torch.where(ok, log_volume, torch.nan), slopes)


def undo_whitening(projection: Tensor, mean: Tensor, sites: GaussianSites, white: Tensor) -> tuple[Tensor, Tensor]:
    """v and log |dv / dw| by operations that autograd differentiates; NaN where P does not factorise.

    Args:
        projection: A' with f = m + A' v, ``(C, N, V)``; L for the full GP.
        mean: m ``(C, N)``.
        sites: of one latent function.
        white: w ``(C, V)``.
    """
    root, shift = root_and_shift(projection, mean, sites)
    total = shift + white.unsqueeze(-1)
    v = torch.linalg.solve_triangular(root.mT, total, upper=True).squeeze(-1)
    return v, -triangular_log_determinant(root)


def whiten_under_sites(projection: Tensor, mean: Tensor, sites: GaussianSites, v: Tensor) -> tuple[Tensor, Tensor]:
    """w ``(C, V)``, from which :func:`undo_whitening` gives back v ``(C, V)``, and log |dv / dw|; other arguments as there."""
    root, shift = root_and_shift(projection, mean, sites)
    w = (root.mT @ v.unsqueeze(-1) - shift).squeeze(-1)
    return w, -triangular_log_determinant(root)


def root_and_shift(projection: Tensor, mean: Tensor, sites: GaussianSites) -> tuple[Tensor, Tensor]:
    """R ``(C, V, V)``, and R^-1 L' W (g - m) ``(C, V, 1)``; NaN where P does not factorise."""
    root_map = projection * sites.precision.sqrt().unsqueeze(-1)
    inner = root_map.mT @ root_map + identity_matrix(projection.shape[-1], projection)
    root, info = torch.linalg.cholesky_ex(inner)
    root = torch.where((info == 0)[:, None, None], root, torch.nan)
    return root, solve_lower(root, projection.mT @ (sites.shift - sites.precision * mean).unsqueeze(-1))
