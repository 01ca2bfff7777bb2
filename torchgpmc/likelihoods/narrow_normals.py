"""E log sum exp(f) of a few narrow independent normals, and its slopes, by products of Gauss-Hermite rules in differences of f."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.quadrature import gauss_hermite
from torchgpmc.numerics.threads import slices

# Nodes along an axis of differences: standard deviations of f up to which so many err by at most 2e-10, in values and slopes. Data
# are told apart by these limits, so that which rule one gets does not depend on those beside it.
_NODES = (0.008, 2), (0.09, 4), (0.2, 6), (0.4, 11), (0.63, 18)
# By the number of functions, standard deviations beyond which products take longer than sums over a lattice.
_NARROW = {2: 0.63, 3: 0.63, 4: 0.2}
NARROW = tuple(limit for limit, _ in _NODES)
_BLOCK_ELEMENTS = 2**16  # of a temporary that stays in a core's cache
_LEAST_VARIANCE = 1e-200  # precisions are divided by, and their squares are summed


def are_narrow(num_functions: int, widest: float) -> bool:
    """Whether :func:`narrow_log_sum_exp` serves so many functions, the widest of this standard deviation.

    Example:
        >>> are_narrow(3, 0.5), are_narrow(4, 0.5), are_narrow(10, 0.01)
        (True, False, False)
    """
    return widest <= _NARROW.get(num_functions, -1.0)


def narrow_log_sum_exp(mean: Tensor, variance: Tensor, widest: float, *, products: bool = False) -> tuple[Tensor, ...]:
    r"""E log sum exp(f), E s and E s (1 - s) / 2, s = softmax(f), and E s s' if ``products`` are wanted.

    What independent normals share, their mean weighted by precisions, is independent of the K - 1 dimensions that are left, and
    only adds its mean. With D the variances, and e the unit vector along :math:`D^{-1/2} 1`, those are :math:`D^{1/2} B z`, z
    standard normal, B the columns but the last of the reflection that takes the last axis to e.

    Args:
        mean: ``(R, K)``, finite.
        variance: the same shape.
        widest: the largest standard deviation; both as :func:`are_narrow` has them.
        products: whether E s s' are.

    Returns:
        ``(R,)``, ``(R, K)``, ``(R, K)``, and with ``products`` ``(R, K, K)``.

    Source:
        Products of Gauss rules (Davis & Rabinowitz 1984, "Methods of numerical integration", section 5.6); log sum exp of
        differences is analytic within pi of the real axis.

    Example:
        >>> zero = torch.zeros(1, 2).double()
        >>> [part.round(decimals=4) for part in narrow_log_sum_exp(zero, zero + 0.01, 0.1)]  # doctest: +NORMALIZE_WHITESPACE
        [tensor([0.6956], dtype=torch.float64), tensor([[0.5000, 0.5000]], dtype=torch.float64),
         tensor([[0.1244, 0.1244]], dtype=torch.float64)]
    """
    count = next(count for limit, count in _NODES if widest <= limit)
    node, weight = gauss_hermite(count, mean.dtype, mean.device)
    size = mean.shape[-1] - 1
    nodes = torch.cartesian_prod(*[node] * size).view(-1, size).mT.contiguous()  # (K - 1, J)
    weights = torch.cartesian_prod(*[weight] * size).view(-1, size).prod(-1)
    greatest = mean.amax(-1, keepdim=True)
    block = max(1, _BLOCK_ELEMENTS // (mean.shape[-1] * len(weights)))
    found = _by_blocks(mean - greatest, variance, nodes, weights, block, products)
    log_sum, softmax, square, *between = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_sum + greatest.squeeze(-1), softmax, (softmax - square).mul_(0.5), *between


def _by_blocks(
    mean: Tensor, variance: Tensor, nodes: Tensor, weights: Tensor, block: int, products: bool
) -> Iterator[tuple[Tensor, ...]]:
    for rows in slices(len(mean), block):
        f = _root(variance[rows]) @ nodes
        f += mean[rows].unsqueeze(-1)
        parts = f.exp_()
        total = parts.sum(-2, keepdim=True)
        log_sum = total.log().squeeze(-2) @ weights
        parts /= total
        softmax = parts @ weights
        if products:
            between = (parts * weights) @ parts.mT
            yield log_sum, softmax, between.diagonal(dim1=-2, dim2=-1), between
        else:
            yield log_sum, softmax, parts.square_() @ weights


def _root(variance: Tensor) -> Tensor:
    """D^1/2 B ``(R, K, K - 1)``."""
    precise = variance.clamp_min(_LEAST_VARIANCE).rsqrt()
    axis = precise / precise.norm(dim=-1, keepdim=True)
    normal = axis.clone()
    normal[..., -1] += 1.0  # not less: components are positive, and nothing cancels
    reflected = normal.unsqueeze(-1) * (normal[..., :-1] / normal[..., -1:]).unsqueeze(-2)
    return variance.sqrt().unsqueeze(-1) * (identity_matrix(variance.shape[-1], variance)[:, :-1] - reflected)
