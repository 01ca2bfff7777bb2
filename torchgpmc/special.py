"""Elementwise functions of the normal distribution, accurate in the tails and fast on CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_SQRT_HALF_PI = 0.5 * math.log(0.5 * math.pi)
LOG_2 = math.log(2.0)
SQRT_HALF = math.sqrt(0.5)

# Below these, erfc(-x / sqrt 2) is denormal or zero and its logarithm loses digits.
_ERFC_LIMIT = {torch.float64: -37.0, torch.float32: -12.5}


def _log_ndtr_value(x: Tensor) -> Tensor:
    # log(erfc) is vectorised on CPU where torch.special.log_ndtr is a scalar loop: four times faster, and good to
    # rounding in absolute terms above the limit.
    if x.device.type != "cpu" or x.dtype not in _ERFC_LIMIT:
        return torch.special.log_ndtr(x)
    limit = _ERFC_LIMIT[x.dtype]
    value = torch.special.erfc(x * -SQRT_HALF).mul_(0.5).log_()
    if x.numel() and float(x.detach().amin()) < limit:
        low = x < limit
        value[low] = torch.special.log_ndtr(x[low])
    return value


def normal_hazard(x: Tensor, log_cdf: Tensor | None = None) -> Tensor:
    """Ratio of the standard normal density to its distribution function, phi(x) / Phi(x).

    The derivative of log Phi. For x below -40 by its asymptotic series, where the plain ratio cancels.

    Args:
        x: any shape.
        log_cdf: ``log_ndtr(x)`` if it is at hand.
    """
    log_cdf = log_ndtr(x) if log_cdf is None else log_cdf
    ratio = torch.addcmul(log_cdf + LOG_SQRT_2PI, x, x, value=0.5).neg_().exp_()
    if x.device.type == "cpu" and (not x.numel() or float(x.detach().amin()) > -40.0):
        return ratio
    inverse_square = 1 / (x * x).clamp_min(1600.0)
    series = 1 - inverse_square * (1 - 3 * inverse_square * (1 - 5 * inverse_square * (1 - 7 * inverse_square)))
    return torch.where(x < -40.0, -x / series, ratio)


def log_ndtr_and_hazard(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`log_ndtr` and :func:`normal_hazard` together, without a graph, in as few passes over memory as they need."""
    if x.device.type != "cpu" or x.dtype not in _ERFC_LIMIT or not x.numel() or float(x.amin()) < _ERFC_LIMIT[x.dtype]:
        value = _log_ndtr_value(x)
        return value, normal_hazard(x, value)
    scaled = x * -SQRT_HALF
    log_erfc = torch.special.erfc(scaled).log_()
    hazard = torch.addcmul(log_erfc + LOG_SQRT_HALF_PI, scaled, scaled).neg_().exp_()
    return log_erfc.sub_(LOG_2), hazard


class _LogNdtr(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value = _log_ndtr_value(x)
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, value = ctx.saved_tensors
        return gradient * normal_hazard(x, value)


def log_ndtr(x: Tensor) -> Tensor:
    r"""Log of the standard normal distribution function, :math:`\log \Phi(x)`, never floored.

    Differentiable any number of times; the gradient is :func:`normal_hazard`.

    Args:
        x: any shape, float32 or float64.

    Returns:
        A tensor of the same shape; absolute error at rounding above -37 (float64), relative error below.

    Example:
        >>> import torch
        >>> log_ndtr(torch.tensor([-40.0, 0.0], dtype=torch.float64))
        tensor([-8.0461e+02, -6.9315e-01], dtype=torch.float64)
    """
    return _LogNdtr.apply(x)
