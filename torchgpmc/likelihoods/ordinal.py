"""Ordered levels."""

from __future__ import annotations

import math

import torch
from gpytorch.constraints import Positive
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import GammaPrior, NormalPrior, Prior
from torch import Tensor
from torch.distributions import Categorical

from torchgpmc.checks import check_count
from torchgpmc.likelihoods.likelihood import Derivatives, Factorised, Moments, TiltedMoments
from torchgpmc.likelihoods.log_likelihood import require_classes
from torchgpmc.numerics import smooth_rules
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import LOG_SQRT_2PI, log_ndtr_interval
from torchgpmc.priors import register_prior_of


class Ordinal(Factorised, Likelihood):
    r"""Ordered levels 0..L-1: y is the number of cut points that f plus standard normal noise exceeds.

    .. math:: p(y = l | f) = \Phi(c_{l + 1} - f) - \Phi(c_l - f), \quad c_0 = -\infty, \; c_L = \infty

    The first cut point and the positive gaps between cut points are sampled; the kernel's outputscale says how much of a level is
    f's doing. A constant mean would move f as the first cut point moves the cuts: leave it out, or fix ``first_cut``.
    Derivatives lose their digits where f is millions of noise deviations away from the level seen.

    Args:
        num_levels: L, at least 3; of two levels :class:`Bernoulli` is the likelihood.
        first_cut_prior: by default normal with variance 1 about the cut that gives all levels equal shares where f has variance 1.
        gaps_prior: one for all L - 2 gaps; by default Gamma(2, r) whose mean puts the last cut point as far above zero as the first
            is below.

    Raises:
        ValueError: fewer than three levels.

    Source:
        Chu & Ghahramani 2005, Gaussian processes for ordinal regression; noise is part of the kernel's scale here.

    Example:
        >>> import torch
        >>> likelihood = Ordinal(num_levels=3)
        >>> likelihood.cut_points.detach()
        tensor([-0.6091,  0.6091])
        >>> likelihood.log_prob(torch.tensor([[-50.0, 50.0]]), torch.tensor([0.0, 2.0])).abs().detach()
        tensor([0.])
    """

    is_classification = True
    is_log_concave = True
    is_analytic = True
    predicts_quickly = True

    def __init__(self, num_levels: int, *, first_cut_prior: Prior | None = None, gaps_prior: Prior | None = None):
        super().__init__()
        check_count("num_levels", num_levels, 3, example="; for two levels use Bernoulli")
        self.num_levels = num_levels
        first = math.sqrt(2) * float(torch.special.ndtri(torch.tensor(1 / num_levels, dtype=torch.float64)))
        gap = -2 * first / (num_levels - 2)
        self.register_parameter("first_cut", torch.nn.Parameter(torch.full((1,), first)))
        self.register_parameter("raw_gaps", torch.nn.Parameter(torch.zeros(num_levels - 2)))
        self.register_constraint("raw_gaps", Positive())
        self.gaps = torch.full((num_levels - 2,), gap)
        register_prior_of(self, "first_cut", first_cut_prior or NormalPrior(first, 1.0))
        register_prior_of(self, "gaps", gaps_prior or GammaPrior(2.0, 2.0 / gap))

    @property
    def gaps(self) -> Tensor:
        """Distances between successive cut points, ``(L - 2,)``."""
        return self.raw_gaps_constraint.transform(self.raw_gaps)

    @gaps.setter
    def gaps(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value).to(self.raw_gaps).expand_as(self.raw_gaps)
        self.initialize(raw_gaps=self.raw_gaps_constraint.inverse_transform(value))

    @property
    def cut_points(self) -> Tensor:
        """c_1 to c_{L-1}, ``(L - 1,)``, or ``(C, L - 1)`` at C settings."""
        first = self.first_cut
        return first + torch.cat([torch.zeros_like(first), self.gaps.cumsum(-1)], -1)

    def _interval(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The cut points below and above each target's level, of the shape of ``(C, N)``."""
        cuts = self.cut_points
        far = torch.full_like(cuts[..., :1], math.inf)
        cuts, level = torch.cat([-far, cuts, far], -1).unsqueeze(-2), targets.long().unsqueeze(-1)
        level = level.view(*[1] * (cuts.dim() - level.dim()), *level.shape)
        return torch.take_along_dim(cuts, level, -1).squeeze(-1), torch.take_along_dim(cuts, level + 1, -1).squeeze(-1)

    def _log_probabilities(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Of all levels ``(..., L)``, f plus noise having standard deviation ``scale``."""
        levels = torch.arange(self.num_levels, device=mean.device)
        lower, upper = self._interval(levels)
        mean, scale = mean.unsqueeze(-1), scale.unsqueeze(-1)
        if lower.dim() > 1:  # (C, L), beside (C, N, 1)
            lower, upper = lower.unsqueeze(-2), upper.unsqueeze(-2)
        return log_ndtr_interval(*_relative(lower, upper, mean, scale))

    def forward(self, function_samples: Tensor) -> Categorical:
        return Categorical(logits=self._log_probabilities(function_samples, torch.ones_like(function_samples)), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        require_classes(targets, self.num_levels, "levels", "num_levels")
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        lower, upper = self._interval(targets)
        return log_ndtr_interval(*_relative(lower, upper, f))

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        lower, upper = self._interval(targets)
        return _derivatives(*_relative(lower, upper, f.detach()))

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        """Closed form: noise and normal add up, and the moments are the normaliser's derivatives in the mean."""
        lower, upper = self._interval(targets)
        scale = (1 + variance).sqrt()
        found = _derivatives(*_relative(lower, upper, mean, scale))
        shift = variance / scale
        return TiltedMoments(found.value, mean + shift * found.first, variance + shift.square() * found.second)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        lower, upper = self._interval(targets)
        centre = torch.where(lower.isinf(), upper, torch.where(upper.isinf(), lower, 0.5 * (lower + upper))).detach()
        return smooth_rules.expectation_about(lambda f: self.pointwise_log_prob(f, targets), mean, variance, centre, 2.8, 100)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Closed form."""
        lower, upper = self._interval(targets)
        return log_ndtr_interval(*_relative(lower, upper, mean, (1 + variance).sqrt()))

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Probabilities of the levels ``(..., L)`` in closed form, and their Bernoulli variances."""
        probabilities = self._log_probabilities(mean, (1 + variance).sqrt()).exp()
        return Moments(probabilities, probabilities * (1 - probabilities))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        cuts = self.cut_points
        noisy = (f + normal_like(f, generator)).unsqueeze(-1)
        return (noisy > (cuts.unsqueeze(-2) if cuts.dim() > 1 else cuts)).sum(-1).to(f.dtype)


def _relative(lower: Tensor, upper: Tensor, mean: Tensor, scale: Tensor | None = None) -> list[Tensor]:
    """Both ends from ``mean`` on in units of ``scale``; infinite ones are constants, since slopes through them have no value."""
    if scale is None:
        return list(torch.broadcast_tensors(lower - mean, upper - mean))

    def of(end: Tensor) -> Tensor:
        finite = end.isfinite()
        return torch.where(finite, (torch.where(finite, end, 0.0) - mean) / scale, end)

    return list(torch.broadcast_tensors(of(lower), of(upper)))


def _derivatives(lower: Tensor, upper: Tensor) -> Derivatives:
    """log(Phi(upper - f) - Phi(lower - f)) at f = 0 and three derivatives in f; differentiable in both ends."""
    value = log_ndtr_interval(lower, upper)
    unlimited = lower.isinf(), upper.isinf()
    lower, upper = lower.masked_fill(unlimited[0], 0.0), upper.masked_fill(unlimited[1], 0.0)
    at_lower, at_upper = (
        (-0.5 * end.square() - value - LOG_SQRT_2PI).masked_fill(none, -math.inf).exp()
        for end, none in zip((lower, upper), unlimited, strict=True)
    )
    first = at_lower - at_upper
    second = (lower * at_lower - upper * at_upper - first.square()).clamp_max(0.0)  # rounding, far out
    third = at_lower * (lower.square() - 1 - lower * first) - at_upper * (upper.square() - 1 - upper * first) - 2 * first * second
    return Derivatives(value, first, second, third)
