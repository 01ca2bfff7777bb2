r"""The best normal density of several classes' functions, all differences alike, by a lower bound of p(y | theta).

Of functions that share a covariance K, and data that see differences alone, the density has means of their own and one covariance

.. math:: \mathrm{Cov}(g_k, g_l) = (\delta_{kl} - 1 / K) S, \quad S = (K^{-1} + A)^{-1}, \quad A = \mathrm{diag}(\alpha)

of g = f - m less what all functions share, of which data say nothing. The bound (Opper & Archambeau 2009) is at rest where

.. math:: \alpha_n = -\frac{1}{K - 1} \mathrm{tr}\, E_q \nabla^2 \log p(y_n | f_n), \quad E_q g_k = K\, E_q \nabla_k \log p(y | f)

so that one factorisation of an N x N matrix does for all classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.class_sites import differences
from torchgpmc.approximations.gaussian_form import LatentProblem, problem_at
from torchgpmc.density import shared_by_rows
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import (
    cholesky_in_place,
    in_single_precision,
    solve_lower,
    times_blocks,
    triangular_log_determinant,
)
from torchgpmc.numerics.matched_points import matched_points
from torchgpmc.trees import mapped, put, take, where

_FEW_POINTS = 8  # and their mirror images; any fixed points will do that have the density's mean and covariance
_LEAST = 1e-6  # of a site's precision
_DAMPING = 0.5
_OPERATIONS = 2  # N^3 of a sweep


class SharedSites(NamedTuple):
    """Sites exp(sum_k b_k g_k - alpha sum_k g_k^2 / 2) of each datum in the differences' g; the sum of b over functions is zero."""

    precision: Tensor  # (C, N), alpha
    shift: Tensor  # (C, K, N), b

    def select(self, rows: slice) -> SharedSites:
        """Of some thetas."""
        return SharedSites(*(values[rows] for values in self))


class FittedSites(NamedTuple):
    """Sites of C thetas, and how well they do."""

    sites: SharedSites
    bound: Tensor  # (C,), of log p(y | theta), of the sites before the last change; -inf where algebra failed


def fitted_class_sites(model: GPModel, theta: Tensor, num_sweeps: int, start: SharedSites | None = None) -> FittedSites:
    """Sites after so many sweeps, from ``start`` or from what the prior's mean expects.

    Args:
        model: with one data set, of a log-concave likelihood of differences.
        theta: ``(C, P)``.
        num_sweeps: each two factorisations.
        start: of C thetas, or of one.
    """
    if start is not None:
        start = SharedSites(*(values.expand(len(theta), *values.shape[1:]) for values in start))

    def fitted(rows: slice) -> FittedSites:
        return _fitted(model, theta[rows], num_sweeps, None if start is None else start.select(rows))

    size = len(model.train_x)
    found = shared_by_rows(fitted, len(theta), _OPERATIONS * float(size) ** 3 * num_sweeps, theta.device, size**2)
    sites = SharedSites(*(torch.cat(values) for values in zip(*(part.sites for part in found), strict=True)))
    return FittedSites(sites, torch.cat([part.bound for part in found]))


def _fitted(model: GPModel, theta: Tensor, num_sweeps: int, start: SharedSites | None) -> FittedSites:
    """In single precision, since sites only guide and a bound only chooses among thetas; in double where that leads nowhere."""
    with torch.no_grad():
        problem = problem_at(model, theta)
        near = problem._replace(covariance=in_single_precision(problem.covariance)).to(torch.float32)
        found = _summing_to_zero(mapped(lambda part: part.to(theta), _swept(near, num_sweeps, start)))
        again = (~torch.isfinite(found.bound)).nonzero().squeeze(-1)
        if not len(again):
            return found
        return put(found, again, _swept(problem.select(again), num_sweeps, None if start is None else take(start, again)))


def _summing_to_zero(found: FittedSites) -> FittedSites:
    """Shifts whose sums over functions rounding has left a little off, which those who take them know to be zero."""
    precision, shift = found.sites
    return found._replace(sites=SharedSites(precision, shift - shift.mean(1, keepdim=True)))


def _swept(problem: LatentProblem, num_sweeps: int, start: SharedSites | None) -> FittedSites:
    basis = differences(problem.model.num_latents, problem.mean.double()).to(problem.mean)
    points = matched_points(len(basis), _FEW_POINTS, problem.mean) @ basis
    now = _from_nothing(problem, points) if start is None else _from_sites(problem, mapped(lambda part: part.to(points), start))
    bound = problem.mean.new_zeros(len(problem.mean))
    for _ in range(num_sweeps):
        new, bound = _sweep(problem, points, now)
        sound = torch.isfinite(new.precision.sum(-1) + new.mean.sum((-2, -1)))
        now = where(sound, new, now)
    sites = SharedSites(now.precision, now.slope + now.precision.unsqueeze(1) * now.mean)
    return FittedSites(sites, torch.nan_to_num(bound, -torch.inf, -torch.inf, -torch.inf))


class _Density(NamedTuple):
    precision: Tensor  # (C, N), alpha
    mean: Tensor  # (C, K, N), of g
    slope: Tensor  # (C, K, N), K^-1 mean


class _Expected(NamedTuple):
    value: Tensor  # (C,), of log p
    slope: Tensor  # (C, K, N)
    precision: Tensor  # (C, N): the mean curvature of a difference
    steepest: Tensor  # (C, N): at least as much as any difference's


def _expected(problem: LatentProblem, centred: Tensor) -> _Expected:
    """Over points g ``(C, J, K, N)``."""
    f = (problem.mean[:, None, None] + centred).mT
    values = {name: value.unsqueeze(1) for name, value in problem.values.items()}
    y = problem.targets.for_draws()
    found = problem.model.likelihood_function(values, lambda likelihood: likelihood.curvature(f, y))
    own = -found.second.diagonal(dim1=-2, dim2=-1).mean(1)  # (C, N, K)
    slope = found.first.mean(1).mT
    slope = slope - slope.mean(1, keepdim=True)
    # Rows of the matrix sum to zero: by Gershgorin's circles no eigenvalue is beyond twice its diagonal.
    precision, steepest = own.sum(-1) / (own.shape[-1] - 1), 2 * own.amax(-1)
    return _Expected(found.value.mean(1).sum(-1), slope, precision.clamp_min(_LEAST), steepest.clamp_min(_LEAST))


def _from_nothing(problem: LatentProblem, points: Tensor) -> _Density:
    count, size = problem.mean.shape
    zero = problem.mean.new_zeros(count, points.shape[-1], size)
    return _Density(_expected(problem, zero.unsqueeze(1)).precision, zero, zero)


def _from_sites(problem: LatentProblem, sites: SharedSites) -> _Density:
    slope = _less_what_sites_take(problem.covariance, _under(problem.covariance, sites.precision), sites.shift)
    return _Density(sites.precision, times_blocks(slope.flatten(1), problem.covariance).view_as(slope), slope)


def _sweep(problem: LatentProblem, points: Tensor, now: _Density) -> tuple[_Density, Tensor]:
    """The density that the present one leads to, and the bound at the present.

    Means take a step of Newton's with the steepest curvature of a datum for all its differences: with their mean curvature steps
    of data that two classes contend for are too long by half K, and the sweeps run away.
    """
    covariance, functions = problem.covariance, now.mean.shape[1]
    under = _under(covariance, now.precision)
    half = solve_lower(under.factor, under.root.unsqueeze(-1) * covariance)
    variance = (covariance.diagonal(dim1=-2, dim2=-1) - half.square().sum(-2)).clamp_min(0.0)
    centred = now.mean.unsqueeze(1) + points[None, :, :, None] * variance.sqrt()[:, None, None]
    found = _expected(problem, centred)
    spread = triangular_log_determinant(under.factor) - 0.5 * (now.precision * variance).sum(-1)
    divergence = 0.5 * (now.slope * now.mean).sum((-2, -1)) + (functions - 1) * spread
    steep = _under(covariance, found.steepest)
    slope = _less_what_sites_take(covariance, steep, found.slope + found.steepest.unsqueeze(1) * now.mean)
    mean = times_blocks(slope.flatten(1), covariance).view_as(slope)
    precision = torch.lerp(now.precision.log(), found.precision.log(), _DAMPING).exp()
    return _Density(precision, mean, slope), torch.where(under.ok & steep.ok, found.value - divergence, -torch.inf)


class _Under(NamedTuple):
    root: Tensor  # (C, N), of the precision
    factor: Tensor  # (C, N, N), lower, of I + A^1/2 K A^1/2
    ok: Tensor  # (C,)


def _under(covariance: Tensor, precision: Tensor) -> _Under:
    root = precision.sqrt()
    matrix = covariance * root.unsqueeze(-1) * root.unsqueeze(-2)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return _Under(root, *cholesky_in_place(matrix))


def _less_what_sites_take(covariance: Tensor, under: _Under, shift: Tensor) -> Tensor:
    """K^-1 (K^-1 + A)^-1 b of each function ``(C, K, N)``."""
    moved = times_blocks(shift.flatten(1), covariance).view_as(shift)
    root = under.root.unsqueeze(1)
    return shift - root * torch.cholesky_solve((root * moved).mT, under.factor).mT
