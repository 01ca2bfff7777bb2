r"""The best normal density of several classes' functions by a lower bound of p(y | theta), for coordinates to move in.

Sites are at rest where they are what the density that they make expects of the likelihood's slopes (Opper & Archambeau 2009),

.. math:: W_n = -E_q \nabla^2 \log p(y_n | f_n), \quad b_n = E_q \nabla \log p(y_n | f_n) + W_n E_q g_n, \quad g = f - m

with of :math:`W_n` the diagonal kept, in the form that needs no matrix of K N rows (:mod:`torchgpmc.approximations.class_sites`).
Unlike EP's they are a smooth function of theta also where K numbers a datum cannot match its covariance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.class_sites import (
    ClassSites,
    class_marginals,
    class_mean,
    class_precision,
    differences,
    under_class_sites,
    weights_of_diagonal,
)
from torchgpmc.approximations.gaussian_form import LatentProblem, problem_of, without_graph
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.matched_points import matched_points

_FEW_POINTS = 16  # and their mirror images; any fixed points will do that have the density's mean and covariance
_LEAST = 1e-6  # of a site's precision
_DAMPING = 0.5
_CHUNK_ELEMENTS = 400_000  # of a function's matrices


class FittedSites(NamedTuple):
    """Sites of C thetas, and how well they do."""

    sites: ClassSites
    bound: Tensor  # (C,), of log p(y | theta), of the sites before the last change; -inf where algebra failed


def fitted_class_sites(model: GPModel, theta: Tensor, num_sweeps: int, start: ClassSites | None = None) -> FittedSites:
    """Sites after so many damped sweeps, from ``start`` or from what the prior's mean expects.

    Args:
        model: with one data set, of a log-concave likelihood of differences.
        theta: ``(C, P)``.
        num_sweeps: each K + 1 factorisations.
        start: of C thetas.
    """
    size, functions = len(model.train_x), model.num_latents
    parts = torch.arange(len(theta)).split(max(1, _CHUNK_ELEMENTS // (functions * size**2)))
    found = [_fitted(model, theta[rows], num_sweeps, None if start is None else _rows(start, rows)) for rows in parts]
    sites = ClassSites(*(torch.cat(values) for values in zip(*(part.sites for part in found), strict=True)))
    return FittedSites(sites, torch.cat([part.bound for part in found]))


def _rows(sites: ClassSites, rows: Tensor) -> ClassSites:
    return ClassSites(sites.weight[rows], sites.shift[rows])


def _fitted(model: GPModel, theta: Tensor, num_sweeps: int, start: ClassSites | None) -> FittedSites:
    with torch.no_grad():
        problem = without_graph(problem_of(model, model.prior(theta), None))
        basis = differences(model.num_latents, problem.mean.double()).to(problem.mean)
        points = matched_points(len(basis), max(_FEW_POINTS, len(basis)), problem.mean) @ basis
        sites, bound = _at_the_mean(problem, model.num_latents) if start is None else start, problem.mean.new_zeros(len(theta))
        for _ in range(num_sweeps):
            new, bound = _sweep(problem, basis, points, sites)
            sound = torch.isfinite(new.weight.sum((-2, -1)) + new.shift.sum((-2, -1)))[:, None, None]
            weight = torch.lerp(sites.weight.log(), new.weight.log(), _DAMPING).exp()
            shift = torch.lerp(sites.shift, new.shift, _DAMPING)
            sites = ClassSites(torch.where(sound, weight, sites.weight), torch.where(sound, shift, sites.shift))
    return FittedSites(sites, torch.nan_to_num(bound, -torch.inf, -torch.inf, -torch.inf))


def _at_the_mean(problem: LatentProblem, num_latents: int) -> ClassSites:
    count, size = problem.mean.shape
    return _expected(problem, problem.mean.new_zeros(count, 1, num_latents, size))[1]


def _sweep(problem: LatentProblem, basis: Tensor, points: Tensor, sites: ClassSites) -> tuple[ClassSites, Tensor]:
    """The sites that those of the present make, and the present bound."""
    under = under_class_sites(problem.covariance, sites.weight)
    _, mean = class_mean(problem.covariance, under, sites.shift)
    root, ok = cholesky(class_marginals(under, basis))
    # Points of the differences' density, as functions: basis' root basis times those of a standard normal density.
    spread = torch.einsum("ak,cnab,bl->cnkl", basis, root, basis)
    centred = mean.unsqueeze(1) + torch.einsum("cnkl,jl->cjkn", spread, points)
    value, new = _expected(problem, centred, mean)
    weight, shift = sites.weight.unsqueeze(1), sites.shift.unsqueeze(1)
    total = (weight * centred).sum(2)
    site = ((shift - 0.5 * weight * centred) * centred).sum(2) + 0.5 * total.square() / weight.sum(2)
    evidence = 0.5 * (sites.shift * mean).sum((-2, -1)) - 0.5 * under.log_determinant
    bound = value - site.mean(1).sum(-1) + evidence
    return new, torch.where(ok.all(-1) & under.ok, bound, -torch.inf)


def _expected(problem: LatentProblem, centred: Tensor, mean: Tensor | None = None) -> tuple[Tensor, ClassSites]:
    """E log p ``(C,)`` and sites over points g ``(C, J, K, N)`` of mean ``mean`` ``(C, K, N)``, zero by default."""
    f = (problem.mean[:, None, None] + centred).mT
    values = {name: value.unsqueeze(1) for name, value in problem.values.items()}
    y = problem.targets.for_draws()
    slopes = problem.model.likelihood_function(values, lambda likelihood: likelihood.curvature(f, y))
    weight = weights_of_diagonal(-slopes.second.diagonal(dim1=-2, dim2=-1).mean(1).mT.clamp_max(-_LEAST))
    shift = slopes.first.mean(1).mT
    if mean is not None:
        shift = shift + (class_precision(weight) @ mean.mT.unsqueeze(-1)).squeeze(-1).mT
    return slopes.value.mean(1).sum(-1), ClassSites(weight, shift)
