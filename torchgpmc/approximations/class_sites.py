r"""Normal densities of K latent functions of which data see differences alone, by K + 1 factorisations of N x N matrices.

Sites of a datum have the precision :math:`W_n = \mathrm{diag}(d_n) - d_n d_n^T / \sum_k d_{nk}`, all d positive: no information
about what the functions share, and the curvature of softmax's log where d are its probabilities. With one covariance K of all
functions, and

.. math:: E_k = (K + D_k^{-1})^{-1}, \quad M = \sum_k E_k, \quad (K^{-1} + W)^{-1} r = K (r - E K r + E R M^{-1} R^T E K r),

R summing over functions, nothing of size K N is factorised (Rasmussen & Williams 2006, section 3.5.2, where sums of d are one).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky_in_place, identity_matrix, solve_lower, times_blocks, triangular_log_determinant

_ROUNDS = 25  # of a fixed point for d, to two hundredths; any positive d will do
_MOST = 0.999  # of a datum's d in one function


class ClassSites(NamedTuple):
    """Sites exp(b'f - f'W f / 2) of each datum, in the centred f."""

    weight: Tensor  # (C, K, N), d
    shift: Tensor  # (C, K, N), b, whose sum over functions is zero


class UnderSites(NamedTuple):
    """The normal density that sites make of the prior."""

    weight: Tensor  # (C, K, N), d
    response: Tensor  # (C, K, N, N), E of each function
    factor: Tensor  # (C, N, N), lower, of M
    log_determinant: Tensor  # (C,), of I + K W
    ok: Tensor  # (C,)

    def respond(self, right: Tensor) -> Tensor:
        """E - E R M^-1 R' E of right-hand sides ``(C, K, N, R)``; K times what is left of r is (K^-1 + W)^-1 r."""
        own = self.response @ right
        shared = torch.cholesky_solve(own.sum(1), self.factor)
        return own - self.response @ shared.unsqueeze(1)


def under_class_sites(covariance: Tensor, weight: Tensor) -> UnderSites:
    """For K ``(C, N, N)`` and d ``(C, K, N)``; rows that could not be factorised are not ``ok``."""
    root = weight.sqrt()
    outer = root.unsqueeze(-1) * root.unsqueeze(-2)
    b = outer * covariance.unsqueeze(1)
    b.diagonal(dim1=-2, dim2=-1).add_(1.0)
    own, own_ok = cholesky_in_place(b)
    own = torch.where(own_ok[..., None, None], own, identity_matrix(own.shape[-1], own))  # a zero on the diagonal would raise
    response = torch.cholesky_inverse(own).mul_(outer)
    factor, ok = cholesky_in_place(response.sum(1))
    log_determinant = 2 * (triangular_log_determinant(own).sum(-1) + triangular_log_determinant(factor))
    return UnderSites(weight, response, factor, log_determinant - weight.sum(1).log().sum(-1), ok & own_ok.all(-1))


def class_mean(covariance: Tensor, under: UnderSites, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Of the centred f: alpha ``(C, K, N)``, and K alpha."""
    moved = times_blocks(shift.flatten(1), covariance).view_as(shift)
    alpha = shift - under.respond(moved.unsqueeze(-1)).squeeze(-1)
    return alpha, times_blocks(alpha.flatten(1), covariance).view_as(shift)


def class_marginals(under: UnderSites, basis: Tensor) -> Tensor:
    """Covariances at each datum ``(C, N, A, A)`` of A combinations of the functions, each row of ``basis`` ``(A, K)`` one."""
    inverse = 1 / under.weight
    # K - K E K = (D - E) / d d', and E K = (D - E) / d: no products.
    own = inverse - under.response.diagonal(dim1=-2, dim2=-1) * inverse.square()
    moved = under.response * inverse.unsqueeze(-2)
    combined = (basis @ moved.flatten(2)).view(len(moved), len(basis), *moved.shape[2:])
    combined.diagonal(dim1=-2, dim2=-1).sub_(basis.sum(-1, keepdim=True))
    shared = solve_lower(under.factor.unsqueeze(1), combined)
    found = basis @ torch.diag_embed(own.mT) @ basis.mT
    for k in range(len(basis)):
        for j in range(k + 1):
            both = (shared[:, k] * shared[:, j]).sum(-2)
            found[:, :, k, j] += both
            if j < k:
                found[:, :, j, k] += both
    return found


def class_precision(weight: Tensor) -> Tensor:
    """W ``(C, N, K, K)`` of d ``(C, K, N)``.

    Example:
        >>> class_precision(torch.ones(1, 2, 1))
        tensor([[[[ 0.5000, -0.5000],
                  [-0.5000,  0.5000]]]])
    """
    d = weight.mT
    return torch.diag_embed(d) - d.unsqueeze(-1) * (d / d.sum(-1, keepdim=True)).unsqueeze(-2)


def weights_of_diagonal(diagonal: Tensor) -> Tensor:
    """The d ``(C, K, N)`` whose W has this diagonal ``(C, K, N)``, positive; the nearest by a few rounds where there is none."""
    share = diagonal / diagonal.sum(1, keepdim=True)
    for _ in range(_ROUNDS):
        share = diagonal / (1 - share.clamp_max(_MOST))
        share = share / share.sum(1, keepdim=True)
    return share * (diagonal.sum(1, keepdim=True) / (share * (1 - share)).sum(1, keepdim=True).clamp_min(1 - _MOST))


def differences(num_latents: int, like: Tensor) -> Tensor:
    """An orthonormal basis of what differences tell of, Helmert's ``(K - 1, K)``.

    Example:
        >>> differences(2, torch.zeros(())).sign()
        tensor([[ 1., -1.]])
    """
    rows = [[1.0] * k + [-float(k)] + [0.0] * (num_latents - k - 1) for k in range(1, num_latents)]
    matrix = like.new_tensor(rows)
    return matrix / matrix.norm(dim=-1, keepdim=True)
