"""E log sum exp(f) of independent normals, and its slopes: what sparse models with softmax ask for at every datum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.likelihoods.gumbel import (
    EULER,
    GUMBEL_LEAST,
    GUMBEL_MOST,
    MAX_RATE,
    WIDEST,
    Likeness,
    by_likeness,
    normal_rule,
    widest_step,
)
from torchgpmc.numerics.quadrature import expectation_of_several
from torchgpmc.numerics.threads import slices

# Sums err by about a Gumbel variable's characteristic function at the frequency 2 pi / 0.4, which is 1e-10: values and slopes of
# coarser lattices do not belong together closely enough for a search to end.
_STEP = 0.4
_REACH = 7.0  # standard deviations of f, beyond which lies 1e-12
_BELOW = 24.0  # so far below u a function is surely less, but for e^-24
_NARROW = 0.22  # the standard deviation below which a few nodes of its own take less time than a lattice for f
_LATTICE = 0.63  # its step, in the narrowest standard deviations
_LIKENESS = Likeness((0.06, _NARROW, 0.63, 2.0, 6.0, 18.0), _STEP, (0.8, 1.6, 4.0, 12.0))
_LOWEST = -300.0  # of exponents: lower ones are denormal, which costs a hundredfold
_LEAST = 1e-25  # of distribution functions, below which differences from one are rounding
_BLOCK_ELEMENTS = 2**16  # of a temporary that stays in a core's cache


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
    value, softmax, slope = by_likeness(_of_like_normals, mean, variance, _LIKENESS)
    return value, softmax, slope


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
    r"""The greatest of K sums of a normal and a Gumbel variable, on a lattice u, the same for all data but for where it begins.

    The j-th is it at u with density :math:`h_j(u) \prod_{k \ne j} H_k(u)`. :math:`H_k(u) = E F(u - f_k)`, F being a Gumbel
    variable's distribution function, is a sum over a lattice x of f: :math:`1 - H_k(u_i) = \sum_j w_{kj} (1 - F(u_i - x_j))`. With
    both lattices counted from where u begins, F's values are one matrix: all data and functions are one product with it.
    """
    shape, num_classes = mean.shape, mean.shape[-1]
    if not mean.numel():
        return mean.new_zeros(shape[:-1]), mean, mean
    # Normals that are none have no say in where lattices lie, and their answer is NaN.
    centre, deviation = (torch.nan_to_num(part.double()).reshape(-1, num_classes) for part in (mean, variance.sqrt()))
    lowest = (centre - _REACH * deviation).amax(-1, keepdim=True) + GUMBEL_LEAST
    centre = centre - lowest
    is_narrow = deviation < _NARROW
    # All that is asked of a device, at once.
    step, top, widest, narrowest = torch.stack(
        [
            widest_step(deviation.square(), _STEP).amin(),
            (centre + _REACH * deviation).amax(),
            torch.where(is_narrow, deviation, -1.0).amax(),
            torch.where(is_narrow, torch.inf, deviation).amin(),
        ]
    ).tolist()
    u = step * torch.arange(int((top + GUMBEL_MOST) / step) + 2, dtype=torch.float64, device=mean.device)
    functions = _Functions(u, top, widest, narrowest)
    rows = slices(len(centre), max(1, _BLOCK_ELEMENTS // (num_classes * functions.width)))
    parts = [_sums_over_lattice(functions.at(centre[part], deviation[part]), u) for part in rows]
    mass, moment, slope = (torch.cat(columns) for columns in zip(*parts, strict=True))
    softmax = step * mass
    value = lowest.squeeze(-1) + step * moment / softmax.sum(-1) - EULER  # the sum is one, but for the rule's error
    unknown = torch.isnan(mean + variance).any(-1)
    found = value.view(shape[:-1]), softmax.view(shape), (0.5 * step * slope).view(shape)
    return tuple(  # type: ignore[return-value]  # as many
        part.to(mean.dtype).masked_fill_(unknown if part.dim() < len(shape) else unknown.unsqueeze(-1), torch.nan) for part in found
    )


def _sums_over_lattice(functions: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``(R, K, 3, n)``: masses ``(R, K)``, first moments in u ``(R,)``, and masses of the densities' slopes ``(R, K)``."""
    cdf = functions[:, :, 0].clamp_min(_LEAST)
    others = cdf.prod(1, keepdim=True) / cdf
    parts = functions[:, :, 1:] * others.unsqueeze(2)
    sums = parts.sum(-1)
    return sums[:, :, 0], parts[:, :, 0].sum(1) @ u, sums[:, :, 1]


class _Functions:
    """Distribution function, density, and the density's slope in the mean, of normals plus a Gumbel variable, on u.

    Args:
        u: ``(n,)``, from 0.
        top: above which no normal has mass.
        widest: standard deviation of the narrow normals, negative where there are none.
        narrowest: of the wide ones, infinite where there are none.
    """

    def __init__(self, u: Tensor, top: float, widest: float, narrowest: float):
        self.u = u
        self.width = 3 * len(u)
        self.rule = normal_rule(widest) if widest >= 0 else None
        self.matrix: Tensor | None = None
        if math.isfinite(narrowest):
            self.step = min(_STEP, _LATTICE * narrowest)
            self.x = self.step * torch.arange(int((top + _BELOW) / self.step) + 2, dtype=u.dtype, device=u.device) - _BELOW
            rates = (self.x.unsqueeze(-1) - u).clamp_max(math.log(MAX_RATE)).exp()
            at_rates = rates * torch.exp(-rates)
            self.matrix = torch.cat([torch.expm1(-rates), at_rates, at_rates * (1 - rates)], -1)
            self.constant = torch.cat([torch.ones_like(u), torch.zeros_like(u), torch.zeros_like(u)])
            self.width = max(self.width, len(self.x))

    def at(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """Of some of the normals, ``(R, K, 3, n)``."""
        if self.rule is None:
            return self._by_lattice(mean, deviation)
        if self.matrix is None:
            return self._by_nodes(mean, deviation)
        is_narrow = deviation < _NARROW
        lattice = self._by_lattice(mean, deviation.clamp_min(_NARROW))
        return torch.where(is_narrow[..., None, None], self._by_nodes(mean, deviation.clamp_max(_NARROW)), lattice)

    def _by_lattice(self, mean: Tensor, deviation: Tensor) -> Tensor:
        assert self.matrix is not None
        scale = deviation.reciprocal().unsqueeze(-1)
        weights = (self.x - mean.unsqueeze(-1)).mul_(scale).square_().mul_(-0.5).clamp_min_(_LOWEST).exp_()
        weights.mul_((self.step / math.sqrt(2 * math.pi)) * scale)
        found = torch.addmm(self.constant, weights.flatten(0, 1), self.matrix)
        return found.view(*mean.shape, 3, len(self.u))

    def _by_nodes(self, mean: Tensor, deviation: Tensor) -> Tensor:
        assert self.rule is not None
        found = mean.new_zeros(*mean.shape, 3, len(self.u))
        cdf, density, square = found.unbind(-2)
        at_mean = mean.unsqueeze(-1).exp() * -torch.exp(-self.u)
        for node, weight in zip(*(part.tolist() for part in self.rule), strict=True):
            rate = (at_mean * (node * deviation).exp().unsqueeze(-1)).clamp_min_(-MAX_RATE)
            below = rate.exp()
            cdf.add_(below, alpha=weight)
            at_rate = below.mul_(rate)
            density.sub_(at_rate, alpha=weight)
            square.addcmul_(rate, at_rate, value=weight)
        torch.sub(density, square, out=square)
        return found
