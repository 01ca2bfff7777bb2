"""Integrals of a single bump whose place and width are known: a few evenly spaced nodes, with a check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_REACH, _SPACING = 12.0, 0.5  # in widths of the bump
_AGREES = 1e-6  # relative, with every other node: for kinks three times the error, for smooth bumps near its root
_ENDS = 1e-10  # of the sum, at either end


def log_integral_of_bump(
    log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, centre: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Log of :math:`\int p(f) N(f | mean, variance) df`, and where it is known to 1e-6; p N is an analytic bump around ``centre``.

    By the trapezoidal rule, which for analytic bumps errs by the exponential of minus the inverse squared spacing; what it finds
    with half the nodes, and at the ends, says whether it may be believed.

    Args:
        log_function: maps points ``(n, ...)`` to log p ``(n, ...)``.
        mean: any shape ``...``; differentiable in this and the variance, and in what ``log_function`` depends on.
        variance: the same shape.
        centre: the mode of p N, nearly; a constant.
        scale: the width there, a standard deviation; a constant.

    Returns:
        Logarithms, and whether they are right, ``(...)`` each.

    Example:
        >>> zero = torch.zeros(2, dtype=torch.float64)
        >>> value, ok = log_integral_of_bump(lambda f: -0.5 * f.square(), zero, zero + 3, zero, torch.tensor([0.9, 40.0]))
        >>> value[0].exp(), ok  # 1 / sqrt(1 + 3); the second width is wrong
        (tensor(0.5000, dtype=torch.float64), tensor([ True, False]))
    """
    steps = torch.arange(-_REACH, _REACH + _SPACING / 2, _SPACING, dtype=mean.dtype, device=mean.device)
    points = centre + scale * steps.view(-1, *[1] * mean.dim())
    log_normal = -0.5 * ((points - mean).square() / variance + (2 * torch.pi * variance).log())
    logs = log_function(points) + log_normal
    value = torch.logsumexp(logs, 0)
    with torch.no_grad():
        half = torch.logsumexp(logs[::2], 0) - value
        ends = torch.maximum(logs[0], logs[-1]) - value
        ok = ((2 * half.exp() - 1).abs() < _AGREES) & (ends.exp() < _ENDS)
    return value + (scale * _SPACING).log(), ok
