"""Importance estimates where the likelihood is not log-concave: f is drawn from a mixture over the modes of p(f | y, theta)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import GaussianApproximation
from torchgpmc.approximations.averaged_curvature import with_average_curvature
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.approximations.other_modes import is_same_mode, modes_known, other_modes, starts_of
from torchgpmc.approximations.site_algebra import factor_of_b
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
from torchgpmc.numerics.threads import side_by_side
from torchgpmc.trees import put, take

_OTHERS = 3  # modes that are looked for besides
_PRIOR_SHARE = 0.1
_WIDE, _WIDE_SHARE = 0.25, 0.2
_EVEN_SHARE = 0.1  # of what the modes get, split evenly: their masses are approximate


class MixtureEstimator(ImportanceEstimator):
    r"""The estimate of :class:`ImportanceEstimator` with f from a mixture, weighed by p(y, f | theta) / q(f).

    .. math:: q(f) = \sum_j \pi_j N(m + K \alpha_j, (K^{-1} + W_j)^{-1})

    Components are the approximation, Laplace's at :func:`other_modes` where there are others, each of them once more with a quarter
    of W, and the prior with a share of a tenth: no weight exceeds ten times the largest likelihood. Those at a mode of one latent
    a datum have the curvature that :func:`with_average_curvature` gives them. Modes have shares by their approximate evidence.
    Every component, and every share, is a function of theta alone (Owen & Zhou 2000, "Safe and effective importance sampling").

    Fields ``alpha`` and ``precision`` of an estimate have a dimension of components after the first, and so has ``log_constant``,
    which is less log share.
    """

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: one more a direction, which chooses its component."""
        return super().auxiliary_size + self.num_directions

    def start_at(self, theta: Tensor) -> Tensor:
        """What the approximation leaves at ``theta``, and the other modes there: nearby they are followed, no others looked for.

        Of one latent a datum ``(C, W + 6 N)``: W numbers of the approximation, then alpha and centred f of up to three modes, zeros
        for those there are not.
        """

        def start(rows: slice) -> Tensor:
            part = self._at(rows)
            prior = part.model.prior(theta[rows])
            problem, own = part._approximate(prior, None)
            modes, is_new = _modes(problem, own, None)
            return torch.cat([own.start, starts_of(modes[1:], is_new[:, 1:])], -1) if len(modes) > 1 else own.start

        with torch.no_grad():
            return torch.cat(side_by_side(start, self.chunks(theta), theta.device))

    def _draws(self, prior: LatentPrior, auxiliary: Tensor, start: Tensor | None) -> MixtureDraws:
        problem, densities, share, work = self.components(prior, start)
        choice, rest = auxiliary[:, : self.num_directions], auxiliary[:, self.num_directions :]
        return MixtureDraws(prior, problem, densities, share, work, torch.special.ndtr(choice), self._directions(rest))

    @torch.no_grad()
    def components(
        self, prior: LatentPrior, start: Tensor | None
    ) -> tuple[LatentProblem, list[GaussianApproximation], Tensor, Tensor]:
        """The problem, the J densities, their shares ``(C, J)``, and the factorisations that they took ``(C,)``.

        A share is zero where a density is of a mode that another has: it may then be any.
        """
        elsewhere = None
        if start is not None and self.model.num_latents == 1:
            of_others = 2 * _OTHERS * prior.mean.shape[-1]
            if start.shape[-1] <= of_others:
                raise ValueError(
                    f"start has {start.shape[-1]} numbers a theta. Expected those of the approximation and {of_others} of other "
                    f"modes; take what start_at(theta) of this estimator returns."
                )
            start, elsewhere = start.tensor_split([start.shape[-1] - of_others], -1)
        problem, own = self._approximate(prior, start)
        modes, is_new = _modes(problem, own, elsewhere)
        work = torch.stack([mode.num_iterations for mode in modes]).sum(0) + 2 * is_new.sum(-1)
        around = modes
        if self.model.num_latents == 1:
            others = _of_new(problem, modes[1:], is_new[:, 1:], with_average_curvature)
            around = [with_average_curvature(problem, own) if self.approximation.is_at_mode else own, *others]
        wide = [or_prior(self.model, part, prior) for part in _of_new(problem, around, is_new, _widened)]
        itself = own.or_prior(torch.zeros_like(own.converged), stacked_mean(self.model, prior))
        return problem, [*around, *wide, itself], _shares(modes, is_new), work

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

    def __init__(
        self,
        prior: LatentPrior,
        problem: LatentProblem,
        densities: list[GaussianApproximation],
        share: Tensor,
        work: Tensor,
        level: Tensor,
        directions: Tensor,
    ):
        """Components, their shares ``(C, J)``, a number between 0 and 1 for each direction ``(C, directions)`` to choose one by.

        ``work`` ``(C,)`` is in factorisations; ``directions`` are standard normals as of :func:`draws_around`.
        """
        mean, alpha, precision = (
            torch.stack(column, 1)
            for column in zip(*((found.mean, found.alpha, found.precision) for found in densities), strict=True)
        )
        super().__init__(prior, problem, densities[0]._replace(mean=mean, alpha=alpha, precision=precision, num_iterations=work))
        # Those that no theta has a share of are not drawn from.
        there = (share > 0).any(0).nonzero().squeeze(-1)
        self.component = _component(share[:, there], level)
        self.parts = _drawn(prior, problem, [densities[place] for place in there.tolist()], self.component, directions)
        self.ok = torch.stack([part.draws.ok for part in self.parts]).all(0)
        constant = torch.stack([part.draws.log_constant for part in self.parts], 1) - share[:, there].log()
        self.log_constant = torch.full_like(share, torch.inf).index_copy(1, there, constant)
        self.mixture = Mixture(mean[:, there], alpha[:, there], precision[:, there], constant)
        self.delta = torch.zeros_like(mean[:, :1]).expand(-1, self.component.shape[1], -1)
        for number, part in enumerate(self.parts):
            self.delta = torch.where((self.component == number).unsqueeze(-1), _rows(part.draws.delta, part.place), self.delta)
        self.middle = _rows(self.mixture.mean, self.component)

    def weigh(self, antithetic: bool) -> tuple[Tensor, Tensor]:
        f = self.middle + self.delta
        if antithetic:
            f = torch.cat([f, self.middle - self.delta], 1)
        log_likelihood = self._log_likelihood(f)
        log_weight = log_likelihood - self.mixture.log_ratio(f)
        return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), log_likelihood

    def whitened(self, antithetic: bool) -> Tensor:
        count = self.delta.shape[1] * (2 if antithetic else 1)
        return torch.stack([self.whitened_at(self.component.new_full(self.ok.shape, draw)) for draw in range(count)], 1)

    def whitened_at(self, chosen: Tensor) -> Tensor:
        num_directions = self.delta.shape[1]
        direction = (chosen % num_directions).unsqueeze(-1)
        each = []
        for part in self.parts:
            twin = torch.where(chosen < num_directions, 0, part.draws.delta.shape[1])
            each.append(part.draws.whitened_at(part.place.gather(-1, direction).squeeze(-1) + twin))
        return _rows(torch.stack(each, 1), self.component.gather(-1, direction)).squeeze(1)


class _Part(NamedTuple):
    """One component's draws: along the directions that chose it, and as many others as the theta with most of those needs."""

    draws: GaussianDraws
    place: Tensor  # (C, directions), of each direction among them; of those that did not choose it any


def _drawn(
    prior: LatentPrior, problem: LatentProblem, densities: list[GaussianApproximation], component: Tensor, directions: Tensor
) -> list[_Part]:
    """Each component along the directions that chose it ``(C, directions)``: a third of the work of all along all."""
    chose = component.unsqueeze(1) == torch.arange(len(densities), device=component.device).view(-1, 1)  # (C, J, directions)
    place = chose.long().cumsum(-1) - 1
    most = (place.amax((0, 2)) + 1).clamp_min(1).tolist()
    number, parts = torch.arange(component.shape[1], device=component.device).expand_as(component), []
    for density, own, at, count in zip(densities, chose.unbind(1), place.unbind(1), most, strict=True):
        # Directions that chose another are put beyond the last.
        chosen = number.new_zeros(len(number), count + 1).scatter(1, torch.where(own, at, count), number)[:, :count]
        rows = chosen[:, None, :, None].expand(-1, directions.shape[1], -1, directions.shape[-1])
        parts.append(_Part(draws_around(prior, problem, density, directions.gather(2, rows)), at.clamp(0, count - 1)))
    return parts


def _modes(problem: LatentProblem, own: GaussianApproximation, starts: Tensor | None) -> tuple[list[GaussianApproximation], Tensor]:
    """The approximation's and others, looked for or followed from ``starts``, and which differ from those before ``(C, J)``."""
    others = other_modes(problem, own) if starts is None else modes_known(problem, own, starts)
    modes = [own, *others]
    return modes, torch.stack([_is_new(mode, modes[:place]) for place, mode in enumerate(modes)], -1)


def _is_new(mode: GaussianApproximation, before: list[GaussianApproximation]) -> Tensor:
    """Whether it is none of those before ``(C,)``."""
    new = torch.ones_like(mode.converged)
    for other in before:
        new = new & ~is_same_mode(other, mode)
    return new


def _of_new(
    problem: LatentProblem, densities: list[GaussianApproximation], is_new: Tensor, make: Callable[..., GaussianApproximation]
) -> list[GaussianApproximation]:
    """What ``make`` makes of each ``(problem, density)`` for the thetas where ``is_new`` ``(C, J)``; elsewhere what it was."""
    made = []
    for density, new in zip(densities, is_new.unbind(-1), strict=True):
        rows = new.nonzero().squeeze(-1)
        if len(rows) == len(new):
            made.append(make(problem, density))
        elif len(rows):
            made.append(put(density, rows, make(problem.select(rows), take(density, rows))))
        else:
            made.append(density)
    return made


def _shares(modes: list[GaussianApproximation], is_new: Tensor) -> Tensor:
    """Of the modes, by their approximate evidence, of the wider ones, and of the prior, which comes last ``(C, J)``."""
    log_mass = torch.stack([torch.where(found.converged, found.log_evidence, -torch.inf) for found in modes], -1)
    log_mass = torch.nan_to_num(log_mass, nan=-1e30, posinf=-1e30, neginf=-1e30)
    share = torch.softmax(log_mass.masked_fill(~is_new, -torch.inf), -1)
    share = (1 - _EVEN_SHARE) * share + _EVEN_SHARE * is_new.to(share) / is_new.sum(-1, keepdim=True)
    share = torch.cat([(1 - _WIDE_SHARE) * share, _WIDE_SHARE * share], -1)
    return torch.cat([(1 - _PRIOR_SHARE) * share, torch.full_like(share[:, :1], _PRIOR_SHARE)], -1)


def _widened(problem: LatentProblem, density: GaussianApproximation) -> GaussianApproximation:
    """With a quarter of the precision that the data give, and so tails to reach what the curvature at the mode does not tell of."""
    precision = _WIDE * density.precision
    if precision.dim() == 2:
        return density._replace(precision=precision, factor=factor_of_b(problem.covariance, precision.sqrt())[0])
    b = density.factor @ density.factor.mT * _WIDE
    b.diagonal(dim1=-2, dim2=-1).add_(1 - _WIDE)  # B is I plus a matrix linear in W
    return density._replace(precision=precision, factor=cholesky_in_place(b).factor)


def _component(share: Tensor, level: Tensor) -> Tensor:
    """Indices drawn with probabilities ``share`` ``(C, J)``, by inversion of ``level`` ``(C, directions)``."""
    return torch.searchsorted(share.cumsum(-1), level.contiguous(), right=True).clamp_max(share.shape[-1] - 1)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` ``(C, directions)`` of each theta's ``(C, J, V)``."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
