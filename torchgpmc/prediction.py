"""Predictions, and fits, averaged over hyperparameters and latents: each draw's own distribution, then the mean over draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchgpmc.checks import check_count, check_positive
from torchgpmc.models.base import GPModel
from torchgpmc.quadrature import FIRST_NODES
from torchgpmc.random import make_generator, normal_like

# Elements in the largest temporary; quadrature multiplies a draw's test points by its number of nodes.
_CHUNK_ELEMENTS = 2_000_000

# Draws to test points to mean and variance of f (s, K, t): what depends on the draws alone is worked out by the first call.
Given = Callable[[slice], Callable[[slice], tuple[Tensor, Tensor]]]


class Prediction:
    """The predictive distribution at T test points, a weighted mixture over S draws.

    Args:
        model: whose likelihood links f to the response.
        given: some draws, then some test points, to mean and variance of f there, ``(s, K, t)`` each.
        num_points: T.
        chunk: test points at once. If T is not larger, moments given every draw are kept; else they are worked out anew by whatever
            asks for averages, densities or draws.
        draws_at_once: that ``given`` takes.
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
        given: Given,
        num_points: int,
        chunk: int,
        draws_at_once: int,
        likelihood_values: dict[str, Tensor],
        log_weights: Tensor,
    ):
        self._model = model
        self._num_points = num_points
        self._likelihood_values = likelihood_values
        self._log_weights = log_weights
        self._points = _slices(num_points, chunk)
        self._draws = _slices(len(log_weights), draws_at_once)
        self._given = given
        if len(self._points) == 1:
            parts = [given(rows)(self._points[0]) for rows in self._draws]
            mean, variance = (torch.cat(part) for part in zip(*parts, strict=True))
            self._draws = [slice(0, len(log_weights))]
            self._given = lambda _: lambda _: (mean, variance)
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
        self._require_response("mean")
        return self._averaged()[2]

    @property
    def variance(self) -> Tensor:
        """Posterior variance of the response, noise included."""
        self._require_response("variance")
        return self._averaged()[3]

    @property
    def probs(self) -> Tensor:
        """Class probabilities: of class 1 ``(T,)`` for binary labels, ``(T, classes)`` otherwise.

        The average of each draw's predictive probabilities, never the probability of an average latent.

        Raises:
            ValueError: the likelihood does not classify.
        """
        self._require_response("probs")
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
            ValueError: ``test_y`` is not ``(T,)``, or outside the set the likelihood describes; the likelihood does not factorise.
        """
        self._require_response("log_prob")
        count = self._num_points
        if not isinstance(test_y, Tensor) or tuple(test_y.shape) != (count,):
            got = tuple(test_y.shape) if isinstance(test_y, Tensor) else type(test_y).__name__
            raise ValueError(f"test_y is {got}. Expected a tensor of shape ({count},), one target a test point.")
        targets = test_y.to(self._log_weights)
        if hasattr(self._model.likelihood, "validate_targets"):
            targets = self._model.likelihood.validate_targets(targets)
        result = torch.full_like(targets, -torch.inf)
        for rows, points, mean, variance in self._parts():
            y = targets[points]
            logs = self._per_draw(
                rows, mean, variance, lambda likelihood, *marginal, y=y: likelihood.predictive_log_prob(*marginal, y)
            )
            result[points] = torch.logaddexp(result[points], torch.logsumexp(logs + self._log_weights[rows, None], 0))
        return result

    def sample(self, num_samples: int = 1, *, seed: int = 0) -> Tensor:
        """Draws of the response ``(num_samples, T)``: a posterior draw by its weight, then f*, then y*.

        Given the posterior draw, test points are drawn independently of one another (their marginals are exact).

        Args:
            num_samples: how many.
            seed: of the draws.

        Raises:
            ValueError: ``num_samples`` below 1, or a likelihood that does not factorise over data.
        """
        self._require_response("sample")
        check_count("num_samples", num_samples)
        generator = make_generator(seed, self._log_weights.device)
        chosen = torch.multinomial(self._log_weights.exp(), num_samples, replacement=True, generator=generator)
        result = self._log_weights.new_empty(num_samples, self._num_points)
        for draws in self._draws:
            which = ((chosen >= draws.start) & (chosen < draws.stop)).nonzero().squeeze(-1)
            if not len(which):
                continue
            given, rows = self._given(draws), chosen[which]
            values = {name: value[rows] for name, value in self._likelihood_values.items()}
            for points in self._points:
                mean, variance = (part[rows - draws.start] for part in given(points))
                f = self._boundary(mean + variance.sqrt() * normal_like(mean, generator))
                result[which, points] = self._model.likelihood_function(
                    values, lambda likelihood, f=f: likelihood.sample(f, generator)
                )
        return result

    def _require_response(self, name: str) -> None:
        if not self._model.factorises:
            raise ValueError(
                f"{type(self._model.likelihood).__name__} does not factorise over data, so that a test point has no response of "
                f"its own and prediction.{name} no meaning. Expected a torchgpmc.likelihoods.Factorised; "
                f"prediction.latent_mean and prediction.latent_variance can be had."
            )

    def _parts(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Some draws, some test points, mean and variance of f ``(s, K, t)``; what depends on draws alone is worked out once."""
        for rows in self._draws:
            given = self._given(rows)
            for points in self._points:
                yield rows, points, *given(points)

    def _boundary(self, f: Tensor) -> Tensor:
        return f.squeeze(-2) if f.shape[-2] == 1 else f.mT

    def _per_draw(self, draws: slice, mean: Tensor, variance: Tensor, function: Any) -> Tensor:
        """``function(likelihood, mean, variance)`` at each of the draws, a few at a time."""
        count, latents, points = mean.shape
        parts = []
        for rows in _slices(count, max(1, _CHUNK_ELEMENTS // (FIRST_NODES * latents * points))):
            marginal = self._boundary(mean[rows]), self._boundary(variance[rows])
            values = {name: value[draws][rows] for name, value in self._likelihood_values.items()}
            parts.append(self._model.likelihood_function(values, lambda likelihood, at=marginal: function(likelihood, *at)))
        return torch.cat(parts)

    def _averaged(self) -> tuple[Tensor, ...]:
        """Mean and variance of f, and of the response if there is one, worked out together when first asked for."""
        if self._averages is None:
            latents, responses = ({points.start: _Mixture() for points in self._points} for _ in range(2))
            for rows, points, mean, variance in self._parts():
                weights = self._log_weights[rows].exp()
                latents[points.start].add(weights, self._boundary(mean), self._boundary(variance))
                if self._model.factorises:
                    moments = self._per_draw(
                        rows, mean, variance, lambda likelihood, *marginal: torch.stack(likelihood.response_moments(*marginal), 1)
                    )
                    responses[points.start].add(weights, *moments.unbind(1))
            kinds = (latents, responses) if self._model.factorises else (latents,)
            columns = [part for kind in kinds for part in zip(*((m.mean, m.variance) for m in kind.values()), strict=True)]
            self._averages = tuple(torch.cat(column) for column in columns)
        return self._averages


class Fitted:
    """The expected response at the data under each draw, noise left out: how a model's mean curve fits, and how well it is known.

    Made by :meth:`Posterior.fitted`.

    Args:
        draws: ``(chains, draws, *shape)``, the shape being that of the targets; classes last where the response is a class.
        log_weights: of the draws ``(chains * draws,)``, unnormalised.

    Attributes:
        draws: as above.

    Example:
        >>> import torch
        >>> fitted = Fitted(torch.arange(8.0).view(2, 2, 2), torch.zeros(4))
        >>> fitted.mean, fitted.quantile(0.75)
        (tensor([3., 4.]), tensor([4., 5.]))
    """

    def __init__(self, draws: Tensor, log_weights: Tensor):
        self.draws = draws
        self._weights = torch.softmax(log_weights.to(draws), 0)

    @property
    def mean(self) -> Tensor:
        """Posterior mean, ``shape``."""
        return torch.tensordot(self._weights, self.draws.flatten(0, 1), 1)

    def quantile(self, q: float) -> Tensor:
        """Posterior quantiles, each the smallest draw up to which lies a share ``q`` of the weight: ``shape``.

        Raises:
            ValueError: ``q`` is not between 0 and 1.
        """
        check_positive("q", q, 0.0, 1.0)
        values, order = self.draws.flatten(0, 1).sort(0)
        below = (self._weights[order].cumsum(0) < q - 1e-9).sum(0, keepdim=True)  # room for rounding of the sum
        return values.gather(0, below.clamp_max(len(values) - 1)).squeeze(0)


class _Mixture:
    """Mean and variance of a mixture whose components come in parts (Chan, Golub & LeVeque 1979)."""

    def __init__(self) -> None:
        self.mean = self.variance = self._weight = torch.zeros(())

    def add(self, weights: Tensor, means: Tensor, variances: Tensor) -> None:
        """Components of weights ``(s,)``, with means and variances ``(s, ...)``."""
        tiny = torch.finfo(weights.dtype).tiny
        total = weights.sum()
        shares = weights / total.clamp_min(tiny)
        mean = torch.tensordot(shares, means, 1)
        variance = torch.tensordot(shares, variances + (means - mean).square(), 1)
        self._weight = self._weight + total
        share = total / self._weight.clamp_min(tiny)
        shift = mean - self.mean
        self.mean = self.mean + share * shift
        self.variance = (1 - share) * self.variance + share * variance + share * (1 - share) * shift.square()


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
