"""Predictions averaged over hyperparameters and latents: each draw's own predictive distribution, then the mean over draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.models.base import GPModel
from torchgpmc.random import make_generator, normal_like

# Elements in the largest temporary; quadrature multiplies a draw's test points by its number of nodes.
_CHUNK_ELEMENTS = 2_000_000
_ASSUMED_NODES = 128


class Prediction:
    """The predictive distribution at T test points, a weighted mixture over S draws.

    Args:
        model: whose likelihood links f to the response.
        latent_mean: of f given each draw ``(S, K, T)``.
        latent_variance: of f given each draw ``(S, K, T)``; a variance.
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
        latent_mean: Tensor,
        latent_variance: Tensor,
        likelihood_values: dict[str, Tensor],
        log_weights: Tensor,
    ):
        self._model = model
        self._latent_mean = latent_mean
        self._latent_variance = latent_variance
        self._likelihood_values = likelihood_values
        self._log_weights = log_weights
        self._moments: tuple[Tensor, Tensor] | None = None

    @property
    def latent_mean(self) -> Tensor:
        """Posterior mean of f: ``(T,)``, ``(T, K)`` for several latents."""
        return self._boundary(self._average(self._latent_mean))

    @property
    def latent_variance(self) -> Tensor:
        """Posterior variance of f, of the same shape."""
        mean = self._average(self._latent_mean)
        return self._boundary(self._average(self._latent_variance + (self._latent_mean - mean).square()))

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the response ``(T,)``; class probabilities ``(T, classes)`` for several classes."""
        return self._response_moments()[0]

    @property
    def variance(self) -> Tensor:
        """Posterior variance of the response, noise included."""
        return self._response_moments()[1]

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
        points = self._latent_mean.shape[-1]
        if not isinstance(test_y, Tensor) or tuple(test_y.shape) != (points,):
            got = tuple(test_y.shape) if isinstance(test_y, Tensor) else type(test_y).__name__
            raise ValueError(f"test_y is {got}. Expected a tensor of shape ({points},), one target a test point.")
        targets = test_y.to(self._latent_mean)
        if hasattr(self._model.likelihood, "validate_targets"):
            targets = self._model.likelihood.validate_targets(targets)
        logs = [
            self._per_draw(rows, lambda likelihood, mean, variance: likelihood.predictive_log_prob(mean, variance, targets))
            for rows in self._chunks()
        ]
        return torch.logsumexp(torch.cat(logs) + self._log_weights[:, None], 0)

    def sample(self, num_samples: int = 1, *, seed: int = 0) -> Tensor:
        """Draws of the response ``(num_samples, T)``: a posterior draw by its weight, then f*, then y*.

        Given the posterior draw, test points are drawn independently of one another (their marginals are exact).

        Args:
            num_samples: how many.
            seed: of the draws.
        """
        if not (isinstance(num_samples, int) and num_samples >= 1):
            raise ValueError(f"num_samples is {num_samples!r}. Expected a whole number of at least 1.")
        generator = make_generator(seed, self._latent_mean.device)
        rows = torch.multinomial(self._log_weights.exp(), num_samples, replacement=True, generator=generator)
        mean, deviation = self._latent_mean[rows], self._latent_variance[rows].sqrt()
        f = self._boundary(mean + deviation * normal_like(mean, generator))
        values = {name: value[rows] for name, value in self._likelihood_values.items()}
        return self._model.likelihood_function(values, lambda likelihood: likelihood.sample(f, generator))

    def _boundary(self, f: Tensor) -> Tensor:
        return f.squeeze(-2) if f.shape[-2] == 1 else f.mT

    def _average(self, values: Tensor) -> Tensor:
        return torch.tensordot(self._log_weights.exp(), values, 1)

    def _chunks(self) -> list[slice]:
        draws, latents, points = self._latent_mean.shape
        size = max(1, _CHUNK_ELEMENTS // (_ASSUMED_NODES * latents * points))
        return [slice(start, min(start + size, draws)) for start in range(0, draws, size)]

    def _per_draw(self, rows: slice, function: Any) -> Any:
        mean, variance = self._boundary(self._latent_mean[rows]), self._boundary(self._latent_variance[rows])
        values = {name: value[rows] for name, value in self._likelihood_values.items()}
        return self._model.likelihood_function(values, lambda likelihood: function(likelihood, mean, variance))

    def _response_moments(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            parts = [
                self._per_draw(rows, lambda likelihood, *marginal: likelihood.response_moments(*marginal))
                for rows in self._chunks()
            ]
            means, variances = (torch.cat([part[i] for part in parts]) for i in range(2))
            mean = self._average(means)
            self._moments = mean, self._average(variances + (means - mean).square())
        return self._moments
