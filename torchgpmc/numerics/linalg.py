"""Batched Cholesky algebra in which the failure of one matrix is a value, not an exception."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.numerics.threads import one_torch_thread, slices

# Rows: of fewer more calls cost what fewer operations gain, from 150 on with one processor, from 300 with another.
_WORTH_BLOCKS = 256
_BLOCK, _MOST_BLOCKS = 64, 8  # rows, about, and how many such blocks, then larger ones
_ALIGNED = 16  # numbers: where blocks begin at other places 500 rows take a third longer
_BESIDE = 2.0**-6  # of the largest number, of which single precision rounds 1e-7


class Cholesky(NamedTuple):
    """Lower factor ``(..., N, N)`` and whether each factorisation succeeded ``(...)``; failed factors hold garbage."""

    factor: Tensor
    ok: Tensor


def cholesky(matrix: Tensor) -> Cholesky:
    """Lower Cholesky factors of a batch of matrices; never raises, never adds to the diagonal.

    Args:
        matrix: symmetric ``(..., N, N)``.

    Returns:
        Factors and a mask. Density code turns ``~ok`` into -inf, see :func:`torchgpmc.density.mask_failures`.

    Example:
        >>> import torch
        >>> cholesky(torch.stack([torch.eye(2), -torch.eye(2)])).ok
        tensor([ True, False])
    """
    if not (matrix.requires_grad and torch.is_grad_enabled()):
        # Torch's own copy takes one triangle, element by element down the columns: half of the whole time at N=200.
        return cholesky_in_place(matrix.clone(memory_format=torch.contiguous_format))
    lower, info = torch.linalg.cholesky_ex(matrix)
    return Cholesky(lower, info == 0)


def cholesky_in_place(matrix: Tensor) -> Cholesky:
    """:func:`cholesky` of a matrix ``(..., N, N)`` without graph that nothing else needs: its memory becomes the factor's.

    Saves a copy and a new piece of memory, a tenth of the time.
    """
    transposed = matrix.mT  # column by column, as LAPACK has it
    info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
    # LAPACK is a tenth (N=200) to a third (N=500) faster on the lower triangle with one thread, on the upper one with more.
    upper = torch.get_num_threads() > 1
    torch.linalg.cholesky_ex(transposed, upper=upper, out=(transposed, info))
    return Cholesky(matrix if upper else transposed, info == 0)


def in_single_precision(matrix: Tensor) -> Tensor:
    """Symmetric matrices ``(..., N, N)`` in single precision, without what is next to nothing beside their diagonal.

    Factors of kernels that fall off quickly would have denormal numbers there, on which processors take three times as long.

    Example:
        >>> in_single_precision(torch.tensor([[1.0, 1e-18], [1e-18, 1.0]]).double())
        tensor([[1., 0.],
                [0., 1.]])
    """
    single = matrix.to(torch.float32, copy=True)
    beside = _BESIDE * single.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    return single.add_(beside).sub_(beside)  # what is not seen beside that is nothing


class _FactorWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, covariance: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return factor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return factor_adjoint(factor, factor.mT @ gradient.tril()), None


def factor_with_gradient(covariance: Tensor, factor: Tensor) -> Tensor:
    """The Cholesky factor of ``covariance`` ``(C, N, N)`` that is at hand, differentiable (once); nothing is factorised here."""
    return _FactorWithGradient.apply(covariance, factor) if covariance.requires_grad else factor


def _halved_lower(matrix: Tensor) -> Tensor:
    """The lower triangle with half the diagonal, in place."""
    matrix = matrix.tril_()
    matrix.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return matrix


def factor_adjoint(factor: Tensor, half: Tensor) -> Tensor:
    """Gradient in K of a function of L, K = L L', from ``half``, the lower triangle of L' dL-bar: L^-T Phi(half) L^-1.

    Phi halves the diagonal of the lower triangle (Murray 2016, "Differentiation of the Cholesky decomposition", eq. 10). Not
    symmetrised: K is made symmetric by whatever made it, which sees the sum of both halves either way.
    """
    half = _halved_lower(half)
    left = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    # Solving from the right costs two to four times as much as solving from the left for the transpose.
    return torch.linalg.solve_triangular(factor.mT, left.mT, upper=True).mT


class _ApplyFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, covariance: Tensor, factor: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(factor, v)
        return times_blocks(v, factor.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor]:
        factor, v = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, times_blocks(gradient, factor)
        covariance, v_gradient = apply_factor_slopes(factor, v, gradient)
        return covariance, None, v_gradient


def apply_factor_slopes(factor: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of sum(gradient * L v) in K = L L' ``(C, N, N)``, not symmetrised, and in v ``(C, K, N)``; without a graph."""
    v_slope = gradient @ factor
    # L-bar = gradient' v, and the lower triangle of L' tril(L-bar) is that of (L' gradient') v: no N x N product.
    return factor_adjoint(factor, v_slope.mT @ v), v_slope


def apply_factor(covariance: Tensor, factor: Tensor, v: Tensor) -> Tensor:
    """L v for K vectors a matrix, differentiable in ``covariance`` = L L' (once) and ``v``; nothing is factorised here.

    Half the cost of differentiating through the factorisation itself, since the adjoint of L has rank K.

    Args:
        covariance: ``(C, N, N)``; carries the graph.
        factor: its Cholesky factor, taken as a constant.
        v: ``(C, K, N)``.

    Returns:
        ``(C, K, N)``.
    """
    return _ApplyFactor.apply(covariance, factor.detach(), v)


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, covariance: Tensor, factor: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        # An explicit inverse, as M is small beside N: matrix products keep every N-sized tensor in the same memory order, where
        # triangular solves would hand back transposed ones and each elementwise operation would then cost fivefold.
        inverse = inverse_lower(factor)
        white = inverse @ right
        ctx.save_for_backward(inverse, white)
        return white, (white * white).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, square_gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        inverse, white = ctx.saved_tensors
        total = torch.addcmul(gradient, white, square_gradient.unsqueeze(-2), value=2)
        # L-bar = -tril(right-bar white'), and the lower triangle of L' L-bar is that of -total white'.
        half = _halved_lower(total @ white.mT)
        return -(inverse.mT @ half @ inverse), None, inverse.mT @ total


def whiten(covariance: Tensor, factor: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """A = L^-1 right and its squared column norms, differentiable in ``covariance`` = L L' (once) and ``right``.

    Nothing is factorised here.

    Args:
        covariance: ``(C, M, M)``; carries the graph.
        factor: its Cholesky factor, taken as a constant.
        right: ``(C, M, N)``.

    Returns:
        A ``(C, M, N)`` and ``(C, N)``.
    """
    constant = not (torch.is_grad_enabled() and (covariance.requires_grad or right.requires_grad))
    if constant and right.shape[-1] <= factor.shape[-1]:  # the inverse would cost more than it saves
        white = solve_lower(factor, right)
        return white, white.square().sum(-2)
    return _Whiten.apply(covariance, factor.detach(), right)


def identity_matrix(size: int, like: Tensor) -> Tensor:
    """The identity matrix ``(size, size)``, of the dtype and on the device of ``like``."""
    return torch.eye(size, dtype=like.dtype, device=like.device)


def inverse_lower(factor: Tensor) -> Tensor:
    """L^-1 of lower triangular L ``(..., N, N)``: of many rows a block of them at a time, whose zeros LAPACK would work out."""
    size = factor.shape[-1]
    if size < _WORTH_BLOCKS or (factor.requires_grad and torch.is_grad_enabled()):
        return _times_inverse(identity_matrix(size, factor).expand_as(factor), factor)
    lower = factor.reshape(-1, size, size)
    found = lower.new_zeros(lower.shape)
    parts = _blocks(size)
    for number, rows in enumerate(parts):
        own = inverse_lower(lower[:, rows, rows])
        found[:, rows, rows] = own
        above = own @ lower[:, rows, : rows.start]
        for columns in parts[:number]:
            between = slice(columns.start, rows.start)
            found[:, rows, columns].baddbmm_(above[..., between], found[:, between, columns], beta=0, alpha=-1)
    return found.view(factor.shape)


def triangular_log_determinant(factor: Tensor) -> Tensor:
    """log |L| of a triangular L ``(..., N, N)`` with a positive diagonal: ``(...)``, half of log |L L'|.

    Example:
        >>> triangular_log_determinant(torch.tensor([[1.0, 0.0], [5.0, 1.0]]))
        tensor(0.)
    """
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def times_matrix(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows ``(C, M)``, each times its own matrix ``(C, M, N)`` from the right."""
    return torch.bmm(rows.unsqueeze(-2), matrix).squeeze(-2)


def times_vector(symmetric: Tensor, vector: Tensor) -> Tensor:
    """K v for symmetric K ``(C, N, N)`` and ``(C, N)``: as a row times a matrix, several times faster than torch's batched K v."""
    return times_matrix(vector, symmetric)


def times_blocks(stacked: Tensor, matrix: Tensor) -> Tensor:
    """Rows ``(C, ..., K N)``, K parts of N entries each, every part times ``(C, N, N)`` or ``(1, N, N)`` from the right."""
    count, size = len(matrix), matrix.shape[-1]
    return torch.bmm(stacked.reshape(count, -1, size), matrix).view(stacked.shape)


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """Solves ``factor x = right`` for lower triangular ``(..., N, N)`` and right-hand sides ``(..., N, R)``.

    Many of them from the right, x' factor' = right': LAPACK takes half the time in single precision, a fifth less in double.
    """
    if 2 * right.shape[-1] < factor.shape[-1]:
        return torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False).mT


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solves ``matrix x = right`` for matrices ``(C, N, N)`` of no special kind, and right-hand sides ``(C, N)`` or ``(C, N, R)``.

    By one thread of torch: by two, LU factors of several matrices of 150 rows and more had no pivots, or never came (torch 2.13 on
    an AMD EPYC).
    """
    with one_torch_thread():
        return torch.linalg.solve(matrix, right)


def weighed_square(factor: Tensor, weight: Tensor) -> Tensor:
    """L' diag(W) L of lower triangular L ``(C, N, N)`` and W ``(C, N)``, without a graph.

    A block of columns at a time, above whose rows L is zero: a third of a product's operations.
    """
    scaled = factor * weight.unsqueeze(-1)
    found = torch.empty_like(factor, memory_format=torch.contiguous_format)
    for columns in _blocks(factor.shape[-1]):
        below, before = slice(columns.start, None), slice(columns.start)
        found[:, columns, : columns.stop].baddbmm_(scaled[:, below, columns].mT, factor[:, below, : columns.stop], beta=0)
        found[:, before, columns] = found[:, columns, before].mT
    return found


def times_lower(matrix: Tensor, lower: Tensor) -> Tensor:
    """A product ``(C, R, N)`` of a matrix ``(C, R, N)`` or ``(R, N)`` and a lower triangular one ``(C, N, N)``, without a graph.

    A block of columns at a time, as in :func:`weighed_square`: of half the operations.
    """
    found = lower.new_empty(len(lower), matrix.shape[-2], lower.shape[-1])
    for columns in _blocks(lower.shape[-1]):
        below = slice(columns.start, None)
        found[..., columns] = matrix[..., below] @ lower[:, below, columns]
    return found


def outer_square(matrix: Tensor) -> Tensor:
    """A A' of a matrix ``(C, R, N)``, without a graph, of half a product's operations."""
    found = matrix.new_empty(*matrix.shape[:-1], matrix.shape[-2])
    for rows in _blocks(matrix.shape[-2]):
        block = matrix[:, rows] @ matrix[:, : rows.stop].mT
        found[:, rows, : rows.stop] = block
        found[:, : rows.stop, rows] = block.mT
    return found


def root_under_sites(factor: Tensor, precision: Tensor) -> Cholesky:
    """Lower G with I + L' diag(W) L = G' G, of a prior's factor L ``(C, N, N)`` and sites' precisions W ``(C, N)``.

    L G^-1 is then the lower factor of (K^-1 + W)^-1: each variable given those before it, those after it integrated out.
    """
    with_graph = factor.requires_grad and torch.is_grad_enabled()
    inner = factor.mT @ (precision.unsqueeze(-1) * factor) if with_graph else weighed_square(factor, precision)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    flipped, ok = cholesky(inner.flip(-2, -1)) if with_graph else cholesky_in_place(inner.flip(-2, -1))
    return Cholesky(flipped.flip(-2, -1).mT, ok)


def divided_by_root(factor: Tensor, root: Tensor) -> Tensor:
    """L G^-1 ``(C, N, N)``, lower: of many rows a block at a time, as :func:`inverse_lower`."""
    size = factor.shape[-1]
    if size < _WORTH_BLOCKS or ((factor.requires_grad or root.requires_grad) and torch.is_grad_enabled()):
        return _times_inverse(factor, root)
    parts = _blocks(size)
    inverses = [inverse_lower(root[:, rows, rows]) for rows in parts]
    found = torch.zeros_like(factor, memory_format=torch.contiguous_format)
    for number, rows in enumerate(parts):
        for columns, inverse in reversed(list(zip(parts, inverses, strict=True))[: number + 1]):
            known = slice(columns.stop, rows.stop)
            rest = torch.baddbmm(factor[:, rows, columns], found[:, rows, known], root[:, known, columns], alpha=-1)
            found[:, rows, columns].baddbmm_(rest, inverse, beta=0)
    return found


def _times_inverse(left: Tensor, lower: Tensor) -> Tensor:
    """B L^-1 ``(..., R, N)``: from this side LAPACK needs no copies of rows, and takes half the time in single precision."""
    return torch.linalg.solve_triangular(lower, left, upper=False, left=False)


def _blocks(size: int) -> list[slice]:
    """Blocks of rows of a triangular matrix, and of its columns."""
    rows = -(-size // min(max(round(size / _BLOCK), 1), _MOST_BLOCKS))
    return slices(size, -(-rows // _ALIGNED) * _ALIGNED)


def normal_from_natural(precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normal densities N(mean, S S') from their precision ``(..., M, M)`` and precision times mean ``(..., M)``.

    Returns:
        Mean ``(..., M)``, the lower triangular root S ``(..., M, M)``, and whether the precision was positive definite ``(...)``.

    Example:
        >>> mean, scale, _ = normal_from_natural(4.0 * torch.eye(1), torch.ones(1))
        >>> mean, scale
        (tensor([0.2500]), tensor([[0.5000]]))
    """
    # The factor of the precision with rows and columns in reverse order has the lower triangular root as its inverse's transpose.
    root, ok = cholesky(precision.flip(-2, -1))
    inverse = inverse_lower(root)
    scale = inverse.flip(-2, -1).mT
    mean = scale @ (scale.mT @ linear.unsqueeze(-1))
    return mean.squeeze(-1), scale, ok
