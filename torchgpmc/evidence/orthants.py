r"""Probit GP classification as Gaussian orthant integrals (paper B): evidence, test probabilities, exact latents.

With signs s = 2 y - 1, noise e ~ N(0, I) and t = s (f - m + e), the labels are those seen when t > -s m, so

.. math:: p(y | \theta) = P(t > -s m), \quad t \sim N(0, \mathrm{diag}(s) (K + I) \mathrm{diag}(s)) \quad (\text{eq. 30})

and f given y is a normal regression on a truncated normal t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import EP
from torchgpmc.approximations.gaussian_form import check_model, without_it
from torchgpmc.checks import check_count
from torchgpmc.evidence.gaussian_draws import or_prior
from torchgpmc.evidence.latent_estimates import LatentEstimate
from torchgpmc.evidence.net_estimator import NetEstimator, weighed
from torchgpmc.likelihoods import Bernoulli
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.models.validation import check_test_inputs
from torchgpmc.numerics.linalg import cholesky, identity_matrix, times_blocks
from torchgpmc.numerics.random import make_generator, normal_like, shifted_net, sobol_net
from torchgpmc.numerics.special import ndtr
from torchgpmc.orthant import SeparationOfVariables, Sequential
from torchgpmc.orthant.matching import sites_beside_noise
from torchgpmc.orthant.problem import Problem
from torchgpmc.orthant.truncated import truncated_draws
from torchgpmc.orthant.weighting import NARROWING, weighted_draws

# Numbers in the largest array of a chunk of thetas.
_CHUNK_ELEMENTS = 2**21


def is_probit(model: GPModel) -> bool:
    """Whether it is a full GP with the probit likelihood.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> [is_probit(tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(link))) for link in ("probit", "logit")]
        [True, False]
    """
    return model.has_latents_at_data and isinstance(model.likelihood, Bernoulli) and model.likelihood.is_probit


def check_probit(model: GPModel, method: str) -> None:
    """Raises a ``ValueError`` unless the model is a full GP with the probit likelihood."""
    check_model(model, method)
    if not is_probit(model):
        raise ValueError(
            f"{method} is for probit classification, and this model has {type(model.likelihood).__name__}"
            f"{'(link=' + repr(model.likelihood.link) + ')' if isinstance(model.likelihood, Bernoulli) else ''}. "
            f"Expected torchgpmc.likelihoods.Bernoulli(link='probit'); {without_it(model)}."
        )


class ProbitProblem(NamedTuple):
    """The orthant problem at C thetas."""

    problem: Problem
    sign: Tensor  # (C, N), 2 y - 1
    ok: Tensor  # (C,), whether K and K + I were factorised; the rest holds a harmless stand-in


def probit_problem(model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> ProbitProblem:
    """Eq. 30 at the thetas of ``prior``, with its graph."""
    y = model.targets if targets is None else targets
    sign = (2 * y.values - 1).expand(prior.mean.shape)
    eye = identity_matrix(sign.shape[-1], sign)
    covariance = torch.addcmul(eye, prior.covariance * sign.unsqueeze(-1), sign.unsqueeze(-2))
    if not bool(prior.ok.all()):
        covariance = torch.where(prior.ok.view(-1, 1, 1), covariance, eye)
    factor, ok = cholesky(covariance)
    lower = -sign * prior.mean
    return ProbitProblem(Problem(covariance, factor, lower, torch.full_like(lower, torch.inf)), sign, ok & prior.ok)


class OrthantEvidence(NamedTuple):
    """Log evidence at C thetas from fixed random numbers."""

    log_evidence: Tensor  # (C,), differentiable
    converged: Tensor  # (C,)


@dataclass(frozen=True)
class Orthant:
    """Evidence of probit GPs as a tilted orthant integral, for ``PseudoMarginal``, ``AMIS`` and ``fit``.

    Args:
        num_points: points an estimate.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(evidence=tg.evidence.Orthant()), num_samples=4000, progress=False)
        >>> posterior.info["log_evidence_error"] < 0.02
        True
    """

    num_points: int = 256

    def estimator(self, model: GPModel, targets: Targets | None = None) -> OrthantEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        check_probit(model, "Orthant")
        check_count("num_points", self.num_points, 2, ", for instance 256")
        net = sobol_net(self.num_points, model.latent_size, model.train_x)
        return OrthantEstimator(model, EP(), net, model.as_targets(targets))

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> OrthantEvidence:
        """The estimate at fixed random numbers, smooth in theta: what :func:`torchgpmc.fit` maximises (paper B, section 6.5)."""
        check_probit(model, "Orthant")
        found = probit_problem(model, prior, targets)
        # Another order of the variables, or another narrowing, at a nearby theta would make the estimate jump.
        method = SeparationOfVariables(reordering=False, narrowing=NARROWING)
        generator = make_generator(0, model.train_x.device)
        estimate = method.estimate(found.problem, max(self.num_points, 2 * method.num_replicates), generator)
        return OrthantEvidence(torch.where(found.ok, estimate.value, -torch.inf), found.ok)


@dataclass(frozen=True, eq=False)
class OrthantEstimator(NetEstimator):
    """Unbiased estimates of p(y | theta) from one randomly shifted net a theta, each with an exact latent draw.

    The draw is chosen by its weight among the points; with it (theta, f) is a joint posterior draw, as in
    :class:`ImportanceEstimator`.

    Made by :class:`Orthant`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> found = tg.evidence.Orthant(num_points=256).estimator(model).draw(theta.expand(100, 0), generator)
        >>> bool(found.value.var() < found.variance.mean() < 1e-4)  # of a net, and as if its points were independent
        True
    """

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a shift of the net, a number to choose the draw, and f given t."""
        return 3 * self.model.latent_size + 1

    def _num_normals(self, num_latents: int) -> int:
        return self.auxiliary_size + 2 * (num_latents - 1) * self.model.latent_size

    @property
    def _thetas_at_once(self) -> int:
        size = self.model.latent_size
        return _CHUNK_ELEMENTS // (size * max(size, self.num_points))

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int) -> LatentEstimate:
        size = self.model.latent_size
        prior = self.model.prior(theta)
        found = probit_problem(self.model, prior, self.targets)
        near = or_prior(self.model, self.approximation.importance_density(self.model, prior, self.targets, start), prior)
        sites = sites_beside_noise(found.problem, found.sign * near.alpha, near.precision)
        log_weight, t = weighted_draws(found.problem, shifted_net(self.net, auxiliary[:, :size]), sites)
        weighed_points = weighed(log_weight, auxiliary[:, size], num_latents)
        normals = auxiliary[:, size + 1 :].view(len(theta), -1, 2, size)
        kept = t.gather(1, weighed_points.chosen.unsqueeze(-1).expand(-1, -1, size))
        latents = _latents_given(prior, found, kept, *normals.unbind(2))
        whitened, more = latents[:, 0], latents[:, 1:]
        log_likelihood = self.model.log_likelihood(self.model.at(prior), whitened, self.targets)
        value = torch.where(found.ok, weighed_points.value, -torch.inf)
        count = near.num_iterations.to(value) + 4
        return LatentEstimate(value, weighed_points.variance, whitened, more, log_likelihood, count, found.ok)


def _latents_given(prior: LatentPrior, found: ProbitProblem, t: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Whitened draws v of f given t ``(C, J, N)`` by Matheron's rule, from two sets of standard normals ``(C, J, N)``.

    v = first + L' (K + I)^-1 (s t - L first - second).
    """
    sign = found.sign.unsqueeze(1)
    residual = sign * t - times_blocks(first, prior.factor.mT) - second
    # diag(s) (K + I)^-1 diag(s) is what the problem's factor gives.
    solved = torch.cholesky_solve((sign * residual).mT, found.problem.factor).mT * sign
    return torch.where(found.ok.view(-1, 1, 1), first + times_blocks(solved, prior.factor), first)


class LatentDraws(NamedTuple):
    """Draws of the latents at one theta."""

    whitened: Tensor  # (S, N)
    log_weight: Tensor  # (S,), zero for exact draws
    acceptance_rate: Tensor  # ()
    exact: Tensor  # ()


def exact_latents(model: GPModel, theta: Tensor, num_samples: int, generator: torch.Generator) -> LatentDraws:
    """Independent posterior draws of the latents at one theta ``(1, P)``, exact unless acceptance is below 1e-4.

    Args:
        model: a :class:`GP` with ``Bernoulli(link="probit")``.
        theta: unconstrained ``(1, P)``.
        num_samples: S.
        generator: of the draws.

    Returns:
        ``whitened`` ``(S, N)``, ``log_weight`` ``(S,)``, ``acceptance_rate`` and ``exact``.

    Raises:
        ValueError: not a probit GP, or a covariance that cannot be factorised.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> theta = torch.zeros(1, model.layout.size).double()
        >>> draws = tg.evidence.exact_latents(model, theta, 500, torch.Generator().manual_seed(0))
        >>> draws.whitened.shape, bool(draws.exact)
        (torch.Size([500, 8]), True)
    """
    check_probit(model, "exact_latents")
    with torch.no_grad():
        prior = model.prior(theta)
        found = probit_problem(model, prior)
        if not bool(found.ok.all()):
            raise ValueError(
                f"the covariance could not be factorised. Expected a positive definite one; raise jitter (now {model.jitter:g})."
            )
        draws = truncated_draws(found.problem, num_samples, generator)
        first, second = normal_like(draws.samples, generator), normal_like(draws.samples, generator)
        whitened = _latents_given(prior, found, draws.samples, first, second)[0]
        return LatentDraws(whitened, draws.log_weight[0], draws.acceptance_rate[0], draws.exact[0])


class OrthantClassifier:
    """Log evidence of a probit GP at C thetas, and class probabilities of any number of test points from the same points.

    Made by :func:`classify`; test points cost O(N^2) a theta and need no new integral (paper B, eqs 59-62).

    Attributes:
        log_evidence: ``(C,)``.
        variance: its relative variance ``(C,)``, as if points were independent.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.tensor([0.0, 100.0]), torch.tensor([0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> found = tg.evidence.classify(model, torch.zeros(1, 0).double())
        >>> found.log_evidence.exp().round(decimals=3)  # two labels that know nothing of one another
        tensor([0.2500], dtype=torch.float64)
        >>> found.probabilities(torch.tensor([0.0, 50.0, 100.0])).round(decimals=2)  # of f ~ N(0, 1): 1/2 + asin(1/2) / pi at a 1
        tensor([[0.3300, 0.5000, 0.6700]], dtype=torch.float64)
    """

    def __init__(self, model: GPModel, prior: LatentPrior, found: ProbitProblem, log_weight: Tensor, t: Tensor):
        self._model, self._prior, self._found, self._t = model, prior, found, t
        self._weights = torch.softmax(log_weight, -1)
        value = torch.logsumexp(log_weight, -1) - math.log(log_weight.shape[-1])
        self.variance = (log_weight - value.unsqueeze(-1)).exp().var(-1) / log_weight.shape[-1]
        self.log_evidence = torch.where(found.ok, value, -torch.inf)

    def probabilities(self, x: Tensor) -> Tensor:
        """P(y* = 1) ``(C, T)`` at test inputs ``(T, D)``: the soft count of eq. 62.

        Raises:
            ValueError: inputs of the wrong shape, NaN or infinite values.
        """
        model, prior = self._model, self._prior
        x = check_test_inputs(x, model.train_x, model.columns)
        with torch.no_grad():
            cross = model.cross(prior, x)
            signed = cross.covariance * self._found.sign.unsqueeze(-1)
            b = torch.cholesky_solve(signed, self._found.problem.factor)
            sd = (1 + cross.variance - (signed * b).sum(-2)).clamp_min(1.0).sqrt()
            mean = cross.mean.unsqueeze(1) + self._t @ b
            return (self._weights.unsqueeze(1) @ ndtr(mean / sd.unsqueeze(1))).squeeze(1)


def classify(
    model: GPModel,
    theta: Tensor,
    *,
    num_points: int = 2048,
    method: Sequential | None = None,
    generator: torch.Generator | None = None,
) -> OrthantClassifier:
    """Evidence and test probabilities of a probit GP at given hyperparameters, as ratios of orthant integrals (paper B, eq. 28).

    Args:
        model: a :class:`GP` with ``Bernoulli(link="probit")``.
        theta: unconstrained ``(C, P)``; ``(C, 0)`` where every hyperparameter is fixed.
        num_points: points a theta.
        method: :class:`torchgpmc.orthant.Sequential` for the paper's own algorithm GPC-MC; by default the tilted net, which is more
            accurate by far.
        generator: by default a fresh one with seed 0.

    Raises:
        ValueError: another model, or numbers out of range.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> x = torch.linspace(0, 1, 10)
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> found = tg.evidence.classify(model, torch.zeros(1, 0).double())
        >>> found.probabilities(torch.tensor([0.0, 1.0]))[0].round(decimals=1)
        tensor([0.2000, 0.8000], dtype=torch.float64)
    """
    check_probit(model, "classify")
    check_count("num_points", num_points, 2, ", for instance 2048")
    generator = make_generator(0, theta.device) if generator is None else generator
    with torch.no_grad():
        prior = model.prior(theta)
        found = probit_problem(model, prior)
        if method is not None:
            particles = method.particles(found.problem, num_points, generator)
            each = particles.log_weight.shape[-1] // particles.log_estimate.shape[-1]
            log_weight = particles.log_weight + math.log(each)
            t = particles.samples
        else:
            shift = normal_like(theta.new_empty(len(theta), model.latent_size), generator)
            log_weight, t = weighted_draws(found.problem, shifted_net(sobol_net(num_points, model.latent_size, shift), shift))
        return OrthantClassifier(model, prior, found, log_weight, t)
