"""What every likelihood does: log p(y | f), and, when it factorises, expectations of it under scalar normal marginals.

A likelihood needs one method, gpytorch's ``forward(f)``, which returns a torch distribution. Everything else follows from it by
quadrature and autograd; a class that knows a closed form overrides the method, and a test compares the two.

Shapes: f is ``(C, N)`` for one latent function and ``(C, N, K)`` for several; targets are ``(N,)`` or ``(C, N)``; a parameter of
the likelihood at C settings is ``(C, 1)``, so that it broadcasts against f.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchgpmc import quadrature
from torchgpmc.random import draw

# A density narrower than the latent's spread (Student t, Laplace noise) needs a finer rule than a logarithm does.
PREDICTION_NODES = 128


class Moments(NamedTuple):
    """Mean and variance of the response at each point, of the same shape."""

    mean: Tensor
    variance: Tensor


class LogLikelihood:
    """Mixin for any log p(y | f), also one that does not factorise over data: ``log_prob`` is all that samplers need."""

    num_latents = 1

    def validate_targets(self, targets: Tensor) -> Tensor:
        """The targets in the form ``log_prob`` takes.

        Raises:
            ValueError: a target is outside the set the likelihood describes.
        """
        return targets

    def log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y | f): f ``(C, N)`` or ``(C, N, K)``, targets ``(N,)`` or ``(C, N)``, to ``(C,)``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob(f, targets)")


class Factorised(LogLikelihood):
    """Mixin for p(y | f) = prod_n p(y_n | f_n); see the module's docstring.

    ``is_classification``: whether the mean response is a class probability.
    """

    is_classification = False

    def forward(self, function_samples: Tensor) -> Distribution:
        """The distribution p(y_n | f_n) of each observation, as gpytorch has it."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(f), which returns a torch distribution")

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y_n | f_n), elementwise."""
        return self.forward(f).log_prob(targets)

    def log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y | f): f ``(C, N)``, targets ``(N,)`` or ``(C, N)``, to ``(C,)``."""
        return self.pointwise_log_prob(f, targets).sum(-1)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        r""":math:`\int \log p(y_n | f) N(f | mean_n, variance_n) df`, elementwise; ``variance`` is a variance."""
        return quadrature.expectation(lambda f: self.pointwise_log_prob(f, targets), mean, variance)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        r""":math:`\log \int p(y_n | f) N(f | mean_n, variance_n) df`, elementwise; ``variance`` is a variance."""
        return quadrature.log_expectation(lambda f: self.pointwise_log_prob(f, targets), mean, variance, PREDICTION_NODES)

    def conditional_moments(self, f: Tensor) -> Moments:
        """Mean and variance of y_n given f_n, elementwise."""
        conditional = self.forward(f)
        return Moments(conditional.mean, conditional.variance)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Mean and variance of y_n when f_n ~ N(mean_n, variance_n), elementwise, by the law of total variance."""
        points, weights = quadrature.evaluation_points(mean, variance)
        conditional = self.conditional_moments(points)
        response = (weights * conditional.mean).sum(0)
        spread = (weights * (conditional.variance + (conditional.mean - response).square())).sum(0)
        return Moments(response, spread)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """A draw y ~ p(y | f), of the shape of f."""
        return draw(self.forward(f), generator)

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Elementwise expectations under the marginals of ``function_dist``: gpytorch's name, for its variational models."""
        return self.expected_log_likelihood(function_dist.mean, function_dist.variance, self.validate_targets(observations))

    def log_marginal(self, observations: Tensor, function_dist: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Elementwise log expectations under the marginals of ``function_dist``: gpytorch's name, for its variational models."""
        return self.predictive_log_prob(function_dist.mean, function_dist.variance, self.validate_targets(observations))


def require_targets(ok: Tensor, targets: Tensor, expected: str, remedy: str) -> None:
    """Raises a ``ValueError`` that shows the first few targets outside the set a likelihood describes."""
    if not bool(ok.all()):
        wrong = targets[~ok].unique()[:5].tolist()
        raise ValueError(f"train_y holds {wrong}. Expected {expected}. {remedy}")
