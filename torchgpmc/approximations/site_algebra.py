"""What follows from the factor of B = I + W^1/2 K W^1/2, which is never badly conditioned, for C thetas at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import (
    cholesky_in_place,
    in_single_precision,
    inverse_lower,
    solve_lower,
    times_matrix,
    times_vector,
)


class Made(NamedTuple):
    """The approximation that sites make."""

    root: Tensor  # of the sites' precision
    factor: Tensor
    ok: Tensor
    alpha: Tensor
    centred: Tensor


def made_by(covariance: Tensor, precision: Tensor, shift: Tensor) -> Made:
    """By sites exp(-precision f^2 / 2 + shift f) in the centred f; algebra in the covariance's type, of sites in theirs."""
    root = precision.sqrt().to(covariance)
    factor, ok = factor_of_b(covariance, root)
    prior_shift = times_vector(covariance, shift.to(covariance))
    alpha = shift - apply_r(factor, root, prior_shift.unsqueeze(-1)).squeeze(-1)
    return Made(root, factor, ok, alpha, times_vector(covariance, alpha.to(covariance)).to(shift))


def factor_of_b(covariance: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factor of B = I + W^1/2 K W^1/2, no graph, and whether each factorisation succeeded; ``root`` is W^1/2 ``(C, N)``.

    B and its factor have the precision of ``root``, the covariance's or single.
    """
    same = covariance.dtype == root.dtype
    column = root.unsqueeze(-1)
    b = (covariance * column if same else in_single_precision(covariance).mul_(column)).mul_(root.unsqueeze(-2))
    b.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return cholesky_in_place(b)


def apply_r(factor: Tensor, root: Tensor, right: Tensor) -> Tensor:
    """R right, R = (W^-1 + K)^-1 = W^1/2 B^-1 W^1/2, for right-hand sides ``(C, N, R)``."""
    half = solve_lower(factor, right * root.unsqueeze(-1))
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).mul_(root.unsqueeze(-1))


def marginal_variances(covariance: Tensor, factor: Tensor, root: Tensor) -> Tensor:
    """Diagonal of (K^-1 + W)^-1 = K - K R K, ``(C, N)``."""
    half = solve_lower(factor, covariance * root.unsqueeze(-1))
    return covariance.diagonal(dim1=-2, dim2=-1) - half.square_().sum(-2)


class SiteMarginals(NamedTuple):
    """What the inverse of B's factor L tells of marginals; garbage where that was not factorised."""

    inverse_factor: Tensor  # L^-1, (C, N, N)
    inverse_diagonal: Tensor  # of B^-1 = L^-T L^-1, (C, N), sums of squares
    variance: Tensor  # diagonal of (K^-1 + W)^-1, (C, N)


def site_marginals(covariance: Tensor, factor: Tensor, ok: Tensor, root: Tensor) -> SiteMarginals:
    """L^-1 and the :func:`marginal_variances` that follow from it, (1 - diag(B^-1)) / W: half of the operations of B^-1.

    Where little of a variance depends on the site, that cancels: such data have theirs by K - K R K.
    """
    inverse_factor = inverse_lower(factor)
    inverse_diagonal = inverse_factor.square().sum(-2)
    explained = 1 - inverse_diagonal
    variance = explained / root.square()
    faint = ((explained < torch.finfo(factor.dtype).eps ** 0.5) & ok.unsqueeze(-1)).any(0)
    if bool(faint.any()):
        rows = faint.nonzero().squeeze(-1)
        half = inverse_factor @ (covariance[..., rows] * root.unsqueeze(-1))
        variance[:, rows] = covariance.diagonal(dim1=-2, dim2=-1)[:, rows] - half.square_().sum(-2)
    return SiteMarginals(inverse_factor, inverse_diagonal, variance)


def posterior_times(covariance: Tensor, inverse_factor: Tensor, root: Tensor, vector: Tensor) -> Tensor:
    """(K^-1 + W)^-1 x = K (x - W^1/2 L^-T L^-1 W^1/2 K x), ``(C, N)``: how far the mean moves where the sites' shifts move by x."""
    within = times_matrix(root * times_vector(covariance, vector.to(covariance)), inverse_factor.mT)
    return times_vector(covariance, vector.to(covariance) - root * times_matrix(within, inverse_factor)).to(vector)


def dense_r(factor: Tensor, root: Tensor) -> Tensor:
    """R = W^1/2 B^-1 W^1/2 as a matrix ``(C, N, N)``."""
    half = solve_lower(factor, torch.diag_embed(root))
    return half.mT @ half
