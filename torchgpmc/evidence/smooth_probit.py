r"""Importance estimates of probit GPs after white noise in f has been integrated out by hand.

K of short lengthscales is nearly diagonal, K = D + K' with a large diagonal D. Such noise is to a probit what its own noise is:

.. math:: p(y | \theta) = E \prod_n \Phi\left(s_n \frac{m_n + g_n}{\sqrt{1 + d_n}}\right), \quad g \sim N(0, K - D), \; s = 2 y - 1

so the evidence is that of another probit GP, of h = (m + g) / sqrt(1 + d), whose posterior is much nearer to a normal density.
Given h, what was integrated out is drawn from its own, one-dimensional posteriors. :class:`torchgpmc.orthant.KnownSplit` splits a
covariance in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation, Laplace
from torchgpmc.evidence.estimators import importance
from torchgpmc.evidence.importance_sampling import ImportanceEstimator
from torchgpmc.evidence.latent_estimates import LatentEstimate
from torchgpmc.evidence.orthants import check_probit
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, solve_lower, times_blocks, times_vector
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import interval_quantile, ndtr
from torchgpmc.numerics.threads import side_by_side

_LEAST = 1e-2  # a variance beside the probit's own of 1
_SHARE = 0.9  # of what could be taken out, lest what is left be singular


class Smoothed(NamedTuple):
    """The prior of h at C thetas, and the variances that were taken out of K."""

    prior: LatentPrior
    noise: Tensor  # (C, N), d; zero where K is smooth


@dataclass(frozen=True)
class SmoothProbit:
    """Evidence of probit GPs by importance sampling, white noise in f integrated out first, for ``PseudoMarginal`` and ``AMIS``.

    For kernels that may be rough, with a lengthscale for each of many inputs for instance: there Laplace's approximation is far
    from the posterior and importance estimates are mostly too low. Where kernels are smooth it is ordinary importance sampling.

    Args:
        approximation: :class:`Laplace` or :class:`EP`, of the posterior of h.
        num_importance: latent vectors an estimate, at least 1.

    Raises:
        ValueError: when an engine prepares a model that is not a full GP with the probit likelihood, or counts are out of range.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(evidence=tg.evidence.SmoothProbit()), num_samples=4000, progress=False)
        >>> posterior.predict(torch.tensor([0.1, 0.9])).probs > 0.5
        tensor([False,  True])
    """

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16

    def estimator(self, model: GPModel, targets: Targets | None = None) -> SmoothProbitEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        check_probit(model, "SmoothProbit")
        return SmoothProbitEstimator(importance(model, self.approximation, num_importance=self.num_importance, targets=targets))


@dataclass(frozen=True, eq=False)
class SmoothProbitEstimator:
    """Unbiased estimates of p(y | theta), each with a latent draw; made by :class:`SmoothProbit`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> kernel.lengthscale = 1e-3  # so short that f is white noise
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)
        >>> smooth = tg.evidence.SmoothProbit(num_importance=16).estimator(model).draw(theta, generator)
        >>> plain = tg.evidence.importance(model, num_importance=16)(theta, generator)
        >>> bool(smooth.variance < plain.variance / 10)
        True
    """

    inner: ImportanceEstimator

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: those of importance sampling, and two vectors for what was integrated out."""
        return self.inner.auxiliary_size + 2 * self.inner.model.latent_size

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates from fresh random numbers."""
        theta = self.inner.model.layout.checked(theta)
        size = self.auxiliary_size + 2 * (num_latents - 1) * self.inner.model.latent_size
        return self.evaluate(theta, normal_like(theta.new_empty(len(theta), size), generator), start)

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> LatentEstimate:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``, two vectors more for each further latent draw."""

        def estimate(rows: slice) -> LatentEstimate:
            return self.select(rows)._evaluate(theta[rows], auxiliary[rows], None if start is None else start[rows])

        with torch.no_grad():
            parts = side_by_side(estimate, self.inner.chunks(theta), theta.device)
        return LatentEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def start_at(self, theta: Tensor) -> Tensor:
        """What the approximation at ``theta`` leaves for those at nearby thetas to start from ``(C, ...)``."""

        def start(rows: slice) -> Tensor:
            inner = self.inner.select(rows)
            prior = smoothed(inner.model.prior(theta[rows])).prior
            return inner.approximation.importance_density(inner.model, prior, inner.targets).start

        with torch.no_grad():
            return torch.cat(side_by_side(start, self.inner.chunks(theta), theta.device))

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Not to be had: the kept draw is of f, and weights are of h."""
        raise ValueError("evidence=SmoothProbit() cannot be combined with latent_steps. Expected latent_steps=0.")

    def select(self, rows: Tensor | slice) -> SmoothProbitEstimator:
        """The same for some of the chains, each with targets of its own."""
        return replace(self, inner=self.inner.select(rows))

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None) -> LatentEstimate:
        model, size = self.inner.model, self.inner.model.latent_size
        targets = self.inner.targets
        prior = model.prior(theta)
        of_h = smoothed(prior)
        of_inner, rest = auxiliary.tensor_split([self.inner.auxiliary_size], -1)
        normals = rest.view(len(theta), -1, 2, size).unbind(2)
        found, _ = self.inner.at_prior(of_h.prior, of_inner, start, normals[0].shape[1])
        whitened, log_likelihood = torch.cat([found.whitened.unsqueeze(1), found.further_whitened], 1), found.log_likelihood
        if bool((of_h.noise > 0).any()):
            whitened = _latents_given(prior, of_h, whitened, 2 * targets.values - 1, *normals)
            log_likelihood = model.log_likelihood(model.at(prior), whitened[:, 0], targets)
        value = torch.where(prior.ok, found.value, -torch.inf)
        kept, more = whitened[:, 0], whitened[:, 1:]
        return LatentEstimate(value, found.variance, kept, more, log_likelihood, found.num_factorizations, found.converged)


def smoothed(prior: LatentPrior) -> Smoothed:
    r"""The prior of h, whose n-th entry is (m_n + g_n) / sqrt(1 + d_n); a function of theta alone.

    .. math:: d_n = \frac{0.9}{P_{nn} \sum_j |C_{nj}|}, \quad P = K^{-1}, \quad C_{nj} = P_{nj} / \sqrt{P_{nn} P_{jj}}

    The diagonal matrix of row sums of absolute values is above C, so that K - D is positive definite.
    """
    noise = torch.zeros_like(prior.mean)
    # Each is the variance of one latent given those before it.
    rough = (prior.factor.diagonal(dim1=-2, dim2=-1).square().median(-1).values > _LEAST) & prior.ok
    if not bool(rough.any()):
        return Smoothed(prior, noise)
    if 2 * int(rough.sum()) < len(rough):
        rows = rough.nonzero().squeeze(-1)
        of_them = prior._replace(mean=prior.mean[rows], covariance=prior.covariance[rows], factor=prior.factor[rows])
        part, taken = _without_white_part(of_them, rough[rows])
        covariance, factor, mean = prior.covariance.clone(), prior.factor.clone(), prior.mean.clone()
        covariance[rows], factor[rows], noise[rows], mean[rows] = part.covariance, part.factor, taken, part.mean
        return Smoothed(prior._replace(mean=mean, covariance=covariance, factor=factor), noise)
    # Copies of rows cost as much as factorisations: of others nothing is taken out, which leaves all numbers as they are.
    return Smoothed(*_without_white_part(prior, rough))


def _without_white_part(prior: LatentPrior, rough: Tensor) -> Smoothed:
    """The prior of h where it is ``rough`` ``(C,)``, of f elsewhere and where rounding has left K - D indefinite."""
    taken = torch.where(rough.unsqueeze(-1), _white_part(prior.factor, rough), 0.0)
    smooth, root, ok = _scaled(prior.covariance, taken)
    if not bool(ok.all()):
        taken = torch.where(ok.unsqueeze(-1), taken, 0.0)
        smooth, root, _ = _scaled(prior.covariance, taken)
    return Smoothed(prior._replace(mean=prior.mean * (1 + taken).rsqrt(), covariance=smooth, factor=root), taken)


def _scaled(covariance: Tensor, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Covariance of h, its factor, and whether it has one."""
    scale = (1 + taken).rsqrt()
    smooth = covariance.clone(memory_format=torch.contiguous_format)
    smooth.diagonal(dim1=-2, dim2=-1).sub_(taken)
    smooth.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))
    return smooth, *cholesky(smooth)


def _white_part(factor: Tensor, rough: Tensor) -> Tensor:
    """d ``(C, N)`` from the factor of K; any would do that leaves K - D positive definite, hence single precision."""
    single = factor.float()
    if not bool(rough.all()):
        single = single.masked_fill(~rough[:, None, None], 1.0)  # or torch refuses to invert
    precision = torch.cholesky_inverse(single)
    root = precision.diagonal(dim1=-2, dim2=-1).rsqrt()
    sums = times_vector(precision.abs_(), root)
    return (_SHARE * root / sums).to(factor)


def _latents_given(prior: LatentPrior, of_h: Smoothed, whitened: Tensor, sign: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Whitened f ``(C, J, N)`` given whitened h, from two sets of standard normals ``(C, J, N)``.

    f = m + g + e. With the probit's noise, e and that noise together are sqrt(1 + d) z, z a standard normal on the side of -h that
    the label says; given z, e is normal.
    """
    noise, sign = of_h.noise.unsqueeze(1), sign.unsqueeze(-2)
    centred = times_blocks(whitened, of_h.prior.factor.mT)
    side = -sign * (of_h.prior.mean.unsqueeze(1) + centred)
    smallest = torch.finfo(first.dtype).eps
    z = sign * interval_quantile(ndtr(first).clamp(smallest, 1 - smallest), side, torch.full_like(side, torch.inf))
    e = noise * (1 + noise).rsqrt() * z + (noise / (1 + noise)).sqrt() * second
    g = (1 + noise).sqrt() * centred
    # Transposed, a row a draw is the column-major layout that triangular solves take without a copy.
    v = solve_lower(prior.factor, (g + e).mT).mT
    return torch.where(noise > 0, v, whitened)
