"""Binary classification."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.nn.functional import logsigmoid

from torchgpmc.likelihoods.likelihood import Derivatives, Factorised, Moments, TiltedMoments
from torchgpmc.likelihoods.log_likelihood import require_targets
from torchgpmc.likelihoods.slopes import ExpectedSlopes
from torchgpmc.numerics import smooth_rules
from torchgpmc.numerics.random import uniform
from torchgpmc.numerics.special import (
    HAZARD_OF_RATIO,
    LOG_2,
    SQRT_HALF,
    log_erfc_and_ratio_,
    log_ndtr,
    log_ndtr_and_hazard,
    lowest_quick_log_ndtr,
    ndtr,
)

_RARE = 1e-4  # probability of a label below which a sum that is right to 1e-11 is not right to a part in a million


class _Form(NamedTuple):
    """log p(f) = offset + value(z), with derivative factor * slope(z), at z = unit * f."""

    function: Callable[[Tensor], tuple[Tensor, Tensor]]  # value and slope of z, whose memory it may take over
    value: Callable[[Tensor], Tensor]  # that value alone, in fewer passes over memory
    unit: float = 1.0
    offset: float = 0.0
    factor: float = 1.0


class _Link(NamedTuple):
    form: _Form  # right everywhere
    quick: _Form  # in fewer passes over memory, right where no f is below
    lowest: Callable[[Tensor], float]  # this, by a tensor's kind; infinite where the host should not look for the least f
    singular: float  # how far from the real line the logarithm has its nearest singularity


def _log_logistic_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return logsigmoid(x), torch.sigmoid(x.neg_())


def _quick_log_logistic_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(x)
    return p.log(), torch.sub(1, p, out=x)


def _log_erfc(z: Tensor) -> Tensor:
    return torch.special.erfc(z).log_()


def _lowest_quick_logistic(like: Tensor) -> float:
    return math.log(torch.finfo(like.dtype).tiny) + 1 if like.device.type == "cpu" else math.inf


_LINKS = {
    "probit": _Link(
        _Form(log_ndtr_and_hazard, log_ndtr),
        _Form(log_erfc_and_ratio_, _log_erfc, -SQRT_HALF, -LOG_2, HAZARD_OF_RATIO),
        lowest_quick_log_ndtr,
        2.816,
    ),
    "logit": _Link(
        _Form(_log_logistic_and_slope, logsigmoid),
        _Form(_quick_log_logistic_and_slope, logsigmoid),
        _lowest_quick_logistic,
        math.pi,
    ),
}


def _expectation(link: _Link, mean: Tensor, variance: Tensor, sign: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log p(s f), f ~ N(mean, variance), elementwise, with both derivatives from the same evaluations.

    d/dmean E g(f) = E g'(f) and d/dvariance E g(mean + sd x) = E[g'(f) x] / (2 sd), under the quadrature rule itself.
    """
    alike = partial(_expectation_alike, link)
    value, mean_slope, variance_slope = smooth_rules.in_groups(alike, variance, link.singular, mean, sign.expand_as(mean))
    return value, mean_slope, variance_slope


def _expectation_alike(link: _Link, variance: Tensor, mean: Tensor, sign: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of normals that get one rule."""
    rule = _rule(link, mean, variance, sign)
    form, centre, spread = rule.form, rule.centre, rule.spread

    def sums(nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = form.function(torch.addcmul(centre, spread, nodes))
        return smooth_rules.weighted_sum(weights[0], value), smooth_rules.weighted_sum(weights, slope)

    value, slopes = smooth_rules.add_up(sums, rule.nodes, centre, rule.weights)
    mean_slope, variance_slope = slopes.mul_(form.factor).unbind()
    return value.add_(form.offset), mean_slope.mul_(sign), variance_slope.div_(rule.deviation.mul_(2))


def _expected_value(link: _Link, mean: Tensor, variance: Tensor, sign: Tensor) -> Tensor:
    """The first part of :func:`_expectation`, to the last digits, where nobody asks for slopes."""
    (value,) = smooth_rules.in_groups(partial(_value_alike, link), variance, link.singular, mean, sign.expand_as(mean))
    return value


def _value_alike(link: _Link, variance: Tensor, mean: Tensor, sign: Tensor) -> tuple[Tensor]:
    """Of normals that get one rule."""
    rule = _rule(link, mean, variance, sign)
    form, centre, spread = rule.form, rule.centre, rule.spread

    def sums(nodes: Tensor, weights: Tensor) -> tuple[Tensor]:
        return (smooth_rules.weighted_sum(weights[0], form.value(torch.addcmul(centre, spread, nodes))),)

    (value,) = smooth_rules.add_up(sums, rule.nodes, centre, rule.weights)
    return (value.add_(form.offset),)


class _Rule(NamedTuple):
    """Where to evaluate a form: at centre + spread * nodes."""

    form: _Form
    nodes: Tensor
    weights: Tensor
    centre: Tensor
    spread: Tensor
    deviation: Tensor  # of f, a tensor of its own


def _rule(link: _Link, mean: Tensor, variance: Tensor, sign: Tensor) -> _Rule:
    centre, deviation = sign * mean, variance.sqrt()
    nodes, weights = smooth_rules.rule_about(centre, variance, 0.0, link.singular)
    form = link.quick if _is_within(link.lowest(mean), centre, deviation) else link.form
    return _Rule(form, nodes, weights, centre.mul_(form.unit), form.unit * deviation, deviation)


def _is_within(lowest: float, centre: Tensor, deviation: Tensor) -> bool:
    """Whether no node lies below."""
    if not math.isfinite(lowest) or not centre.numel():
        return False
    return float(torch.sub(centre, deviation, alpha=smooth_rules.REACH).amin()) >= lowest


class _ExpectedLogLink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, sign: Tensor, link: _Link) -> Tensor:
        value, *slopes = _expectation(link, mean, variance, sign)
        ctx.save_for_backward(*slopes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean_slope, variance_slope = ctx.saved_tensors
        return gradient * mean_slope, gradient * variance_slope, None, None


class Bernoulli(Factorised, Likelihood):
    r"""Labels 0 or 1 with :math:`p(y = 1 | f) = \Phi(f)` (probit) or :math:`1 / (1 + e^{-f})` (logit).

    No probability is floored: log Phi(-40) is -804.6, with the gradient to match.

    Args:
        link: ``"probit"`` (default) or ``"logit"``.

    Raises:
        ValueError: another link.

    Example:
        >>> import torch
        >>> Bernoulli().log_prob(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
        tensor([-1.3863])
    """

    is_classification = True
    is_log_concave = True
    predicts_quickly = True

    def __init__(self, link: str = "probit"):
        super().__init__()
        if link not in ("probit", "logit"):
            raise ValueError(f"link is {link!r}. Expected 'probit' or 'logit'.")
        self.link = link

    @property
    def is_probit(self) -> bool:
        """Whether the link is the normal distribution function."""
        return self.link == "probit"

    def _log_link(self, f: Tensor) -> Tensor:
        return log_ndtr(f) if self.is_probit else logsigmoid(f)

    def _probability(self, f: Tensor) -> Tensor:
        return ndtr(f) if self.is_probit else torch.sigmoid(f)

    def forward(self, function_samples: Tensor) -> BernoulliDistribution:
        return BernoulliDistribution(probs=self._probability(function_samples))

    def validate_targets(self, targets: Tensor) -> Tensor:
        """Labels as 0 and 1; -1 and +1 are accepted."""
        ok = (targets == 0) | (targets == 1) | (targets == -1)
        remedy = "Encode the two classes as 0 and 1."
        require_targets(ok, targets, "labels 0 and 1 (or -1 and +1)", remedy)
        if bool((targets == -1).any()):
            require_targets(targets != 0, targets, "labels -1 and +1, without 0", remedy)
            return (targets > 0).to(targets.dtype)
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return self._log_link((2 * targets - 1) * f)

    def log_prob_and_slope(self, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Closed form of value and derivative."""
        sign = 2 * targets - 1
        if not self.is_probit:
            return logsigmoid(sign * f).sum(-1), targets - torch.sigmoid(f)
        value, hazard = log_ndtr_and_hazard(sign * f)
        return value.sum(-1), sign * hazard

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        sign = 2 * targets - 1
        if not self.is_probit:
            p = torch.sigmoid(f)
            curvature = p * (p - 1)
            return Derivatives(logsigmoid(sign * f), targets - p, curvature, curvature * (1 - 2 * p))
        value, hazard = log_ndtr_and_hazard(sign * f)
        signed = sign * hazard
        moved = f + signed  # sign * (z + hazard) at z = sign * f
        second = -signed * moved
        return Derivatives(value, signed, second, signed * (moved.square() - 1 - second))

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        """Closed form for probit (Rasmussen & Williams 2006, eqs 3.58 and 3.82-3.85)."""
        if not self.is_probit:
            return super().tilted_moments(mean, variance, targets)
        sign = 2 * targets - 1
        inverse_root = (1 + variance).rsqrt()
        z = sign * mean * inverse_root
        value, hazard = log_ndtr_and_hazard(z)
        shift = variance * inverse_root
        return TiltedMoments(value, mean + sign * shift * hazard, variance - shift.square() * hazard * (z + hazard))

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        link, sign = _LINKS[self.link], 2 * targets - 1
        if torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad):
            return _ExpectedLogLink.apply(mean, variance, sign, link)
        return _expected_value(link, mean, variance, sign)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        value, mean_slope, variance_slope = _expectation(_LINKS[self.link], mean, variance, 2 * targets - 1)
        return ExpectedSlopes(value.sum(-1), mean_slope, variance_slope)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        sign = 2 * targets - 1
        if self.is_probit:
            return log_ndtr(sign * mean / torch.sqrt(1 + variance))
        # A rule of few nodes, right to 1e-11; of less likely labels that is not enough for the logarithm.
        probability = smooth_rules.expectation_about(torch.sigmoid, sign * mean, variance, 0.0, math.pi)
        rare = probability < _RARE
        result = probability.masked_fill(rare, 1.0).log()
        if bool(rare.any()):
            labels = targets.expand_as(mean)[rare]
            result = result.masked_scatter(rare, super().predictive_log_prob(mean[rare], variance[rare], labels))
        return result

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        r"""Closed form for probit, :math:`\Phi(m / \sqrt{1 + v})` (Rasmussen & Williams 2006, eq. 3.82)."""
        if self.is_probit:
            probability = ndtr(mean / torch.sqrt(1 + variance))
        else:
            probability = self.predictive_log_prob(mean, variance, torch.ones_like(mean)).exp()
        return Moments(probability, probability * (1 - probability))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return (uniform(f.shape, f, generator) < self._probability(f)).to(f.dtype)
