r"""The normal q(v) that is nearest to p(v | y, theta), the one of the highest bound, for C thetas at once by natural gradients.

Where the bound is stationary, q is the posterior under sites (:mod:`~torchgpmc.approximations.normal_latents`) with

.. math:: W_n = -2 \, \partial E_q[\log p(y_n | f_n)] / \partial \mathrm{var}_n, \quad
    W_n (g_n - m_n) = \partial E_q[\log p(y_n | f_n)] / \partial \mathrm{mean}_n,

m_n being q's mean of f_n (Opper & Archambeau 2009). Blending old sites with these is a natural-gradient step (Khan & Lin 2017,
"Conjugate-computation variational inference"); a whole step is Newton's, exact at once for Gaussian noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import Approximation, iterate
from torchgpmc.approximations.normal_latents import GaussianLatents, LatentSites, at_boundary, lower_bound, no_sites, under_sites
from torchgpmc.likelihoods.slopes import ExpectedSlopes, coupling_function, slopes_function
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import solve_lower
from torchgpmc.numerics.matched_points import matched_points
from torchgpmc.trees import where

_SMALLEST_STEP = 1e-4
_MEMORY = 2  # earlier steps that are mixed
_NEAR = 10.0  # squared length of a step below which the next are mixed
_ROUNDING = 1e-11  # of the bound, relative: a fall by less is no fall
_ROUGHLY, _POINTS = 1e-4, 8  # the same of a bound by points; points, and as many mirror images
# Squared length of a last step, in deviations of q: estimates from one nearer than this vary hardly less, while slopes of the
# bound are off by the root of it.
_TO_DRAW_FROM, _FOR_SLOPES = 0.1, 1e-12


class NearestNormal(NamedTuple):
    """The best q(v) found, of C thetas."""

    latents: GaussianLatents
    sites: LatentSites  # that made it; a later search may start from them
    log_evidence: Tensor  # (C,), the ELBO, below log p(y | theta) by the divergence of q; -inf where the algebra failed
    converged: Tensor  # (C,)
    num_iterations: Tensor  # (C,), evaluations of the bound, one factorisation each

    @property
    def alpha(self) -> Tensor:
        """The mean, the prior's covariance of v being I, as the approximations of f at the data have it ``(C, V)``."""
        return self.latents.mean.flatten(1)

    @property
    def precision(self) -> Tensor:
        """The sites' W, as those have it; of one latent function ``(C, N)``."""
        return self.sites.precision.squeeze(1)

    @property
    def start(self) -> Tensor:
        """The sites as one tensor ``(C, R, N)``."""
        return self.sites.stacked()


class _Problem(NamedTuple):
    """f at the data given v and p(y | f), as the iterations see them: rows can be taken out when they are done."""

    model: GPModel
    at: LatentsAt
    values: dict[str, Tensor]  # of the likelihood's parameters, (C, 1)
    targets: Targets
    roughly: bool = False  # whether expectations are means over few points

    @property
    def mean(self) -> Tensor:
        return self.at.mean

    def select(self, rows: Tensor) -> _Problem:
        at = self.at._replace(mean=self.at.mean[rows], projection=self.at.projection[rows], variance=self.at.variance[rows])
        values = {name: value[rows] for name, value in self.values.items()}
        return _Problem(self.model, at, values, self.targets.select(rows), self.roughly)

    def slopes(self, mean: Tensor, variance: Tensor) -> ExpectedSlopes:
        """Of E log p(y | f) in the marginals ``(C, K, N)``, all parts of that shape."""
        moments = at_boundary(mean), at_boundary(variance)
        found = self.model.likelihood_function(
            self.values, lambda likelihood: slopes_function(likelihood)(*moments, self.targets.values)
        )
        first, second = (part.view_as(mean) if mean.shape[1] == 1 else part.mT for part in (found.mean, found.variance))
        return ExpectedSlopes(found.value, first, second)

    def slopes_and_coupling(self, mean: Tensor, variance: Tensor, *, central: bool = False) -> tuple[ExpectedSlopes, Tensor]:
        """The same of several latent functions, and minus the second derivatives in two means ``(C, pairs, N)``."""
        found, coupling = self.model.likelihood_function(
            self.values,
            lambda likelihood: coupling_function(likelihood, central=central)(mean.mT, variance.mT, self.targets.values),
        )
        return ExpectedSlopes(found.value, found.mean.mT, found.variance.mT), coupling.mT

    def rough_slopes(self, mean: Tensor, variance: Tensor) -> tuple[ExpectedSlopes, Tensor]:
        """The same of several latent functions, and minus the second derivatives in two means ``(C, pairs, N)``, by points alone.

        Derivatives are means of log p's own (Bonnet's and Price's theorems) over points whose mean and covariance are right.
        """
        points = matched_points(mean.shape[1], _POINTS, mean)
        f = (mean.unsqueeze(1) + variance.sqrt().unsqueeze(1) * points.unsqueeze(-1)).mT  # (C, J, N, K)
        values = {name: value.unsqueeze(1) for name, value in self.values.items()}
        targets = self.targets.for_draws()
        found = self.model.likelihood_function(values, lambda likelihood: likelihood.curvature(f, targets))
        second = found.second.mean(1)
        first, second_of_pairs = torch.triu_indices(mean.shape[1], mean.shape[1], 1, device=mean.device)
        own = 0.5 * second.diagonal(dim1=-2, dim2=-1).mT
        value = found.value.mean(1).sum(-1)
        return ExpectedSlopes(value, found.first.mean(1).mT, own), -second[..., first, second_of_pairs].mT


class _Point(NamedTuple):
    """q under some sites, and how it was reached."""

    mean: Tensor
    scale: Tensor
    bound: Tensor
    path: Tensor  # (C, 2 R (memory + 1), N), sites and those a whole step away, of a few points before and, last, of this one
    length: Tensor  # (C,), squared, of the last step
    size: Tensor  # (C,), of the next step

    @property
    def latents(self) -> GaussianLatents:
        return GaussianLatents(self.mean, self.scale)

    @property
    def steps(self) -> Tensor:
        """The path as ``(C, memory + 1, 2, R, N)``."""
        return self.path.unflatten(1, (_MEMORY + 1, 2, -1))


def _evaluate(problem: _Problem, sites: LatentSites) -> tuple[GaussianLatents, Tensor, LatentSites]:
    """q under the sites, its bound, and the sites a whole step away."""
    latents, ok = under_sites(problem.at, sites)
    return latents, *_around(problem, latents, ok, coupled=bool(sites.coupling.shape[1]))


def _around(problem: _Problem, latents: GaussianLatents, ok: Tensor, *, coupled: bool) -> tuple[Tensor, LatentSites]:
    """The bound of q, and the sites at which it would be stationary."""
    mean, variance = latents.marginals(problem.at)
    usable = ok & torch.isfinite((mean + variance).sum((-2, -1)))
    mean, variance = (torch.where(usable[:, None, None], moment, 1.0) for moment in (mean, variance))
    coupling = mean.new_zeros(len(mean), 0, mean.shape[-1])
    if problem.roughly:
        expected, found = problem.rough_slopes(mean, variance)
        coupling = found if coupled else coupling
    elif coupled:
        expected, coupling = problem.slopes_and_coupling(mean, variance)
    else:
        expected = problem.slopes(mean, variance)
    following = LatentSites(-2 * expected.variance, coupling, expected.mean)
    bound = torch.where(usable, expected.value - latents.divergence(), -torch.inf).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    return bound, following._replace(shift=expected.mean + following.times(mean))


def sites_of(model: GPModel, at: LatentsAt, latents: GaussianLatents) -> LatentSites:
    """The sites that make q(v), if that is the best one at its theta: where to go on from it.

    Args:
        model: with a factorised likelihood and one data set.
        at: f at the data given v, of C thetas; its graph is not followed.
        latents: q there.
    """
    with torch.no_grad():
        values = {name: value.detach() for name, value in likelihood_values(at.prior).items()}
        coupled = bool(no_sites(at, model.num_latents).coupling.shape[1])
        return _around(_Problem(model, at, values, model.targets), latents, at.prior.ok, coupled=coupled)[1]


def precisions_of(model: GPModel, at: LatentsAt, latents: GaussianLatents) -> LatentSites:
    """Minus the second derivatives of E log p(y | f) in the means of f, of every two functions, under q; shifts are left out.

    What functions share has to cancel in sums over many data, where :func:`sites_of` may have errors of a thousandth of each.
    """
    with torch.no_grad():
        values = {name: value.detach() for name, value in likelihood_values(at.prior).items()}
        problem = _Problem(model, at, values, model.targets)
        mean, variance = latents.marginals(at)
        expected, coupling = problem.slopes_and_coupling(mean, variance, central=True)
        return LatentSites(-2 * expected.variance, coupling, torch.zeros_like(mean))


def _proposal(point: _Point, rounding: float) -> Tensor:
    """The sites of a step: Anderson's mixture of the last few whole steps, or far off, or where one failed, a part of the last.

    Whole steps overshoot, by four fifths where few data meet a wide prior, or shrink slowly where variances shape the curvature
    (Anderson 1965, "Iterative procedures for nonlinear integral equations").
    """
    steps = point.steps
    sites, goal = steps[:, -1].unbind(1)
    plain = torch.lerp(sites, goal, point.size[:, None, None])
    near = (point.size == 1) & (point.length < _NEAR)
    if not bool(near.any()):
        return plain
    changes = steps.diff(dim=1)
    turns = (changes[:, :, 1] - changes[:, :, 0]).flatten(2)  # changes of whole steps
    gram = turns @ turns.mT
    gram.diagonal(dim1=-2, dim2=-1).mul_(1 + rounding).add_(torch.finfo(gram.dtype).tiny)
    shares, _ = torch.linalg.solve_ex(gram, turns @ (goal - sites).flatten(1).unsqueeze(-1))
    mixed = goal - (shares.mT @ changes[:, :, 1].flatten(2)).view_as(goal)
    return torch.where(near[:, None, None], mixed, plain)


def _squared_step(old: GaussianLatents, new: GaussianLatents) -> Tensor:
    """How far apart two neighbouring q are, in deviations of the first: twice their divergence."""
    right = torch.cat([(new.mean - old.mean).unsqueeze(-1), new.scale - old.scale], -1)
    shift, turn = solve_lower(old.scale, right).tensor_split([1], -1)
    return shift.square().sum((-3, -2, -1)) + 2 * turn.square().sum((-3, -2, -1))


def nearest_normal(
    model: GPModel,
    at: LatentsAt,
    targets: Targets,
    starts: Sequence[LatentSites] = (),
    tolerance: float = _FOR_SLOPES,
    max_iterations: int = 100,
    *,
    roughly: bool = False,
) -> NearestNormal:
    """The q(v) of the highest bound at C thetas, each on its own: those that are done leave the batch.

    A step that lowers the bound, or whose precision is not positive definite, is tried again at half its size.

    Args:
        model: with a factorised likelihood.
        at: f at the data given v; its graph is not followed.
        targets: of one data set, or one a theta.
        starts: sites; a theta's search begins at those with the highest bound. By default at the prior.
        tolerance: of the squared length of the last step, in deviations of q.
        max_iterations: evaluations of the bound; a theta that takes more counts as not converged.
        roughly: of several latent functions with a smooth likelihood, to draw from: expectations are means over 16 points, and
            the bound is known to a ten thousandth of itself.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> found = nearest_normal(model, model.at(model.prior(torch.zeros(4, 1, dtype=torch.float64))), model.targets)
        >>> found.latents.scale.shape, bool(found.converged.all())
        (torch.Size([4, 1, 3, 3]), True)
    """
    rounding = torch.finfo(at.mean.dtype).eps
    tolerance, slack = max(tolerance, rounding), max(_ROUNDING, 10 * rounding)
    allowed = _ROUGHLY if roughly else slack
    starts = starts or [no_sites(at, model.num_latents)]

    def begin_at(sites: LatentSites) -> _Point:
        latents, bound, following = _evaluate(problem, sites)
        path = torch.cat((*sites, *following) * (_MEMORY + 1), 1)
        return _Point(*latents, bound, path, torch.full_like(bound, torch.inf), torch.ones_like(bound))

    def step(problem: _Problem, point: _Point) -> tuple[_Point, _Point, Tensor, Tensor]:
        sites = _proposal(point, slack)
        latents, bound, following = _evaluate(problem, LatentSites.from_stacked(sites, model.num_latents))
        length = _squared_step(point.latents, latents)
        path = torch.cat([point.path[:, 2 * sites.shape[1] :], sites, *following], 1)
        better = torch.isfinite(bound) & (bound >= point.bound - allowed * point.bound.abs())
        trial = _Point(*latents, bound, path, length, (2 * point.size).clamp_max(1.0))
        # A copy of all is spared where, as mostly, every step was one up.
        new = trial if bool(better.all()) else where(better, trial, point._replace(size=0.5 * point.size))
        return new, new, better & (length <= tolerance * point.size.square()), new.size < _SMALLEST_STEP

    with torch.no_grad():
        values = {name: value.detach() for name, value in likelihood_values(at.prior).items()}
        problem = _Problem(model, at, values, targets, roughly)
        begin, *others = (begin_at(sites) for sites in starts)
        for other in others:
            begin = where(other.bound >= begin.bound, other, begin)
        best, converged, counts = iterate(problem, begin, step, max_iterations)
        bound = torch.where(at.prior.ok, best.bound, -torch.inf)
        sites = LatentSites.from_stacked(best.steps[:, -1, 0], model.num_latents)
    return NearestNormal(best.latents, sites, bound, converged & torch.isfinite(bound), counts + len(starts))


@dataclass(frozen=True)
class Variational(Approximation):
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
    ) -> NearestNormal:
        """The approximation at the thetas of ``prior``; ``start`` ``(C, 2, N)``, of an earlier one, saves iterations."""
        with torch.no_grad():
            return self.to_draw_from(model, model.at(prior), model.as_targets(targets), start)

    def to_draw_from(self, model: GPModel, at: LatentsAt, targets: Targets, start: Tensor | None) -> NearestNormal:
        """:meth:`importance_density`, of f at the data given v as the model has it."""
        starts = [] if start is None else [LatentSites.from_stacked(start, model.num_latents)]
        return nearest_normal(model, at, targets, starts, _TO_DRAW_FROM, self.max_iterations)

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> NearestNormal:
        """The approximation with a differentiable ``log_evidence``: slopes are those at a fixed q, the bound being stationary."""
        at, y = model.at(prior), model.as_targets(targets)
        found = nearest_normal(model, at, y, max_iterations=self.max_iterations)
        if not torch.is_grad_enabled():
            return found
        bound = lower_bound(model, at, found.latents, y)
        return found._replace(log_evidence=found.log_evidence + (bound - bound.detach()))
