"""Predictions averaged over hyperparameters and latents: each draw's own predictive distribution, then the mean over draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpmc.checks import check_count
from torchgpmc.models.base import GPModel
from torchgpmc.random import make_generator, normal_like

# Elements in the largest temporary; quadrature multiplies a draw's test points by its number of nodes.
_CHUNK_ELEMENTS = 2_000_000
_ASSUMED_NODES = 128


class Prediction:
    """The predictive distribution at T test points, a weighted mixture over S draws.

    Args:
        model: whose likelihood links f to the response.
        moments: mean and variance of f given each draw, ``(S, K, t)`` each, at the test points of a slice.
        num_points: T.
        chunk: test points whose moments given every draw are held at once. If T is larger, moments are worked out anew by whatever
            asks for averages, densities or draws.
        likelihood_values: the likelihood's parameters at each draw.
        log_weights: of the draws ``(S,)``, normalised.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=4000, progress=False)
        >>> prediction = posterior.predict(torch.tensor([0.0, 0.5, 1.0]))
        >>> bool(prediction.probs[0] < prediction.probs[1] < prediction.probs[2])
        True
        >>> torch.allclose(prediction.log_prob(torch.tensor([1, 1, 1])), prediction.probs.log())
        True
        >>> prediction.sample(100).shape
        torch.Size([100, 3])
    """

    def __init__(
        self,
        model: GPModel,
        moments: Callable[[slice], tuple[Tensor, Tensor]],
        num_points: int,
        chunk: int,
        likelihood_values: dict[str, Tensor],
        log_weights: Tensor,
    ):
        self._model = model
        self._moments = moments
        self._num_points = num_points
        self._slices = [slice(start, min(start + chunk, num_points)) for start in range(0, num_points, chunk)]
        self._kept = moments(self._slices[0]) if len(self._slices) == 1 else None
        self._likelihood_values = likelihood_values
        self._log_weights = log_weights
        self._averages: tuple[Tensor, ...] | None = None

    @property
    def latent_mean(self) -> Tensor:
        """Posterior mean of f: ``(T,)``, ``(T, K)`` for several latents."""
        return self._averaged()[0]

    @property
    def latent_variance(self) -> Tensor:
        """Posterior variance of f, of the same shape."""
        return self._averaged()[1]

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the response ``(T,)``; class probabilities ``(T, classes)`` for several classes."""
        return self._averaged()[2]

    @property
    def variance(self) -> Tensor:
        """Posterior variance of the response, noise included."""
        return self._averaged()[3]

    @property
    def probs(self) -> Tensor:
        """Class probabilities: of class 1 ``(T,)`` for binary labels, ``(T, classes)`` otherwise.

        The average of each draw's predictive probabilities, never the probability of an average latent.

        Raises:
            ValueError: the likelihood does not classify.
        """
        likelihood = self._model.likelihood
        if not getattr(likelihood, "is_classification", False):
            raise ValueError(
                f"{type(likelihood).__name__} does not classify, so it has no probs. Expected Bernoulli or Softmax; "
                f"use prediction.mean and prediction.variance."
            )
        return self.mean

    def log_prob(self, test_y: Tensor) -> Tensor:
        """Log of p(y* | data) for each test target ``(T,)``: the log of the average predictive density over draws.

        Raises:
            ValueError: ``test_y`` is not ``(T,)``, or outside the set the likelihood describes.
        """
        points = self._num_points
        if not isinstance(test_y, Tensor) or tuple(test_y.shape) != (points,):
            got = tuple(test_y.shape) if isinstance(test_y, Tensor) else type(test_y).__name__
            raise ValueError(f"test_y is {got}. Expected a tensor of shape ({points},), one target a test point.")
        targets = test_y.to(self._log_weights)
        if hasattr(self._model.likelihood, "validate_targets"):
            targets = self._model.likelihood.validate_targets(targets)
        return torch.cat([self._log_prob_of(targets[points], *self._at(points)) for points in self._slices])

    def _log_prob_of(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        logs = self._per_draw(mean, variance, lambda likelihood, *marginal: likelihood.predictive_log_prob(*marginal, targets))
        return torch.logsumexp(logs + self._log_weights[:, None], 0)

    def sample(self, num_samples: int = 1, *, seed: int = 0) -> Tensor:
        """Draws of the response ``(num_samples, T)``: a posterior draw by its weight, then f*, then y*.

        Given the posterior draw, test points are drawn independently of one another (their marginals are exact).

        Args:
            num_samples: how many.
            seed: of the draws.
        """
        check_count("num_samples", num_samples)
        generator = make_generator(seed, self._log_weights.device)
        rows = torch.multinomial(self._log_weights.exp(), num_samples, replacement=True, generator=generator)
        values = {name: value[rows] for name, value in self._likelihood_values.items()}
        parts = []
        for points in self._slices:
            mean, variance = (part[rows] for part in self._at(points))
            f = self._boundary(mean + variance.sqrt() * normal_like(mean, generator))
            parts.append(self._model.likelihood_function(values, lambda likelihood, f=f: likelihood.sample(f, generator)))
        return torch.cat(parts, 1)

    def _at(self, points: slice) -> tuple[Tensor, Tensor]:
        """Mean and variance of f given each draw ``(S, K, t)`` at some of the test points."""
        return self._moments(points) if self._kept is None else self._kept

    def _boundary(self, f: Tensor) -> Tensor:
        return f.squeeze(-2) if f.shape[-2] == 1 else f.mT

    def _average(self, values: Tensor) -> Tensor:
        return torch.tensordot(self._log_weights.exp(), values, 1)

    def _per_draw(self, mean: Tensor, variance: Tensor, function: Any) -> Tensor:
        """``function(likelihood, mean, variance)`` at each draw, a few draws at a time."""
        draws, latents, points = mean.shape
        size = max(1, _CHUNK_ELEMENTS // (_ASSUMED_NODES * latents * points))
        parts = []
        for start in range(0, draws, size):
            rows = slice(start, min(start + size, draws))
            marginal = self._boundary(mean[rows]), self._boundary(variance[rows])
            values = {name: value[rows] for name, value in self._likelihood_values.items()}
            parts.append(self._model.likelihood_function(values, lambda likelihood, at=marginal: function(likelihood, *at)))
        return torch.cat(parts)

    def _averaged(self) -> tuple[Tensor, ...]:
        """Mean and variance of f, and of the response, worked out together when first asked for."""
        if self._averages is None:
            parts = [self._averaged_at(points) for points in self._slices]
            self._averages = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        return self._averages

    def _averaged_at(self, points: slice) -> tuple[Tensor, ...]:
        mean, variance = self._at(points)
        latents = self._mixture(self._boundary(mean), self._boundary(variance))
        moments = self._per_draw(
            mean, variance, lambda likelihood, *marginal: torch.stack(likelihood.response_moments(*marginal), 1)
        )
        return *latents, *self._mixture(*moments.unbind(1))

    def _mixture(self, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the mixture over draws, whose own are given ``(S, ...)``."""
        mean = self._average(means)
        return mean, self._average(variances + (means - mean).square())
