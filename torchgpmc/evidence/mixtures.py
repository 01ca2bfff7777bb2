"""Importance estimates where the likelihood is not log-concave: f is drawn from a mixture over the modes of p(f | y, theta)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import GaussianApproximation, Laplace
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.approximations.other_modes import other_modes
from torchgpmc.evidence.gaussian_draws import (
    GaussianDraws,
    draws_around,
    log_likelihoods,
    or_prior,
    quadratic,
    stacked_mean,
)
from torchgpmc.evidence.importance_sampling import ImportanceEstimate, ImportanceEstimator
from torchgpmc.models.latents import LatentPrior
from torchgpmc.numerics.linalg import cholesky_in_place, times_blocks
from torchgpmc.numerics.random import uniform

_PRIOR_SHARE = 0.1
_WIDE, _WIDE_SHARE = 0.25, 0.2
_EVEN_SHARE = 0.1  # of what the modes get, split evenly: their masses are approximate


class MixtureEstimator(ImportanceEstimator):
    r"""The estimate of :class:`ImportanceEstimator` with f from a mixture, weighed by p(y, f | theta) / q(f).

    .. math:: q(f) = \sum_j \pi_j N(m + K \alpha_j, (K^{-1} + W_j)^{-1})

    Components are the approximation, Laplace's at :func:`other_modes`, each of them once more with a quarter of W, and the prior
    with a share of a tenth: no weight exceeds ten times the largest likelihood. Modes have shares by their approximate evidence,
    each counted once. Every component, and every share, is a function of theta alone (Owen & Zhou 2000, "Safe and effective
    importance sampling").

    Fields ``alpha`` and ``precision`` of an estimate have a dimension of components after the first, and so has ``log_constant``,
    which is less log share.
    """

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: one more a direction, which chooses its component."""
        return super().auxiliary_size + self.num_directions

    def _draws(self, prior: LatentPrior, auxiliary: Tensor, start: Tensor | None) -> MixtureDraws:
        problem, densities, share, work = self.components(prior, start)
        choice, rest = auxiliary[:, : self.num_directions], auxiliary[:, self.num_directions :]
        parts = [draws_around(prior, problem, component, self._directions(rest)) for component in densities]
        return MixtureDraws(parts, share, torch.special.ndtr(choice), work)

    def components(
        self, prior: LatentPrior, start: Tensor | None
    ) -> tuple[LatentProblem, list[GaussianApproximation], Tensor, Tensor]:
        """The problem, the J densities, their shares ``(C, J)``, and the factorisations that they took ``(C,)``."""
        problem, own = self._approximate(prior, start)

        def find(begin: Tensor) -> GaussianApproximation:
            return or_prior(self.model, Laplace().importance_density(self.model, prior, self.targets, begin), prior)

        modes = [own, *other_modes(problem, own, find)]
        wide = [or_prior(self.model, _widened(mode), prior) for mode in modes]
        itself = own.or_prior(torch.zeros_like(own.converged), stacked_mean(self.model, prior))
        work = torch.stack([mode.num_iterations + 1 for mode in modes]).sum(0)  # and one factorisation for each that is widened
        return problem, [*modes, *wide, itself], _shares(prior, modes), work

    def _weights_of_kept(
        self, prior: LatentPrior, problem: LatentProblem, kept: ImportanceEstimate, generator: torch.Generator
    ) -> list[Tensor]:
        """As for one component; a twin is the mirror image in the component the draw came from, which is drawn given the draw."""
        middle = stacked_mean(self.model, prior).unsqueeze(1) + times_blocks(kept.alpha, prior.covariance)
        mixture = Mixture(middle, kept.alpha, kept.precision, kept.log_constant)
        f = stacked_mean(self.model, prior) + times_blocks(kept.whitened, prior.factor.mT)
        by_component = mixture.log_ratios(f.unsqueeze(1)).squeeze(1)
        weights = [kept.log_likelihood - torch.logsumexp(by_component, -1)]
        if self.antithetic:
            level = uniform(kept.value.shape, kept.value, generator)
            component = _component(torch.softmax(by_component, -1), level.unsqueeze(-1))
            twin = 2 * _rows(middle, component) - f.unsqueeze(1)
            other = log_likelihoods(self.model, problem.values, twin, self.targets)
            weights.append((other - mixture.log_ratio(twin)).squeeze(-1))
        return weights


class Mixture(NamedTuple):
    """Gaussian densities, J a theta."""

    mean: Tensor  # (C, J, V), of f
    alpha: Tensor  # (C, J, V)
    precision: Tensor  # (C, J, N), or (C, J, N, K, K) for several latents
    log_constant: Tensor  # (C, J), as of GaussianDraws, less log share

    def log_ratios(self, f: Tensor) -> Tensor:
        """Log of each component's share times its density over the prior's, ``(C, draws, V)`` to ``(C, draws, J)``."""
        columns = []
        for mean, alpha, precision, constant in zip(*(part.unbind(1) for part in self), strict=True):
            delta = f - mean.unsqueeze(1)
            linear = (delta @ alpha.unsqueeze(-1)).squeeze(-1)
            columns.append(linear - 0.5 * quadratic(precision, delta) - constant.unsqueeze(-1))
        return torch.stack(columns, -1)

    def log_ratio(self, f: Tensor) -> Tensor:
        """Log of the mixture's density over the prior's, ``(C, draws)``."""
        return torch.logsumexp(self.log_ratios(f), -1)


class MixtureDraws(GaussianDraws):
    """Draws from a mixture, each mirrored, if asked, in the mean of its component."""

    def __init__(self, parts: list[GaussianDraws], share: Tensor, level: Tensor, work: Tensor):
        """Components, their shares ``(C, J)``, a number between 0 and 1 for each direction ``(C, directions)`` to choose one by.

        ``work`` ``(C,)`` is in factorisations.
        """
        first = parts[0]
        densities = [part.found for part in parts]
        mean, alpha, precision = (
            torch.stack(column, 1)
            for column in zip(*((found.mean, found.alpha, found.precision) for found in densities), strict=True)
        )
        super().__init__(
            first.prior, first.problem, densities[0]._replace(mean=mean, alpha=alpha, precision=precision, num_iterations=work)
        )
        self.ok = torch.stack([part.ok for part in parts]).all(0)
        self.log_constant = torch.stack([part.log_constant for part in parts], 1) - share.log()
        self.mixture = Mixture(mean, alpha, precision, self.log_constant)
        component = _component(share, level)
        self.delta = _taken(torch.stack([part.delta for part in parts], 1), component)
        self.middle = _rows(mean, component)
        self.white = _taken(torch.stack([part.whitened(False) for part in parts], 1), component)
        self.white_middle = _rows(torch.stack([part._middle() for part in parts], 1), component)

    def weigh(self, antithetic: bool) -> tuple[Tensor, Tensor]:
        f = self.middle + self.delta
        if antithetic:
            f = torch.cat([f, self.middle - self.delta], 1)
        log_likelihood = self._log_likelihood(f)
        log_weight = log_likelihood - self.mixture.log_ratio(f)
        return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), log_likelihood

    def whitened(self, antithetic: bool) -> Tensor:
        return torch.cat([self.white, 2 * self.white_middle - self.white], 1) if antithetic else self.white

    def whitened_at(self, chosen: Tensor) -> Tensor:
        return _rows(self.whitened(True), chosen.unsqueeze(-1)).squeeze(1)


def _shares(prior: LatentPrior, modes: list[GaussianApproximation]) -> Tensor:
    """Of the modes, by their approximate evidence, and of the prior, which comes last ``(C, J)``."""
    log_mass = torch.stack([torch.where(found.converged, found.log_evidence, -torch.inf) for found in modes], -1)
    log_mass = torch.nan_to_num(log_mass, nan=-1e30, posinf=-1e30, neginf=-1e30)
    share = torch.softmax(log_mass - _multiplicity(prior, modes).log(), -1)
    share = (1 - _EVEN_SHARE) * share + _EVEN_SHARE / len(modes)
    share = torch.cat([(1 - _WIDE_SHARE) * share, _WIDE_SHARE * share], -1)
    return torch.cat([(1 - _PRIOR_SHARE) * share, torch.full_like(share[:, :1], _PRIOR_SHARE)], -1)


def _widened(mode: GaussianApproximation) -> GaussianApproximation:
    """With a quarter of the precision that the data give, and so tails to reach what the curvature at the mode does not tell of."""
    b = mode.factor @ mode.factor.mT * _WIDE
    b.diagonal(dim1=-2, dim2=-1).add_(1 - _WIDE)  # B is I plus a matrix linear in W
    return mode._replace(precision=_WIDE * mode.precision, factor=cholesky_in_place(b).factor)


def _multiplicity(prior: LatentPrior, modes: list[GaussianApproximation]) -> Tensor:
    """Of how many modes each is one, ``(C, J)``: those that lie within one of its standard deviations."""
    counts = []
    for here in modes:
        near = []
        for there in modes:
            alpha, delta = there.alpha - here.alpha, there.mean - here.mean
            square = quadratic(here.precision, delta.unsqueeze(1)).squeeze(1) + (alpha * delta).sum(-1)
            near.append(square < 1)
        counts.append(torch.stack(near, -1).sum(-1))
    return torch.stack(counts, -1).clamp_min(1).to(prior.mean)


def _component(share: Tensor, level: Tensor) -> Tensor:
    """Indices drawn with probabilities ``share`` ``(C, J)``, by inversion of ``level`` ``(C, directions)``."""
    return torch.searchsorted(share.cumsum(-1), level.contiguous(), right=True).clamp_max(share.shape[-1] - 1)


def _taken(of_each: Tensor, component: Tensor) -> Tensor:
    """From ``(C, J, directions, V)``, of each direction its component's ``(C, directions, V)``."""
    index = component[:, None, :, None].expand(-1, 1, -1, of_each.shape[-1])
    return of_each.gather(1, index).squeeze(1)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` ``(C, directions)`` of each theta's ``(C, J, V)``."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
