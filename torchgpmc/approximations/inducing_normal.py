r"""The normal density of a sparse model's whitened inducing values that is nearest to p(v | y, theta), batched over theta.

With f = m + A'v + rest, the rest of variance s, the sparse model's density of v given theta is
:math:`\exp(\sum_n E[\log p(y_n | f_n)]) N(v | 0, I)`. The normal q of least divergence from it has precision I + A W A', where

.. math:: W_n = -2 \, \partial E_q[\log p(y_n | f_n)] / \partial \mathrm{var}_n, \quad
    W_n (g_n - m_n) = \partial E_q[\log p(y_n | f_n)] / \partial \mathrm{mean}_n

for Gaussian sites N(f_n | g_n, 1 / W_n) (Opper & Archambeau 2009). Blending old sites with these is a natural-gradient step (Khan &
Lin 2017, "Conjugate-computation variational inference").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import iterate
from torchgpmc.likelihoods.slopes import slopes_function
from torchgpmc.linalg import normal_from_natural, solve_lower, times_matrix
from torchgpmc.models.gp_model import GPModel, LatentPrior, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.trees import where

_SMALLEST_STEP = 1e-4
_ROUNDING = 1e-11  # of the bound, relative: a fall by less is no fall
# Squared length of a last step, in deviations of q: estimates from one nearer than this vary no less, while slopes of the
# bound are off by the root of it.
_TO_DRAW_FROM, _FOR_SLOPES = 0.1, 1e-12


class InducingNormal(NamedTuple):
    """q(v) = N(mean, scale scale') for each of C thetas."""

    mean: Tensor  # (C, M)
    scale: Tensor  # (C, M, M), lower triangular
    precision: Tensor  # (C, N), W: scale scale' is the inverse of I + A W A'
    log_evidence: Tensor  # (C,), the bound, below the log of the integral over v by the divergence of q; -inf where unusable
    converged: Tensor  # (C,)
    num_iterations: Tensor  # (C,), one factorisation each
    start: Tensor  # (C, 2 N), W and W times the sites' centres, from which a later search near this theta may start

    @property
    def alpha(self) -> Tensor:
        """The mean, the prior's covariance of v being I, as the approximations of f at the data have it ``(C, M)``."""
        return self.mean


class _Problem(NamedTuple):
    """f at the data given v and p(y | f), as the iterations see them: rows can be taken out when they are done."""

    model: GPModel
    at: LatentsAt
    values: dict[str, Tensor]  # of the likelihood's parameters, (C, 1)
    targets: Targets

    @property
    def mean(self) -> Tensor:
        return self.at.mean

    def select(self, rows: Tensor) -> _Problem:
        at = self.at._replace(mean=self.at.mean[rows], projection=self.at.projection[rows], variance=self.at.variance[rows])
        return _Problem(self.model, at, {name: value[rows] for name, value in self.values.items()}, self.targets.select(rows))


class _Point(NamedTuple):
    """q under some sites, those of a whole step from there, and both of the point before; sites as in ``InducingNormal.start``."""

    mean: Tensor
    scale: Tensor
    bound: Tensor
    sites: Tensor
    next: Tensor
    last_sites: Tensor
    last_next: Tensor
    size: Tensor  # (C,), of the next step


def _evaluate(problem: _Problem, sites: Tensor, size: Tensor) -> _Point:
    at, (precision, shift) = problem.at, sites.chunk(2, -1)
    natural = (at.projection * precision.unsqueeze(-2)) @ at.projection.mT
    natural.diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear = times_matrix(shift - precision * at.mean, at.projection.mT)
    mean, scale, ok = normal_from_natural(natural, linear)
    center, variance = _marginals(mean, scale, at)
    usable = ok & torch.isfinite(center + variance).all(-1)
    center, variance = (torch.where(usable.unsqueeze(-1), moment, 1.0) for moment in (center, variance))
    expected = problem.model.likelihood_function(
        problem.values, lambda likelihood: slopes_function(likelihood)(center, variance, problem.targets.values)
    )
    log_volume = scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    divergence = 0.5 * (mean.square().sum(-1) + scale.square().sum((-2, -1)) - mean.shape[-1]) - log_volume
    bound = torch.where(usable, expected.value - divergence, -torch.inf).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    following = -2 * expected.variance
    following = torch.cat([following, expected.mean + following * center], -1)
    return _Point(mean, scale, bound, sites, following, sites, following, size)


def _proposal(point: _Point) -> Tensor:
    """The sites of a step: Anderson's mixture of this whole step and the last, or where one failed a part of it alone.

    Whole steps overshoot, by four fifths where few data meet a wide prior (Anderson 1965, "Iterative procedures for nonlinear
    integral equations"; of depth one).
    """
    left, before = point.next - point.sites, point.last_next - point.last_sites
    change = left - before
    square = change.square().sum(-1)
    share = torch.where((square > 0) & (point.size == 1), (change * left).sum(-1) / square, 0.0).unsqueeze(-1)
    plain = torch.lerp(point.sites, point.next, point.size.unsqueeze(-1))
    return plain - share * (point.next - point.last_next)


def _marginals(mean: Tensor, scale: Tensor, at: LatentsAt) -> tuple[Tensor, Tensor]:
    """Mean and variance of f at N inputs ``(C, N)`` under q(v), differentiable in ``at``."""
    half = scale.mT @ at.projection
    return at.mean + times_matrix(mean, at.projection), at.variance + half.square().sum(-2)


def _squared_step(old: _Point, new: _Point) -> Tensor:
    """How far apart two neighbouring q are, in deviations of the first: twice their divergence."""
    right = torch.cat([(new.mean - old.mean).unsqueeze(-1), new.scale - old.scale], -1)
    shift, turn = solve_lower(old.scale, right).tensor_split([1], -1)
    return shift.square().sum((-2, -1)) + 2 * turn.square().sum((-2, -1))


def inducing_normal(
    model: GPModel,
    at: LatentsAt,
    targets: Targets,
    start: Tensor | None = None,
    tolerance: float = _FOR_SLOPES,
    max_iterations: int = 100,
) -> InducingNormal:
    """The q(v) of the highest bound at C thetas, each on its own: those that are done leave the batch.

    A step that lowers the bound, or whose precision is not positive definite, is tried again at half its size.

    Args:
        model: one that ``takes_expectations``, with a likelihood of one latent function.
        at: f at the data given v; its graph is not followed.
        targets: of one data set, or one a theta.
        start: ``(C, 2 N)`` of a search at nearby thetas; by default from the prior.
        tolerance: of the squared length of the last step, in deviations of q.
        max_iterations: evaluations of the bound; a theta that takes more counts as not converged.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> found = inducing_normal(model, model.at(model.prior(torch.zeros(4, 1, dtype=torch.float64))), model.targets)
        >>> found.scale.shape, bool(found.converged.all())
        (torch.Size([4, 3, 3]), True)
    """
    with torch.no_grad():
        values = {name: value.detach() for name, value in likelihood_values(at.prior).items()}
        problem = _Problem(model, at, values, targets)
        sites = at.mean.new_zeros(len(at.prior.ok), 2 * at.mean.shape[-1]) if start is None else start
        begin = _evaluate(problem, sites, torch.ones_like(sites[:, 0]))
        slack = max(_ROUNDING, 10 * torch.finfo(sites.dtype).eps)
        tolerance = max(tolerance, torch.finfo(sites.dtype).eps)

        def step(problem: _Problem, point: _Point) -> tuple[_Point, _Point, Tensor, Tensor]:
            trial = _evaluate(problem, _proposal(point), (2 * point.size).clamp_max(1.0))
            floor = torch.where(torch.isinf(point.bound), -torch.inf, point.bound - slack * point.bound.abs())
            better = torch.isfinite(trial.bound) & (trial.bound >= floor)
            finished = better & (_squared_step(point, trial) <= tolerance * point.size.square())
            trial = trial._replace(last_sites=point.sites, last_next=point.next)
            new = where(better, trial, point._replace(size=0.5 * point.size))
            return new, new, finished, new.size < _SMALLEST_STEP

        best, converged, counts = iterate(problem, begin, step, max_iterations)
    bound = torch.where(at.prior.ok, best.bound, -torch.inf)
    precision = best.sites.chunk(2, -1)[0]
    return InducingNormal(best.mean, best.scale, precision, bound, converged & torch.isfinite(bound), counts + 1, best.sites)


@dataclass(frozen=True)
class Variational:
    """The normal density of inducing values that is nearest to p(v | y, theta) by Kullback-Leibler divergence, and its bound.

    What :class:`Laplace` and :class:`EP` are to a :class:`GP`, this is to a :class:`SparseGP` with a log-concave likelihood of one
    latent function. Its ``log_evidence`` is the bound of Hensman et al. 2015 at the best normal q(v).

    Args:
        max_iterations: evaluations of the bound; a theta that takes more counts as not converged.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> density = tg.approximations.ApproximateMarginal(model, tg.approximations.Variational())
        >>> density.value_and_grad(torch.zeros(5, 1, dtype=torch.float64))[1].shape
        torch.Size([5, 1])
    """

    max_iterations: int = 100
    serves_inducing_values: ClassVar[bool] = True

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> InducingNormal:
        """The approximation at the thetas of ``prior``; ``start`` ``(C, 2 N)``, of an earlier one, saves iterations."""
        with torch.no_grad():
            return self.to_draw_from(model, model.at(prior), model.as_targets(targets), start)

    def to_draw_from(self, model: GPModel, at: LatentsAt, targets: Targets, start: Tensor | None) -> InducingNormal:
        """:meth:`importance_density`, of f at the data given v as the model has it."""
        return inducing_normal(model, at, targets, start, _TO_DRAW_FROM, self.max_iterations)

    def value_and_grad(self, model: GPModel, theta: Tensor, targets: Targets) -> None:
        """By autograd, of :meth:`evidence`."""
        return None

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> InducingNormal:
        """The approximation with a differentiable ``log_evidence``: slopes are those at a fixed q, the bound being stationary."""
        at, y = model.at(prior), model.as_targets(targets)
        found = inducing_normal(model, at, y, None, _FOR_SLOPES, self.max_iterations)
        if not (torch.is_grad_enabled() and _has_graph(at)):
            return found
        mean, variance = _marginals(found.mean, found.scale, at)
        expected = model.likelihood_function(
            likelihood_values(prior), lambda likelihood: likelihood.expected_log_likelihood(mean, variance, y.values)
        ).sum(-1)
        return found._replace(log_evidence=found.log_evidence + (expected - expected.detach()))


def _has_graph(at: LatentsAt) -> bool:
    parts = [at.mean, at.projection, at.variance, *likelihood_values(at.prior).values()]
    return any(part.requires_grad for part in parts)
