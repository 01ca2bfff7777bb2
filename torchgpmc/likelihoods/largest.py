"""Which of K independent normal variables is the largest, with what probability: a sum in one dimension, whatever K is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.numerics import quadrature, smooth_rules
from torchgpmc.numerics.special import HAZARD_OF_RATIO, log_ndtr

_MOST_NODES = 2000  # adaptive integrals cost as much as 15000, but these take memory
_ROOT_2 = math.sqrt(2.0)
_HIGHEST_EXPONENT = 18.0  # squared, in exp(-x^2): denormal numbers cost a hundredfold


class Accuracy(NamedTuple):
    """How far a lattice reaches, in standard deviations, and its step in widths of the integrand."""

    reach: float
    step: float


# A normal has 3e-14 and 2e-9 of its mass beyond the reach; the sum errs by about exp(-2 pi^2 / step^2), 1e-12 and 2e-8.
PRECISE, QUICK = Accuracy(7.5, 0.85), Accuracy(6.0, 1.05)


class ProbabilityAndSlopes(NamedTuple):
    """P(f_k is the largest) for one k a datum, and its derivatives; without a graph."""

    value: Tensor  # (...)
    mean: Tensor  # (..., K)
    variance: Tensor  # (..., K)


def probabilities_of_largest(mean: Tensor, variance: Tensor) -> Tensor:
    r"""P(f_k is the largest of all), f independent normals, for every k: ``(..., K)`` to ``(..., K)``.

    .. math:: p_k = \int N(u | m_k, v_k) \prod_{j \ne k} \Phi((u - m_j) / s_j) \, du

    The integrand is entire, and its growth off the real line that of a normal density of precision :math:`\sum_k 1 / v_k`, so sums
    over a lattice converge geometrically (Trefethen & Weideman 2014): absolute errors are about 1e-12. They need as many nodes as
    the widest normal has of these widths; beyond 2000, adaptive quadrature stands in, right to 1e-6.

    Args:
        mean: ``(..., K)``.
        variance: the same shape; a variance. One that is expanded over K is known to be shared without a look at its numbers.

    Example:
        >>> import torch
        >>> probabilities_of_largest(torch.tensor([1.0, 0.0]).double(), torch.full((2,), 0.5).double())  # Phi(1) is 0.8413
        tensor([0.8413, 0.1587], dtype=torch.float64)
    """
    lattice = _lattice(mean, variance, PRECISE)
    if lattice is None:
        return torch.stack([_adaptive(mean, variance, k) for k in range(mean.shape[-1])], -1)

    def sums(nodes: Tensor) -> tuple[Tensor]:
        terms = _terms(mean, variance, nodes)
        return ((terms.hazard * terms.product).sum(1),)

    (total,) = smooth_rules.add_up(sums, lattice.nodes, mean)
    return _density_constant(mean, variance, lattice.step) * total.movedim(0, -1)


def probability_of_largest(mean: Tensor, variance: Tensor, index: Tensor, accuracy: Accuracy = PRECISE) -> Tensor:
    """:func:`probabilities_of_largest` of one k each: ``index``, whole numbers that broadcast against ``(...)``, to ``(...)``.

    Differentiable once, in closed form. ``accuracy`` as for :func:`probability_and_slopes`, whose value this is.
    """
    return _ProbabilityOfLargest.apply(mean, variance, index, accuracy)


def probability_and_slopes(mean: Tensor, variance: Tensor, index: Tensor, accuracy: Accuracy = PRECISE) -> ProbabilityAndSlopes:
    """:func:`probability_of_largest` with its derivatives in mean and variance, from the same nodes.

    ``accuracy`` may be ``QUICK``, for errors about 1e-8 from two thirds of the nodes.
    """
    column = index.long().expand(mean.shape[:-1])
    lattice = _lattice(mean, variance, accuracy)
    if lattice is None:
        return _slopes_by_autograd(mean, variance, column.unsqueeze(-1))
    variance, own = _distinct(variance), column.unsqueeze(-1)

    def sums(nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        offset, hazard, product = _terms(mean, variance, nodes)
        mass = product.mul_(hazard.gather(0, column.expand(1, *product.shape)).squeeze(0))
        falling = hazard.mul_(mass)
        return mass.sum(0), falling.sum(1), falling.mul_(offset).sum(1)

    with torch.no_grad():
        mass, falling, bent = smooth_rules.add_up(sums, lattice.nodes, mean)
        own_variance = variance if variance.shape[-1] == 1 else variance.gather(-1, own)
        constant = _density_constant(mean, own_variance, lattice.step)
        # Of the other classes, which have distribution functions where the labelled one has its density.
        mean_slope = (falling.movedim(0, -1) * (-HAZARD_OF_RATIO * constant * variance.rsqrt())).scatter_(-1, own, 0.0)
        variance_slope = (bent.movedim(0, -1) * (0.5 * _ROOT_2 * HAZARD_OF_RATIO * constant / variance)).scatter_(-1, own, 0.0)
        # The labelled one's follow: nothing changes where all normals move by as much, or are stretched about the labelled mean.
        stretched = 0.5 * (mean - mean.gather(-1, own)) * mean_slope + variance * variance_slope
        variance_slope.scatter_(-1, own, -stretched.sum(-1, keepdim=True) / own_variance)
        mean_slope.scatter_(-1, own, -mean_slope.sum(-1, keepdim=True))
        return ProbabilityAndSlopes(constant.squeeze(-1) * mass, mean_slope, variance_slope)


class _ProbabilityOfLargest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, index: Tensor, accuracy: Accuracy) -> Tensor:
        found = probability_and_slopes(mean, variance, index, accuracy)
        ctx.save_for_backward(found.mean, found.variance)
        return found.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean_slope, variance_slope = ctx.saved_tensors
        return gradient.unsqueeze(-1) * mean_slope, gradient.unsqueeze(-1) * variance_slope, None, None


class _Lattice(NamedTuple):
    nodes: Tensor  # (n, ...)
    step: Tensor  # (...)


def _lattice(mean: Tensor, variance: Tensor, accuracy: Accuracy) -> _Lattice | None:
    """From where some normal all but surely exceeds u, up to where all are surely below; ``None`` where nodes were too many."""
    with torch.no_grad():
        deviation, latents = _distinct(variance).sqrt(), mean.shape[-1]
        lowest = (mean - accuracy.reach * deviation).amax(-1)
        length = (mean + accuracy.reach * deviation).amax(-1) - lowest
        is_shared = variance.stride(-1) == 0
        widths = 2 * accuracy.reach * latents**0.5
        if not is_shared:  # a normal that is none has no say, and its answer is NaN
            widths = float((length * (1 / variance).sum(-1).sqrt()).nan_to_num(0.0, posinf=torch.inf).max())
        if not widths <= (_MOST_NODES - 1) * accuracy.step:
            return None
        count = max(1, math.ceil(widths / accuracy.step)) + 1
        step = length / (count - 1)
        steps = torch.arange(count, dtype=mean.dtype, device=mean.device).view(-1, *[1] * (mean.dim() - 1))
        return _Lattice(lowest + step * steps, step)


class _Terms(NamedTuple):
    """Of each normal at each node, classes first: sums over them, and products, then run along memory."""

    offset: Tensor  # (K, n, ...), (m - u) / (s sqrt 2)
    hazard: Tensor  # (K, n, ...), the density of (u - m) / s over the distribution function, over HAZARD_OF_RATIO
    product: Tensor  # (n, ...), of the distribution functions of all, times 2^K


def _distinct(variance: Tensor) -> Tensor:
    """One that is expanded over K as ``(..., 1)``."""
    return variance[..., :1] if variance.stride(-1) == 0 else variance


def _offset(mean: Tensor, variance: Tensor, nodes: Tensor) -> Tensor:
    """(m - u) / (s sqrt 2), classes first: ``(K, n, ...)``."""
    scale = (2 * variance).rsqrt()
    centre, scale = ((mean * scale).movedim(-1, 0).unsqueeze(1), scale.movedim(-1, 0).unsqueeze(1))
    return torch.addcmul(centre, nodes, scale, value=-1)


def _terms(mean: Tensor, variance: Tensor, nodes: Tensor) -> _Terms:
    offset = _offset(mean, _distinct(variance), nodes)
    twice_below = torch.special.erfc(offset)  # at least that of the reach, so that it may be divided by
    hazard = offset.clamp_min(-_HIGHEST_EXPONENT).square_().neg_().exp_() / twice_below
    return _Terms(offset, hazard, twice_below.prod(0))


def _density_constant(mean: Tensor, variance: Tensor, step: Tensor) -> Tensor:
    """What makes hazards times products the step times the density of the k-th normal times the others' functions."""
    return HAZARD_OF_RATIO * 0.5 ** mean.shape[-1] * step.unsqueeze(-1) * variance.rsqrt()


def _adaptive(mean: Tensor, variance: Tensor, k: int) -> Tensor:
    others = [j for j in range(mean.shape[-1]) if j != k]
    centre, deviation = mean[..., others], variance[..., others].sqrt()

    def log_below(u: Tensor) -> Tensor:
        return log_ndtr((u.unsqueeze(-1) - centre) / deviation).sum(-1)

    # Where the highest of the others turns the integrand off: a step that a wide normal's nodes may all lie beyond.
    highest = centre.detach().argmax(-1, keepdim=True)
    where, width = (part.detach().gather(-1, highest).squeeze(-1) for part in (centre, deviation))
    return quadrature.log_integral(log_below, mean[..., k], variance[..., k], (where, width)).exp()


def _slopes_by_autograd(mean: Tensor, variance: Tensor, column: Tensor) -> ProbabilityAndSlopes:
    mean, variance = (part.detach().clone().requires_grad_(True) for part in (mean, variance))
    with torch.enable_grad():
        every = torch.stack([_adaptive(mean, variance, k) for k in range(mean.shape[-1])], -1)
        value = every.gather(-1, column).squeeze(-1)
        mean_slope, variance_slope = torch.autograd.grad(value.sum(), [mean, variance])
    return ProbabilityAndSlopes(value.detach(), mean_slope, variance_slope)
