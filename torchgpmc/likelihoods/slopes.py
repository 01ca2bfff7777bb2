"""The derivatives of E log p(y | f) in the normal's mean and variance, and in the likelihood's own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.overriding import is_newest

_DENSITIES = ("expected_log_likelihood", "pointwise_log_prob", "log_prob", "forward")
_DIFFERENCE = 1e-3  # of a mean, in deviations


class ExpectedSlopes(NamedTuple):
    """sum_n E log p(y_n | f_n), f_n ~ N(mean_n, variance_n), and its derivatives; without a graph."""

    value: Tensor  # (C,)
    mean: Tensor  # of the mean's shape
    variance: Tensor  # of the mean's shape
    parameters: tuple[Tensor, ...] = ()  # each of its parameter's shape


def slopes_by_autograd(
    likelihood: Any, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
) -> ExpectedSlopes:
    """What ``expected_log_likelihood`` of any likelihood has for derivatives; see :meth:`Factorised.expected_and_slopes`."""
    leaves = [mean.detach().requires_grad_(True), variance.detach().requires_grad_(True), *parameters]
    with torch.enable_grad():
        value = likelihood.expected_log_likelihood(leaves[0], leaves[1], targets).sum(-1)
        found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    slopes = [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(leaves, found, strict=True)]
    return ExpectedSlopes(value.detach(), slopes[0], slopes[1], tuple(slopes[2:]))


def coupling_by_differences(
    slopes: Any, mean: Tensor, variance: Tensor, targets: Tensor, *, central: bool = False
) -> tuple[ExpectedSlopes, Tensor]:
    """What ``slopes``, an ``expected_and_slopes``, has for :meth:`Factorised.expected_and_coupling`.

    By differences on one side, right to a thousandth, or ``central`` ones, twice as many, right to a millionth.
    """
    found, coupling = slopes(mean, variance, targets), []
    sizes = (_DIFFERENCE, -_DIFFERENCE) if central else (_DIFFERENCE,)
    for k in range(mean.shape[-1] - 1):
        total = torch.zeros_like(mean[..., k + 1 :])
        for size in sizes:
            moved, step = mean.clone(), size * variance[..., k].sqrt()
            moved[..., k] += step
            total += (found.mean - slopes(moved, variance, targets).mean)[..., k + 1 :] / step.unsqueeze(-1)
        coupling.append(total / len(sizes))
    return found, torch.cat(coupling, -1)


def through_parameters(own: Sequence[Tensor], slopes: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Derivatives in ``parameters``, of which the likelihood's ``own`` parameters are made, from those in the latter.

    Args:
        own: with a graph, ``(C, 1)``.
        slopes: one for each of ``own``, still to be summed over the data, ``(C, N)``.
        parameters: leaves.
    """
    pairs = [(value, slope.sum_to_size(value.shape)) for value, slope in zip(own, slopes, strict=True) if value.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, parameters))
    values, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(values, list(parameters), gradients, allow_unused=True)
    return tuple(torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(parameters, found, strict=True))


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, Tensor, Tensor]], mean: Tensor, variance: Tensor) -> Tensor:
        value, *slopes = function(mean, variance)
        ctx.save_for_backward(*slopes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        of_mean, of_variance = ctx.saved_tensors
        return None, gradient.unsqueeze(-1) * of_mean, gradient.unsqueeze(-1) * of_variance


def with_known_slopes(function: Callable[..., tuple[Tensor, Tensor, Tensor]], mean: Tensor, variance: Tensor) -> Tensor:
    """An expectation of K independent normals, ``(..., K)`` to ``(...)``, differentiable once by the slopes that come with it.

    Args:
        function: of mean and variance, to the value ``(...)`` and its derivatives in either ``(..., K)``.
        mean: ``(..., K)``.
        variance: the same shape.
    """
    value: Tensor = _Known.apply(function, mean, variance)
    return value


def slopes_function(likelihood: Any) -> Any:
    """``expected_and_slopes`` where it is of the very density that ``expected_log_likelihood`` gives, not of a parent class's."""
    kind: Any = type(likelihood)
    if is_newest(kind, "expected_and_slopes", _DENSITIES):
        return likelihood.expected_and_slopes
    return lambda *arguments: slopes_by_autograd(likelihood, *arguments)


def coupling_function(likelihood: Any, *, central: bool = False) -> Any:
    """``expected_and_coupling`` where it is exact and of the density that ``expected_log_likelihood`` gives, likewise.

    Else differences, ``central`` ones if these are asked for.
    """
    kind: Any = type(likelihood)
    if is_newest(kind, "expected_and_coupling", ("expected_and_slopes", *_DENSITIES)):
        return likelihood.expected_and_coupling
    return lambda *arguments: coupling_by_differences(slopes_function(likelihood), *arguments, central=central)
