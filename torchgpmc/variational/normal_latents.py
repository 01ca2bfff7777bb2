r"""A Gaussian q(v) for every latent function, and the best one at fixed hyperparameters by natural gradients.

With f = m + A'v at the data (A = L^-1 K(Z, X); for the full GP A = L'), v ~ N(0, I) a priori and q(v) = prod_k N(mean_k, S_k S_k'),

.. math:: ELBO = \sum_n E_{q(f_n)} \log p(y_n | f_n) - KL(q(v) | N(0, I)).

Where the bound is stationary, q is the posterior under Gaussian sites N(f_n | g_n, 1 / W_n): its precision is I + A W A' with
W = -2 dE/dvariance, and W (g - mean) = dE/dmean (Opper & Archambeau 2009). Blending old sites with these is the natural-gradient
step (Khan & Lin 2017, "Conjugate-computation variational inference"); a whole step is Newton's, exact at once for Gaussian noise.

Several latent functions meet in the likelihood. What softmax and robust max see is differences of functions, so a shift that all
share has the prior's curvature, 1, where each function's own is W: were means moved one function at a time, they would take W steps
to arrive. So sites hold the second derivatives between functions too, and means move by a Newton step of all together, under
the sites' full precision; covariances, a block a function, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.likelihoods.slopes import ExpectedSlopes, slopes_function
from torchgpmc.linalg import cholesky, normal_from_natural, solve_lower
from torchgpmc.models.gp_model import GPModel, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets

_TOLERANCE = 1e-10
_SMALLEST_STEP = 1e-4
_MEMORY = 6  # earlier steps that are mixed
_RIDGE = 1e-12
_SLOW = 0.05  # share of a step's squared length by which the next must shrink, or steps are mixed
_DIFFERENCE = 1e-3  # of a mean, in deviations, for curvature between latent functions
_MOST_COUPLED = 2000  # numbers in q's mean up to which functions move together: beyond, that matrix costs more than steps
_NEAR = 1.0  # squared length of a step below which steps are mixed
_ROUNDING = 1e-11  # of the bound, relative: a fall by less is no fall


class GaussianLatents(NamedTuple):
    """q(v) = prod_k N(mean_k, scale_k scale_k') at C thetas."""

    mean: Tensor  # (C, K, M)
    scale: Tensor  # (C, K, M, M), lower triangular

    def marginals(self, at: LatentsAt) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at N inputs ``(C, K, N)``, differentiable in ``at``."""
        half = self.scale.mT @ at.projection.unsqueeze(1)
        mean = at.mean.unsqueeze(1) + self.mean @ at.projection
        return mean, at.variance.unsqueeze(1) + half.square().sum(-2)

    def divergence(self) -> Tensor:
        """KL(q(v) | N(0, I)) ``(C,)``."""
        log_volume = self.scale.diagonal(dim1=-2, dim2=-1).log().flatten(1).sum(-1)
        size = self.mean.shape[1] * self.mean.shape[2]
        squares = self.mean.square().flatten(1).sum(-1) + self.scale.square().flatten(1).sum(-1)
        return 0.5 * (squares - size) - log_volume


class LatentSites(NamedTuple):
    """Gaussian sites at the data: precisions W (of either sign), and precisions times the centres."""

    precision: Tensor  # (C, K, N)
    coupling: Tensor  # (C, K (K - 1) / 2, N), of pairs of latent functions, for q's mean alone; no pairs where they are left out
    shift: Tensor  # (C, K, N)

    def times(self, values: Tensor) -> Tensor:
        """Precisions times ``(C, K, N)``."""
        found = self.precision * values
        if self.coupling.shape[1]:
            first, second = _pairs(values.shape[1], values.device)
            found = found.index_add(1, first, self.coupling * values[:, second])
            found = found.index_add(1, second, self.coupling * values[:, first])
        return found


class Optimum(NamedTuple):
    """The best q(v) found, of C thetas."""

    latents: GaussianLatents
    sites: LatentSites  # that made it; a later search may start from them
    bound: Tensor  # (C,), the ELBO; -inf where the algebra failed
    converged: Tensor  # (C,)


class _Trial(NamedTuple):
    latents: GaussianLatents
    sites: LatentSites
    bound: Tensor
    next: LatentSites  # a whole step away


def expected_log_likelihood(
    model: GPModel, at: LatentsAt, mean: Tensor, variance: Tensor, targets: Targets, rows: Tensor | None = None
) -> Tensor:
    """E log p(y_n | f_n) ``(C, N)`` under normal marginals ``(C, K, N)``, differentiable in all that it is given.

    ``rows``, if given, are those of all data that the targets are of.
    """
    moments = [_at_boundary(part) for part in (mean, variance)]

    def expected(likelihood: Any) -> Tensor:
        part = likelihood if rows is None else likelihood.for_data(rows)
        return part.expected_log_likelihood(*moments, targets.values)

    return model.likelihood_function(likelihood_values(at.prior), expected)


def _at_boundary(moment: Tensor) -> Tensor:
    """(C, K, N) to what likelihoods take: ``(C, N)``, or ``(C, N, K)``."""
    return moment.squeeze(1) if moment.shape[1] == 1 else moment.mT


def from_natural(precision: Tensor, linear: Tensor) -> tuple[GaussianLatents, Tensor]:
    """q(v) from its precision ``(C, K, M, M)`` and precision times mean ``(C, K, M)``, and whether it factorised ``(C, K)``."""
    mean, scale, ok = normal_from_natural(precision, linear)
    return GaussianLatents(mean, scale), ok


def _pairs(latents: int, device: torch.device) -> Tensor:
    """First and second latent function of each pair, ``(2, K (K - 1) / 2)``."""
    return torch.triu_indices(latents, latents, 1, device=device)


def under_sites(at: LatentsAt, sites: LatentSites) -> tuple[GaussianLatents, Tensor]:
    """q(v) with sites in place of the likelihood, differentiable in ``at``, and whether it is one ``(C,)``."""
    projection = at.projection.unsqueeze(1)
    precision = (projection * sites.precision.unsqueeze(-2)) @ projection.mT
    precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear = (sites.shift - sites.times(at.mean.unsqueeze(1).expand_as(sites.shift))) @ at.projection.mT
    latents, ok = from_natural(precision, linear)
    ok = ok.all(-1)
    if sites.coupling.shape[1]:
        mean, joint_ok = _joint_mean(precision, (projection * sites.coupling.unsqueeze(-2)) @ projection.mT, linear)
        latents, ok = latents._replace(mean=mean), ok & joint_ok
    return latents, ok


def _joint_mean(precision: Tensor, coupling: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """What the precision of all latents, of blocks ``(C, K, M, M)`` and one a pair, takes to ``linear`` ``(C, K, M)``."""
    count, latents, size = linear.shape
    own, (first, second) = torch.arange(latents, device=linear.device), _pairs(latents, linear.device)
    blocks = precision.new_zeros(count, latents, latents, size, size)
    blocks[:, own, own], blocks[:, first, second], blocks[:, second, first] = precision, coupling, coupling
    root, ok = cholesky(blocks.transpose(2, 3).reshape(count, latents * size, latents * size))
    return torch.cholesky_solve(linear.reshape(count, -1, 1), root).view_as(linear), ok


def _try(model: GPModel, at: LatentsAt, targets: Targets, sites: LatentSites) -> _Trial:
    latents, ok = under_sites(at, sites)
    mean, variance = latents.marginals(at)
    usable = (ok & torch.isfinite(mean + variance).flatten(1).all(-1))[:, None, None]
    mean, variance = (torch.where(usable, part, 1.0) for part in (mean, variance))
    values = {name: value.detach() for name, value in likelihood_values(at.prior).items()}

    def slopes(mean: Tensor) -> ExpectedSlopes:
        return model.likelihood_function(
            values, lambda likelihood: slopes_function(likelihood)(_at_boundary(mean), _at_boundary(variance), targets.values)
        )

    expected = slopes(mean)
    first, slope = (part.view_as(mean) if mean.shape[1] == 1 else part.mT for part in (expected.mean, expected.variance))
    coupling = sites.coupling
    if coupling.shape[1]:
        coupling = _coupling(lambda moved: slopes(moved).mean.mT, mean, first, variance)
    following = LatentSites(-2 * slope, coupling, first)
    bound = expected.value - latents.divergence()
    bound = torch.where(usable.view(-1) & torch.isfinite(bound), bound, -torch.inf)
    return _Trial(latents, sites, bound, following._replace(shift=first + following.times(mean)))


def _coupling(slope_at: Callable[[Tensor], Tensor], mean: Tensor, slope: Tensor, variance: Tensor) -> Tensor:
    """Minus the second derivatives of E log p(y | f) in two latent functions' means, by differences: ``(C, pairs, N)``."""
    latents = mean.shape[1]
    step = _DIFFERENCE * variance.sqrt()
    found = []
    for k in range(latents - 1):
        moved = mean.clone()
        moved[:, k] += step[:, k]
        found.append((slope - slope_at(moved))[:, k + 1 :] / step[:, k : k + 1])
    return torch.cat(found, 1)


def _squared_step(old: GaussianLatents, new: GaussianLatents) -> Tensor:
    """How far apart two neighbouring q are, in deviations of the first: twice their divergence."""
    shift = solve_lower(old.scale, (new.mean - old.mean).unsqueeze(-1))
    turn = solve_lower(old.scale, new.scale) - torch.eye(old.scale.shape[-1]).to(old.scale)
    return shift.square().flatten(1).sum(-1) + 2 * turn.square().flatten(1).sum(-1)


def _where(condition: Tensor, new: _Trial, old: _Trial) -> _Trial:
    def chosen(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition.view(-1, *[1] * (a.dim() - 1)), a, b)

    latents = GaussianLatents(*map(chosen, new.latents, old.latents))
    sites, following = (LatentSites(*map(chosen, a, b)) for a, b in ((new.sites, old.sites), (new.next, old.next)))
    return _Trial(latents, sites, chosen(new.bound, old.bound), following)


def empty_sites(at: LatentsAt, num_latents: int) -> LatentSites:
    """Sites that say nothing: q is the prior."""
    zeros = at.mean.new_zeros(len(at.prior.ok), num_latents, at.mean.shape[-1])
    pairs = num_latents * (num_latents - 1) // 2 if num_latents * at.projection.shape[-2] <= _MOST_COUPLED else 0
    return LatentSites(zeros, zeros.new_zeros(len(zeros), pairs, zeros.shape[-1]), zeros)


def optimal_latents(
    model: GPModel,
    at: LatentsAt,
    targets: Targets,
    sites: LatentSites | None = None,
    tolerance: float = _TOLERANCE,
    max_iterations: int = 100,
) -> Optimum:
    """The q(v) of the highest bound at fixed hyperparameters, for C thetas at once.

    A step that lowers the bound, or whose precision is not positive definite, is tried again at half its size.

    Args:
        model: with a factorised likelihood.
        at: f at the data given v; its graph is not followed.
        targets: of one data set.
        sites: where the search starts if the bound is higher there than at the prior.
        tolerance: of the squared length of a step, in deviations of q.
        max_iterations: evaluations of the bound.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> found = optimal_latents(model, model.at(model.prior(torch.zeros(4, 1, dtype=torch.float64))), model.targets)
        >>> found.latents.scale.shape, bool(found.converged.all())
        (torch.Size([4, 1, 3, 3]), True)
    """
    with torch.no_grad():
        best = _try(model, at, targets, empty_sites(at, model.num_latents))
        if sites is not None:  # those of elsewhere may be worse than none
            warm = _try(model, at, targets, sites)
            best = _where(warm.bound >= best.bound, warm, best)
        size = torch.ones_like(best.bound)
        converged = torch.zeros_like(best.bound, dtype=torch.bool)
        rounding = torch.finfo(best.bound.dtype).eps
        tolerance, slack = max(tolerance, rounding), max(_ROUNDING, 10 * rounding)
        slow, last_step = torch.zeros_like(converged), torch.full_like(best.bound, torch.inf)
        history: list[_Trial] = []
        for _ in range(max_iterations):
            if bool((converged | (size < _SMALLEST_STEP)).all()):
                break
            history = [*history[-_MEMORY:], best]
            mix = (slow & (size == 1.0))[:, None, None]
            plain = _lerp(best.sites, best.next, size[:, None, None])
            proposal = LatentSites(*(torch.where(mix, a, b) for a, b in zip(_mixed(history), plain, strict=True)))
            trial = _try(model, at, targets, proposal)
            floor = torch.where(torch.isinf(best.bound), -torch.inf, best.bound - slack * best.bound.abs())
            better = torch.isfinite(trial.bound) & (trial.bound >= floor)
            step = _squared_step(best.latents, trial.latents)
            converged = converged | (better & (step <= tolerance * size.square()))
            slow, last_step = (step > _SLOW * last_step) & (step < _NEAR), step
            best = _where(better, trial, best)
            size = torch.where(better, (2 * size).clamp_max(1.0), size / 2)
        bound = torch.where(at.prior.ok, best.bound, -torch.inf)
    return Optimum(best.latents, best.sites, bound, converged & torch.isfinite(bound))


def _lerp(old: LatentSites, new: LatentSites, share: Tensor) -> LatentSites:
    return LatentSites(*(torch.lerp(a, b, share) for a, b in zip(old, new, strict=True)))


def _mixed(history: list[_Trial]) -> LatentSites:
    """Anderson's mixture of whole steps from the last few sites: where variances shape the curvature, steps shrink slowly else."""

    def flat(sites: LatentSites) -> Tensor:
        return torch.cat([part.flatten(1) for part in sites], -1)

    goals = torch.stack([flat(trial.next) for trial in history], -1)
    residuals = goals - torch.stack([flat(trial.sites) for trial in history], -1)
    last, changes = residuals[..., -1:], residuals.diff(dim=-1)
    gram = changes.mT @ changes
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] + torch.finfo(gram.dtype).tiny
    shares = torch.linalg.solve(gram + ridge * torch.eye(gram.shape[-1]).to(gram), changes.mT @ last)
    mixed = goals[..., -1] - (goals.diff(dim=-1) @ shares).squeeze(-1)
    like = history[-1].next
    parts = mixed.split([part[0].numel() for part in like], -1)
    return LatentSites(*(part.view_as(old) for part, old in zip(parts, like, strict=True)))
