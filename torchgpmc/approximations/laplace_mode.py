"""Laplace's approximation by Newton's method, batched over theta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import several_latents
from torchgpmc.approximations.gaussian_form import (
    Approximation,
    GaussianApproximation,
    LatentProblem,
    iterate,
    needs_gradient,
    problem_of,
    with_gradient,
    without_graph,
)
from torchgpmc.approximations.site_algebra import dense_r, factor_of_b, marginal_variances
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import identity_matrix, solve, solve_lower, times_vector, triangular_log_determinant
from torchgpmc.trees import put, take

_MAX_HALVINGS = 40
_CHEAP_STEPS = 8
_ROUNDS = 2  # of these, after which a search that leads back to where a factor is from is nearly there
# Beside the variance that the model has for a unit.
_LEAST_PRECISION = 1e-10
_NEAR, _FAR = 1e-4, 1e-2  # squared change of f, a datum, and distance to where the curvature is from: of densities to draw from
_NEARLY = 1 / 16  # of what the curvature may be off: its last factorisation need then be no other's
# Where single precision comes near enough (squared change of f, a datum), and the least curvature that does not swell its rounding.
_LOOSE, _FIRM = 1e-5, 1e-3
_ROUNDING = 1e-10
# Data from which factorisations in single precision save more than another round of small operations costs; from a good start there
# are none to save.
_WORTH_SINGLE = 100
_MOST_REWEIGHTED = 100  # steps
_LITTLE = 1.0  # nats that a reweighted step gains, from which on Newton's are the quicker
# Elements of the factors of thetas at rest, less those that must be copied, from which it pays that they leave the batch.
_WORTH_LEAVING = 50_000


class _Point(NamedTuple):
    """Where Newton's iteration stands."""

    alpha: Tensor  # (C, N)
    centred: Tensor  # (C, N), K alpha
    objective: Tensor  # (C,), log p(y | f) - alpha' K alpha / 2
    slope: Tensor  # (C, N), of log p(y_n | f_n)
    precision: Tensor  # (C, N), minus its second derivative, not below zero, at ...
    curved_at: Tensor  # (C, N), ... this centred f


class _Step(NamedTuple):
    """From one point to another."""

    alpha: Tensor  # (C, N)
    centred: Tensor  # (C, N), K alpha


class _Course(NamedTuple):
    """Steps with one factor, and where they have come to."""

    precision: Tensor  # (C, N), W
    factor: Tensor  # (C, N, N), of B
    firm: Tensor | None  # (C, 1), where W is large enough to divide by; None: nowhere
    point: _Point
    before: tuple[_Point, _Step] | None  # the last point, and the step that was worked out there


class _Mode(NamedTuple):
    """A mode, with the curvature at the point where B was last factorised."""

    alpha: Tensor
    centred: Tensor
    objective: Tensor
    precision: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Laplace(Approximation):
    """Laplace's approximation: the mode of p(f | y, theta) and the curvature there (paper A, eqs 9-13).

    Where log p(y_n | f_n) is not concave, its negative precision is taken as zero, so that the covariance stays positive definite.

    Args:
        tolerance: Newton's iteration ends when the squared change of f falls under ``tolerance * N``, of the targets' variance
            where these are f plus noise, and so does the squared distance to where the curvature was taken. ``None``: 1e-14 where
            the evidence or its gradient is wanted, 1e-18 for the curvature; to draw from, 1e-4 as in paper A, and 1e-2 for the
            curvature.
        max_iterations: factorisations; a theta that takes more counts as not converged.

    With several latents a datum (Rasmussen & Williams 2006, section 3.5, for any likelihood) the curvature at the mode is the true
    one, a K x K matrix a datum, and each iteration factorises a matrix of K N rows.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> found = tg.Laplace().evidence(model, model.prior(torch.zeros(3, 1, dtype=torch.float64)))
        >>> found.log_evidence.shape, bool(found.converged.all())
        (torch.Size([3]), True)
    """

    tolerance: float | None = None
    max_iterations: int = 100
    serves_several_latents: ClassVar[bool] = True
    is_at_mode: ClassVar[bool] = True

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> GaussianApproximation:
        """The approximation at the thetas of ``prior``; ``start`` ``(C, 2 N)``, of an earlier one, saves iterations."""
        problem = without_graph(problem_of(model, prior, targets))
        with torch.no_grad():
            near, far = (_NEAR, _FAR) if self.tolerance is None else (self.tolerance, self.tolerance)
            return self._find_mode(problem, prior, near, far, start)

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> GaussianApproximation:
        """The approximation with a differentiable ``log_evidence`` (implicit differentiation of the mode)."""
        problem = problem_of(model, prior, targets)
        constant = without_graph(problem)
        with torch.no_grad():
            # An error of the curvature is one of the evidence, where an error of the mode counts by its square.
            near, far = (1e-14, 1e-18) if self.tolerance is None else (self.tolerance, self.tolerance)
            least = (8 * torch.finfo(prior.mean.dtype).eps) ** 2  # single precision settles no closer
            near, far = max(near, least), max(far, least)
            found = self._find_mode(constant, prior, near, far, None)
        if not needs_gradient(problem):
            return found
        if model.num_latents > 1:
            return found._replace(log_evidence=several_latents.differentiable(problem, prior.factor, found))
        return found._replace(log_evidence=_differentiable(problem, constant, found))

    def _find_mode(
        self, problem: LatentProblem, prior: LatentPrior, tolerance: float, far: float, start: Tensor | None
    ) -> GaussianApproximation:
        if problem.model.num_latents > 1:
            return several_latents.find_mode(problem, prior.factor, tolerance, far, self.max_iterations, start)
        return _find_mode(problem, tolerance, far, self.max_iterations, start)


def mode_near(problem: LatentProblem, start: Tensor) -> GaussianApproximation:
    """A mode of a problem without graph, good enough to draw from, near a ``start`` ``(C, 2 N)``, alpha and centred f."""
    return _find_mode(problem, _NEAR, _FAR, 100, start)


def ascended(problem: LatentProblem, start: Tensor, found: GaussianApproximation) -> Tensor:
    """Where steps from ``start``, none of them downhill, lead: alpha and centred f ``(C, 2 N)``; with the factor of ``found``.

    Under noise of mixed variances by steps with factors of their own.
    """
    point = _begin(problem, start)
    if _mixes_variances(problem):
        point, _ = _reweighted(problem, point, _MOST_REWEIGHTED)
        return torch.cat([point.alpha, point.centred], -1)
    enough = _NEAR * problem.mean.shape[-1] * problem.model.unit
    for _ in range(_ROUNDS):
        point, settled = _steps(problem, point._replace(precision=found.precision), found.factor, enough)
        if bool(settled.all()):
            break
    return torch.cat([point.alpha, point.centred], -1)


def _evaluate(problem: LatentProblem, alpha: Tensor, centred: Tensor) -> _Point:
    slopes = problem.derivatives(centred)
    precision = (-slopes.second).clamp_min(_LEAST_PRECISION / problem.model.unit)
    objective = slopes.value.sum(-1) - 0.5 * (alpha * centred).sum(-1)
    return _Point(alpha, centred, objective, slopes.first, precision, centred)


def _find_mode(
    problem: LatentProblem, tolerance: float, far: float, max_iterations: int, start: Tensor | None
) -> GaussianApproximation:
    """The mode, and the curvature at a point no further from it than ``far``."""
    point = _begin(problem, start)
    size = problem.mean.shape[-1] * problem.model.unit
    rough = torch.zeros_like(point.objective, dtype=torch.long)
    if _mixes_variances(problem):
        point, rough = _reweighted(problem, point, max_iterations)
    elif start is None and problem.mean.shape[-1] >= _WORTH_SINGLE and point.alpha.dtype == torch.float64:
        point, rough = _approach(problem, point, max(tolerance, _NEARLY * far) * size, max_iterations)

    def step(problem: LatentProblem, point: _Point) -> tuple[_Point, _Mode, Tensor, Tensor]:
        factor, ok = factor_of_b(problem.covariance, point.precision.sqrt())
        new, settled = _steps(problem, point, factor, tolerance * size)
        close = (new.centred - point.curved_at).square().sum(-1) < far * size
        failed = ~ok | ~torch.isfinite(new.objective)
        return new, _Mode(new.alpha, new.centred, new.objective, point.precision, factor), settled & close, failed

    mode, converged, counts = iterate(problem, point, step, max_iterations)
    log_evidence = mode.objective - triangular_log_determinant(mode.factor)
    mean = problem.mean + mode.centred
    begin = torch.cat([mode.alpha, mode.centred], -1)
    return GaussianApproximation(mean, mode.alpha, mode.precision, mode.factor, log_evidence, converged, counts + rough, begin)


def _begin(problem: LatentProblem, start: Tensor | None) -> _Point:
    """f = mean, or a start's f, which is much nearer to the mode than K times the start's alpha, the two being of another K.

    From f = mean the first step has the curvature where each datum alone would take f, if less: so it mostly is at the mode.

    From a start the point that comes back is K alpha, with the slope there that the expansion about f gives: the step from it ends
    where Newton's step from f does. Its objective, of no one point, is lowered by so much that it stops none but wild steps.
    """
    if start is None:
        nothing = torch.zeros_like(problem.mean)
        begin = _evaluate(problem, nothing, nothing)
        variance = problem.covariance.diagonal(dim1=-2, dim2=-1)
        deviation = variance.sqrt()
        alone = begin.slope / (begin.precision + variance.reciprocal())
        alone = alone.minimum(deviation).maximum(-deviation)
        precision = _evaluate(problem, nothing, alone).precision.minimum(begin.precision)
        return begin._replace(precision=precision, curved_at=alone)
    alpha, before = start.chunk(2, -1)
    near = _evaluate(problem, alpha, before)
    if _mixes_variances(problem):
        near = near._replace(precision=_mean_precision(problem, near))
    centred = times_vector(problem.covariance, alpha)
    slope = near.slope + near.precision * (before - centred)
    return near._replace(centred=centred, slope=slope, objective=near.objective - alpha.shape[-1])


def _reweighted(problem: LatentProblem, begin: _Point, max_iterations: int) -> tuple[_Point, Tensor]:
    """Towards a mode under noise of mixed variances, by the mean of 1 / variance of each, and the factorisations of each theta.

    Given these means the mode is a regression's: EM (Lange, Little & Taylor 1989, "Robust statistical modeling using the t
    distribution"), which never goes downhill. Newton's steps overshoot where log p(y | f) curves upwards: of 500 data, some
    60 of them outliers, they take 8 to 14 factorisations to where these are within a nat of after five.
    """
    dtype = begin.alpha.dtype
    quick = torch.float32 if problem.mean.shape[-1] >= _WORTH_SINGLE else dtype

    def step(problem: LatentProblem, point: _Point) -> tuple[_Point, _Point, Tensor, Tensor]:
        factor, ok = factor_of_b(problem.covariance, point.precision.sqrt().to(quick))
        new, _ = _follow(problem, _Course(point.precision, factor, None, point, None), 0.0, 1)
        good = ok & torch.isfinite(new.objective)
        new = new if bool(good.all()) else _choose(good, new, point)
        return new._replace(precision=_mean_precision(problem, new)), new, new.objective - point.objective < _LITTLE, ~good

    point, _, counts = iterate(problem, begin, step, max_iterations)
    return point, counts


def _mixes_variances(problem: LatentProblem) -> bool:
    return bool(as_likelihood(problem.model.likelihood).mixes_variances)


def _mean_precision(problem: LatentProblem, point: _Point) -> Tensor:
    """E[1 / variance | y_n, f_n], which is the slope of log p(y_n | f_n) over y_n - f_n."""
    residual = problem.targets.values - problem.mean - point.centred
    return torch.where(residual.abs() > 0, point.slope / residual, point.precision).clamp_min(_LEAST_PRECISION / problem.model.unit)


def _approach(problem: LatentProblem, begin: _Point, enough: float, max_iterations: int) -> tuple[_Point, Tensor]:
    """Towards the mode with factors in single precision, which cost half, and the factorisations that each theta took.

    Gradients stay in double precision, so that the steps end at the same mode; where a factorisation fails, they end early. Where
    that is near enough, the steps go without products with K, all but one at the end, which makes up for what rounding did to f.
    """
    unit = problem.model.unit
    loose = enough >= _LOOSE * unit * problem.mean.shape[-1]

    def step(problem: LatentProblem, point: _Point) -> tuple[_Point, _Point, Tensor, Tensor]:
        factor, ok = factor_of_b(problem.covariance, point.precision.sqrt().float())
        firm = point.precision.amin(-1, keepdim=True) > _FIRM / unit if loose else None
        new, settled = _steps(problem, point, factor, enough, firm)
        good = ok & torch.isfinite(new.objective)
        new = new if bool(good.all()) else _choose(good, new, point)
        return new, new, settled, ~good

    point, _, counts = iterate(problem, begin, step, max_iterations)
    return _evaluate(problem, point.alpha, times_vector(problem.covariance, point.alpha)) if loose else point, counts


def _times_covariance(problem: LatentProblem, precision: Tensor, move: Tensor, rest: Tensor, firm: Tensor | None) -> Tensor:
    """K move, which is (rest - move) / W as (I + W K) move = rest; so it is worked out for thetas that are ``firm`` ``(C, 1)``."""
    if firm is None:
        return times_vector(problem.covariance, move)
    short = (rest - move) / precision
    return short if bool(firm.all()) else torch.where(firm, short, times_vector(problem.covariance, move))


def _steps(
    problem: LatentProblem, begin: _Point, factor: Tensor, enough: float, firm: Tensor | None = None
) -> tuple[_Point, Tensor]:
    """A Newton step from ``begin``, then a few with the same factor, and whether each theta came to rest ``(C,)``.

    Steps with an old factor cost N^2 operations in place of N^3 and still converge, the order of the whole rising by one with each
    (Shamanskii 1967, "A modification of Newton's method"), all the more when each makes use of the last. One that would lower the
    objective is not taken.
    """
    return _follow(problem, _Course(begin.precision, factor, firm, begin, None), enough, 1 + _CHEAP_STEPS)


def _follow(problem: LatentProblem, course: _Course, enough: float, num_steps: int) -> tuple[_Point, Tensor]:
    """Further steps of a course: where they end, and whether each theta came to rest; those at rest leave when they are many."""
    precision, factor, firm, point, before = course
    root = precision.sqrt()
    settled = torch.zeros_like(point.objective, dtype=torch.bool)
    going = ~settled
    for number in range(1, num_steps + 1):
        # (I + W K)^-1 = W^1/2 B^-1 W^-1/2, of what is left of the gradient.
        rest = point.slope - point.alpha
        half = solve_lower(factor, (rest / root).unsqueeze(-1).to(factor))
        move = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1) * root
        step = _Step(move, _times_covariance(problem, precision, move, rest, firm))
        taken = step if before is None else _accelerate(point, step, *before)
        shift = torch.maximum(step.centred.abs(), taken.centred.abs())
        new = _evaluate(problem, point.alpha + taken.alpha, point.centred + taken.centred)
        least = point.objective - _ROUNDING * (1 + point.objective.abs())
        better = new.objective >= least
        if before is not None:
            going = going & better
            new = new if bool(going.all()) else _choose(going, new, point)
        elif not bool(better.all()):
            new = _shorten(problem, point, new, ~better, least)
            shift = new.centred - point.centred
        before, point = (point, step), new
        settled = settled | (going & (shift.square().sum(-1) < enough))
        going = going & ~settled
        rows = going.nonzero().squeeze(-1)
        if not len(rows):
            break
        if (len(going) - 2 * len(rows)) * root.shape[-1] ** 2 > _WORTH_LEAVING:
            left = take(course._replace(point=point, before=before), rows)
            end, at_rest = _follow(problem.select(rows), left, enough, num_steps - number)
            return put(point, rows, end), put(settled, rows, at_rest)
    return point, settled


def _accelerate(point: _Point, step: _Step, last_point: _Point, last_step: _Step) -> _Step:
    """Anderson's acceleration, of depth one and in the metric of K: the combination of two steps that would leave the least.

    Anderson 1965, "Iterative procedures for nonlinear integral equations"; K alpha being linear, it takes no product with K.
    """
    alpha, centred = step.alpha - last_step.alpha, step.centred - last_step.centred
    square = (alpha * centred).sum(-1)
    share = torch.where(square > 0, (step.alpha * centred).sum(-1) / square, 0.0).unsqueeze(-1)
    return _Step(
        step.alpha - share * (alpha + point.alpha - last_point.alpha),
        step.centred - share * (centred + point.centred - last_point.centred),
    )


def _choose(mask: Tensor, first: _Point, second: _Point) -> _Point:
    column = mask.unsqueeze(-1)
    return _Point(*(torch.where(column if a.dim() == 2 else mask, a, b) for a, b in zip(first, second, strict=True)))


def _shorten(problem: LatentProblem, point: _Point, new: _Point, worse: Tensor, least: Tensor) -> _Point:
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
        system = identity_matrix(second.shape[-1], second) - second.unsqueeze(-1) * covariance
        return solve(system, pull)
    return pull - times_vector(r, times_vector(covariance, pull))


def _differentiable(problem: LatentProblem, constant: LatentProblem, found: GaussianApproximation) -> Tensor:
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
