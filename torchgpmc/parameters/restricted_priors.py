"""gpytorch priors as batched log densities restricted to an interval, in one dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior, LogNormalPrior, NormalPrior, Prior
from torch import Tensor
from torch.distributions import Distribution, constraints

from torchgpmc.adapter.functional import convert_distribution
from torchgpmc.numerics.random import with_forked_global_generator
from torchgpmc.parameters.bijections import Interval
from torchgpmc.priors import ShiftedGammaPrior

_MAX_REJECTIONS = 1000
_PATIENCE = 100  # rejections after which the distribution function is inverted, where there is one
_INVERTIBLE = 1000  # roundings of a distribution function that an interval has to hold for its draws to be right to a thousandth
_BISECTIONS = 64


class ClosedDensity(NamedTuple):
    """A log density up to a constant and its derivative, elementwise, of the coordinate t in which its support is the whole line.

    Positive parameters have theirs in log x: what most need is then at hand.
    """

    function: Callable[..., tuple[Tensor, Tensor]]  # of t, dx / dt and the numbers
    numbers: tuple[float | Tensor, ...]  # of one prior, or of several in a row
    support: Interval

    def __call__(self, coordinate: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(coordinate, derivative, *self.numbers)

    def of_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same for x itself."""
        coordinate = self.support.unconstrain(x)
        derivative = self.support.derivative(coordinate, x)
        log_density, slope = self(coordinate, derivative)
        log_prob = log_density - self.support.log_jacobian(coordinate)
        return log_prob, (slope - self.support.jacobian_slope(coordinate)) / derivative


def _gamma(log: Tensor, x: Tensor, concentration: Any, rate: Any) -> tuple[Tensor, Tensor]:
    pull = rate * x
    return concentration * log - pull, concentration - pull


def _half_cauchy(log: Tensor, x: Tensor, square_scale: Any) -> tuple[Tensor, Tensor]:
    square = x.square()
    return log - torch.log1p(square / square_scale), 1 - 2 * square / (square_scale + square)


def _half_normal(log: Tensor, x: Tensor, precision: Any) -> tuple[Tensor, Tensor]:
    pull = precision * x.square()
    return log - 0.5 * pull, 1 - pull


def _normal(coordinate: Tensor, _: Tensor, mean: Any, precision: Any) -> tuple[Tensor, Tensor]:
    gap = coordinate - mean
    pull = precision * gap
    return -0.5 * pull * gap, -pull


def _closed_form(prior: Prior) -> ClosedDensity | None:
    """Of the priors used most, when their parameters are single numbers; ``None`` for others."""
    numbers = [parameter for parameter in (*prior.buffers(), *prior.parameters())]
    if getattr(prior, "_transform", None) is not None or any(number.numel() != 1 for number in numbers):
        return None
    kind = type(prior)
    if kind in (GammaPrior, ShiftedGammaPrior):
        return ClosedDensity(_gamma, (float(prior.concentration), float(prior.rate)), support_of(prior))
    if kind in (NormalPrior, LogNormalPrior):
        return ClosedDensity(_normal, (float(prior.loc), float(prior.scale) ** -2), support_of(prior))
    if kind is HalfCauchyPrior:
        return ClosedDensity(_half_cauchy, (float(prior.scale) ** 2,), support_of(prior))
    if kind is HalfNormalPrior:
        return ClosedDensity(_half_normal, (float(prior.scale) ** -2,), support_of(prior))
    return None


def support_of(prior: Distribution) -> Interval:
    """The interval a prior says it lives on; the whole line where it says nothing that bounds a scalar."""
    try:
        support = prior.support
    except (NotImplementedError, AttributeError):  # torch's way of saying that none is declared
        support = None
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    lower = torch.as_tensor(getattr(support, "lower_bound", -math.inf))
    upper = torch.as_tensor(getattr(support, "upper_bound", math.inf))
    if bool((lower != lower.min()).any()) or bool((upper != upper.min()).any()):
        raise ValueError(
            f"{type(prior).__name__} has bounds that differ between elements. Expected one lower and one upper bound; "
            f"split the parameter, or use the widest bounds."
        )
    return Interval(float(lower.min()), float(upper.min()))


class RestrictedPrior:
    """A prior over one parameter, restricted to an interval and renormalised there where it has a distribution function.

    ``is_normalised`` says whether it is; :func:`torchgpmc.parameters.prior_mass.log_prior_mass` has what is missing.

    Args:
        prior: a gpytorch prior on constrained values; a user's own with ``log_prob`` alone is enough.
        shape: shape of the parameter.
        interval: where the parameter may lie: its constraint intersected with the prior's support.
        dtype: floating type of all answers.
        device: device of all answers.
    """

    def __init__(self, prior: Prior, shape: torch.Size, interval: Interval, dtype: torch.dtype, device: torch.device):
        self.prior = convert_distribution(prior, dtype, device)
        self.shape = shape
        self.interval = interval
        self._like = torch.zeros((), dtype=dtype, device=device)
        self._rows_at_once = self._answers_rows_independently()
        ends = self._probabilities_below_ends(support_of(prior))
        self.is_normalised = ends is not None
        self._ends = (torch.zeros_like(self._like), torch.ones_like(self._like)) if ends is None else ends
        self._log_mass = torch.log(self._ends[1] - self._ends[0]).expand(self.shape or torch.Size([1])).sum()
        self.closed_form = _closed_form(self.prior)
        self.closed_constant = self._constant_of(self.closed_form)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of C values ``(C, *shape)``, summed over the elements of each: ``(C,)``."""
        return self._unnormalised(value) - self._log_mass

    def log_prob_and_slope(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob` ``(C,)`` and its derivative, without a graph; the elements of each value lie in a row, ``(C, size)``."""
        with torch.enable_grad():
            leaf = value.detach().requires_grad_(True)
            log_prob = self.log_prob(leaf.view(-1, *self.shape))
            if not log_prob.requires_grad:
                return log_prob, torch.zeros_like(value)
            (slope,) = torch.autograd.grad(log_prob.sum(), leaf)
        return log_prob.detach(), slope

    def _constant_of(self, closed: ClosedDensity | None) -> float:
        """What :meth:`log_prob` has beyond the closed form; forgets a closed form that does not fit."""
        if closed is None:
            return 0.0
        value = self._test_values()
        gap = self.log_prob(value) - closed.of_value(value)[0].reshape(len(value), -1).sum(1)
        if not bool((gap - gap.mean()).abs().max() < 1e-4 * (1 + gap.mean().abs())):
            self.closed_form = None
        return float(gap.mean())

    def _unnormalised(self, value: Tensor) -> Tensor:
        if self._rows_at_once:
            # A trailing dimension keeps priors that sum over the last one (SmoothedBoxPrior) from summing over chains.
            rows = value if self.shape else value.unsqueeze(-1)
            return self.prior.log_prob(rows).reshape(len(value), -1).sum(-1)
        return torch.stack([self.prior.log_prob(row).sum() for row in value])

    def _test_values(self) -> Tensor:
        """Three distinct values inside the interval, ``(3, *shape)``."""
        count = 3 * math.prod(self.shape)
        return self.interval.constrain(torch.linspace(-0.7, 0.6, count).to(self._like)).view(3, *self.shape)

    def _answers_rows_independently(self) -> bool:
        value = self._test_values()
        alone = torch.stack([self.prior.log_prob(row).sum() for row in value])
        self._rows_at_once = True
        try:
            together = self._unnormalised(value)
        except (RuntimeError, ValueError):
            return False
        return together.shape == alone.shape and torch.allclose(together, alone, rtol=1e-4, atol=1e-5, equal_nan=True)

    def _probabilities_below_ends(self, support: Interval) -> tuple[Tensor, Tensor] | None:
        """The distribution function at both ends of the interval."""
        if self.has_transform:
            return None
        try:
            return self._cdf(self.interval.lower, support, 0.0), self._cdf(self.interval.upper, support, 1.0)
        except (NotImplementedError, AttributeError):  # no distribution function: the constant matters to the evidence alone
            return None

    @property
    def has_transform(self) -> bool:
        """Whether ``log_prob`` is that of a function of the value, without a Jacobian: no density, and its draws are others."""
        return getattr(self.prior, "_transform", None) is not None

    def _cdf(self, point: float, support: Interval, beyond: float) -> Tensor:
        if point <= support.lower or point >= support.upper:
            return torch.full_like(self._like, beyond)
        cdf: Callable[[Tensor], Tensor] = self.prior.cdf
        return cdf(torch.full_like(self._like, point))

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws ``(num_draws, *shape)`` from the restricted prior: by rejection, and by inversion where that takes long.

        Raises:
            NotImplementedError: the prior cannot draw.
            RuntimeError: nearly all of the prior's mass lies outside the interval.
        """

        def propose() -> Tensor:
            return self._unrestricted_draws(num_draws)

        result = with_forked_global_generator(propose, generator)
        joint = len(self.prior.event_shape) > 0
        for attempt in range(_MAX_REJECTIONS):
            outside = ~self.interval.contains(result)
            if joint and self.shape:  # one prior for the whole vector: accept or reject it whole
                outside = outside.reshape(num_draws, -1).any(-1).view(-1, *[1] * len(self.shape)).expand_as(result)
            if not bool(outside.any()):
                return result
            invert = attempt >= _PATIENCE and self._can_invert()
            fresh = self._by_inversion(num_draws, generator) if invert else with_forked_global_generator(propose, generator)
            result = torch.where(outside, fresh, result)
        raise RuntimeError(
            f"could not draw from {type(self.prior).__name__} inside ({self.interval.lower}, {self.interval.upper}): "
            f"nearly all of its mass lies outside. Change the prior or the constraint."
        )

    def _can_invert(self) -> bool:
        """Whether the interval cuts off a part that the distribution function tells, and what it leaves is more than rounding."""
        mass = self._ends[1] - self._ends[0]
        return bool((mass < 1).any() and (mass > _INVERTIBLE * torch.finfo(mass.dtype).eps).all())

    def _by_inversion(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws ``(num_draws, *shape)``, by bisection of the distribution function on the unconstrained scale."""
        below, above = self._ends
        like = self._like
        share = torch.rand(num_draws, *self.shape, dtype=like.dtype, device=like.device, generator=generator)
        level = below + share * (above - below)
        widest = math.log(torch.finfo(like.dtype).max) - 1
        falls = math.isinf(self.interval.lower)  # the value, as what it is made of rises
        low, high = (torch.full_like(share, end if falls else -end) for end in (widest, -widest))
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            is_low = self.prior.cdf(self.interval.constrain(middle)) < level
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        return self.interval.constrain(high)

    def _unrestricted_draws(self, num_draws: int) -> Tensor:
        event = self.prior.batch_shape + self.prior.event_shape
        missing = self.shape[: len(self.shape) - len(event)] if event != torch.Size([1]) else self.shape
        return self.prior.sample(torch.Size((num_draws, *missing))).reshape(num_draws, *self.shape)

    def share_inside(self, num_draws: int, generator: torch.Generator) -> float:
        """Share of the unrestricted prior's draws that lie in the interval with all their elements.

        Raises:
            NotImplementedError: the prior cannot draw.
        """
        draws = with_forked_global_generator(lambda: self._unrestricted_draws(num_draws), generator)
        return float(self.interval.contains(draws).reshape(num_draws, -1).all(-1).double().mean())


class JointPrior(NamedTuple):
    """Independent priors of one closed form, whose values lie side by side."""

    form: ClosedDensity
    constant: float

    def log_prob_and_slope(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Of values ``(C, size)``: ``(C,)`` and ``(C, size)``."""
        return self._summed(*self.form.of_value(value))

    def log_density_and_slope(self, coordinate: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        """Of the coordinates ``(C, size)`` in which the priors' support is the whole line, with dx / dt."""
        return self._summed(*self.form(coordinate, derivative))

    def _summed(self, log_density: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        return log_density.sum(1) + self.constant, slope


def joint_prior(priors: Sequence[RestrictedPrior], like: Tensor) -> JointPrior:
    """One evaluation for several priors of the same closed form, one after another; each number is a row if they differ in it."""
    sizes = torch.tensor([math.prod(prior.shape) for prior in priors])
    forms = [prior.closed_form for prior in priors if prior.closed_form is not None]
    columns = zip(*(form.numbers for form in forms), strict=True)
    rows = (
        column[0] if len(set(column)) == 1 else like.new_tensor(column).repeat_interleave(sizes.to(like.device))
        for column in columns
    )
    return JointPrior(forms[0]._replace(numbers=tuple(rows)), sum(prior.closed_constant for prior in priors))
