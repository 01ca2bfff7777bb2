"""E log sum exp(f) of independent normals, and its slopes: what sparse models with softmax ask for at every datum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchgpmc.likelihoods.decided import decided_log_sum_exp
from torchgpmc.likelihoods.greatest_sum import greatest_of_sums
from torchgpmc.likelihoods.gumbel import WIDEST, RuleEdges, by_rule
from torchgpmc.likelihoods.gumbel_parts import STEP
from torchgpmc.likelihoods.narrow_normals import NARROW, are_narrow, narrow_log_sum_exp
from torchgpmc.likelihoods.slopes import with_known_slopes
from torchgpmc.numerics.quadrature import expectation_of_several

_EDGES = RuleEdges((*NARROW, 2.0, 6.0, 18.0), STEP, (0.8, 1.6, 4.0, 12.0))
_EDGES_OF_MANY = RuleEdges((0.3, 0.7, 2.0, 7.0), STEP, (1.2, 4.0, 12.0))  # that have lattices alone
_DECIDED = 1e-10  # what the series of those may be off


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> Tensor:
    r"""E log sum exp(f), f independent normals: ``(..., K)`` to ``(...)``; a sum in one dimension, whatever K is, to 1e-8.

    Where one function is all but surely the greatest a series (:func:`torchgpmc.likelihoods.decided.decided_log_sum_exp`), else
    :func:`torchgpmc.likelihoods.greatest_sum.greatest_of_sums`. Beyond standard deviations of 50
    :func:`torchgpmc.numerics.quadrature.product_rule` stands in, right to about a twentieth of the deviation.

    Example:
        >>> import torch
        >>> expected_log_sum_exp(torch.zeros(3).double(), torch.full((3,), 1e-12).double()).exp()
        tensor(3.0000, dtype=torch.float64)
    """
    found = with_known_slopes(log_sum_exp_and_slopes, mean, variance.clamp_max(WIDEST**2))
    too_wide = (variance > WIDEST**2).any(-1)
    if not bool(too_wide.any()):
        return found
    return torch.where(too_wide, expectation_of_several(lambda f: torch.logsumexp(f, -1), mean, variance), found)


def log_sum_exp_and_slopes(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log sum exp(f), and its derivatives E s in the means and E s (1 - s) / 2 in the variances, s = softmax(f).

    (Bonnet's and Price's theorems.)

    Args:
        mean: ``(..., K)``.
        variance: the same shape; standard deviations of at most 50.

    Returns:
        ``(...)``, ``(..., K)``, ``(..., K)``.

    Example:
        >>> import torch
        >>> value, mean_slope, variance_slope = log_sum_exp_and_slopes(torch.zeros(2), torch.full((2,), 1e-12))
        >>> value.exp(), mean_slope, variance_slope
        (tensor(2.), tensor([0.5000, 0.5000]), tensor([0.1250, 0.1250]))
    """
    value, softmax, slope = _found(mean, variance, products=False)
    return value, softmax, slope


def log_sum_exp_slopes_and_products(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and E s s', minus the derivatives in two functions' means, ``(..., K, K)``; on the diagonal E s^2.

    Example:
        >>> import torch
        >>> log_sum_exp_slopes_and_products(torch.zeros(2), torch.full((2,), 1e-12))[3]
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])
    """
    value, softmax, slope, products = _found(mean, variance, products=True)
    return value, softmax, slope, products


def _found(mean: Tensor, variance: Tensor, *, products: bool) -> tuple[Tensor, ...]:
    shape = mean.shape
    if not mean.numel():
        empty = mean.new_zeros(shape[:-1]), mean, mean
        return (*empty, mean.new_zeros(*shape, shape[-1])) if products else empty
    # Normals that are none have no say in where lattices lie, and their answer is NaN.
    centre, spread = (torch.nan_to_num(part.double()).reshape(-1, shape[-1]) for part in (mean, variance))
    unknown = torch.isnan(mean + variance).any(-1)

    def shaped(part: Tensor) -> Tensor:
        part = part.view((*shape[:-1], *part.shape[1:])).to(mean.dtype)
        return part.masked_fill_(unknown.view((*unknown.shape, *[1] * (part.dim() - unknown.dim()))), torch.nan)

    return tuple(map(shaped, _of_normals(centre, spread, products)))


def _of_normals(mean: Tensor, variance: Tensor, products: bool) -> tuple[Tensor, ...]:
    """Those of which one is surely the greatest apart from the others; on a GPU they would have to be counted on the host."""
    of_like_normals = partial(_of_like_normals, products=products)
    edges = _EDGES if are_narrow(mean.shape[-1], 0.0) else _EDGES_OF_MANY
    if mean.device.type != "cpu" or mean.shape[-1] == 1:
        return by_rule(of_like_normals, mean, variance, edges)
    *found, bound = decided_log_sum_exp(mean, variance, products=products)
    open_ones = (~(bound <= _DECIDED)).nonzero().squeeze(-1)
    if len(open_ones):
        others = by_rule(of_like_normals, mean[open_ones], variance[open_ones], edges)
        for part, other in zip(found, others, strict=True):
            part[open_ones] = other
    return tuple(found)


def _of_like_normals(mean: Tensor, variance: Tensor, products: bool) -> tuple[Tensor, ...]:
    # On a GPU the widest would have to be looked at from the host.
    widest = float(variance.amax().sqrt()) if mean.device.type == "cpu" else torch.inf
    if are_narrow(mean.shape[-1], widest):
        return narrow_log_sum_exp(mean, variance, widest, products=products)
    return greatest_of_sums(mean, variance, products=products)
