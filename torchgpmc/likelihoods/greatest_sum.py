"""The mean of the greatest sum of a normal and a Gumbel variable, and its slopes: one lattice, run forwards and backwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchgpmc.likelihoods.gumbel import GUMBEL_LEAST, widest_step
from torchgpmc.likelihoods.gumbel_parts import REACH, STEP, parts_of
from torchgpmc.numerics.threads import slices

_MOST = 7.5  # above all normals, and the logarithm of how many: from there on two exponentials are right to e^-22
_EULER = 0.5772156649015329  # a Gumbel variable's mean
_LEAST = 1e-25  # of distribution functions, below which differences from one are rounding
_FAR = -1e6  # below u_0, where no normal is the greatest, however wide; farther ones would take numbers that overflow
_NORMALS, _NORMALS_ON_DEVICE = 2**13, 2**15  # at once


def greatest_of_sums(mean: Tensor, variance: Tensor, *, products: bool = False) -> tuple[Tensor, ...]:
    r"""E log sum exp(f), f independent normals, and its derivatives in their means and variances; to 1e-10, whatever K is.

    Given f, the greatest of all :math:`f_k + g_k`, g standard Gumbel variables, is a Gumbel variable about log sum exp(f), whose
    mean lies higher by Euler's constant. With :math:`H_k` the distribution functions of these sums, F that of g,

    .. math:: E \max_k (f_k + g_k) = u_0 + \int_{u_0}^\infty \Big(1 - \prod_k H_k(u)\Big) du,
        \quad H_k(u) = \int N(x | m_k, v_k) F(u - x) \, dx

    where u_0 is surely exceeded. Both integrals are sums over lattices, and slopes are those of the sums: with weights
    :math:`\omega_i`, the derivative in :math:`H_k(u_i)` is :math:`-\omega_i \prod_{j \ne k} H_j(u_i)`, and goes back to x through
    the values F(u - x) that it came by. Normals are told apart by width, and those of like mean share a stretch of the lattice.
    Products of s = softmax(f) are curvatures, :math:`E s_j s_k = \int H_j' H_k' \prod_{i \ne j, k} H_i \, du`.

    Args:
        mean: ``(R, K)``, finite.
        variance: the same shape.
        products: whether E s_j s_k are wanted, too.

    Returns:
        ``(R,)``, ``(R, K)``, ``(R, K)``, and with ``products`` ``(R, K, K)``.

    Source:
        Sums over lattices of functions that are analytic in a strip converge geometrically (Trefethen & Weideman 2014).

    Example:
        >>> zero = torch.zeros(1, 2).double()
        >>> [part.round(decimals=4) for part in greatest_of_sums(zero, zero + 0.01)]  # doctest: +NORMALIZE_WHITESPACE
        [tensor([0.6956], dtype=torch.float64), tensor([[0.5000, 0.5000]], dtype=torch.float64),
         tensor([[0.1244, 0.1244]], dtype=torch.float64)]
    """
    normals = _NORMALS if mean.device.type == "cpu" else _NORMALS_ON_DEVICE
    rows = slices(len(mean), max(1, normals // mean.shape[-1]))
    found = [_of_rows(mean[part], variance[part], products) for part in rows]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _of_rows(mean: Tensor, variance: Tensor, products: bool) -> tuple[Tensor, ...]:
    deviation = variance.sqrt()
    lowest = (mean - REACH * deviation).amax(-1, keepdim=True) + GUMBEL_LEAST
    centre = (mean - lowest).clamp_min(_FAR)
    highest = (centre + REACH * deviation).amax()
    step, top = torch.stack([widest_step(variance, STEP).amin(), highest]).tolist()
    count = int((top + _MOST + math.log(mean.shape[-1])) / step) + 2
    u = step * torch.arange(count, dtype=mean.dtype, device=mean.device)
    weights = _weights(u, step)
    parts = list(parts_of(centre.flatten(), deviation.flatten(), u, densities=products))
    below = mean.new_empty(mean.numel(), count)  # H less one
    for part in parts:
        below[part.which] = part.below()
    functions = below.add_(1).clamp_min_(_LEAST).view(*mean.shape, count)
    product = functions.prod(1, keepdim=True)
    value = lowest.squeeze(-1) + (1 - product.squeeze(1)) @ weights - _EULER
    hazard = mean.new_empty(mean.numel(), count if products else 0)  # H' / H
    for part in parts if products else ():
        hazard[part.which] = part.density()
    hazard = hazard.view(*mean.shape, -1).div_(functions) if products else hazard
    slope = torch.div(product * -weights, functions, out=functions).flatten(0, 1)
    mean_slope, variance_slope = torch.empty_like(centre).flatten(), torch.empty_like(centre).flatten()
    for part in parts:
        mean_slope[part.which], variance_slope[part.which] = part.slopes(slope[part.which])
    mean_slope, variance_slope = mean_slope.view_as(mean), variance_slope.view_as(mean)
    if not products:
        return value, mean_slope, variance_slope
    of_pairs = (hazard * (product * _weights_of_pairs(u, step))) @ hazard.mT
    of_pairs.diagonal(dim1=-2, dim2=-1).copy_(mean_slope - 2 * variance_slope)  # of E s (1 - s) / 2
    return value, mean_slope, variance_slope, of_pairs


def _weights(u: Tensor, step: float) -> Tensor:
    r"""Of 1 - G at 0, step, ..., for its integral from 0 on: half of one at first, where it is level.

    Beyond the last it is :math:`A e^{-u} - B e^{-2u}`, with A and B from the last two, and so is what sums of it add.
    """
    weights = torch.full_like(u, step)
    weights[0] *= 0.5
    fall = math.exp(-step)
    once, twice = fall / (1 - fall), fall**2 / (1 - fall**2)  # sums beyond the last, of one that is 1 there
    # Of last = A - B and the one before = A / fall - B / fall^2.
    scale = 1 / fall**2 - 1 / fall
    a_of_last, a_of_before = 1 / fall**2 / scale, -1 / scale
    weights[-1] += step * (a_of_last * once - (a_of_last - 1) * twice)
    weights[-2] += step * (a_of_before * once - a_of_before * twice)
    return weights


def _weights_of_pairs(u: Tensor, step: float) -> Tensor:
    """Of products of two densities, which fall as exp(-2 u) beyond the last."""
    weights = torch.full_like(u, step)
    weights[-1] += step / math.expm1(2 * step)
    return weights
