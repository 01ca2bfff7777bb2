"""Which of K independent normal variables is the largest, with what probability: a sum in one dimension, whatever K is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc import quadrature
from torchgpmc.special import LOG_SQRT_2PI, log_ndtr, ndtr

_REACH = 7.5  # deviations beyond which lie 3e-14 of a normal
_STEP = 0.85  # of the lattice, in widths of the integrand: the sum errs by about exp(-2 pi^2 / step^2)
_MOST_NODES = 500
_LOWEST_EXPONENT = -350.0  # denormal numbers cost a hundredfold


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
    the widest normal has of these widths; beyond 500, adaptive quadrature stands in, right to 1e-6.

    Args:
        mean: ``(..., K)``.
        variance: the same shape; a variance. One that is expanded over K is known to be shared without a look at its numbers.

    Example:
        >>> import torch
        >>> probabilities_of_largest(torch.tensor([1.0, 0.0]).double(), torch.full((2,), 0.5).double())  # Phi(1) is 0.8413
        tensor([0.8413, 0.1587], dtype=torch.float64)
    """
    lattice = _lattice(mean, variance)
    if lattice is None:
        return torch.stack([_adaptive(mean, variance, k) for k in range(mean.shape[-1])], -1)
    terms = _terms(mean, variance, lattice)
    return lattice.step.unsqueeze(-1) * (terms.density * (terms.product.unsqueeze(-1) / terms.cdf)).sum(0)


def probability_of_largest(mean: Tensor, variance: Tensor, index: Tensor) -> Tensor:
    """:func:`probabilities_of_largest` of one k each: ``index``, whole numbers that broadcast against ``(...)``, to ``(...)``.

    Differentiable once, in closed form.
    """
    return _ProbabilityOfLargest.apply(mean, variance, index)


def probability_and_slopes(mean: Tensor, variance: Tensor, index: Tensor) -> ProbabilityAndSlopes:
    """:func:`probability_of_largest` with its derivatives in mean and variance, from the same nodes."""
    column = index.long().expand(mean.shape[:-1]).unsqueeze(-1)
    lattice = _lattice(mean, variance)
    if lattice is None:
        return _slopes_by_autograd(mean, variance, column)
    with torch.no_grad():
        terms, step = _terms(mean, variance, lattice), lattice.step.unsqueeze(-1)
        at = column.expand(len(terms.z), *column.shape)
        mass = step * terms.density.gather(-1, at) * terms.product.unsqueeze(-1) / terms.cdf.gather(-1, at)
        # Of the other classes; the labelled one has a density where these have distribution functions.
        rising = -mass * terms.hazard
        mean_slope, variance_slope = rising.sum(0), 0.5 * (rising * terms.z).sum(0)
        z = terms.z.gather(-1, at)
        mean_slope.scatter_(-1, column, (mass * z).sum(0))
        variance_slope.scatter_(-1, column, 0.5 * (mass * (z.square() - 1)).sum(0))
        return ProbabilityAndSlopes(mass.sum(0).squeeze(-1), mean_slope / variance.sqrt(), variance_slope / variance)


class _ProbabilityOfLargest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, index: Tensor) -> Tensor:
        found = probability_and_slopes(mean, variance, index)
        ctx.save_for_backward(found.mean, found.variance)
        return found.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        mean_slope, variance_slope = ctx.saved_tensors
        return gradient.unsqueeze(-1) * mean_slope, gradient.unsqueeze(-1) * variance_slope, None


class _Lattice(NamedTuple):
    nodes: Tensor  # (n, ..., 1)
    step: Tensor  # (...)


def _lattice(mean: Tensor, variance: Tensor) -> _Lattice | None:
    """From where some normal all but surely exceeds u, up to where all are surely below; ``None`` where nodes were too many."""
    with torch.no_grad():
        deviation, latents = variance.sqrt(), mean.shape[-1]
        lowest = (mean - _REACH * deviation).amax(-1)
        length = (mean + _REACH * deviation).amax(-1) - lowest
        is_shared = variance.stride(-1) == 0
        widths = 2 * _REACH * latents**0.5 if is_shared else float((length * (1 / variance).sum(-1).sqrt()).max())
        count = math.ceil(widths / _STEP) + 1
        if not count <= _MOST_NODES:
            return None
        step = length / (count - 1)
        steps = torch.arange(count, dtype=mean.dtype, device=mean.device).view(-1, *[1] * (mean.dim() - 1))
        return _Lattice((lowest + step * steps).unsqueeze(-1), step)


class _Terms(NamedTuple):
    """At each node and of each normal, ``(n, ..., K)``."""

    z: Tensor
    cdf: Tensor  # at least Phi(-7.5), so that the product may be divided by it
    density: Tensor  # of f, and not of z
    hazard: Tensor  # the density of z over the distribution function
    product: Tensor  # (n, ...), of the distribution functions of all


def _terms(mean: Tensor, variance: Tensor, lattice: _Lattice) -> _Terms:
    deviation = variance.sqrt()
    z = (lattice.nodes - mean) / deviation
    cdf = ndtr(z)
    density = (-0.5 * z.square()).clamp_min(_LOWEST_EXPONENT).exp() * math.exp(-LOG_SQRT_2PI)
    return _Terms(z, cdf, density / deviation, density / cdf, cdf.prod(-1))


def _adaptive(mean: Tensor, variance: Tensor, k: int) -> Tensor:
    others = [j for j in range(mean.shape[-1]) if j != k]
    center, deviation = mean[..., others], variance[..., others].sqrt()

    def log_below(u: Tensor) -> Tensor:
        return log_ndtr((u.unsqueeze(-1) - center) / deviation).sum(-1)

    # Where the highest of the others turns the integrand off: a step that a wide normal's nodes may all lie beyond.
    highest = center.detach().argmax(-1, keepdim=True)
    where, width = (part.detach().gather(-1, highest).squeeze(-1) for part in (center, deviation))
    return quadrature.log_integral(log_below, mean[..., k], variance[..., k], (where, width)).exp()


def _slopes_by_autograd(mean: Tensor, variance: Tensor, column: Tensor) -> ProbabilityAndSlopes:
    mean, variance = (part.detach().clone().requires_grad_(True) for part in (mean, variance))
    with torch.enable_grad():
        every = torch.stack([_adaptive(mean, variance, k) for k in range(mean.shape[-1])], -1)
        value = every.gather(-1, column).squeeze(-1)
        mean_slope, variance_slope = torch.autograd.grad(value.sum(), [mean, variance])
    return ProbabilityAndSlopes(value.detach(), mean_slope, variance_slope)
