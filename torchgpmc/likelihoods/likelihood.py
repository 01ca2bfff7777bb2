"""What likelihoods do that factorise over data: log p(y | f), and expectations of it under scalar normal marginals.

A likelihood needs one method, gpytorch's ``forward(f)``, which returns a torch distribution. Everything else follows from it by
quadrature and autograd; a class that knows a closed form overrides the method, and a test compares the two.

Shapes: f is ``(C, N)`` for one latent function and ``(C, N, K)`` for several; targets are ``(N,)`` or ``(C, N)``; a parameter of
the likelihood at C settings is ``(C, 1)``, so that it broadcasts against f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.likelihoods.rows import log_prob_by_rows
from torchgpmc.likelihoods.slopes import ExpectedSlopes, coupling_by_differences, slopes_by_autograd, slopes_function
from torchgpmc.numerics import quadrature
from torchgpmc.numerics.bump import log_integral_of_bump
from torchgpmc.numerics.random import draw

TILTED_NODES = 40
# A few settle most; of a count far below its exposure each goes one down, of one far above it two up.
_MODE_STEPS = 100
_MODE_TOLERANCE = 1e-6  # in standard deviations


class Moments(NamedTuple):
    """Mean and variance of the response at each point, of the same shape."""

    mean: Tensor
    variance: Tensor


class Derivatives(NamedTuple):
    """log p(y_n | f_n) and its derivatives in f_n, elementwise."""

    value: Tensor
    first: Tensor
    second: Tensor
    third: Tensor


class Curvature(NamedTuple):
    """log p(y_n | f_n) of K latents a datum, with gradient and Hessian in f_n."""

    value: Tensor  # (C, N)
    first: Tensor  # (C, N, K)
    second: Tensor  # (C, N, K, K)


class TiltedMoments(NamedTuple):
    """Of the density proportional to p(y_n | f) N(f | mean_n, variance_n), elementwise."""

    log_normaliser: Tensor
    mean: Tensor
    variance: Tensor


class Factorised(LogLikelihood):
    """Mixin for p(y | f) = prod_n p(y_n | f_n); see the module's docstring.

    ``predicts_quickly``: whether predictive densities and moments are formulas, or short rules, so that a prediction can afford to
    average over all latent vectors that are kept of a theta; ``has_moments_by_formula``: whether moments alone are.
    ``is_analytic``: whether log p(y | f) is so in f, without kinks, which evenly spaced nodes may miss.
    ``expectation_operations``: floating-point operations that products of matrices make in the time of a datum's expectation with
    slopes; 0 where it is quick.

    Example:
        >>> import gpytorch, torch
        >>> from torch.distributions import Exponential
        >>> class Waiting(Factorised, gpytorch.likelihoods.Likelihood):  # times between events of rate exp(f)
        ...     is_log_concave = True
        ...
        ...     def forward(self, f):
        ...         return Exponential(f.exp())
        >>> mean, variance, y = torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.tensor([1.0])
        >>> Waiting().expected_log_likelihood(mean, variance, y)  # E f - y E exp(f), E exp(f) = exp(variance / 2)
        tensor([[-2.7183]])
        >>> Waiting().response_moments(mean, variance).mean  # E exp(-f)
        tensor([[2.7183]])
    """

    predicts_quickly = False
    is_analytic = False
    has_moments_by_formula = False
    expectation_operations = 0.0

    def forward(self, function_samples: Tensor) -> Distribution:
        """The distribution p(y_n | f_n) of each observation, as gpytorch has it."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(f), which returns a torch distribution")

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y_n | f_n), elementwise; NaN for settings at which torch refuses the parameters of ``forward``'s distribution."""
        return log_prob_by_rows(self, f, targets, self.num_latents)

    def log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y | f): f ``(C, N)``, targets ``(N,)`` or ``(C, N)``, to ``(C,)``."""
        return self.pointwise_log_prob(f, targets).sum(-1)

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        """log p(y_n | f_n) and three derivatives in f_n; a constant in ``f``, differentiable in the likelihood's parameters."""
        with torch.enable_grad():
            f = f.detach().requires_grad_(True)
            parts = [self.pointwise_log_prob(f, targets)]
            for _ in range(3):
                parts.append(_slope(parts[-1], f))
        return Derivatives(*parts)

    def curvature(self, f: Tensor, targets: Tensor) -> Curvature:
        """log p(y_n | f_n) of several latents ``(C, N, K)``, gradient and Hessian; differentiable in f and in the parameters."""
        with torch.enable_grad():
            f = f if f.requires_grad else f.detach().requires_grad_(True)
            value = self.pointwise_log_prob(f, targets)
            first = _slope(value, f)
            second = torch.stack([_slope(column, f) for column in first.unbind(-1)], -2)
        return Curvature(value, first, second)

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        """Normaliser, mean and variance of p(y_n | f) N(f | mean_n, variance_n), elementwise; ``variance`` is a variance.

        By Gauss-Hermite quadrature around the mode of that product, so that a likelihood much narrower than the normal is seen; to
        1e-6, all humps included, where the likelihood is not log-concave (:func:`quadrature.integrals`), nor ``levels_off``.
        """
        if not (self.is_log_concave or self.levels_off):
            return self._moments_over_all_humps(mean, variance, targets)
        centre, scale = self._tilted_mode(mean, variance, targets)
        nodes, weights = quadrature.gauss_hermite(TILTED_NODES, mean.dtype, mean.device)
        shape = (-1,) + (1,) * mean.dim()
        standard = nodes.view(shape)
        points = centre + scale * standard
        log_ratio = 0.5 * (standard.square() - (points - mean).square() / variance) + 0.5 * (scale.square() / variance).log()
        terms = self.pointwise_log_prob(points, targets) + log_ratio + weights.log().view(shape)
        log_normaliser = torch.logsumexp(terms, 0)
        posterior = (terms - log_normaliser).exp()
        tilted_mean = (posterior * points).sum(0)
        return TiltedMoments(log_normaliser, tilted_mean, (posterior * (points - tilted_mean).square()).sum(0))

    def _moments_over_all_humps(self, mean: Tensor, variance: Tensor, targets: Tensor) -> TiltedMoments:
        peak, one = self._peak(targets), mean.new_ones(())

        def first(f: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.pointwise_log_prob(f, targets), (one, f - mean)

        found = quadrature.integrals(first, mean, variance, peak)
        tilted_mean = mean + found.values[1] / found.values[0]

        # About the tilted mean: nothing cancels where the product is narrow and far from the normal's mean.
        def second(f: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.pointwise_log_prob(f, targets), (one, (f - tilted_mean).square())

        spread = quadrature.integrals(second, mean, variance, peak)
        return TiltedMoments(found.log_scale + found.values[0].log(), tilted_mean, spread.values[1] / spread.values[0])

    def _tilted_mode(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mode of p(y_n | f) N(f | mean_n, variance_n) and the deviation that its curvature suggests: Newton steps in a bracket.

        The slope of the logarithm falls with f, so that its sign says on which side of a point the mode is.
        """
        point, scale = mean.detach().clone(), variance.detach().sqrt()
        lower, upper = torch.full_like(point, -torch.inf), torch.full_like(point, torch.inf)
        # An exponential throws Newton's point far off, and lets it come back by a unit a step.
        reach = 2 * scale.clamp_min(1.0)
        before = gone = torch.full_like(point, torch.inf)  # Newton's last step, and how far it was to the point
        settled = torch.zeros_like(point, dtype=torch.bool)
        smallest = torch.finfo(point.dtype).eps
        for _ in range(_MODE_STEPS):
            slopes = self.derivatives(point, targets)
            precision = 1 / variance + (-slopes.second.detach()).clamp_min(0.0)
            # Those that are done stay as they are, so that none depends on how long others in the batch take.
            scale = torch.where(settled, scale, precision.rsqrt())
            slope = torch.nan_to_num(slopes.first.detach() - (point - mean) / variance)
            lower, upper = torch.where(slope > 0, point, lower), torch.where(slope < 0, point, upper)
            newton = slope / precision
            settled = settled | (newton.abs() <= (_MODE_TOLERANCE * scale).clamp_min(4 * smallest * point.abs()))
            if bool(settled.all()):
                break
            step = newton.clamp(-reach, reach)
            # Steps that lead out of the bracket go to its middle, as do those that hardly shrink; without a bracket they grow.
            middle = 0.5 * (lower + upper)
            slow = step.abs() > 0.5 * before
            before = step.abs()
            new = point + torch.where(slow, 2 * gone * slope.sign(), step)
            new = torch.where(torch.isfinite(middle) & (slow | (new <= lower) | (new >= upper)), middle, new)
            gone = (new - point).abs()
            point = torch.where(settled, point, new)
        return point, scale

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        r""":math:`\int \log p(y_n | f) N(f | mean_n, variance_n) df`, elementwise; ``variance`` is a variance.

        To 1e-6 for one latent, kinks included, by :func:`quadrature.integrals`; where log p is smooth in f an override by
        :func:`torchgpmc.numerics.smooth_rules.expectation_about` is several times faster. Of several latents, mean and variance are
        ``(C, N, K)``, the latents independent, and the error that of :func:`quadrature.product_rule`: small only at variances
        below 1.
        """
        if self.num_latents > 1:
            return quadrature.expectation_of_several(lambda f: self.pointwise_log_prob(f, targets), mean, variance)
        return quadrature.adaptive_expectation(lambda f: (self.pointwise_log_prob(f, targets),), mean, variance)[0]

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        """The sum of :meth:`expected_log_likelihood` over data, and its derivatives; nothing that is returned has a graph.

        By autograd; an override saves the graph, and serves no subclass that has another density.

        Args:
            mean: ``(C, N)``, or ``(C, N, K)`` for several latents.
            variance: the same shape.
            targets: ``(N,)`` or ``(C, N)``.
            parameters: leaves that the likelihood's own parameters are made of, in which derivatives are wanted too; a closed form
                may leave these cases to the parent class.
        """
        return slopes_by_autograd(self, mean, variance, targets, parameters)

    def expected_and_coupling(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[ExpectedSlopes, Tensor]:
        """The same without parameters, and minus the second derivatives in the means of two latents at a datum.

        By differences of slopes on both sides, right to about a millionth; an override serves no subclass that has another density.

        Args:
            mean: ``(C, N, K)``.
            variance: the same shape; a variance.
            targets: ``(N,)`` or ``(C, N)``.

        Returns:
            The slopes, and ``(C, N, K (K - 1) / 2)``, pairs in the order (0, 1), (0, 2), ..., (1, 2), ...
        """
        return coupling_by_differences(slopes_function(self), mean, variance, targets, central=True)

    def by_few_points(self) -> Factorised:
        """The same density with expectations that are means over few points; itself where they are quick as they are.

        For what need not be exact: where a fit lies, which way a trajectory goes that is tested at its end.
        """
        return self

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        r""":math:`\log \int p(y_n | f) N(f | mean_n, variance_n) df`, elementwise; ``variance`` is a variance.

        To 1e-6 for one latent (:func:`quadrature.integrals`); about 1e-3, with a warning from 1e-2, for several, which are
        independent with mean and variance ``(C, N, K)`` (:func:`quadrature.log_integral_of_several`).
        """
        if self.num_latents > 1:
            return quadrature.log_integral_of_several(lambda f: self.pointwise_log_prob(f, targets), mean, variance)
        if self.is_log_concave and self.is_analytic and mean.dim() == 2:
            return self._predictive_of_bumps(mean, variance, targets)
        return quadrature.log_integral(lambda f: self.pointwise_log_prob(f, targets), mean, variance, self._peak(targets))

    def _predictive_of_bumps(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """By a rule around the mode, several times as fast as one that looks for it; by that where the first fails somewhere."""
        with torch.no_grad():
            centre, scale = self._tilted_mode(mean, variance, targets)
        value, ok = log_integral_of_bump(lambda f: self.pointwise_log_prob(f, targets), mean, variance, centre, scale)
        rest = (~ok).any(0).nonzero().squeeze(-1)
        if not len(rest):
            return value
        part, y = self.for_data(rest), targets.expand_as(mean)[:, rest]
        slow = quadrature.log_integral(lambda f: part.pointwise_log_prob(f, y), mean[:, rest], variance[:, rest], part._peak(y))
        return value.index_copy(1, rest, slow)

    def _peak(self, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where p(y_n | f) has its peak in f, and how wide it is: to find it from afar, where p(y | f) is not log-concave in f."""
        return None

    def conditional_moments(self, f: Tensor) -> Moments:
        """Mean and variance of y_n given f_n, elementwise."""
        conditional = self.forward(f)
        return Moments(conditional.mean, conditional.variance)

    def expected_response(self, f: Tensor) -> Tensor:
        """The mean of y_n given f_n, elementwise; class probabilities ``(C, N, classes)`` for several classes."""
        return self.conditional_moments(f).mean

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Mean and variance of y_n when f_n ~ N(mean_n, variance_n), elementwise, by the law of total variance."""
        # Moments about the response at the latent's mean: nothing cancels when the response is far from zero.
        centre = self.conditional_moments(mean).mean.detach()

        def moments(f: Tensor) -> tuple[Tensor, Tensor]:
            conditional = self.conditional_moments(f)
            return conditional.mean - centre, conditional.variance + (conditional.mean - centre).square()

        if self.num_latents > 1:
            shift, second = (
                quadrature.expectation_of_several(lambda f, part=part: moments(f)[part], mean, variance)  # type: ignore[misc]
                for part in range(2)
            )
        else:
            shift, second = quadrature.adaptive_expectation(moments, mean, variance)
        return Moments(centre + shift, second - shift.square())

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """A draw y ~ p(y | f), of the shape of f."""
        return draw(self.forward(f), generator)

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Elementwise expectations under the marginals of ``function_dist``: gpytorch's name, for its variational models."""
        return self.expected_log_likelihood(function_dist.mean, function_dist.variance, self.validate_targets(observations))

    def log_marginal(self, observations: Tensor, function_dist: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Elementwise log expectations under the marginals of ``function_dist``: gpytorch's name, for its variational models."""
        return self.predictive_log_prob(function_dist.mean, function_dist.variance, self.validate_targets(observations))


def _slope(value: Tensor, f: Tensor) -> Tensor:
    """Elementwise derivative of ``value`` in ``f``; zero where it does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(f)
    (gradient,) = torch.autograd.grad(value.sum(), f, create_graph=True, allow_unused=True)
    return torch.zeros_like(f) if gradient is None else gradient
