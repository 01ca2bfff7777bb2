"""E log sum exp(f) and its slopes where one function is all but surely the greatest: a series in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

_TERMS = 7
_LARGEST = 300.0  # of exponents: products of two such are numbers still, and what they belong to is not decided


def decided_log_sum_exp(mean: Tensor, variance: Tensor, *, products: bool = False) -> tuple[Tensor, ...]:
    r"""E log sum exp(f), its derivatives in means and variances, f independent normals, and how far these are off at most.

    With t the function of the highest mean and :math:`r = \sum_{j \ne t} e^{f_j - f_t}`,

    .. math:: E \log \sum_k e^{f_k} = m_t + \sum_{n=1}^7 \frac{(-1)^{n+1}}{n} E r^n + \ldots,
        \quad E r^n = e^{n^2 v_t / 2} \, n! \, [z^n] \prod_{j \ne t} \sum_i \frac{z^i}{i!} e^{i (m_j - m_t) + i^2 v_j / 2}

    For r > 0 Taylor's polynomial of log(1 + r) is off by less than the first term it leaves out, and its slopes by at most eight
    times that. Slopes are those of the sum.

    Args:
        mean: ``(R, K)``, finite; K at least 2.
        variance: the same shape.
        products: whether E s s' are wanted, s = softmax(f).

    Returns:
        ``(R,)``, ``(R, K)``, ``(R, K)``, with ``products`` ``(R, K, K)``, and what bounds all errors, ``(R,)``: large, infinite or
        NaN where nothing is decided.

    Source:
        Moments of sums of lognormal variables are products of series; that the remainder is bounded by the first term left out is
        Taylor's theorem with its integral remainder. Their series diverges, as those of lognormal moments do (Heyde 1963).

    Example:
        >>> mean = torch.tensor([[0.0, 12.0, -3.0], [0.0, 1.0, 0.0]]).double()
        >>> value, softmax, _, bound = decided_log_sum_exp(mean, torch.full_like(mean, 0.1))
        >>> bound < 1e-12, round(float(value[0]), 6), round(float(softmax[0, 0] * 1e6), 2)
        (tensor([ True, False]), 12.000007, 6.79)
    """
    mean, variance = mean.mT, variance.mT
    top = mean.argmax(0, keepdim=True)
    others = torch.arange(len(mean) - 1, device=mean.device).unsqueeze(-1)
    others = others + (others >= top)
    highest = mean.gather(0, top)
    gap, spread = mean.gather(0, others) - highest, variance.gather(0, others)
    order = torch.arange(_TERMS + 2, dtype=mean.dtype, device=mean.device).view(-1, 1, 1)
    log_factorial = torch.lgamma(order + 1)
    series = (order * (gap + 0.5 * order * spread) - log_factorial).clamp_(-_LARGEST, _LARGEST).exp_()  # (n, K - 1, R)
    own = (0.5 * order.square() * variance.gather(0, top) + log_factorial).clamp_max_(_LARGEST).exp_().squeeze(1)
    total = series[:, 0].clone()
    for factor in series.unbind(1)[1:]:
        product = total.clone()
        for i in range(1, _TERMS + 2):
            product[i:].addcmul_(factor[i], total[:-i])
        total = product
    moments, order = own * total, order[:-1]
    # (-1)^(n + 1) / n, and zero for n = 0.
    signs = (2 * (order % 2) - 1).squeeze(1) / order.squeeze(1).clamp_min(1) * (order.squeeze(1) > 0)
    terms = signs * moments[:-1]
    value = highest.squeeze(0) + terms.sum(0)
    along = _along(signs * own[:-1], total)
    parts = _adjoint(along, series) * series[:-1] * order
    slope, own_slope = 0.5 * (parts * order).sum(0), 0.5 * (terms * order.squeeze(1).square()).sum(0)
    softmax = torch.empty_like(mean).scatter_(0, others, parts.sum(0))
    softmax.scatter_(0, top, 1 - parts.sum((0, 1)).unsqueeze(0))
    slopes = torch.empty_like(mean).scatter_(0, others, slope).scatter_(0, top, own_slope.unsqueeze(0))
    found, bound = (value, softmax.mT, slopes.mT), (_TERMS + 1) * moments[-1]
    if not products:
        return *found, bound
    between = _products(along, series[:-1], order)
    between.diagonal(dim1=-2, dim2=-1).zero_()
    with_top = 2 * slope.mT - between.sum(-1)  # all products of one function's sum to it
    ordered = torch.nn.functional.pad(between, (0, 1, 0, 1))
    ordered[:, -1, :-1] = ordered[:, :-1, -1] = with_top
    place = torch.cat([others, top]).argsort(0).mT
    of_all = ordered.gather(1, place.unsqueeze(2).expand_as(ordered)).gather(2, place.unsqueeze(1).expand_as(ordered))
    of_all.diagonal(dim1=-2, dim2=-1).copy_((softmax - 2 * slopes).mT)
    return *found, of_all, bound


def _along(weights: Tensor, series: Tensor) -> Tensor:
    """Derivatives of ``weights`` ``(n, ...)`` times a product's coefficients in one factor's, the other being ``series``."""
    along = weights * series[0]
    for i in range(1, len(weights)):
        along[:-i].addcmul_(weights[i:], series[i])
    return along


def _adjoint(along: Tensor, series: Tensor) -> Tensor:
    """Of :func:`_along` the product of all, in each factor's coefficients ``(n, K - 1, R)``: that of the others.

    With the transposed product with this one it makes that of all.
    """
    found = along.unsqueeze(1).expand(-1, *series.shape[1:]).clone()
    for n in range(len(along) - 2, -1, -1):
        for i in range(1, len(along) - n):
            found[n].addcmul_(series[i], found[n + i], value=-1)
    return found


def _products(along: Tensor, series: Tensor, order: Tensor) -> Tensor:
    """E s s' of two functions that are not the greatest ``(R, K - 1, K - 1)``, but for its diagonal.

    They are minus the derivatives in both means; a product's is the product times both factors' logarithmic derivatives.
    """
    turns = order * series
    for n in range(2, len(turns)):
        for i in range(1, n):
            turns[n].addcmul_(series[i], turns[n - i], value=-1)
    return -(turns.permute(2, 1, 0) @ _along(along.unsqueeze(1).expand_as(turns), turns).permute(2, 0, 1))
