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

from torchgpmc.numerics.linalg import (
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

    def select(self, rows: Tensor | slice) -> GaussianSites:
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
    shift = (sites.shift - sites.precision * mean).unsqueeze(1)
    linear = shift @ factor
    found = white_under_precision(inner.unsqueeze(1), linear, white)

    def slopes(gradient: Tensor) -> LatentSlopes:
        f_slope = gradient @ factor
        parts = found.slopes(f_slope - found.v, 1)
        half = parts.half + f_slope.mT @ found.v + linear.mT @ parts.linear
        mean_slope = gradient - sites.precision.unsqueeze(-2) * (parts.linear @ factor.mT)
        return LatentSlopes(factor_adjoint(factor, half), parts.white, mean_slope.squeeze(1))

    return Latents(found.v @ factor.mT, found.v, found.log_volume, slopes)


class PrecisionSlopes(NamedTuple):
    """Derivatives of sum(gradient * v) + log |dv / dw|."""

    white: Tensor  # (C, B, m)
    linear: Tensor  # (C, B, m)
    half: Tensor  # (C, M, M), T' times that in T where the precision is I + T' Lambda T, T the same for all functions of all blocks


class UnderPrecision(NamedTuple):
    """v = R^-T (R^-1 b + w) for precisions P = R R', without graph."""

    v: Tensor  # (C, B, m)
    log_volume: Tensor  # (C,), log |dv / dw|; NaN where a precision does not factorise
    slopes: Callable[[Tensor, int], PrecisionSlopes]  # of a gradient (C, B, m), and the number of functions in a block


def white_under_precision(precision: Tensor, linear: Tensor, white: Tensor) -> UnderPrecision:
    """v that is N(P^-1 b, P^-1) where w is white, with derivatives in w, in b and in what makes P.

    Args:
        precision: P ``(C, B, m, m)``, of B independent blocks of latents.
        linear: b ``(C, B, m)``.
        white: w ``(C, B, m)``.
    """
    root, ok = cholesky(precision)
    inverse = inverse_lower(root)
    explained = linear.unsqueeze(-2) @ inverse.mT  # R^-1 b as a row, like all vectors here
    total = explained + white.unsqueeze(-2)
    v = total @ inverse

    def slopes(gradient: Tensor, num_functions: int) -> PrecisionSlopes:
        white_slope = gradient.unsqueeze(-2) @ inverse.mT
        linear_slope = white_slope @ inverse
        # R-bar = -v white_slope' - linear_slope e' - diag(1 / R), so R' R-bar is of rank two but for the identity, and
        # (P - I) (P-bar + P-bar') = (R^-T - R) S R^-1 with S its symmetric completion from the lower triangle, times -1.
        lower = (total.mT @ white_slope + white_slope.mT @ explained).tril_()
        symmetric = lower + lower.mT
        symmetric.diagonal(dim1=-2, dim2=-1).mul_(0.5).add_(1.0)
        # T is that of each function, so blocks on the diagonal alone are needed, and their sum.
        count, blocks, size, _ = root.shape
        each = size // num_functions
        left = (inverse.mT - root).view(count, blocks * num_functions, each, size).transpose(1, 2).reshape(count, each, -1)
        right = (symmetric @ inverse).view(count, blocks, size, num_functions, each).transpose(2, 3).reshape(count, -1, each)
        return PrecisionSlopes(white_slope.squeeze(-2), linear_slope.squeeze(-2), left @ right)

    log_volume = -triangular_log_determinant(root).sum(-1)
    return UnderPrecision(v.squeeze(-2), torch.where(ok.all(-1), log_volume, torch.nan), slopes)


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
