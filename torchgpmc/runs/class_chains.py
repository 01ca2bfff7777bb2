"""Chains of [theta, v] for several classes: theta and the latents in turn, in coordinates that are white at every theta.

Given theta the latents move by Hamiltonian trajectories in w, which factorise nothing, and of which a theta gets several, for
predictions to average over their ends. Gradients are rough, values at the ends are not. Given w theta is proposed from a quadratic
fitted to the density at some thetas that stay, whose factors are worked out once, on the other side of it from where theta is: so
each theta that is tried takes two factorisations, four of five are accepted, and data that know of theta through w let go of it in
half the sweeps. Where w is wide, sites being too sure of some data, steps are longer. Sites are a
linear function of theta (of their precision, in logarithms), fitted to those of :mod:`torchgpmc.approximations.class_variational`
at some thetas, and frozen with all else before the first kept draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.class_variational import FittedSites, SharedSites, fitted_class_sites
from torchgpmc.density import AutogradDensity, mask_failures, mask_value
from torchgpmc.models.class_coordinates import ClassMap, class_map
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.numerics.random import log_uniform, make_generator, normal_like
from torchgpmc.parameters.normal_scale import NormalScale, normal_scale
from torchgpmc.runs.blocks import KeptPrior, LatentsGivenTheta, kept_prior
from torchgpmc.runs.chain import combined
from torchgpmc.samplers.adaptation import PositionMoments, start_moments, update_moments
from torchgpmc.samplers.fitted_proposals import design, fitted_proposal
from torchgpmc.samplers.hmc import HMCInfo, HMCState, transition
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import concatenate, take, where
from torchgpmc.types import Sampler

_SEED = 0  # of the search for where theta lies, which a run that is resumed makes again
_FAR = 1.5, 3.0, 5.0, 8.0  # along each hyperparameter, in the prior's deviations: data may say what the prior hardly allows
_DRAWS_AROUND = 12
_ROUGH_DATA = 200  # that the first search looks at, of more
_MOST_CLIMBS, _CLIMBING_SWEEPS, _WORTH_A_CLIMB = 8, 5, 0.5  # nats
_FIRST_DEVIATION = 0.3  # of theta, in the prior's
_SITES_REACH, _FARTHEST = 0.8, 4.0  # of the thetas that sites are fitted at, in deviations; of the line, in those
_SWEEPS, _MORE_SWEEPS = 25, 8
_WINDOWS = 1, 2, 4, 7, 11, 16  # their ends, in twentieths of warm-up: the lower bound may have theta far from where it lies
_KNOWN = 40.0  # positions that the covariance before a window counts for, and deviations
_OVERDISPERSION = 2.0
_LARGEST_STEP = 1.5  # times V^-1/4
_ADAPTATION, _SETTLING = 0.3, 5.0
_TRAJECTORIES = 2  # of a sweep, after which latents are nearly independent of those before
# Of trajectories, at least, and twice that at most: a quarter of the period in w on average. After a half |w| is as before.
_LENGTH = math.pi / 3


class ClassTuning(NamedTuple):
    """The step size of the latents, where theta lies, and sites."""

    step_size: Tensor  # ()
    centre: Tensor  # (P,)
    root: Tensor  # (P, P), lower triangular, of theta's covariance
    log_precision: Tensor  # (P + 1, N), of sites: at the centre, and slopes
    shift: Tensor  # the same of their shifts, (P + 1, K, N)
    deviation: Tensor  # (V,), of w: of some data much wider than under their sites
    moments: PositionMoments  # of [theta, w] since the last window

    @property
    def coordinates(self) -> tuple[Tensor, ...]:
        """All that decides what thetas are tried, and their sites."""
        return self.centre, self.root, self.log_precision, self.shift

    def standardised(self, theta: Tensor) -> Tensor:
        """theta ``(C, P)`` in deviations."""
        return solve_lower(self.root, (theta - self.centre).mT).mT

    def theta(self, standardised: Tensor) -> Tensor:
        """Back again."""
        return self.centre + standardised @ self.root.mT

    def sites(self, theta: Tensor) -> SharedSites:
        """At ``theta`` ``(C, P)``."""
        along = (self.standardised(theta) / _SITES_REACH).clamp(-_FARTHEST, _FARTHEST)
        terms = torch.cat([torch.ones_like(along[:, :1]), along], -1)
        log_precision, shift = (torch.tensordot(terms, part, 1) for part in (self.log_precision, self.shift))
        return SharedSites(log_precision.exp(), shift)


class AtTheta(NamedTuple):
    """What depends on theta and the tuning alone."""

    kept: KeptPrior
    coordinates: ClassMap


class ClassState(NamedTuple):
    """Position [theta, v] and its log density; the latents as they move."""

    position: Tensor  # (C, P + V)
    log_density: Tensor  # (C,)
    at: AtTheta
    white: HMCState  # of w
    further: Tensor  # (C, J - 1, V), what latents were before at this theta: draws given it as well


class ClassInfo(NamedTuple):
    """What is known about one sweep of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # of the latents
    hyper_acceptance: Tensor
    diverging: Tensor
    n_steps: Tensor  # evaluations
    n_failures: Tensor


class _OfWhite(AutogradDensity):
    """log p(theta, v(w), y) + log |dv / dw| of w ``(C, V)``."""

    def __init__(self, joint: JointLogDensity, at: AtTheta):
        self.joint = joint
        self.at = at
        self.given = LatentsGivenTheta(joint, at.kept, with_prior=False)
        super().__init__(self._evaluate)

    def _evaluate(self, white: Tensor) -> Tensor:
        coordinates = self.at.coordinates
        differences = coordinates.differences(white, self.at.kept.at.prior.factor)
        likelihood = self.given.at_deviation(differences) if self.given.sees_f_alone else self.given(coordinates.latents(white))
        return self.value_at(white, differences, likelihood)

    def value_at(self, white: Tensor, differences: Tensor, likelihood: Tensor) -> Tensor:
        """From differences of functions and the log likelihood ``(C,)``."""
        return self.at.kept.log_prior + likelihood + self.at.coordinates.log_prior(white, differences)

    def select(self, rows: Tensor) -> _OfWhite:
        """Of some chains."""
        return _OfWhite(self.joint.select(rows), take(self.at, rows))


class _NearlyOfWhite:
    """The same but for rounding, in a third of the time, where the likelihood is one of f: products in single precision."""

    def __init__(self, exact: _OfWhite):
        self.exact = exact

    def __call__(self, position: Tensor) -> Tensor:
        if not self.exact.given.sees_f_alone:
            return self.exact(position)
        with torch.no_grad():
            differences = self.exact.at.coordinates.near_differences(position)
            return mask_value(self.exact.value_at(position, differences, self.exact.given.at_deviation(differences)))

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """By two products where the likelihood has its slope in f, else not nearly."""
        coordinates = self.exact.at.coordinates
        with torch.no_grad():
            differences = coordinates.near_differences(position)
            found = self.exact.given.value_and_slope_at_deviation(differences)
            if found is None:
                return self.exact.value_and_grad(position)
            value = self.exact.value_at(position, differences, found[0])
            return mask_failures(value, coordinates.gradient(position, differences, found[1]))

    def select(self, rows: Tensor) -> _NearlyOfWhite:
        """Of some chains."""
        return _NearlyOfWhite(self.exact.select(rows))


class ClassChains:
    """The kernel at a tuning, and how that is found.

    Args:
        joint: of a model of several classes.
        num_steps: leapfrog steps a trajectory at most.
        chain_chunk: thetas whose matrices are worked out at once, at most.
    """

    def __init__(self, joint: JointLogDensity, num_steps: int, chain_chunk: int | None):
        self.joint = joint
        self.model = model = joint.model
        self.num_steps = num_steps
        self.chain_chunk = chain_chunk
        self.points = design(model.layout.size, model.train_x)
        self._designed: tuple[tuple[Tensor, ...], list[AtTheta]] | None = None

    def at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        """At ``theta`` ``(C, P)``."""
        parts = [self._at(part, tuning) for part in theta.split(self.chain_chunk or len(theta))]
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def _at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        with torch.no_grad():
            hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
            kept = kept_prior(self.model, self.model.at_data(hyperparameters), log_prior)
            return AtTheta(kept, class_map(kept.at.prior.factor, *tuning.sites(theta)))

    def designed(self, tuning: ClassTuning) -> list[AtTheta]:
        """At each of the thetas that stay.

        No part of the tuning, though it follows from that alone: checkpoints and ranks would carry dozens of matrices of N rows.
        """
        if self._designed is None or not all(map(torch.equal, self._designed[0], tuning.coordinates)):
            thetas = tuning.theta(self.points)
            self._designed = tuning.coordinates, [self._at(theta[None], tuning) for theta in thetas]
        return self._designed[1]

    def kernel(self, tuning: ClassTuning) -> Sampler:
        """Sweeps: a theta, and some trajectories of the latents, whose ends are all draws given it."""
        size = self.model.layout.size
        scale = Preconditioner(tuning.deviation.new_zeros(0, 0), tuning.deviation)

        def seen(theta: Tensor, at: AtTheta, white: HMCState, further: Tensor) -> ClassState:
            position = torch.cat([theta, at.coordinates.latents(white.position)], -1)
            return ClassState(position, white.log_density - at.coordinates.log_volume, at, white, further)

        def begun(at: AtTheta, white: Tensor) -> HMCState:
            density = _OfWhite(self.joint, at)
            return HMCState(white, density(white), _NearlyOfWhite(density).value_and_grad(white)[1])

        def init(position: Tensor, generator: torch.Generator) -> ClassState:
            theta, v = position.tensor_split([size], -1)
            at = self.at(theta, tuning)
            further = v.unsqueeze(1).repeat(1, _TRAJECTORIES - 1, 1)
            return seen(theta, at, begun(at, at.coordinates.white(v)), further)

        def theta_moved(state: ClassState, generator: torch.Generator) -> tuple[Tensor, AtTheta, HMCState, Tensor]:
            theta, at, white = state.position[:, :size], state.at, state.white
            values = [_NearlyOfWhite(_OfWhite(self.joint, there))(white.position) for there in self.designed(tuning)]
            proposal = fitted_proposal(self.points, torch.stack(values, -1))
            here = tuning.standardised(theta)
            there = proposal.opposite(here, generator)
            log_u = log_uniform(white.log_density.shape, white.log_density, generator)
            other_theta = tuning.theta(there)
            other_at = self.at(other_theta, tuning)
            other = begun(other_at, white.position)
            log_ratio = other.log_density - white.log_density + proposal.log_density(here) - proposal.log_density(there)
            log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf)
            return *where(log_u < log_ratio, (other_theta, other_at, other), (theta, at, white)), log_ratio

        def latents_moved(at: AtTheta, white: HMCState, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
            length = _LENGTH * (1 + float(torch.rand((), generator=generator, device=generator.device)))
            steps = min(max(round(length / float(tuning.step_size)), 1), self.num_steps)
            exact = _OfWhite(self.joint, at)
            return transition(_NearlyOfWhite(exact), scale, tuning.step_size, steps, white, generator, exact)[:2]

        def step(state: ClassState, generator: torch.Generator) -> tuple[ClassState, ClassInfo]:
            theta, at, white, log_ratio = theta_moved(state, generator)
            whites, infos = [], []
            for _ in range(_TRAJECTORIES):
                white, info = latents_moved(at, white, generator)
                whites.append(white.position)
                infos.append(info)
            known = combined(infos)
            work = known["n_steps"] + len(self.points) + 1
            failures = known["n_failures"] + torch.isinf(log_ratio)
            further = torch.stack([at.coordinates.latents(position) for position in whites[:-1]], 1)
            acceptance = log_ratio.clamp_max(0.0).exp()
            of_sweep = ClassInfo(known["acceptance_rate"], acceptance, known["diverging"], work, failures)
            return seen(theta, at, white, further), of_sweep

        return Sampler(init, step)

    def starts(self, tuning: ClassTuning, num_chains: int, generator: torch.Generator) -> Tensor:
        """Positions [theta, v] around the centre, theta twice as wide; there itself where that is impossible."""
        spread = _OVERDISPERSION * normal_like(tuning.centre.expand(num_chains, -1), generator)
        white = normal_like(tuning.centre.new_empty(num_chains, self.model.latent_size), generator)
        theta = tuning.theta(spread)
        possible = torch.isfinite(_OfWhite(self.joint, self.at(theta, tuning))(white)).unsqueeze(-1)
        theta = torch.where(possible, theta, tuning.centre)
        return torch.cat([theta, self.at(theta, tuning).coordinates.latents(white)], -1)

    def first_tuning(self) -> ClassTuning:
        """From a search by the lower bound of p(y | theta)."""
        centre, deviation = _rough_theta(self.model)
        step_size = centre.new_tensor(_LARGEST_STEP / self.model.latent_size**0.25)
        root = cholesky(deviation @ deviation.mT).factor
        return self.renewed(centre, root, centre.new_ones(self.model.latent_size), step_size, None)

    def renewed(
        self, centre: Tensor, root: Tensor, deviation: Tensor, step_size: Tensor, before: ClassTuning | None
    ) -> ClassTuning:
        """With sites fitted around ``centre``, beginning from those of ``before``."""
        unit = identity_matrix(len(centre), centre)
        along = torch.cat([torch.zeros_like(unit[:1]), unit, -unit])
        theta = centre + _SITES_REACH * along @ root.mT
        start = None if before is None else before.sites(theta)
        sites = fitted_class_sites(self.model, theta, _SWEEPS if before is None else _MORE_SWEEPS, start).sites
        terms = torch.linalg.pinv(torch.cat([torch.ones_like(along[:, :1]), along], -1))
        log_precision, shift = (torch.tensordot(terms, part, 1) for part in (sites.precision.log(), sites.shift))
        moments = start_moments(len(centre), len(centre) + len(deviation), centre)
        return ClassTuning(step_size, centre, root, log_precision, shift, deviation, moments)


class ClassWarmUp(NamedTuple):
    """The step size at every iteration; where theta lies, and sites, at the ends of windows.

    Args:
        steps: iterations.
        target_acceptance: of the latents.
        chains: what is tuned.
        first: the tuning to begin with.
    """

    steps: int
    target_acceptance: float
    chains: ClassChains
    first: Callable[[], ClassTuning]

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> ClassTuning:
        """The first tuning."""
        return self.first()

    def update(self, tuning: ClassTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> ClassTuning:
        """From the positions and the acceptance rates ``(C,)``."""
        gain = _ADAPTATION / math.sqrt(1 + iteration / _SETTLING)
        step_size = tuning.step_size * (gain * (info.acceptance_rate.mean() - self.target_acceptance)).exp()
        size = len(tuning.centre)
        position = torch.cat([state.position[:, :size], state.white.position], -1)
        tuning = tuning._replace(step_size=step_size, moments=update_moments(tuning.moments, position))
        if not self.restarts(iteration):
            return tuning
        moments, weight = tuning.moments, tuning.moments.num_seen + _KNOWN
        root, ok = cholesky((moments.dense + _KNOWN * tuning.root @ tuning.root.mT) / weight)
        deviation = ((moments.diagonal + _KNOWN * tuning.deviation.square()) / weight).sqrt()
        return self.chains.renewed(moments.mean[:size], torch.where(ok, root, tuning.root), deviation, step_size, tuning)

    def restarts(self, iteration: int) -> bool:
        """At the ends of windows, since coordinates change."""
        return iteration in [share * self.steps // 20 for share in _WINDOWS]

    def statistics(self, tuning: ClassTuning) -> dict[str, Tensor]:
        """The step size."""
        return {"step_size": tuning.step_size}


def _rough_theta(model: GPModel) -> tuple[Tensor, Tensor]:
    """Where a lower bound of the posterior is highest ``(P,)``, nearly, and deviations there ``(P, P)``, a diagonal matrix."""
    rows = torch.arange(len(model.train_x), device=model.train_x.device)[:: -(-len(model.train_x) // _ROUGH_DATA)]
    few = model.with_buffers(train_x=model.train_x[rows], train_y=model.train_y[rows])
    scale = normal_scale(model.layout)
    best, deviation = _climbed(model, scale, _best_of_a_few(few, scale))
    ends = [scale.theta(best + sign * deviation)[0] for sign in (1, -1)]
    return scale.theta(best)[0][0], (0.5 * (ends[0] - ends[1])[0]).diag()


def _bound(model: GPModel, scale: NormalScale, z: Tensor, num_sweeps: int, start: SharedSites | None = None) -> FittedSites:
    """Of the posterior on the scale of the priors, at ``z`` ``(C, P)``."""
    sites, bound = fitted_class_sites(model, scale.theta(z)[0], num_sweeps, start)
    return FittedSites(sites, bound - 0.5 * z.square().sum(-1))


def _best_of_a_few(model: GPModel, scale: NormalScale) -> Tensor:
    """``(1, P)``, of thetas along the axes and around the best of them.

    Draws from the prior are no help where it has inputs so far apart that f is white noise, which no longer depends on theta: of a
    dozen columns and more, under a prior that one would have for two or three.
    """
    unit = identity_matrix(model.layout.size, model.train_x)
    axes = torch.cat([distance * side for distance in _FAR for side in (unit, -unit)])
    best = _best_of(model, scale, torch.cat([torch.zeros_like(unit[:1]), axes]))
    around = normal_like(best.expand(_DRAWS_AROUND, -1), make_generator(_SEED, best.device))
    return _best_of(model, scale, torch.cat([best, best + 0.5 * around]))


def _best_of(model: GPModel, scale: NormalScale, z: Tensor) -> Tensor:
    """The one ``(1, P)`` of some thetas ``(C, P)`` whose bound is highest."""
    bound = torch.nan_to_num(_bound(model, scale, z, _SWEEPS).bound, nan=-torch.inf)
    return z[bound.argmax()][None]


def _climbed(model: GPModel, scale: NormalScale, best: Tensor) -> tuple[Tensor, Tensor]:
    """From ``best`` ``(1, P)`` by quadratics fitted around it, and deviations ``(P,)`` by the last of them."""
    points = design(model.layout.size, best)
    highest = _bound(model, scale, best, _SWEEPS)
    for _ in range(_MOST_CLIMBS):
        around = _bound(model, scale, best + _FIRST_DEVIATION * points, _CLIMBING_SWEEPS, highest.sites).bound
        proposal = fitted_proposal(points, around[None])
        there = best + _FIRST_DEVIATION * proposal.mean
        found = _bound(model, scale, there, _MORE_SWEEPS, highest.sites)
        gain = float(found.bound) - float(highest.bound)
        if gain > 0:
            best, highest = there, found
        if gain < _WORTH_A_CLIMB:
            break
    covariance = (proposal.axes[0] / proposal.precision[0]) @ proposal.axes[0].mT
    return best, _FIRST_DEVIATION * covariance.diagonal().sqrt()
