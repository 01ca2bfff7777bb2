"""Elementwise functions of the normal distribution, accurate in the tails and fast on CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2.0)
SQRT_HALF = math.sqrt(0.5)
LOG_2PI = math.log(2 * math.pi)
HAZARD_OF_RATIO = math.sqrt(2 / math.pi)  # see log_erfc_and_ratio_

# Below these, erfc(-x / sqrt 2) is denormal or zero and its logarithm loses digits.
_ERFC_LIMIT = {torch.float64: -37.0, torch.float32: -12.5}


def log_standard_normal(v: Tensor) -> Tensor:
    """log N(v | 0, I) of each row ``(C, V)``: ``(C,)``.

    Example:
        >>> import torch
        >>> log_standard_normal(torch.zeros(1, 2))  # -log(2 pi)
        tensor([-1.8379])
    """
    return -0.5 * ((v * v).sum(-1) + LOG_2PI * v.shape[-1])


def _log_ndtr_value(x: Tensor) -> Tensor:
    # log(erfc) is vectorised on CPU where torch.special.log_ndtr is a scalar loop: four times faster, and good to
    # rounding in absolute terms above the limit.
    if x.device.type != "cpu" or x.dtype not in _ERFC_LIMIT:
        return torch.special.log_ndtr(x)
    limit = _ERFC_LIMIT[x.dtype]
    value = torch.special.erfc(x * -SQRT_HALF).mul_(0.5).log_()
    if x.numel() and not float(x.detach().amin()) >= limit:  # also where a NaN hides the least
        low = x < limit
        value[low] = torch.special.log_ndtr(x[low])
    return value


def ndtr(x: Tensor) -> Tensor:
    """The standard normal distribution function with all its digits in the lower tail, which torch's own cancels away on CPU.

    Example:
        >>> import torch
        >>> ndtr(torch.tensor([-9.0, 0.0], dtype=torch.float64))
        tensor([1.1286e-19, 5.0000e-01], dtype=torch.float64)
    """
    return 0.5 * torch.special.erfc(x * -SQRT_HALF)


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
    lowest = lowest_quick_log_ndtr(x)
    if not math.isfinite(lowest) or not x.numel() or not float(x.amin()) >= lowest:
        value = _log_ndtr_value(x)
        return value, normal_hazard(x, value)
    log_erfc, ratio = log_erfc_and_ratio_(x * -SQRT_HALF)
    return log_erfc.sub_(LOG_2), ratio.mul_(HAZARD_OF_RATIO)


def lowest_quick_log_ndtr(like: Tensor) -> float:
    """The least x = -z sqrt 2 that :func:`log_erfc_and_ratio_` serves; infinite where the plain functions are the better ones."""
    return _ERFC_LIMIT.get(like.dtype, math.inf) if like.device.type == "cpu" else math.inf


def log_erfc_and_ratio_(z: Tensor) -> tuple[Tensor, Tensor]:
    """log erfc(z) and exp(-z^2) / erfc(z), z being overwritten: at -x / sqrt 2 they are :func:`log_ndtr` and its slope at x.

    But for a constant: log Phi is log erfc less log 2, and its slope the ratio times ``HAZARD_OF_RATIO``.
    """
    log_erfc = torch.special.erfc(z).log_()
    return log_erfc, torch.addcmul(log_erfc, z, z, out=z).neg_().exp_()


class _LogNdtr(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _log_ndtr_value(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return _LogNdtr.apply(x), in_dims[0]  # elementwise, so one dimension more changes nothing

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


def ndtri_exp(log_probability: Tensor) -> Tensor:
    """The standard normal quantile of a probability given by its logarithm: accurate from exp(-1e300) up to one.

    No derivative; see :func:`interval_quantile`.

    Args:
        log_probability: at most 0, any shape.

    Example:
        >>> import torch
        >>> ndtri_exp(torch.tensor([-804.6084, -0.693147], dtype=torch.float64))
        tensor([-4.0000e+01,  2.2630e-07], dtype=torch.float64)
    """
    y = log_probability
    upper = y > -LOG_2
    x = torch.special.ndtri(torch.where(upper, -torch.expm1(y), y.exp()))
    x = torch.where(upper, -x, x)
    far = y < (-650.0 if y.dtype == torch.float64 else -70.0)
    if bool(far.any()):
        target = y[far]
        # log Phi(x) is about -x^2 / 2 - log(-x sqrt(2 pi)); Newton's method on log Phi, which is concave, needs few steps.
        root = -(-2 * target - 2 * LOG_SQRT_2PI - (-2 * target).log()).sqrt()
        for _ in range(4):
            value = _log_ndtr_value(root)
            root = root - (value - target) / normal_hazard(root, value)
        x[far] = torch.where(torch.isfinite(target), root, target)
    return x


def _unlimited(upper: Tensor) -> bool:
    """Whether a shorter way will do; elsewhere than on CPU it is not worth waiting for the answer."""
    return upper.device.type == "cpu" and bool((upper == math.inf).all())


def _log_interval_value(lower: Tensor, upper: Tensor) -> Tensor:
    # Mirrored so that the interval's nearer end is its upper one: both probabilities are then small or moderate.
    mirrored = lower + upper > 0
    high, low = torch.where(mirrored, -lower, upper), torch.where(mirrored, -upper, lower)
    limit = _ERFC_LIMIT.get(high.dtype, math.inf) if high.device.type == "cpu" else math.inf
    if math.isinf(limit):
        return _log_difference(high, low)
    # One logarithm of a difference in place of two, an exponential and log1p: half of the time. Of infinite ends erfc is zero.
    near = torch.special.erfc(high * -SQRT_HALF).sub_(torch.special.erfc(low.mul_(-SQRT_HALF)))
    value = near.log_().sub_(LOG_2)
    if high.numel() and not float(high.amin()) >= limit:  # also where a NaN hides the least
        far = high < limit
        value[far] = _log_difference(high[far], low[far] / -SQRT_HALF)
    return value


def _log_difference(high: Tensor, low: Tensor) -> Tensor:
    value = _log_ndtr_value(high)
    return value + torch.log1p(-(_log_ndtr_value(low) - value).exp())


class _LogInterval(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor, upper: Tensor) -> Tensor:
        value = _log_ndtr_value(-lower) if _unlimited(upper) else _log_interval_value(lower, upper)
        ctx.save_for_backward(lower, upper, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper, value = ctx.saved_tensors
        at_lower, at_upper = interval_densities(lower, upper, value)
        return -gradient * at_lower, gradient * at_upper


def log_ndtr_interval(lower: Tensor, upper: Tensor) -> Tensor:
    r"""Log of the standard normal probability of an interval, :math:`\log(\Phi(u) - \Phi(l))`, without cancellation in the tails.

    Args:
        lower: any shape; -inf for none.
        upper: the same shape, above ``lower``; inf for none.

    Example:
        >>> import torch
        >>> log_ndtr_interval(torch.tensor([-1.0, 40.0]).double(), torch.tensor([1.0, torch.inf]).double())
        tensor([-3.8172e-01, -8.0461e+02], dtype=torch.float64)
    """
    return _LogInterval.apply(lower, upper)


def interval_densities(lower: Tensor, upper: Tensor, log_probability: Tensor) -> tuple[Tensor, Tensor]:
    """The normal density at both ends of an interval over the probability of the interval; 0 at infinite ends."""
    shift = log_probability + LOG_SQRT_2PI
    at_lower, at_upper = (torch.addcmul(shift, end, end, value=0.5).neg_().exp_() for end in (lower, upper))
    return at_lower, at_upper


class _IntervalQuantile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, uniform: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        if _unlimited(upper):
            x = torch.maximum(-ndtri_exp(_log_ndtr_value(-lower) + torch.log1p(-uniform)), lower)
        else:
            mirrored = lower + upper > 0
            below, above = torch.where(mirrored, -upper, lower), torch.where(mirrored, -lower, upper)
            level = torch.where(mirrored, 1 - uniform, uniform)
            high = _log_ndtr_value(above)
            ratio = (_log_ndtr_value(below) - high).exp()
            x = ndtri_exp(high + (ratio + level * (1 - ratio)).log())
            x = torch.where(mirrored, -x, x).clamp(lower, upper)
        ctx.save_for_backward(uniform, lower, upper, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        uniform, lower, upper, x = ctx.saved_tensors
        square = x * x
        at_lower = (1 - uniform) * (0.5 * (square - lower * lower)).exp()
        at_upper = uniform * (0.5 * (square - upper * upper)).exp()
        return None, gradient * at_lower, gradient * at_upper


def interval_quantile(uniform: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Quantile of the standard normal restricted to an interval: turns a uniform number into a draw, smoothly in the limits.

    Args:
        uniform: in (0, 1), any shape.
        lower: the same shape; -inf for none.
        upper: above ``lower``; inf for none.

    Example:
        >>> import torch
        >>> interval_quantile(*torch.tensor([[0.5, 0.5], [-1.0, 40.0], [2.0, torch.inf]]).double())
        tensor([ 0.1712, 40.0173], dtype=torch.float64)
    """
    return _IntervalQuantile.apply(uniform, lower, upper)
