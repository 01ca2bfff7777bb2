r"""Importance estimates of regressions with noise of their own size at each input: the mean function is integrated out by hand.

Given the log deviations f_2 the targets are normal, so that the evidence is an integral over N numbers, not 2 N:

.. math:: p(y | \theta) = E \, N(y | m, K + D), \quad D = scale^2 \, \mathrm{diag} \exp(2 f_2), \quad f_2 \sim N(m, K)

and nothing of f_1, which follows the data wherever noise may be small, is left to be missed (Goldberg, Williams & Bishop 1998).
Given f_2, f_1 is drawn from its normal density by Matheron's rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import check_latents_at_data, iterate, without_it
from torchgpmc.checks import check_count
from torchgpmc.evidence.defended import LEAST_DRAWS, chosen_draws, defended_draws, mean_weight
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.likelihoods import HeteroskedasticGaussian
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import (
    cholesky,
    cholesky_in_place,
    in_single_precision,
    solve_lower,
    times_vector,
    triangular_log_determinant,
)
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import LOG_SQRT_2PI
from torchgpmc.numerics.threads import even_slices, side_by_side
from torchgpmc.overriding import is_newest

_CHUNK_ELEMENTS = 1_300_000  # of the matrices that are factorised at once
_BLOCK_ELEMENTS = 400_000  # of those in a core's cache: all 64 of 300 data at once, memory, copied twice, took 3.6 times as long
_NEAR, _MOST_STEPS, _MOST_HALVINGS = 1e-2, 30, 30  # squared change of w in all
_WIDEST = 300.0  # log deviations beyond overflow
_SINGLE = torch.float32
_SEEN = 0.1  # by how much K may be off by rounding, of the least noise variance, where the mode is looked for
_ROUNDING = 100  # of objectives, in their own


class _Problem(NamedTuple):
    """At C thetas; rows can be taken out when they are done."""

    mean: Tensor  # (C, N)
    covariance: Tensor  # (C, N, N)
    factor: Tensor  # (C, N, N), L
    residual: Tensor  # (C, N), y - m
    log_scale: float

    def select(self, rows: Tensor) -> _Problem:
        mean, covariance, factor, residual, log_scale = self
        return _Problem(mean[rows], covariance[rows], factor[rows], residual[rows], log_scale)

    def in_single_precision(self) -> _Problem:
        matrices = in_single_precision(self.covariance), in_single_precision(self.factor)
        return _Problem(self.mean.to(_SINGLE), *matrices, self.residual.to(_SINGLE), self.log_scale)


class _Noise(NamedTuple):
    """y given f_2, of any number of draws a theta."""

    log_likelihood: Tensor  # log N(y | m, K + D)
    factor: Tensor  # (..., N, N), of K + D
    variance: Tensor  # (..., N), D


class _Sited(NamedTuple):
    """Where the search stands: w, and the linear problem that its next step solves."""

    white: Tensor  # (C, N), f_2 = m + L w
    objective: Tensor  # (C,), log N(y | m, K + D) - w'w / 2
    information: Tensor  # (C, N, N), Fisher's, of f_2
    linear: Tensor  # (C, N), information (f_2 - m) + slope


class _Normal(NamedTuple):
    """Where it ended: a normal density of w, and where another search may start."""

    white: Tensor  # (C, N)
    precision: Tensor  # (C, N, N), I + L' F L
    centred: Tensor  # (C, N), L w


@dataclass(frozen=True)
class NoiseAlone:
    """Evidence of a full GP with :class:`HeteroskedasticGaussian` noise by importance sampling of log deviations alone.

    Half of them from a normal density at their mode, with Fisher's information for its precision, others from one with a quarter
    of that and from the prior, each weighed by the mixture of the three: no weight exceeds ten times the largest likelihood. An
    estimate factorises an N x N matrix a draw.

    Args:
        num_importance: draws of f_2 an estimate, at least 10.

    Raises:
        ValueError: when an engine prepares a model that is not a full GP with that likelihood, or counts are out of range.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (5 * x).sin(), kernel, tg.likelihoods.HeteroskedasticGaussian(scale=0.1))
        >>> method = tg.AMIS(evidence=tg.evidence.NoiseAlone(), begin=tg.AtPrior())
        >>> posterior = tg.sample(model, method, num_samples=500, progress=False)
        >>> posterior.whitened.shape
        torch.Size([1, 500, 16])
    """

    num_importance: int = 64

    def estimator(self, model: GPModel, targets: Targets | None = None) -> NoiseAloneEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        check_latents_at_data(model, "NoiseAlone")
        if not is_heteroskedastic(model):
            raise ValueError(
                f"NoiseAlone is for regression with noise of a latent size, and this model has {type(model.likelihood).__name__}. "
                f"Expected torchgpmc.likelihoods.HeteroskedasticGaussian(); {without_it(model)}."
            )
        check_count("num_importance", self.num_importance, LEAST_DRAWS)
        return NoiseAloneEstimator(model, model.as_targets(targets), self.num_importance)


def is_heteroskedastic(model: GPModel) -> bool:
    """Whether it is a full GP with the likelihood whose mean function integrates out.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> likelihoods = tg.likelihoods.HeteroskedasticGaussian(scale=0.1), tg.likelihoods.StudentT().requires_grad_(False)
        >>> [is_heteroskedastic(tg.GP(x, x.sin(), kernel, likelihood)) for likelihood in likelihoods]
        [True, False]
    """
    kind: Any = type(model.likelihood)
    known = isinstance(model.likelihood, HeteroskedasticGaussian) and is_newest(
        kind, "expected_log_likelihood", ("pointwise_log_prob", "forward", "log_prob", "_log_deviation")
    )
    return model.has_latents_at_data and known


@dataclass(frozen=True, eq=False)
class NoiseAloneEstimator:
    """Unbiased estimates of p(y | theta), each with latent draws; made by :class:`NoiseAlone`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> model = tg.GP(x, x.sin(), kernel, tg.likelihoods.HeteroskedasticGaussian(scale=0.1))
        >>> estimator = tg.evidence.NoiseAlone(num_importance=100).estimator(model)
        >>> found = estimator.draw(torch.zeros(1, 0).double(), torch.Generator().manual_seed(0))
        >>> found.whitened.shape, bool(found.variance < 0.05)  # the mean function's values, then the log deviations'
        (torch.Size([1, 16]), True)
    """

    model: GPModel
    targets: Targets
    num_importance: int

    @property
    def _size(self) -> int:
        return len(self.model.train_x)

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a vector a draw, one number to choose the kept draw, two vectors for its f_1."""
        return self._size * (self.num_importance + 2) + 1

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates from fresh random numbers."""
        theta = self.model.layout.checked(theta)
        size = self.auxiliary_size + 2 * (num_latents - 1) * self._size
        return self.evaluate(theta, normal_like(theta.new_empty(len(theta), size), generator), start)

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> LatentEstimate:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``, two vectors more for each further latent draw."""

        def estimate(rows: slice) -> LatentEstimate:
            return self.select(rows)._evaluate(theta[rows], auxiliary[rows], None if start is None else start[rows])

        with torch.no_grad():
            parts = side_by_side(estimate, self._chunks(theta), theta.device)
        return LatentEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def start_at(self, theta: Tensor) -> Tensor:
        """Centred modes of f_2 ``(C, N)``."""

        def start(rows: slice) -> Tensor:
            return _mode(self.select(rows)._problem(self.model.prior(theta[rows])), None)[0].centred

        with torch.no_grad():
            return torch.cat(side_by_side(start, self._chunks(theta), theta.device))

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Not to be had: the kept draw has f_1, and weights are of f_2."""
        raise ValueError("evidence=NoiseAlone() cannot be combined with latent_steps. Expected latent_steps=0.")

    def select(self, rows: Tensor | slice) -> NoiseAloneEstimator:
        """The same for some of the chains, each with targets of its own."""
        return replace(self, targets=self.targets.select(rows))

    def _chunks(self, theta: Tensor) -> list[slice]:
        return even_slices(len(theta), max(1, _CHUNK_ELEMENTS // (self.num_importance * self._size**2)), theta.device)

    def _problem(self, prior: LatentPrior) -> _Problem:
        residual = self.targets.values - prior.mean
        return _Problem(prior.mean, prior.covariance, prior.factor, residual, math.log(self.model.likelihood.scale))

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None) -> LatentEstimate:
        count, size, draws = len(theta), self._size, self.num_importance
        prior = self.model.prior(theta)
        problem = self._problem(prior)
        found, converged, steps = _mode(problem, start)
        noise, level, rest = auxiliary.split([size * draws, 1, auxiliary.shape[1] - size * draws - 1], -1)
        white, log_ratio = defended_draws(found.white, found.precision, noise.view(count, draws, size))
        centred = white @ problem.factor.mT
        log_likelihood = _log_likelihoods(problem, centred)
        log_weight = torch.nan_to_num(log_likelihood - log_ratio, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        value, variance = mean_weight(log_weight)
        value = torch.where(prior.ok, value, -torch.inf)
        normals = rest.view(count, -1, 2, size)
        chosen = chosen_draws(log_weight, level.squeeze(-1), normals.shape[1])
        rows = torch.arange(count, device=theta.device)
        kept = [
            torch.cat([_mean_given(problem, _noise(problem, centred[rows, index]), pair), white[rows, index]], -1)
            for index, pair in zip(chosen.unbind(-1), normals.unbind(1), strict=True)
        ]
        more = stacked_latents(kept[1:], theta, 2 * size)
        log_likelihood = self.model.log_likelihood(self.model.at(prior), kept[0], self.targets)
        work = steps.to(value) + 2 + draws
        return LatentEstimate(value, variance, kept[0], more, log_likelihood, work, converged)


def _noise(problem: _Problem, centred: Tensor, memory: Tensor | None = None) -> _Noise:
    """y given centred f_2 ``(C, N)``, or ``(C, draws, N)`` with memory ``(C, draws, N, N)`` for its covariances."""
    draws = centred.dim() - 2
    mean, residual = (part.view(len(part), *[1] * draws, -1) for part in (problem.mean, problem.residual))
    variance = _variance(mean + centred + problem.log_scale)
    covariance = problem.covariance.clone() if memory is None else memory.copy_(problem.covariance.unsqueeze(1))
    covariance.diagonal(dim1=-2, dim2=-1).add_(variance)
    factor, ok = cholesky_in_place(covariance)
    half = solve_lower(factor, residual.expand_as(centred).unsqueeze(-1)).squeeze(-1)
    value = -0.5 * half.square().sum(-1) - triangular_log_determinant(factor) - LOG_SQRT_2PI * centred.shape[-1]
    return _Noise(torch.where(ok, value, -torch.inf), factor, variance)


def _variance(log_deviation: Tensor) -> Tensor:
    return (2 * log_deviation.clamp(-_WIDEST, _WIDEST)).exp()


def _log_likelihoods(problem: _Problem, centred: Tensor) -> Tensor:
    """log N(y | m, K + D) at centred f_2 ``(C, draws, N)``, a few draws at a time: factors are not kept."""
    count, draws, size = centred.shape
    block = max(1, min(draws, _BLOCK_ELEMENTS // (count * size**2)))
    memory = centred.new_empty(count, block, size, size)
    parts = (_noise(problem, part, memory[:, : part.shape[1]]).log_likelihood for part in centred.split(block, 1))
    return torch.cat(list(parts), 1)


def _sited(problem: _Problem, white: Tensor, centred: Tensor) -> _Sited:
    """The objective at w, and Fisher's scoring about f_2: information 2 P o P and slope b^2 - diag P, P = Q D, b^2 = D (Q r)^2.

    Q is (K + D)^-1. P, whose product with its transpose element by element is meant by P o P, never overflows.
    """
    noise = _noise(problem, centred)
    inverse = torch.cholesky_inverse(noise.factor)
    answer = times_vector(inverse, problem.residual)
    scaled = inverse.mul_(noise.variance.unsqueeze(-2))
    slope = (noise.variance.sqrt() * answer).square() - scaled.diagonal(dim1=-2, dim2=-1)
    information = 2 * scaled * scaled.mT
    linear = times_vector(information, centred) + slope
    return _Sited(white, noise.log_likelihood - 0.5 * white.square().sum(-1), information, linear)


def _mode(problem: _Problem, start: Tensor | None) -> tuple[_Normal, Tensor, Tensor]:
    """Of p(f_2 | y, theta), a function of each theta and its start alone, but for rounding: in single precision, unless it shows.

    Draws are around it, and any normal density that does not know them is right for these.
    """
    if problem.mean.dtype == _SINGLE:
        return _searched(problem, start)
    centred = torch.zeros_like(problem.mean) if start is None else start
    least = _variance(problem.mean + centred + problem.log_scale).amin(-1)
    shows = problem.covariance.diagonal(dim1=-2, dim2=-1).sum(-1) * torch.finfo(_SINGLE).eps > _SEEN * least
    if bool(shows.all()):
        return _searched(problem, start)
    near, converged, steps = _searched(problem.in_single_precision(), None if start is None else start.to(_SINGLE))
    found = _Normal(*(part.to(problem.mean) for part in near))
    again = (shows | ~converged).nonzero().squeeze(-1)
    if len(again):
        parts = _searched(problem.select(again), None if start is None else start[again])
        for whole, part in zip((*found, converged), (*parts[0], parts[1]), strict=True):
            whole[again] = part
        steps = steps.index_add(0, again, parts[2])
    return found, converged, steps


def _searched(problem: _Problem, start: Tensor | None) -> tuple[_Normal, Tensor, Tensor]:
    """By Fisher's scoring."""
    zero = torch.zeros_like(problem.mean)
    begin = _sited(problem, zero, zero if start is None else start)
    if start is not None:
        # Of f = m, below which no step may lead; the start, of another covariance, only says where to go first.
        begin = begin._replace(objective=_noise(problem, zero).log_likelihood)

    def step(problem: _Problem, point: _Sited) -> tuple[_Sited, _Normal, Tensor, Tensor]:
        precision = problem.factor.mT @ point.information @ problem.factor
        precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
        root, ok = cholesky(precision)
        right = _transposed_times(problem.factor, point.linear)
        target = torch.cholesky_solve(right.unsqueeze(-1), root).squeeze(-1)
        new = _ascend(problem, point, target)
        close = (new.white - point.white).square().sum(-1) < _NEAR
        centred = (problem.factor @ new.white.unsqueeze(-1)).squeeze(-1)
        failed = ~ok | ~torch.isfinite(new.objective)
        return new, _Normal(new.white, precision, centred), close, failed

    return iterate(problem, begin, step, _MOST_STEPS)


def _transposed_times(factor: Tensor, vector: Tensor) -> Tensor:
    """L' r for ``(C, N, N)`` and ``(C, N)``."""
    return torch.bmm(vector.unsqueeze(-2), factor).squeeze(-2)


def _ascend(problem: _Problem, point: _Sited, target: Tensor) -> _Sited:
    """As much of the way to the target as does not lead down."""
    length, rounding = torch.ones_like(point.objective), max(1e-10, _ROUNDING * torch.finfo(point.white.dtype).eps)
    for _ in range(_MOST_HALVINGS):
        white = torch.lerp(point.white, target, length.unsqueeze(-1))
        new = _sited(problem, white, (problem.factor @ white.unsqueeze(-1)).squeeze(-1))
        worse = ~(new.objective >= point.objective - rounding * (1 + point.objective.abs()))
        if not bool(worse.any()):
            break
        length = torch.where(worse, 0.5 * length, length)
    return new


def _mean_given(problem: _Problem, noise: _Noise, normals: Tensor) -> Tensor:
    """Whitened f_1 ``(C, N)`` given f_2, from two standard normal vectors: Matheron's rule."""
    first, second = normals.unbind(1)
    gap = problem.residual - (problem.factor @ first.unsqueeze(-1)).squeeze(-1) - noise.variance.sqrt() * second
    answer = torch.cholesky_solve(gap.unsqueeze(-1), noise.factor).squeeze(-1)
    return first + _transposed_times(problem.factor, answer)
