"""E log sum exp(f) of independent normals, and its slopes: what sparse models with softmax ask for at every datum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.likelihoods.gumbel import EULER, WIDEST, Lattice, RuleEdges, Weights, by_rule
from torchgpmc.likelihoods.narrow_normals import NARROW, are_narrow, narrow_log_sum_exp
from torchgpmc.numerics.quadrature import expectation_of_several

# Sums err by about a Gumbel variable's characteristic function at the frequency 2 pi / 0.3, which is 8e-14, and slopes in variances
# by a hundred times as much, so that nobody sees which lattice a batch gets (3e-10 with 0.333). Values and slopes of coarser ones
# (1e-9 with 0.4) do not belong together closely enough for every search to end. Beyond 7.5 deviations of f lies 6e-14.
_LATTICE = Lattice(step=0.3, reach=7.5, slopes=True)
_EDGES = RuleEdges((*NARROW, 2.0, 6.0, 18.0), _LATTICE.step, (0.8, 1.6, 4.0, 12.0))
_LEAST = 1e-25  # of distribution functions, below which differences from one are rounding


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> Tensor:
    r"""E log sum exp(f), f independent normals: ``(..., K)`` to ``(...)``; a sum in one dimension, whatever K is, to 1e-8.

    Given f, the greatest of all :math:`f_j + g_j`, g standard Gumbel variables, is a Gumbel variable about log sum exp(f), whose
    mean lies higher by Euler's constant. Beyond standard deviations of 50
    :func:`torchgpmc.numerics.quadrature.product_rule` stands in, right to about a twentieth of the deviation.

    Example:
        >>> import torch
        >>> expected_log_sum_exp(torch.zeros(3).double(), torch.full((3,), 1e-12).double()).exp()
        tensor(3.0000, dtype=torch.float64)
    """
    found = _ExpectedLogSumExp.apply(mean, variance.clamp_max(WIDEST**2))
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
    shape = mean.shape
    if not mean.numel():
        return mean.new_zeros(shape[:-1]), mean, mean
    # Normals that are none have no say in where lattices lie, and their answer is NaN.
    centre, spread = (torch.nan_to_num(part.double()).reshape(-1, shape[-1]) for part in (mean, variance))
    value, *columns = by_rule(_of_like_normals, centre, spread, _EDGES)
    unknown = torch.isnan(mean + variance).any(-1)
    softmax, slope = (part.view(shape).to(mean.dtype).masked_fill_(unknown.unsqueeze(-1), torch.nan) for part in columns)
    return value.view(shape[:-1]).to(mean.dtype).masked_fill_(unknown, torch.nan), softmax, slope


class _ExpectedLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        value, *slopes = log_sum_exp_and_slopes(mean, variance)
        ctx.save_for_backward(*slopes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        mean_slope, variance_slope = ctx.saved_tensors
        return gradient.unsqueeze(-1) * mean_slope, gradient.unsqueeze(-1) * variance_slope


def _of_like_normals(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # On a GPU the widest would have to be looked at from the host.
    widest = float(variance.amax().sqrt()) if mean.device.type == "cpu" else torch.inf
    if are_narrow(mean.shape[-1], widest):
        return narrow_log_sum_exp(mean, variance, widest)
    return _by_greatest(mean, variance)


def _by_greatest(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""By the greatest of the sums f_k + g_k: the j-th is it at u with density :math:`H_j'(u) \prod_{k \ne j} H_k(u)`."""
    lowest, weights, sums = _LATTICE.sums(mean, variance)
    softmax, moment, slope = (torch.cat(parts) for parts in zip(*[_over_lattice(part, weights) for _, part in sums], strict=True))
    # The sum of softmax is one, but for the rule's error.
    return lowest.squeeze(-1) + moment / softmax.sum(-1) - EULER, softmax, 0.5 * slope


def _over_lattice(functions: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``(R, K, 3, n)``: masses ``(R, K)``, first moments in u ``(R,)``, and masses of the densities' slopes ``(R, K)``."""
    cdf = functions[:, :, 0].clamp_min(_LEAST)
    others = cdf.prod(1, keepdim=True) / cdf
    parts = functions[:, :, 1:] * others.unsqueeze(2)
    sums = parts @ weights.mass
    return sums[:, :, 0], parts[:, :, 0].sum(1) @ weights.moment, sums[:, :, 1]
