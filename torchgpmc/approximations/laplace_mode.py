"""Laplace's approximation by Newton's method, batched over theta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.base import (
    GaussianApproximation,
    Problem,
    apply_r,
    dense_r,
    factor_of_b,
    iterate,
    marginal_variances,
    needs_gradient,
    problem_of,
    with_gradient,
    without_graph,
)
from torchgpmc.linalg import times_vector
from torchgpmc.models.base import GPModel, LatentPrior

_MAX_HALVINGS = 40
_ROUNDING = 1e-10


class _Point(NamedTuple):
    """Where Newton's iteration stands."""

    alpha: Tensor  # (C, N)
    centred: Tensor  # (C, N), K alpha
    objective: Tensor  # (C,), log p(y | f) - alpha' K alpha / 2
    slope: Tensor  # (C, N), of log p(y_n | f_n)
    precision: Tensor  # (C, N), minus its second derivative, not below zero


class _Mode(NamedTuple):
    """A mode, with the curvature at the point from which the last step was taken."""

    alpha: Tensor
    centred: Tensor
    objective: Tensor
    precision: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Laplace:
    """Laplace's approximation: the mode of p(f | y, theta) and the curvature there (paper A, eqs 9-13).

    Where log p(y_n | f_n) is not concave, its negative precision is taken as zero, so that the covariance stays positive definite.

    Args:
        tolerance: Newton's iteration ends when the squared change of f falls under ``tolerance * N``. ``None``: 1e-4, as in
            paper A, to draw from; 1e-14 where the evidence or its gradient is wanted.
        max_iterations: a theta that takes more counts as not converged.
    """

    tolerance: float | None = None
    max_iterations: int = 100

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Tensor | None = None, start: Tensor | None = None
    ) -> GaussianApproximation:
        """The approximation at the thetas of ``prior``; ``start``, an earlier ``alpha`` ``(C, N)``, saves iterations."""
        problem = without_graph(problem_of(model, prior, targets))
        with torch.no_grad():
            return _find_mode(problem, 1e-4 if self.tolerance is None else self.tolerance, self.max_iterations, start)

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Tensor | None = None) -> GaussianApproximation:
        """The approximation with a differentiable ``log_evidence`` (implicit differentiation of the mode)."""
        problem = problem_of(model, prior, targets)
        constant = without_graph(problem)
        with torch.no_grad():
            found = _find_mode(constant, 1e-14 if self.tolerance is None else self.tolerance, self.max_iterations, None)
        if not needs_gradient(problem):
            return found
        return found._replace(log_evidence=_differentiable(problem, constant, found))


def _evaluate(problem: Problem, alpha: Tensor, centred: Tensor) -> _Point:
    slopes = problem.derivatives(centred)
    objective = slopes.value.sum(-1) - 0.5 * (alpha * centred).sum(-1)
    return _Point(alpha, centred, objective, slopes.first, (-slopes.second).clamp_min(0.0))


def _find_mode(problem: Problem, tolerance: float, max_iterations: int, start: Tensor | None) -> GaussianApproximation:
    alpha = torch.zeros_like(problem.mean) if start is None else start
    centred = alpha if start is None else times_vector(problem.covariance, alpha)
    size = problem.mean.shape[-1]

    def step(problem: Problem, point: _Point) -> tuple[_Point, _Mode, Tensor, Tensor]:
        new, precision, factor, ok = _newton_step(problem, point)
        change = (new.centred - point.centred).square().sum(-1)
        failed = ~ok | ~torch.isfinite(new.objective)
        return new, _Mode(new.alpha, new.centred, new.objective, precision, factor), change < tolerance * size, failed

    mode, converged, counts = iterate(problem, _evaluate(problem, alpha, centred), step, max_iterations)
    log_evidence = mode.objective - mode.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    mean = problem.mean + mode.centred
    return GaussianApproximation(mean, mode.alpha, mode.precision, mode.factor, log_evidence, converged, counts, mode.alpha)


def _newton_step(problem: Problem, point: _Point) -> tuple[_Point, Tensor, Tensor, Tensor]:
    """One step (Rasmussen & Williams 2006, algorithm 3.1), halved until the objective does not fall.

    f is linear in alpha, so a shorter step costs a likelihood and no algebra.
    """
    root = point.precision.sqrt()
    factor, ok = factor_of_b(problem.covariance, root)
    right = torch.addcmul(point.slope, point.precision, point.centred)
    target = right - apply_r(factor, root, times_vector(problem.covariance, right).unsqueeze(-1)).squeeze(-1)
    new = _evaluate(problem, target, times_vector(problem.covariance, target))
    least = point.objective - _ROUNDING * (1 + point.objective.abs())
    worse = ~(new.objective >= least)
    if bool(worse.any()):
        new = _shorten(problem, point, new, worse, least)
    return new, point.precision, factor, ok


def _shorten(problem: Problem, point: _Point, new: _Point, worse: Tensor, least: Tensor) -> _Point:
    full_alpha, full_centred = new.alpha - point.alpha, new.centred - point.centred
    length = torch.ones_like(point.objective)
    for _ in range(_MAX_HALVINGS):
        length = torch.where(worse, 0.5 * length, length)
        column = length.unsqueeze(-1)
        new = _evaluate(problem, point.alpha + column * full_alpha, point.centred + column * full_centred)
        worse = ~(new.objective >= least)
        if not bool(worse.any()):
            break
    return new


def _respond(covariance: Tensor, second: Tensor, r: Tensor, pull: Tensor) -> Tensor:
    """(I + W K)^-1 pull with W minus the second derivatives as they are: how the mode moves does not know of their clamping."""
    if bool((second > 0).any()):
        system = torch.eye(second.shape[-1]).to(second) - second.unsqueeze(-1) * covariance
        return torch.linalg.solve(system, pull)
    return pull - times_vector(r, times_vector(covariance, pull))


def _differentiable(problem: Problem, constant: Problem, found: GaussianApproximation) -> Tensor:
    """Attaches the gradient of the log evidence (Rasmussen & Williams 2006, section 5.5.1)."""
    with torch.no_grad():
        root = found.precision.sqrt()
        r = dense_r(found.factor, root)
        variance = marginal_variances(constant.covariance, found.factor, root)
        slopes = constant.derivatives(found.mean - constant.mean)
        counted = (slopes.second < 0).to(variance) * variance
        pull = 0.5 * counted * slopes.third  # of the evidence on the mode
        moved = _respond(constant.covariance, slopes.second, r, pull)
        covariance = (0.5 * found.alpha + moved).unsqueeze(-1) * found.alpha.unsqueeze(-2) - 0.5 * r
        response = times_vector(constant.covariance, moved)
    with_graph = problem._replace(mean=constant.mean).derivatives(found.mean - constant.mean)
    likelihood = (with_graph.value + 0.5 * counted * with_graph.second + response * with_graph.first).sum(-1)
    return with_gradient(found.log_evidence, problem, covariance, found.alpha + moved, likelihood)
