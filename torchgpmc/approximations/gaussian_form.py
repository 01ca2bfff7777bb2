"""Gaussian approximations of p(f | y, theta) for C thetas at once, in the one form that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.likelihoods.likelihood import Derivatives, TiltedMoments
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_parameters, likelihood_values
from torchgpmc.models.remedies import checked_model, what_samples
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower, times_blocks
from torchgpmc.overriding import keeps_methods, methods_of


class GaussianApproximation(NamedTuple):
    r"""A normal density :math:`N(m + K\alpha, (K^{-1} + W)^{-1})` near p(f | y, theta), for each of C thetas.

    m and K are the prior's mean and covariance; W is diagonal. Nothing here needs K^-1, and B is never badly conditioned.
    K latents a datum are stacked, one after the other, in vectors of V = K N; W then has one K x K matrix a datum.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> prior = model.prior(torch.zeros(1, 0))
        >>> found = tg.Laplace().evidence(model, prior)
        >>> torch.allclose(found.mean, (prior.covariance @ found.alpha.unsqueeze(-1)).squeeze(-1), atol=1e-6)  # m is zero
        True
    """

    mean: Tensor  # (C, V), of f
    alpha: Tensor  # (C, V), K^-1 (mean - prior mean)
    precision: Tensor  # (C, N), the diagonal of W, not negative; (C, N, K, K) for several latents
    factor: Tensor  # (C, V, V), lower Cholesky factor of B = I + W^1/2 K W^1/2; of I + L' W L, K = L L', for several latents
    log_evidence: Tensor  # (C,), approximate log p(y | theta)
    converged: Tensor  # (C,)
    num_iterations: Tensor  # (C,), one factorisation each
    start: Tensor  # (C, ...), what a later call near this theta may start from

    def is_sound(self) -> Tensor:
        """Where it can be drawn from ``(C,)``."""
        return can_be_drawn_from(self)

    def or_prior(self, sound: Tensor, prior_mean: Tensor) -> GaussianApproximation:
        """Itself where it is ``sound`` ``(C,)``, elsewhere the prior, of mean ``(C, V)``, in the same form and not converged."""
        return with_prior_elsewhere(self, sound, prior_mean)


def can_be_drawn_from(found: Any) -> Tensor:
    """Where a normal density's fields are finite and its factor is one ``(C,)``."""
    # What is wrong in a row of a Cholesky factor shows in its diagonal: not finite, or at a failed pivot not positive.
    diagonal = found.factor.diagonal(dim1=-2, dim2=-1)
    finite = torch.isfinite(found.alpha.sum(-1) + found.precision.flatten(1).sum(-1) + diagonal.sum(-1))
    return finite & (diagonal > 0).all(-1)


def with_prior_elsewhere(found: Any, sound: Tensor, prior_mean: Tensor) -> Any:
    """The fields that all normal densities have, those of the prior where one is not ``sound`` ``(C,)``."""
    good = sound.unsqueeze(-1)
    identity = identity_matrix(found.factor.shape[-1], found.factor)
    return found._replace(
        mean=torch.where(good, found.mean, prior_mean),
        alpha=torch.where(good, found.alpha, 0.0),
        precision=torch.where(good.view(-1, *[1] * (found.precision.dim() - 1)), found.precision, 0.0),
        factor=torch.where(good.unsqueeze(-1), found.factor, identity),
        converged=found.converged & sound,
    )


class Rows(Protocol):
    """Something with a row a theta."""

    @property
    def mean(self) -> Tensor: ...

    def select(self, rows: Tensor) -> Any:
        """The same for some of the thetas."""
        ...


class Approximation:
    """Options of one kind of approximation; :class:`Laplace`, :class:`EP` and :class:`Variational` are such.

    One of your own is a frozen dataclass that subclasses this, has :meth:`importance_density` and, to be a ``marginal`` too,
    :meth:`evidence`, and says what it serves.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> @dataclass(frozen=True)
        ... class Hasty(tg.approximations.Approximation):  # Laplace's after two steps, converged or not
        ...     def importance_density(self, model, prior, targets=None, start=None):
        ...         return tg.Laplace(max_iterations=2).importance_density(model, prior, targets, start)
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> def estimate(approximation):  # unbiased whatever the approximation is
        ...     estimator = tg.evidence.importance(model, approximation, num_importance=1000)
        ...     return estimator(torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)).value
        >>> (estimate(Hasty()) - estimate(tg.Laplace())).abs() < 0.1
        tensor([True])
    """

    serves_inducing_values: ClassVar[bool] = False  # it is of p(v | y, theta), not of f at the data
    serves_several_latents: ClassVar[bool] = False
    is_at_mode: ClassVar[bool] = False  # its precision is of one point, and not of the density's width
    has_no_root: ClassVar[bool] = False  # of its covariance, of several latents: draws come by Matheron's rule

    def check(self, model: GPModel) -> None:
        """Raises a ``ValueError`` for a model, of the kind that it serves, that it does not; most serve all."""

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> Any:
        """A :class:`GaussianApproximation`, or a ``NearestNormal``, good enough to draw from, without derivatives.

        Its ``log_evidence`` may be off by several nats: :meth:`rough_evidence` has one that is near.
        """
        raise NotImplementedError(f"{type(self).__name__} must define importance_density(model, prior, targets, start)")

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> Any:
        """An approximation so converged that ``log_evidence`` is smooth, and differentiable once in what made ``prior``."""
        raise NotImplementedError(f"{type(self).__name__} must define evidence(model, prior, targets)")

    def rough_evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> Any:
        """An approximation whose ``log_evidence`` is off by some hundredths, and no more, without derivatives."""
        return self.importance_density(model, prior, targets)

    def quick_evidence(self, model: GPModel, theta: Tensor, targets: Targets | None = None) -> Tensor:
        """Approximate log p(y | theta) ``(C,)``, without derivatives, off by some tenths of a nat where that takes much less time.

        Args:
            model: whose evidence it is.
            theta: unconstrained ``(C, P)``.
            targets: the model's own by default.

        Returns:
            NaN where it fails. Where a covariance has no factor -inf or any number: it only guides, and what is weighed is exact.
        """
        prior = model.prior(theta)
        log_evidence: Tensor = self.rough_evidence(model, prior, targets).log_evidence
        return torch.where(prior.ok, log_evidence, -torch.inf)

    def value_and_grad(self, model: GPModel, theta: Tensor, targets: Targets) -> tuple[Tensor, Tensor] | None:
        """log p(theta) q(y | theta) ``(C,)`` and its gradient ``(C, P)``, where that is faster than autograd of the evidence."""
        return None


def check_approximation(option: str, value: Any) -> None:
    """Raises a ``TypeError`` unless ``value`` is an :class:`Approximation`, an object and not its class."""
    if not isinstance(value, Approximation):
        raise TypeError(
            f"{option} is {value!r}. Expected an approximation of p(f | y, theta): torchgpmc.Laplace() or torchgpmc.EP(), with "
            f"their brackets, or a subclass of torchgpmc.approximations.Approximation."
        )


def check_model(model: GPModel, method: str, approximation: Approximation | None = None) -> None:
    """Raises a ``ValueError`` unless p(f | y, theta) can be approximated: one latent a datum, or several by Laplace.

    Of an approximation of inducing values: unless p(v | y, theta) can be.
    """
    if approximation is not None:
        check_approximation("approximation", approximation)
    if approximation is not None and approximation.serves_inducing_values:
        _check_expectations(model, method, approximation)
        return
    check_latents_at_data(checked_model(model), method, approximation)
    if not model.factorises:
        raise ValueError(
            f"{method} needs a likelihood that factorises over data, and {type(model.likelihood).__name__} has only log_prob. "
            f"Expected a subclass of torchgpmc.likelihoods.Factorised; {_instead(model)}."
        )
    if not model.is_smooth:
        raise ValueError(
            f"{method} follows slopes of log p(y | f) in f, and {type(model.likelihood).__name__} is a step in f. Expected a "
            f"smooth likelihood such as Softmax, or a SparseGP, whose expectations are smooth; {_instead(model)}."
        )
    if model.num_latents != 1 and (approximation is None or not approximation.serves_several_latents):
        raise ValueError(
            f"{method} handles one latent function and {type(model.likelihood).__name__} has {model.num_latents}. "
            f"Expected num_latents=1; {_instead(model, approximation)}."
        )
    if approximation is not None:
        approximation.check(model)


def check_latents_at_data(model: GPModel, method: str, approximation: Approximation | None = None) -> None:
    """Raises a ``ValueError`` unless f at the data is what the model's latents are."""
    if not model.has_latents_at_data:
        raise ValueError(
            f"{method} integrates out f at the data, which is not a latent of {type(model).__name__}. Expected a model of "
            f"f at the data, such as torchgpmc.GP; {_instead(model, approximation)}."
        )


def what_approximates(model: GPModel) -> str | None:
    """An approximation, in words, that :func:`check_model` lets through; ``None`` where there is none."""
    if has_inducing_normal(model):
        return "torchgpmc.approximations.Variational()"
    serves = model.has_latents_at_data and model.factorises and model.is_smooth
    return "torchgpmc.Laplace()" if serves else None


def without_it(model: GPModel) -> str:
    """What to do with this model in place of an evidence that is not for it."""
    served = model.layout.size and what_approximates(model) is not None
    return f"use AMIS() without it, or sample this model with {what_samples(model)}" if served else _instead(model)


def _instead(model: GPModel, approximation: Approximation | None = None) -> str:
    """What to do with this model: sample it otherwise or, in place of an approximation that was asked for, use another."""
    found = None if approximation is None else what_approximates(model)
    return f"{'' if found is None else f'use {found}, or '}sample this model with {what_samples(model)}"


def has_inducing_normal(model: GPModel) -> bool:
    """Whether the inducing values of a sparse model can be integrated out around a normal density: one latent, log-concave."""
    return (
        model.takes_expectations and model.factorises and model.num_latents == 1 and as_likelihood(model.likelihood).is_log_concave
    )


def _check_expectations(model: GPModel, method: str, approximation: Approximation | None) -> None:
    if has_inducing_normal(model):
        return
    if not model.takes_expectations:
        raise ValueError(
            f"{method} integrates out inducing values, and {type(model).__name__} has none whose density is that of a SparseGP. "
            f"Expected a SparseGP; {_instead(model, approximation)}."
        )
    raise ValueError(
        f"{method} draws inducing values around one normal density, and {type(model.likelihood).__name__} may give them several "
        f"modes, or has several latent functions. Expected one latent function and a factorised log-concave likelihood, such as "
        f"Bernoulli or Poisson; {_instead(model)}."
    )


def matrix_size(model: GPModel) -> int:
    """Numbers in the largest matrix at one theta: covariances of the latents with themselves, or with f at the data."""
    return model.latent_size * max(model.latent_size, len(model.train_x))


class LatentProblem(NamedTuple):
    """p(y | f) and N(f | mean, covariance) at C thetas, as the iterations see them: rows can be taken out when they are done."""

    model: GPModel
    covariance: Tensor  # (C, N, N)
    mean: Tensor  # (C, N), of the prior
    values: dict[str, Tensor]  # of the likelihood's parameters, (C, 1)
    targets: Targets

    def select(self, rows: Tensor) -> LatentProblem:
        """The same for some of the thetas."""
        values = {name: value[rows] for name, value in self.values.items()}
        return LatentProblem(self.model, self.covariance[rows], self.mean[rows], values, self.targets.select(rows))

    def to(self, dtype: torch.dtype) -> LatentProblem:
        """The same in another floating type."""
        values = {name: value.to(dtype) for name, value in self.values.items()}
        targets = self.targets._replace(values=self.targets.values.to(dtype))
        return LatentProblem(self.model, self.covariance.to(dtype), self.mean.to(dtype), values, targets)

    def derivatives(self, centred: Tensor) -> Derivatives:
        """Of log p(y_n | f_n) at f = mean + ``centred`` ``(C, N)``."""
        f = torch.nan_to_num(self.mean + centred)  # torch's distributions refuse NaN; the iterations see it elsewhere
        return self.model.likelihood_function(self.values, lambda likelihood: likelihood.derivatives(f, self.targets.values))

    def tilted_moments(self, centred: Tensor, variance: Tensor) -> TiltedMoments:
        """Of p(y_n | f) N(f | mean + centred, variance); the mean that comes back is centred too."""
        mean = torch.nan_to_num(self.mean + centred)
        variance = torch.where((variance > 0) & torch.isfinite(variance), variance, 1.0)
        found = self.model.likelihood_function(
            self.values, lambda likelihood: likelihood.tilted_moments(mean, variance, self.targets.values)
        )
        return found._replace(mean=found.mean - self.mean)


def problem_of(model: GPModel, prior: LatentPrior, targets: Tensor | Targets | None) -> LatentProblem:
    """The problem at the thetas of ``prior``, with its graph."""
    return LatentProblem(model, prior.covariance, prior.mean, likelihood_values(prior), model.as_targets(targets))


_PRIOR = methods_of(GPModel, ("prior", "prior_at"))


def problem_at(model: GPModel, theta: Tensor, targets: Targets | None = None) -> LatentProblem:
    """The problem at thetas ``(C, P)``, constant to autograd; nothing is factorised, but for a prior that takes it."""
    if not keeps_methods(model, _PRIOR):
        return without_graph(problem_of(model, model.prior(theta), targets))
    with torch.no_grad():
        values, count = model.layout.raw_values(model.layout.checked(theta))
        covariance = (model.bindings.among_latents(values["kernel"]) + model.bindings.jitter).expand(count, -1, -1)
        mean = model.mean_function(values["mean"], model.latent_inputs, count)
        return LatentProblem(model, covariance, mean, likelihood_parameters(values["likelihood"]), model.as_targets(targets))


def without_graph(problem: LatentProblem) -> LatentProblem:
    """The same, constant to autograd."""
    values = {name: value.detach() for name, value in problem.values.items()}
    return problem._replace(covariance=problem.covariance.detach(), mean=problem.mean.detach(), values=values)


def needs_gradient(problem: LatentProblem) -> bool:
    """Whether anything in the problem carries a graph."""
    parts = [problem.covariance, problem.mean, *problem.values.values()]
    return torch.is_grad_enabled() and any(part.requires_grad for part in parts)


def covariance_factor(prior: LatentPrior, approximation: GaussianApproximation) -> Tensor:
    """A square root S of the approximation's covariance ``(C, V, V)``: S S' = (K^-1 + W)^-1.

    Made from the prior's factor L as L (I + L' W L)^-T/2, so that rounding can never make it indefinite; not triangular.

    Args:
        prior: of C thetas.
        approximation: at the same.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> theta = torch.zeros(3, 1, dtype=torch.float64)
        >>> covariance_factor(model.prior(theta), tg.approximations.laplace(model, theta)).shape
        torch.Size([3, 8, 8])
    """
    if approximation.precision.dim() > 2:
        identity = identity_matrix(approximation.factor.shape[-1], prior.factor)
        return times_blocks(solve_lower(approximation.factor, identity), prior.factor.mT).mT
    inner = prior.factor.mT @ (prior.factor * approximation.precision.unsqueeze(-1))
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return solve_lower(cholesky(inner).factor, prior.factor.mT).mT


def with_gradient(value: Tensor, problem: LatentProblem, covariance: Tensor, mean: Tensor, likelihood: Tensor) -> Tensor:
    """``value`` ``(C,)``, with given first derivatives attached.

    Args:
        value: without a graph.
        problem: with its graph.
        covariance: derivative in K ``(C, N, N)``; K being symmetric, only its symmetric part matters.
        mean: derivative in the prior mean ``(C, N)``.
        likelihood: ``(C,)``, a function of the likelihood's parameters that has the right derivatives in them.
    """
    linear = (problem.covariance * covariance).sum((-2, -1)) + (problem.mean * mean).sum(-1) + likelihood
    return value + (linear - linear.detach())


def iterate(
    problem: Rows, state: Any, step: Callable[[Any, Any], tuple[Any, Any, Tensor, Tensor]], max_iterations: int
) -> tuple[Any, Tensor, Tensor]:
    """Repeats ``step`` for every theta until it is done; those that are done leave the batch.

    A theta's result depends on that theta alone, never on how long its neighbours take: pseudo-marginal chains rely on it.

    Args:
        problem: at C thetas.
        state: NamedTuple of tensors ``(C, ...)``, what the next step needs.
        step: ``(problem, state) -> (state, result, finished, failed)``, the last two ``(C,)`` masks; it writes into none of its
            arguments, and results are NamedTuples of tensors without graph.
        max_iterations: a theta that is not finished then counts as not converged.

    Returns:
        Results in the order of the thetas; whether each converged; iterations each took.
    """
    rows = torch.arange(len(problem.mean), device=problem.mean.device)
    converged, counts = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
    kept: Any = None
    for iteration in range(1, max_iterations + 1):
        state, result, finished, failed = step(problem, state)
        ends = finished | failed
        if iteration == max_iterations:
            ends = torch.ones_like(ends)
        if not bool(ends.any()):
            continue
        all_end = bool(ends.all())
        done = slice(None) if all_end else ends.nonzero().squeeze(-1)
        converged[rows[done]], counts[rows[done]] = (finished & ~failed)[done], iteration
        if kept is None:  # of every theta: those that go on are overwritten when they are done, and none is copied twice
            kept = result
        else:
            for whole, part in zip(kept, result, strict=True):
                whole.index_copy_(0, rows[done], part[done])
        if all_end:
            break
        going = (~ends).nonzero().squeeze(-1)
        rows, state, problem = rows[going], state._make(part[going] for part in state), problem.select(going)
    return kept, converged, counts
