"""Predictions, and fits, averaged over hyperparameters and latents: each draw's own distribution, then the mean over draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.arrays import as_tensor
from torchgpmc.checks import NotOfferedError, check_count
from torchgpmc.intensity import CentralInterval, Intensity, check_levels, interval_levels
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.random import make_generator, uniform
from torchgpmc.numerics.threads import one_torch_thread, slices
from torchgpmc.prediction.components import CHUNK_ELEMENTS, Components, independent_normals
from torchgpmc.prediction.mixture_moments import MixtureMoments


class Prediction(Components):
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
        exposure: of counts at the test points, ``()`` or ``(T,)``; ``None`` for that of the data, if it is one number.
        jointly: some draws to f at all test points together; ``None`` where only marginals are known.
        each: draws in a row that share a theta and their weight. Densities that are integrals are averaged over the first alone.

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
        >>> torch.allclose(prediction.variance, prediction.mean * (1 - prediction.mean))  # of a label, 0 or 1
        True
        >>> prediction.latent_mean.shape, bool(prediction.latent_variance[1] < 1)  # of f, whose prior variance is 1
        (torch.Size([3]), True)
        >>> prediction.sample(100).shape
        torch.Size([100, 3])
    """

    _averages: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        offered = ["latent_mean", "latent_variance"]
        likelihood = as_likelihood(self._model.likelihood)
        if self._has_response:
            of_order = ["quantile(q)", "interval(level)"] if likelihood.is_ordered else []
            classes = ["probs"] if likelihood.is_classification else []
            offered = [*classes, "mean", "variance", *of_order, "log_prob(y)", "sample(n)", *offered]
        if likelihood.has_intensity:
            offered.append("intensity")
        count = "1 test point" if self._num_points == 1 else f"{self._num_points} test points"
        return f"Prediction({count}: {', '.join(offered)})"

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
            AttributeError: the likelihood does not classify; as all of its kind here a ``ValueError`` too.
        """
        self._require_response("probs")
        likelihood = self._model.likelihood
        if not as_likelihood(likelihood).is_classification:
            raise NotOfferedError(
                f"{type(likelihood).__name__} does not classify, so it has no probs. Expected Bernoulli, Softmax or the like; "
                f"use prediction.mean and prediction.variance."
            )
        return self.mean

    def log_prob(self, test_y: Tensor) -> Tensor:
        """Log of p(y* | data) for each test target ``(T,)``: the log of the average predictive density over draws.

        Raises:
            ValueError: ``test_y`` is not ``(T,)``, or outside the set the likelihood describes; the likelihood does not factorise.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.likelihoods import GaussianLikelihood
            >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
            >>> x, likelihood = torch.linspace(0, 1, 8), GaussianLikelihood(noise_prior=HalfNormalPrior(0.1))
            >>> model = tg.GPRegression(x, x.sin(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), likelihood)
            >>> prediction = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False).predict([0.5, 5.0])
            >>> near, far = prediction.log_prob([0.5, 5.0])  # sin(0.5) is near 0.5, and known; at 5.0 the prior has little there
            >>> bool(near > 0 > far)
            True
        """
        self._require_response("log_prob")
        count = self._num_points
        test_y = as_tensor("test_y", test_y, self._log_weights.device)
        if tuple(test_y.shape) not in ((count,), (count, 1)):
            raise ValueError(f"test_y has shape {tuple(test_y.shape)}. Expected ({count},), one target a test point.")
        targets = test_y.reshape(count).to(self._log_weights)
        if hasattr(self._model.likelihood, "validate_targets"):
            targets = self._at(self._model.likelihood, slice(None)).validate_targets(targets)
        result = torch.full_like(targets, -torch.inf)
        step = 1 if as_likelihood(self._model.likelihood).predicts_quickly else self._each
        with one_torch_thread():
            for rows, points, mean, variance in self._parts():
                y, some = targets[points], slice(rows.start, rows.stop, step)
                logs = self._per_draw(
                    some,
                    points,
                    mean[::step],
                    variance[::step],
                    lambda likelihood, *marginal, y=y: likelihood.predictive_log_prob(*marginal, y),
                )
                log_weights = self._log_weights[some, None] + math.log(step)
                result[points] = torch.logaddexp(result[points], torch.logsumexp(logs + log_weights, 0))
        return result

    @property
    def intensity(self) -> Intensity:
        """The rate exp(f) of counts per unit of exposure: ``mean``, ``quantile(q)``, ``interval(level)``, ``(T,)`` each.

        Raises:
            AttributeError: a likelihood that is not one of counts.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.means import ConstantMean
            >>> from gpytorch.priors import NormalPrior
            >>> kernel, mean = RBFKernel().requires_grad_(False), ConstantMean(constant_prior=NormalPrior(0.0, 3.0))
            >>> binned = tg.bin_events(torch.arange(100) / 100, (0.0, 1.0), 10)  # ten a cell of 0.1: a rate of 100
            >>> model = tg.GP(binned.centres, binned.counts, kernel, tg.likelihoods.Poisson(exposure=binned.area), mean=mean)
            >>> intensity = tg.sample(model, tg.AMIS(), num_samples=500, progress=False).predict([0.5]).intensity
            >>> lower, upper = intensity.interval(0.9)
            >>> bool(lower < 100 < upper), bool(upper - lower < 80)
            (True, True)
        """
        likelihood = self._model.likelihood
        if not as_likelihood(likelihood).has_intensity:
            raise NotOfferedError(
                f"{type(likelihood).__name__} has no intensity. Expected a likelihood of counts, Poisson or NegativeBinomial; "
                f"use prediction.mean."
            )

        def moments(points: slice) -> tuple[Tensor, Tensor]:
            mean, variance = self._of_all_draws(points)
            return mean.squeeze(1), variance.squeeze(1)

        return Intensity(moments, self._points, self._log_weights)

    def quantile(self, q: float | Sequence[float] | Tensor, *, num_samples: int = 20_000, seed: int = 0) -> Tensor:
        """The quantile of the response at level ``q``: ``(T,)``, or ``(Q, T)`` for Q levels; of counts and levels one of them.

        From response draws at each test point, posterior draws having shares by their weights: the probability below has a
        standard error of at most ``(q (1 - q) / num_samples) ** 0.5``, 0.001 at 0.975.

        Args:
            q: in (0, 1).
            num_samples: response draws a test point.
            seed: of the draws; the same for all levels, which keeps quantiles in order.

        Raises:
            ValueError: a level outside (0, 1), ``num_samples`` below 1, or a response without an order.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.likelihoods import GaussianLikelihood
            >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
            >>> x, likelihood = torch.linspace(0, 1, 8), GaussianLikelihood(noise_prior=HalfNormalPrior(0.1))
            >>> model = tg.GPRegression(x, x.sin(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), likelihood)
            >>> prediction = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False).predict([0.5, 5.0])
            >>> prediction.quantile([0.1, 0.5, 0.9]).diff(dim=0) > 0  # a row a level
            tensor([[True, True],
                    [True, True]])
        """
        self._require_response("quantile")
        levels = check_levels(q)
        check_count("num_samples", num_samples)
        likelihood = self._model.likelihood
        if not as_likelihood(likelihood).is_ordered:
            raise ValueError(
                f"{type(likelihood).__name__} has classes without an order, and so without quantiles. Expected a likelihood of "
                f"numbers or levels; use prediction.probs."
            )
        generator = make_generator(seed, self._log_weights.device)
        # Systematic resampling (Carpenter, Clifford & Fearnhead 1999): shares are the weights to within one draw.
        ladder = torch.arange(num_samples, device=self._log_weights.device) + uniform((1,), self._log_weights, generator)
        chosen = torch.searchsorted(self._log_weights.exp().cumsum(0), ladder / num_samples).clamp_max(len(self._log_weights) - 1)
        ranks = (levels.view(-1) * num_samples).ceil().long().sub(1).clamp_min(0).to(chosen.device)
        parts = []
        with one_torch_thread():
            for whole in self._points:
                mean, variance = self._of_all_draws(whole)
                for part in slices(whole.stop - whole.start, max(1, CHUNK_ELEMENTS // num_samples)):
                    points = slice(whole.start + part.start, whole.start + part.stop)
                    f = independent_normals(mean[..., part][chosen], variance[..., part][chosen], generator)
                    parts.append(self._responses(chosen, points, f, generator).sort(0).values[ranks])
        return torch.cat(parts, -1).view(*levels.shape, -1)

    def interval(self, level: float = 0.95, *, num_samples: int = 20_000, seed: int = 0) -> CentralInterval:
        """The central interval of the response of probability ``level``, point by point; see :meth:`quantile`.

        Args:
            level: in (0, 1).
            num_samples: response draws a test point.
            seed: of the draws.

        Returns:
            ``lower`` and ``upper``, ``(T,)`` each.

        Raises:
            ValueError: as :meth:`quantile` does.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.likelihoods import GaussianLikelihood
            >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
            >>> x, likelihood = torch.linspace(0, 1, 8), GaussianLikelihood(noise_prior=HalfNormalPrior(0.1))
            >>> model = tg.GPRegression(x, x.sin(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), likelihood)
            >>> prediction = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False).predict([0.5, 5.0])
            >>> lower, upper = prediction.interval(0.9)
            >>> bool(lower[0] < 0.4794 < upper[0]), bool(upper[1] - lower[1] > 2)  # around sin(0.5); as wide as the prior, far away
            (True, True)
        """
        return CentralInterval(*self.quantile(interval_levels(level), num_samples=num_samples, seed=seed))

    def sample(self, num_samples: int = 1, *, seed: int = 0, joint: bool = False) -> Tensor:
        """Draws of the response ``(num_samples, T)``: a posterior draw by its weight, then f*, then y*.

        Given the posterior draw, test points are drawn independently of one another (their marginals are exact), or together.

        Args:
            num_samples: how many.
            seed: of the draws.
            joint: draw f at all test points together, from its T x T covariance, factorised for each posterior draw; the model's
                jitter is added to its variances.

        Raises:
            ValueError: ``num_samples`` below 1, a likelihood that does not factorise over data, or ``joint=True`` of a prediction
                that knows marginals alone, or whose covariance cannot be factorised.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.likelihoods import GaussianLikelihood
            >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
            >>> x, likelihood = torch.linspace(0, 1, 8), GaussianLikelihood(noise_prior=HalfNormalPrior(0.1))
            >>> model = tg.GPRegression(x, x.sin(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), likelihood)
            >>> prediction = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False).predict([0.5, 5.0])
            >>> draws = prediction.sample(1000)
            >>> draws.shape, draws.std(0).round()  # noise is small near the data, and far away f is the prior's
            (torch.Size([1000, 2]), tensor([0., 1.], dtype=torch.float64))
        """
        self._require_response("sample")
        check_count("num_samples", num_samples)
        generator = make_generator(seed, self._log_weights.device)
        chosen = torch.multinomial(self._log_weights.exp(), num_samples, replacement=True, generator=generator)
        result = self._log_weights.new_empty(num_samples, self._num_points)
        draw = self._fill_jointly if joint else self._fill
        with one_torch_thread():
            draw(result, chosen, generator)
        return result

    def _fill(self, result: Tensor, chosen: Tensor, generator: torch.Generator) -> None:
        for draws in self._draws:
            which = ((chosen >= draws.start) & (chosen < draws.stop)).nonzero().squeeze(-1)
            if not len(which):
                continue
            given, rows = self._given(draws), chosen[which]
            for points in self._points:
                mean, variance = (part[rows - draws.start] for part in given(points))
                f = independent_normals(mean, variance, generator)
                result[which, points] = self._responses(rows, points, f, generator)

    def _fill_jointly(self, result: Tensor, chosen: Tensor, generator: torch.Generator) -> None:
        if self._jointly is None:
            raise ValueError(
                "this prediction knows each test point alone, not their covariances. Expected joint=False, or the prediction of a "
                "sampled posterior."
            )
        order = chosen.argsort()  # a posterior draw that is chosen several times is factorised once
        for which in order.split(max(1, CHUNK_ELEMENTS // self._num_points**2)):
            rows, place = chosen[which].unique(return_inverse=True)
            mean, covariance = self._jointly(rows)
            factor, ok = cholesky(covariance)
            if not bool(ok.all()):
                raise ValueError(
                    f"the covariance of f at the test points could not be factorised. Expected it to be positive definite; raise "
                    f"the model's jitter (now {self._model.jitter:g}), leave out test points that coincide, or use joint=False."
                )
            noise = torch.randn(len(which), *mean.shape[1:], 1, dtype=mean.dtype, device=mean.device, generator=generator)
            factor = factor.expand(len(rows), -1, -1)[place].unsqueeze(1)
            f = mean[place] + (factor @ noise).squeeze(-1)
            result[which] = self._responses(chosen[which], slice(None), f, generator)

    @property
    def _has_response(self) -> bool:
        likelihood = as_likelihood(self._model.likelihood)
        return self._model.factorises and not (likelihood.needs_exposure and self._exposure is None)

    def _require_response(self, name: str) -> None:
        if not self._model.factorises:
            raise NotOfferedError(
                f"{type(self._model.likelihood).__name__} does not factorise over data, so that a test point has no response of "
                f"its own and prediction.{name} no meaning. Expected a torchgpmc.likelihoods.Factorised; "
                f"prediction.latent_mean and prediction.latent_variance can be had."
            )
        self._at(as_likelihood(self._model.likelihood), slice(None))  # says so where test points need exposures of their own

    def _averaged(self) -> tuple[Tensor, ...]:
        """Mean and variance of f, and of the response if there is one, worked out together when first asked for."""
        with one_torch_thread():
            if self._averages is None:
                latents, responses = MixtureMoments(self._num_points), MixtureMoments(self._num_points)
                for rows, points, mean, variance in self._parts():
                    weights = self._log_weights[rows].exp()
                    latents.add(points, weights, self._boundary(mean), self._boundary(variance))
                    if self._has_response:
                        moments = self._per_draw(
                            rows,
                            points,
                            mean,
                            variance,
                            lambda likelihood, *marginal: torch.stack(likelihood.response_moments(*marginal), 1),
                        )
                        responses.add(points, weights, *moments.unbind(1))
                kinds = (latents, responses) if self._has_response else (latents,)
                self._averages = tuple(moment for kind in kinds for moment in (kind.mean, kind.variance))
        return self._averages
