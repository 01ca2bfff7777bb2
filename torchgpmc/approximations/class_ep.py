r"""Expectation propagation for K latent functions of which data see differences alone, to draw from.

Each site is changed until the normal density has, at its datum, the mean of the density with p(y_n | f_n) in the site's place, and
as nearly its covariance as sites of K numbers can have:

.. math:: N(f_n | \mu_n, \Sigma_n) \, p(y_n | f_n) / \mathrm{site}_n(f_n)

Its moments are weighted sums over fixed points of N(mu_n, Sigma_n), which have no error where the site is right in form: they need
not be exact, since estimates from any sites are unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.class_sites import (
    ClassSites,
    UnderSites,
    class_marginals,
    class_mean,
    class_precision,
    differences,
    under_class_sites,
    weights_of_diagonal,
)
from torchgpmc.approximations.gaussian_form import (
    Approximation,
    LatentProblem,
    can_be_drawn_from,
    iterate,
    problem_of,
    with_prior_elsewhere,
    without_graph,
)
from torchgpmc.approximations.several_latents import curvature
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, identity_matrix
from torchgpmc.numerics.matched_points import matched_points

_NEAR, _GOOD_ENOUGH = 0.02, 0.5  # squared, in deviations, of all data together; where it grows again
_NEARLY, _SLOW = 10.0, 0.7  # tolerances, from where on a sweep that leaves more than this part of the mismatch is the last
_PATIENCE = 3  # sweeps without a smaller mismatch than before
_LEAST = 1e-6  # of a site's precision
_LEAST_SPREAD = 1e-6
_NO_WEIGHT = 1e-300  # sums of weights are divided by
_SHRINKING, _LEAST_DAMPING = 0.7, 1e-2
_NEWTON_STEPS, _FARTHEST = 5, 4.0  # of f in one
_POINTS = 32  # and their mirror images


class ClassApproximation(NamedTuple):
    """What ``GaussianApproximation`` is, of sites with a number a function: no matrix has K N rows.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, likelihood = RBFKernel().requires_grad_(False), tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
        >>> model = tg.GP(torch.linspace(0, 1, 6), torch.arange(6) // 2, kernel, likelihood)
        >>> found = tg.approximations.ClassEP().importance_density(model, model.prior(torch.zeros(1, 0)))
        >>> found.mean.unflatten(-1, (3, 6)).argmax(1)  # the function that is highest at each datum: its class's
        tensor([[0, 0, 1, 1, 2, 2]])
        >>> found.precision.sum(-1).abs().max() < 1e-12  # data say nothing of what all functions share
        tensor(True)
    """

    mean: Tensor  # (C, V), of f
    alpha: Tensor  # (C, V)
    precision: Tensor  # (C, N, K, K), W
    factor: Tensor  # (C, N, N), of M
    weight: Tensor  # (C, K, N), d
    response: Tensor  # (C, K, N, N), E of each function
    log_determinant: Tensor  # (C,), of I + K W
    converged: Tensor  # (C,)
    num_iterations: Tensor  # (C,), one factorisation a function and one more each
    start: Tensor  # (C, 2 K, N), sites

    @property
    def log_evidence(self) -> NoReturn:
        """Not to be had."""
        raise ValueError(_NO_EVIDENCE)

    @property
    def under(self) -> UnderSites:
        """What answers to right-hand sides."""
        return UnderSites(self.weight, self.response, self.factor, self.log_determinant, torch.isfinite(self.log_determinant))

    def is_sound(self) -> Tensor:
        """Where it can be drawn from ``(C,)``."""
        finite = torch.isfinite(self.log_determinant) & torch.isfinite(self.response.sum((1, 2, 3)))
        return can_be_drawn_from(self) & finite

    def or_prior(self, sound: Tensor, prior_mean: Tensor) -> ClassApproximation:
        """Itself where it is ``sound`` ``(C,)``, elsewhere the prior, of mean ``(C, V)``, in the same form and not converged."""
        column = sound[:, None, None]
        found: ClassApproximation = with_prior_elsewhere(self, sound, prior_mean)
        return found._replace(
            weight=torch.where(column, self.weight, _NO_WEIGHT),
            response=torch.where(column.unsqueeze(-1), self.response, 0.0),
            log_determinant=torch.where(sound, self.log_determinant, 0.0),
        )


class _State(NamedTuple):
    """Sites, and how they were last moved."""

    weight: Tensor  # (C, K, N)
    shift: Tensor  # (C, K, N)
    weight_step: Tensor
    shift_step: Tensor
    damping: Tensor  # (C,)
    mismatch: Tensor  # (C,)
    best_weight: Tensor  # (C, K, N), the sites of least mismatch so far
    best_shift: Tensor  # (C, K, N)
    best_mismatch: Tensor  # (C,)
    waited: Tensor  # (C,), sweeps since; below zero: back at those sites, to end there


class _Result(NamedTuple):
    """Sites, with the approximation they make."""

    weight: Tensor
    shift: Tensor
    alpha: Tensor
    centred: Tensor
    response: Tensor
    factor: Tensor
    log_determinant: Tensor


class _Rule(NamedTuple):
    """Points of a standard normal density in K - 1 dimensions whose mean and covariance are right, and a basis for them."""

    basis: Tensor  # (K - 1, K)
    points: Tensor  # (J, K - 1)


@dataclass(frozen=True)
class ClassEP(Approximation):
    """Expectation propagation for several classes, to draw latents from; ``Softmax`` without mixing weights.

    Nearer to p(f | y, theta) than :class:`Laplace`, whose mode lies off where labels are few or noise, and at the cost of K + 1
    factorisations of N x N matrices an iteration, where Laplace's takes one of K N x K N. It has no ``evidence``.

    Args:
        tolerance: the iteration ends when squared differences of tilted and approximate means, in deviations, and half those of
            covariances add up to less over all data; near that, once sweeps hardly help; and at the best sites met where they do
            not help at all.
        max_iterations: a theta that takes more counts as not converged.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
        >>> model = tg.GP(x, torch.arange(9) // 3, kernel, likelihood)
        >>> estimator = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=64)
        >>> estimator(torch.zeros(2, 1, dtype=torch.float64), torch.Generator().manual_seed(0)).value.shape
        torch.Size([2])
    """

    tolerance: float = _NEAR
    max_iterations: int = 50
    serves_several_latents: ClassVar[bool] = True
    has_no_root: ClassVar[bool] = True

    def check(self, model: GPModel) -> None:
        """Raises a ``ValueError`` for a likelihood that sees more of f than differences, or is not log-concave."""
        if not sees_differences(model):
            raise ValueError(
                f"ClassEP() is for log-concave likelihoods of differences between latent functions, and "
                f"{type(model.likelihood).__name__} is not known to be one. Expected Softmax without mixing weights; or use "
                f"{'torchgpmc.EP()' if model.num_latents == 1 else 'torchgpmc.Laplace()'}."
            )

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> ClassApproximation:
        """The approximation at the thetas of ``prior``; ``start``, earlier sites ``(C, 2 K, N)``, saves iterations.

        Raises:
            ValueError: a likelihood that sees more of f than differences, or is not log-concave.
        """
        self.check(model)
        problem, rule = without_graph(problem_of(model, prior, targets)), _rule(model.num_latents, prior.mean)
        with torch.no_grad():
            sites = _near_mode(problem, rule) if start is None else ClassSites(*start.chunk(2, 1))
            zero = torch.zeros_like(sites.weight)
            none = zero[:, 0, 0]
            state = _State(*sites, zero, zero, none + 1.0, none + torch.inf, *sites, none + torch.inf, none)
            found, converged, counts = iterate(
                problem, state, lambda part, at: _sweep(part, at, rule, self.tolerance), self.max_iterations
            )
        mean = problem.mean.unsqueeze(1) + found.centred
        start = torch.cat([found.weight, found.shift], 1)
        precision = class_precision(found.weight)
        under = found.factor, found.weight, found.response, found.log_determinant
        return ClassApproximation(mean.flatten(1), found.alpha.flatten(1), precision, *under, converged, counts, start)

    def value_and_grad(self, model: GPModel, theta: Tensor, targets: Targets) -> NoReturn:
        """Not to be had."""
        raise ValueError(_NO_EVIDENCE)

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> NoReturn:
        """Not to be had."""
        raise ValueError(_NO_EVIDENCE)


_NO_EVIDENCE = "ClassEP() is to draw latents from and has no evidence. Expected torchgpmc.Laplace() where one is needed."


def sees_differences(model: GPModel) -> bool:
    """Whether this is a log-concave likelihood of differences between latent functions."""
    likelihood = as_likelihood(model.likelihood)
    return model.num_latents > 1 and likelihood.sees_differences and likelihood.is_log_concave


def _rule(num_latents: int, like: Tensor) -> _Rule:
    return _Rule(differences(num_latents, like.double()).to(like), matched_points(num_latents - 1, _POINTS, like))


class _Matched(NamedTuple):
    """Of the tilted density of each datum, in coordinates z in which q's marginal is standard normal."""

    mean: Tensor  # (C, N, K - 1)
    covariance: Tensor  # (C, N, K - 1, K - 1)


def _tilted(problem: LatentProblem, rule: _Rule, centred: Tensor, root: Tensor, sites: ClassSites) -> _Matched:
    """At marginals N(centred, root root') of the differences, ``(C, K, N)`` and ``(C, N, K - 1, K - 1)``."""
    spread = rule.basis.mT @ root  # (C, N, K, K - 1)
    centred = centred.unsqueeze(1) + torch.einsum("cnka,ja->cjkn", spread, rule.points)
    weight, shift = sites.weight.unsqueeze(1), sites.shift.unsqueeze(1)
    total = (weight * centred).sum(2)
    site = ((shift - 0.5 * weight * centred) * centred).sum(2) + 0.5 * total.square() / weight.sum(2)
    f = (problem.mean[:, None, None] + centred).mT
    values = {name: value.unsqueeze(1) for name, value in problem.values.items()}
    y = problem.targets.for_draws()
    log_likelihood = problem.model.likelihood_function(values, lambda likelihood: likelihood.pointwise_log_prob(f, y))
    share = torch.softmax(log_likelihood - site, 1)  # (C, J, N)
    mean = torch.einsum("cjn,ja->cna", share, rule.points)
    products = (rule.points.unsqueeze(-1) * rule.points.unsqueeze(-2)).flatten(1)
    square = torch.einsum("cjn,jb->cnb", share, products).view(root.shape)
    return _Matched(mean, square - mean.unsqueeze(-1) * mean.unsqueeze(-2))


def _new_sites(rule: _Rule, found: _Matched, mean: Tensor, root: Tensor, sites: ClassSites) -> ClassSites:
    """Those that match the tilted mean and, but for what K numbers cannot say, its covariance; ``mean`` ``(C, K, N)`` is q's."""
    unit = identity_matrix(found.mean.shape[-1], root)
    inverse = torch.linalg.inv_ex(root)[0]
    added = inverse.mT @ (torch.linalg.inv_ex(found.covariance + _LEAST_SPREAD * unit)[0] - unit) @ inverse
    old = class_precision(sites.weight)
    precision = old + rule.basis.mT @ added @ rule.basis
    weight = weights_of_diagonal(precision.diagonal(dim1=-2, dim2=-1).mT.clamp_min(_LEAST))
    # The mean that q has without the site, and with the new one, is the tilted mean.
    moved = (root @ found.mean.unsqueeze(-1)).squeeze(-1)
    needed = (inverse.mT @ found.mean.unsqueeze(-1)).squeeze(-1) @ rule.basis
    at = (rule.basis @ mean).mT + moved
    change = class_precision(weight) - old
    shift = needed + (change @ (at @ rule.basis).unsqueeze(-1)).squeeze(-1)
    return ClassSites(weight, sites.shift + shift.mT)


def _near_mode(problem: LatentProblem, rule: _Rule) -> ClassSites:
    """The sites of a few cautious Newton steps towards the mode, from the prior's mean."""
    centred = problem.mean.new_zeros(len(problem.mean), rule.basis.shape[1], problem.mean.shape[1])
    for _ in range(_NEWTON_STEPS):
        slopes = curvature(problem, (problem.mean.unsqueeze(1) + centred).flatten(1))
        weight = weights_of_diagonal(-slopes.second.diagonal(dim1=-2, dim2=-1).mT.clamp_max(-_LEAST))
        shift = slopes.first.mT + (class_precision(weight) @ centred.mT.unsqueeze(-1)).squeeze(-1).mT
        sites = ClassSites(weight, shift)
        move = class_mean(problem.covariance, under_class_sites(problem.covariance, weight), shift)[1] - centred
        longest = move.abs().amax((-2, -1), keepdim=True)
        centred = centred + torch.nan_to_num(move * (_FARTHEST / longest).clamp_max(1.0))
    return sites


def _sweep(problem: LatentProblem, state: _State, rule: _Rule, tolerance: float) -> tuple[_State, _Result, Tensor, Tensor]:
    sites = ClassSites(state.weight, state.shift)
    under = under_class_sites(problem.covariance, sites.weight)
    alpha, centred = class_mean(problem.covariance, under, sites.shift)
    result = _Result(*sites, alpha, centred, under.response, under.factor, under.log_determinant)
    root, root_ok = cholesky(torch.nan_to_num(class_marginals(under, rule.basis)))
    matched = _tilted(problem, rule, centred, root, sites)
    following = _new_sites(rule, matched, centred, root, sites)
    # By what sites of this form can still mend.
    change = rule.basis @ (class_precision(following.weight) - class_precision(sites.weight)) @ rule.basis.mT
    spread = (root.mT @ change @ root).diagonal(dim1=-2, dim2=-1)
    mismatch = (matched.mean.square() + 0.5 * spread.square()).sum((-2, -1))
    finite = torch.isfinite(mismatch + following.weight.sum((-2, -1)) + following.shift.sum((-2, -1)))
    sound = under.ok & root_ok.all(-1) & finite
    better = sound & (mismatch < state.best_mismatch)
    moved = _remembering(_move(state, following, sound, mismatch), state, better, torch.where(sound, mismatch, torch.inf))
    slow = (mismatch < _NEARLY * tolerance) & (mismatch > _SLOW * state.mismatch) & better
    back = state.waited < 0
    near = mismatch < _GOOD_ENOUGH
    finished = sound & ((mismatch < tolerance) | slow | (back & near))
    return moved, result, finished, (moved.damping < _LEAST_DAMPING) | (back & ~near)


def _remembering(moved: _State, state: _State, better: Tensor, mismatch: Tensor) -> _State:
    """With the best sites so far; back at them where sweeps lead nowhere, as a covariance that K numbers cannot match may have it.

    Sites that wander off give estimates that all miss what these have.
    """
    column = better[:, None, None]
    weight = torch.where(column, state.weight, state.best_weight)
    shift = torch.where(column, state.shift, state.best_shift)
    least = torch.where(better, mismatch, state.best_mismatch)
    waited = torch.where(better, 0.0, state.waited + 1)
    ends = ~better & ((waited >= _PATIENCE) | (least < _GOOD_ENOUGH)) & torch.isfinite(least)
    column = ends[:, None, None]
    return moved._replace(
        weight=torch.where(column, weight, moved.weight),
        shift=torch.where(column, shift, moved.shift),
        best_weight=weight,
        best_shift=shift,
        best_mismatch=least,
        waited=torch.where(ends, -1.0, waited),
    )


def _move(state: _State, following: ClassSites, sound: Tensor, mismatch: Tensor) -> _State:
    """A step, damped more where the last one led away; half of that is taken back where it led nowhere."""
    growing = mismatch > state.mismatch
    damping = state.damping * torch.where(sound, torch.where(growing, _SHRINKING, 1.0), 0.5).to(state.damping)
    good, size = sound[:, None, None], damping[:, None, None]
    weight_step = torch.where(good, size * (following.weight - state.weight), -0.5 * state.weight_step)
    shift_step = torch.where(good, size * (following.shift - state.shift), -0.5 * state.shift_step)
    return state._replace(
        weight=state.weight + weight_step,
        shift=state.shift + shift_step,
        weight_step=torch.where(good, weight_step, 0.5 * state.weight_step),
        shift_step=torch.where(good, shift_step, 0.5 * state.shift_step),
        damping=damping,
        mismatch=torch.where(sound, mismatch, state.mismatch),
    )
