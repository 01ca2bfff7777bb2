"""Stationary correlations from fixed inputs: Gaussian ones with derivatives written out, Matern and rational quadratic ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Exponentials of less than this are denormal or close to it; arithmetic on denormal numbers costs a hundredfold. What is
# left out is below 1e-152 (float64) and 1e-17 (float32), nothing beside any jitter.
_LOWEST_EXPONENT = {torch.float64: -350.0, torch.float32: -40.0}
# Where no exponent is as far below zero as this, a scale's logarithm aside, a pass over them is saved.
_LOW = {torch.float64: 300.0, torch.float32: 30.0}
# What rounding may cost an exponent, below which |a|^2 + |b|^2 - 2 ab stands for |a - b|^2.
_LOSS = {torch.float64: 1e-8, torch.float32: 1e-2}
# Numbers in the squared differences of all dimensions that are kept off the CPU, 256 MiB in float64.
_MOST_KEPT = 2**25


class Inputs(NamedTuple):
    """Two sets of inputs, with what of their distances is kept."""

    x1: Tensor
    x1_and_one: Tensor  # (N1, D + 1): with a column of ones, for sums that a product of inputs then has in it
    x2: Tensor
    equal: Tensor | None  # which rows are (N1, N2), where distances are products of inputs; None where none are
    minus_half_square1: Tensor  # (N1, D), -x1^2 / 2
    minus_half_square2: Tensor
    squared_distance: Tensor | None  # (N1, N2), where one lengthscale serves all dimensions
    squared_differences: Tensor | None  # (D, N1, N2), where each has its own, on a device that would have to tell the host of rows
    greatest_square: Tensor  # (D,), of all inputs


def prepare(x1: Tensor, x2: Tensor, isotropic: bool) -> Inputs:
    """All that depends on the inputs ``(N1, D)`` and ``(N2, D)`` alone."""
    # Centred inputs lose the fewest digits in |a|^2 + |b|^2 - 2 ab.
    centre = x1.mean(0) if len(x1) else 0.0
    x1_and_one = torch.cat([x1 - centre, torch.ones_like(x1[:, :1])], 1)
    x1, x2 = x1_and_one[:, :-1], (x2 - centre).contiguous()
    constant = not (x1.requires_grad or x2.requires_grad)
    distance = _pairwise_square(x1, x2) if constant and isotropic else None
    # On a GPU a pass over memory costs less than waiting for the host, which products of inputs need; see precautions.
    keep = constant and not isotropic and x1.device.type != "cpu" and x1.numel() * len(x2) <= _MOST_KEPT
    differences = (x1.T[:, :, None] - x2.T[:, None, :]).square_() if keep else None
    equal = equal_rows(x1, x2) if distance is None and differences is None else None
    squares = -0.5 * x1.square(), -0.5 * x2.square()
    greatest = torch.cat([x1, x2]).detach().square().amax(0)
    return Inputs(x1, x1_and_one, x2, equal, *squares, distance, differences, greatest)


def equal_rows(x1: Tensor, x2: Tensor) -> Tensor | None:
    """Which rows of ``(N1, D)`` and ``(N2, D)`` are equal ``(N1, N2)``; ``None`` where none are.

    |a|^2 + |b|^2 - 2 ab is not quite zero for them, and its root is half of all digits: at a lengthscale of 1e-7 a rough function
    would have another value at each of them, and counts that vary more than their likelihood says would have that of all values.

    Example:
        >>> import torch
        >>> equal_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[False],
                [ True]])
    """
    place = torch.unique(torch.cat([x1, x2]).detach(), dim=0, return_inverse=True)[1]
    equal = place[: len(x1), None] == place[len(x1) :]
    return equal if bool(equal.any()) else None


def rows_of(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Some of the first inputs against all of the second."""
    distance, differences = inputs.squared_distance, inputs.squared_differences
    return inputs._replace(
        x1=inputs.x1[rows],
        x1_and_one=inputs.x1_and_one[rows],
        equal=None if inputs.equal is None else inputs.equal[rows],
        minus_half_square1=inputs.minus_half_square1[rows],
        squared_distance=None if distance is None else distance[rows],
        squared_differences=None if differences is None else differences[:, rows],
    )


class Precautions(NamedTuple):
    """What some lengthscales ask for."""

    by_differences: Tensor | None  # settings (R,) whose lengthscales are so short that products of inputs would cancel to noise
    clamped: bool  # whether an exponent may be too low


def precautions(weights: Tensor, inputs: Inputs) -> Precautions:
    """At inverse squared lengthscales ``(C, 1)`` or ``(C, D)``; with one look at numbers, where products of inputs are taken."""
    if inputs.squared_distance is not None or inputs.squared_differences is not None or not weights.numel():
        return Precautions(None, True)
    limit = _LOSS[weights.dtype] / torch.finfo(weights.dtype).eps
    size = weights.detach().expand(-1, inputs.greatest_square.shape[0]) @ inputs.greatest_square
    longest = float(size.max())
    # Half of |a - b|^2 is at most twice the greater of |a|^2 and |b|^2.
    return Precautions((size > limit).nonzero().squeeze(-1) if longest > limit else None, not 2 * longest <= _LOW[weights.dtype])


def _precise_square(weights: Tensor, inputs: Inputs) -> Tensor:
    """Weighted squared distances ``(R, N1, N2)`` from differences, one input dimension after another: exact, and slow."""
    total = weights.new_zeros(len(weights), len(inputs.x1), len(inputs.x2))
    spread = weights.expand(-1, inputs.x1.shape[-1]).unbind(-1)
    for weight, left, right in zip(spread, inputs.x1.unbind(-1), inputs.x2.unbind(-1), strict=True):
        total = total + weight[:, None, None] * (left[:, None] - right[None, :]).square()
    return total


def _weighted(weights: Tensor, differences: Tensor) -> Tensor:
    """The same ``(R, N1, N2)`` from squared differences ``(D, N1, N2)``."""
    return (weights @ differences.flatten(1)).view(-1, *differences.shape[1:])


def _pairwise_square(x1: Tensor, x2: Tensor) -> Tensor:
    """Sum of squared differences, without cancellation: ``(N1, N2)``."""
    return torch.cdist(x1, x2, compute_mode="donot_use_mm_for_euclid_dist").square_()


class _ScaledRBF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, log_scale: Tensor, inputs: Inputs) -> Tensor:
        ctx.care = precautions(weights, inputs)
        covariance = scaled_rbf_value(weights, log_scale, inputs, ctx.care)
        ctx.save_for_backward(covariance)
        ctx.inputs = inputs
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (covariance,) = ctx.saved_tensors
        return *scaled_rbf_slopes(gradient * covariance, ctx.inputs, ctx.care), None


def scaled_rbf(weights: Tensor, log_scale: Tensor, inputs: Inputs) -> Tensor:
    """exp(log_scale - 0.5 sum_d w_d (x1_d - x2_d)^2) ``(C, N1, N2)``, differentiable once; weights ``(C, 1)`` or ``(C, D)``."""
    if not torch.is_grad_enabled():
        return scaled_rbf_value(weights, log_scale, inputs, precautions(weights, inputs))
    return _ScaledRBF.apply(weights, log_scale, inputs)


def scaled_rbf_value(weights: Tensor, log_scale: Tensor, inputs: Inputs, care: Precautions) -> Tensor:
    """:func:`scaled_rbf` without a graph, :func:`precautions` being at hand."""
    if inputs.squared_distance is not None:  # three passes over memory
        exponent = (inputs.squared_distance * (-0.5 * weights).unsqueeze(-1)).add_(log_scale[:, None, None])
    elif inputs.squared_differences is not None:
        exponent = log_scale[:, None, None] - 0.5 * _weighted(weights, inputs.squared_differences)
    else:
        x1, x2 = inputs.x1, inputs.x2
        chains, (n1, dims) = weights.shape[0], x1.shape
        row = torch.addmm(log_scale[:, None], weights, inputs.minus_half_square1.T)
        column = weights @ inputs.minus_half_square2.T
        if n1 <= x2.shape[0]:  # the fewer inputs are scaled
            exponent = ((x1 * weights[:, None, :]).view(chains * n1, dims) @ x2.T).view(chains, n1, -1)
            exponent.add_(row[:, :, None]).add_(column[:, None, :])
        else:
            scaled = torch.cat([x2 * weights[:, None, :], column.unsqueeze(-1)], -1)
            exponent = torch.bmm(inputs.x1_and_one.expand(chains, -1, -1), scaled.mT).add_(row[:, :, None])
        if care.by_differences is not None:
            rows = care.by_differences
            exponent[rows] = log_scale[rows, None, None] - 0.5 * _precise_square(weights[rows], inputs)
    return (exponent.clamp_min_(_LOWEST_EXPONENT[exponent.dtype]) if care.clamped else exponent).exp_()


def scaled_rbf_slopes(product: Tensor, inputs: Inputs, care: Precautions) -> tuple[Tensor, Tensor]:
    """Derivatives of sum(gradient * K) in the weights and the log of the scale, given gradient * K: a pass, or a matrix product."""
    if inputs.squared_distance is not None:
        flat = product.flatten(1)
        return (flat @ inputs.squared_distance.flatten()).mul_(-0.5).unsqueeze(-1), flat.sum(1)
    if inputs.squared_differences is not None:
        flat = product.flatten(1)
        return (flat @ inputs.squared_differences.flatten(1).T).mul_(-0.5), flat.sum(1)
    chains, n1, n2 = product.shape
    row = product.sum(2)
    if n1 <= n2:
        column = product.sum(1)
        cross = ((product.reshape(chains * n1, n2) @ inputs.x2).view(chains, n1, -1) * inputs.x1).sum(1)
    else:
        moments = torch.bmm(product.mT, inputs.x1_and_one.expand(chains, -1, -1))
        column = moments[..., -1]
        cross = (moments[..., :-1] * inputs.x2).sum(1)
    slopes = cross.addmm_(row, inputs.minus_half_square1).addmm_(column, inputs.minus_half_square2)
    if care.by_differences is not None:
        rows, pairs = care.by_differences, zip(inputs.x1.unbind(-1), inputs.x2.unbind(-1), strict=True)
        parts = [(product[rows] * (left[:, None] - right[None, :]).square()).sum((1, 2)) for left, right in pairs]
        slopes[rows] = -0.5 * torch.stack(parts, -1)
    return slopes, row.sum(1)


def scaled_square(inputs: Inputs, lengthscale: Tensor) -> Tensor:
    """Squared distances in units of ``lengthscale`` ``(C, 1, L)``: ``(C, N1, N2)``."""
    if inputs.squared_distance is not None:
        return inputs.squared_distance * lengthscale.reciprocal().square()
    if inputs.squared_differences is not None:
        return _weighted(lengthscale.reciprocal().square().squeeze(1), inputs.squared_differences)
    a, b = inputs.x1 / lengthscale, inputs.x2 / lengthscale
    square = a.square().sum(-1)[:, :, None] + b.square().sum(-1)[:, None, :] - 2 * a @ b.mT
    if inputs.equal is not None:
        square = square.masked_fill(inputs.equal, 0.0)
    weights = lengthscale.reciprocal().square().squeeze(1)
    rows = precautions(weights, inputs).by_differences
    if rows is not None:
        square = square.index_copy(0, rows, _precise_square(weights[rows], inputs))
    return square.clamp_min(0.0)


def _exp(exponent: Tensor) -> Tensor:
    return torch.exp(exponent.clamp_min(_LOWEST_EXPONENT[exponent.dtype]))


def _matern_half(square: Tensor, values: Mapping[str, Tensor], base: str) -> Tensor:
    return _exp(-_root(square))


def _matern_three_halves(square: Tensor, values: Mapping[str, Tensor], base: str) -> Tensor:
    distance = math.sqrt(3) * _root(square)
    return (1 + distance) * _exp(-distance)


def _matern_five_halves(square: Tensor, values: Mapping[str, Tensor], base: str) -> Tensor:
    distance = math.sqrt(5) * _root(square)
    return (1 + distance + (5 / 3) * square) * _exp(-distance)


def matern_decay(smoothness: float, square: Tensor) -> tuple[Tensor, Tensor]:
    """A Matern correlation g at squared scaled distances r^2, and -2 dg / d(r^2), elementwise; of smoothness 1/2, 3/2 or 5/2.

    The second is what the Gaussian correlation is to itself, so that :func:`scaled_rbf_slopes` serves both.
    """
    root = square.sqrt()
    scaled = math.sqrt(2 * smoothness) * root
    decay = _exp(-scaled)
    if smoothness == 0.5:  # infinite at zero, where it meets a difference of zero
        return decay, torch.where(root > 0, decay / root, 0.0)
    if smoothness == 1.5:
        return (1 + scaled) * decay, 3 * decay
    linear = 1 + scaled
    return torch.addcmul(linear, square, square.new_tensor(5 / 3)) * decay, (5 / 3) * linear * decay


def _root(square: Tensor) -> Tensor:
    # The square root of zero has an infinite derivative; of 1e-36 it has a finite one, times a zero.
    return torch.sqrt(square + 1e-36)


def rbf(square: Tensor, values: Mapping[str, Tensor], base: str) -> Tensor:
    """The Gaussian correlation at squared scaled distances."""
    return _exp(-0.5 * square)


def rational_quadratic(square: Tensor, values: Mapping[str, Tensor], base: str) -> Tensor:
    """A scale mixture of Gaussian correlations, with ``raw_alpha`` among the values."""
    alpha = values[base + "raw_alpha"].unsqueeze(-1)
    return _exp(-alpha * torch.log1p(square / (2 * alpha)))


MATERN = {0.5: _matern_half, 1.5: _matern_three_halves, 2.5: _matern_five_halves}
