"""Laplace's approximation for K latent functions a datum, batched over theta.

Latents are stacked one after the other: f, alpha and v are ``(C, V)``, V = K N. Newton's method works on whitened v, where the
prior is N(0, I) and the curvature H = I + L' W L, W having one K x K matrix a datum, is positive definite at every strict mode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import (
    GaussianApproximation,
    LatentProblem,
    iterate,
    needs_gradient,
    with_gradient,
    without_graph,
)
from torchgpmc.likelihoods.likelihood import Curvature
from torchgpmc.numerics.linalg import cholesky, solve_lower, times_blocks, triangular_log_determinant

_MAX_HALVINGS = 40
_ROUNDING = 1e-10


class _Whitened(NamedTuple):
    """A problem, and L."""

    problem: LatentProblem
    factor: Tensor  # (C, N, N)

    @property
    def mean(self) -> Tensor:
        return self.problem.mean

    def select(self, rows: Tensor) -> _Whitened:
        return _Whitened(self.problem.select(rows), self.factor[rows])


class _Point(NamedTuple):
    """Where Newton's iteration stands."""

    white: Tensor  # (C, V), v
    centred: Tensor  # (C, V), L v
    objective: Tensor  # (C,), log p(y | f) - v'v / 2
    slope: Tensor  # (C, V), of the objective in v
    precision: Tensor  # (C, N, K, K), W at ...
    curved_at: Tensor  # (C, V), ... this centred f


class _Mode(NamedTuple):
    """A mode, with W and the factor of H at the point of the last factorisation."""

    white: Tensor
    centred: Tensor
    objective: Tensor
    precision: Tensor
    factor: Tensor


def find_mode(
    problem: LatentProblem, factor: Tensor, tolerance: float, far: float, max_iterations: int, start: Tensor | None
) -> GaussianApproximation:
    """The mode of p(f | y, theta), and the curvature at a point no further from it than ``far``.

    Args:
        problem: at C thetas, without graph.
        factor: L ``(C, N, N)``.
        tolerance: Newton's iteration ends when the squared change of f falls under ``tolerance * V``.
        far: the same for the squared distance to where the curvature was taken.
        max_iterations: factorisations.
        start: ``(C, 2 V)``, of an earlier call.
    """
    whitened = _Whitened(problem, factor)
    count, size = len(problem.mean), problem.model.latent_size
    begin = _evaluate(whitened, factor.new_zeros(count, size))
    if start is not None:
        alpha, before = start.chunk(2, -1)
        near = curvature(problem, problem.mean.repeat(1, problem.model.num_latents) + before)
        begin = _evaluate(whitened, times_blocks(alpha, factor))._replace(precision=-near.second.detach(), curved_at=before)

    def step(whitened: _Whitened, point: _Point) -> tuple[_Point, _Mode, Tensor, Tensor]:
        root, exact, ok = _root_of_h(whitened.factor, point.precision)
        move = torch.cholesky_solve(point.slope.unsqueeze(-1), root).squeeze(-1)
        new = _ascend(whitened, point, move)
        change = (new.centred - point.centred).square().sum(-1)
        close = (new.centred - point.curved_at).square().sum(-1) < far * size
        finished = (change < tolerance * size) & close & exact
        return (
            new,
            _Mode(new.white, new.centred, new.objective, point.precision, root),
            finished,
            ~ok | ~torch.isfinite(new.objective),
        )

    mode, converged, counts = iterate(whitened, begin, step, max_iterations)
    log_evidence = mode.objective - triangular_log_determinant(mode.factor)
    blocks = mode.white.view(count, -1, factor.shape[-1])
    alpha = torch.linalg.solve_triangular(factor.mT, blocks.mT, upper=True).mT.flatten(1)
    mean = problem.mean.repeat(1, blocks.shape[1]) + mode.centred
    begin_again = torch.cat([alpha, mode.centred], -1)
    return GaussianApproximation(mean, alpha, mode.precision, mode.factor, log_evidence, converged, counts, begin_again)


def curvature(problem: LatentProblem, f: Tensor) -> Curvature:
    """Of log p(y_n | f_n) at stacked f ``(C, V)``: a latent after the other, and not one by datum, as likelihoods have it."""
    by_datum = torch.nan_to_num(f).view(len(f), problem.model.num_latents, -1).mT
    return problem.model.likelihood_function(
        problem.values, lambda likelihood: likelihood.curvature(by_datum, problem.targets.values)
    )


def times_precision(precision: Tensor, stacked: Tensor) -> Tensor:
    """W f for W ``(C, N, K, K)`` and stacked vectors ``(C, R, V)``."""
    count, rows, _ = stacked.shape
    latents = precision.shape[-1]
    return torch.einsum("cnkl,crln->crkn", precision, stacked.view(count, rows, latents, -1)).reshape(stacked.shape)


def _evaluate(whitened: _Whitened, white: Tensor) -> _Point:
    problem, factor = whitened
    centred = times_blocks(white, factor.mT)
    found = curvature(problem, problem.mean.repeat(1, problem.model.num_latents) + centred)
    objective = found.value.detach().sum(-1) - 0.5 * white.square().sum(-1)
    slope = times_blocks(found.first.detach().mT.flatten(1), factor) - white
    return _Point(white, centred, objective, slope, -found.second.detach(), centred)


def _root_of_h(factor: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower factor of H ``(C, V, V)``, whether W is the true one in it, and whether it could be factorised.

    Far from a mode H may be indefinite; W then loses its negative eigenvalues, so that the step still leads uphill.
    """
    root, exact = _factorise_h(factor, precision)
    if bool(exact.all()):
        return root, exact, exact
    values, vectors = torch.linalg.eigh(torch.nan_to_num(precision))
    clamped = (vectors * values.clamp_min(0.0).unsqueeze(-2)) @ vectors.mT
    safe, ok = _factorise_h(factor, clamped)
    return torch.where(exact[:, None, None], root, safe), exact, exact | ok


def _factorise_h(factor: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    by_pair = precision.permute(0, 2, 3, 1).unsqueeze(-1)  # (C, K, K, N, 1)
    across = factor[:, None, None]
    inner = across.mT @ (by_pair * across)  # (C, K, K, N, N)
    size = factor.shape[-1] * precision.shape[-1]
    h = inner.transpose(2, 3).reshape(len(factor), size, size)
    h.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return cholesky(h)


def _ascend(whitened: _Whitened, point: _Point, move: Tensor) -> _Point:
    """``point`` plus the move, halved until the objective does not fall."""
    least = point.objective - _ROUNDING * (1 + point.objective.abs())
    length = torch.ones_like(point.objective)
    for _ in range(_MAX_HALVINGS):
        new = _evaluate(whitened, point.white + length.unsqueeze(-1) * move)
        worse = ~(new.objective >= least)
        if not bool(worse.any()):
            break
        length = torch.where(worse, 0.5 * length, length)
    return new


def differentiable(problem: LatentProblem, factor: Tensor, found: GaussianApproximation) -> Tensor:
    """The log evidence with its gradient, implicit differentiation of the mode (Rasmussen & Williams 2006, section 5.5.1).

    As with one latent, Sigma = L H^-1 L' and R = W - W Sigma W in the places of their diagonals and factors.

    Args:
        problem: with its graph.
        factor: L ``(C, N, N)``, without.
        found: the mode, to machine precision.
    """
    if not needs_gradient(problem):
        return found.log_evidence
    constant = without_graph(problem)
    count, size = found.mean.shape
    latents = problem.model.num_latents
    with torch.no_grad():
        blocks = torch.zeros(count, latents, factor.shape[-1], latents, factor.shape[-1]).to(factor)
        for latent in range(latents):
            blocks[:, latent, :, latent] = factor.mT
        half = solve_lower(found.factor, blocks.view(count, size, size))  # half' half = Sigma
        by_datum = half.view(count, size, latents, -1).permute(0, 3, 2, 1)  # (C, N, K, V)
        marginal = by_datum @ by_datum.mT  # Sigma's K x K blocks
        pull = _pull(constant, found.mean, marginal)
        moved = pull - times_precision(found.precision, ((half @ pull.unsqueeze(-1)).mT @ half)).squeeze(1)
        response = times_blocks(moved, constant.covariance)
        beside = times_precision(found.precision, half).reshape(count, size * latents, -1)
        r = torch.diag_embed(found.precision.diagonal(dim1=-2, dim2=-1).sum(-1)) - beside.mT @ beside  # of all latents together
        alpha, direction = (part.view(count, latents, -1) for part in (found.alpha, moved))
        covariance = (0.5 * alpha + direction).mT @ alpha - 0.5 * r
        mean = (alpha + direction).sum(1)
    slopes = curvature(problem._replace(mean=constant.mean), found.mean)
    response = response.view(count, latents, -1).mT
    terms = slopes.value + 0.5 * (marginal * slopes.second).sum((-2, -1)) + (response * slopes.first).sum(-1)
    return with_gradient(found.log_evidence, problem, covariance, mean, terms.sum(-1))


def _pull(problem: LatentProblem, f: Tensor, marginal: Tensor) -> Tensor:
    """Gradient in f ``(C, V)`` of half the trace of Sigma times the Hessian: what log det H does to the mode."""
    with torch.enable_grad():
        f = f.detach().requires_grad_(True)
        trace = 0.5 * (marginal * curvature(problem, f).second).sum()
        if not trace.requires_grad:
            return torch.zeros_like(f)
        (gradient,) = torch.autograd.grad(trace, f, allow_unused=True)
    return torch.zeros_like(f) if gradient is None else gradient
