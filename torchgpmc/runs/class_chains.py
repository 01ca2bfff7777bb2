"""Chains of [theta, v] for several classes: theta and the latents in turn, in coordinates that are white at every theta.

Given theta the latents move by Hamiltonian trajectories in w, which factorise nothing, and of which a theta gets several, for
predictions to average over their ends. Gradients are rough, values at the ends are not.

Given w few hyperparameters are proposed from a quadratic fitted to the density at some thetas that stay, whose factors are worked
out once, on the other side of it from where theta is: so each theta that is tried takes two factorisations, four of five are
accepted, and data that know of theta through w let go of it in half the sweeps. More move by trajectories, too, whose steps each
take the gradient of what is factorised: of ten, quadratics would be fitted to 201 thetas.

Where w is wide, sites being too sure of some data, steps are longer. Sites follow theta, fitted to those of
:mod:`torchgpmc.approximations.class_variational` at some thetas, and are frozen with all else before the first kept draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import AutogradDensity, mask_failures, mask_value
from torchgpmc.models.class_coordinates import class_basis, class_map
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.runs.blocks import LatentsGivenTheta, kept_prior
from torchgpmc.runs.chain import combined
from torchgpmc.runs.class_search import rough_theta
from torchgpmc.runs.class_theta import ThetaGivenWhite, has_slope_in_theta, shared_by_threads
from torchgpmc.runs.class_tuning import AtTheta, ClassTuning, FollowingSites
from torchgpmc.runs.run import in_chunks
from torchgpmc.samplers.adaptation import start_moments, update_moments
from torchgpmc.samplers.fitted_proposals import FEW, design, fitted_proposal
from torchgpmc.samplers.hmc import HMCInfo, HMCState, transition
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import concatenate, take, where
from torchgpmc.types import Sampler

_SWEEPS, _MORE_SWEEPS = 25, 8
_WINDOWS = 1, 2, 4, 7, 11, 16  # their ends, in twentieths of warm-up: the lower bound may have theta far from where it lies
_KNOWN = 40.0  # positions that the covariance before a window counts for, and deviations
_OVERDISPERSION = 2.0
_LARGEST_STEP = 1.5  # times V^-1/4
_THETA_STEP = 0.5  # deviations, before warm-up
_ADAPTATION, _SETTLING = 0.3, 5.0
_TRAJECTORIES = 2  # of a sweep, after which latents are nearly independent of those before
# Of trajectories, at least, and twice that at most: a quarter of the period in w on average. After a half |w| is as before.
_LENGTH = math.pi / 3


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


class _Moved(NamedTuple):
    """A theta, and what goes with it."""

    theta: Tensor  # (C, P)
    at: AtTheta
    white: HMCState  # of w there
    acceptance: Tensor  # (C,)
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
        differences = coordinates.differences(white)
        given = self.given
        likelihood = given.at_deviation(differences) if given.sees_f_alone else given(coordinates.latents(white, self.at.factor))
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
        self.by_trajectories = model.layout.size > FEW and has_slope_in_theta(model)
        self.points = design(model.layout.size, model.train_x)[: 0 if self.by_trajectories else None]
        self._designed: tuple[tuple[Tensor, ...], list[AtTheta]] | None = None

    def at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        """At ``theta`` ``(C, P)``."""
        parts = [self._at(part, tuning) for part in theta.split(self.chain_chunk or len(theta))]
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def _at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        with torch.no_grad():
            hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
            kept = kept_prior(self.model, self.model.at_data(hyperparameters), log_prior)
            sites = tuning.sites.at(tuning.standardised(theta))
            return AtTheta(kept, class_map(kept.at.prior.factor, tuning.basis, *sites))

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
        as_it_is = Preconditioner(tuning.deviation.new_zeros(0, 0), torch.ones_like(tuning.centre))

        def seen(theta: Tensor, at: AtTheta, white: HMCState, further: Tensor) -> ClassState:
            position = torch.cat([theta, at.coordinates.latents(white.position, at.factor)], -1)
            return ClassState(position, white.log_density - at.coordinates.log_volume, at, white, further)

        def begun(at: AtTheta, white: Tensor) -> HMCState:
            density = _OfWhite(self.joint, at)
            return HMCState(white, density(white), _NearlyOfWhite(density).value_and_grad(white)[1])

        def init(position: Tensor, generator: torch.Generator) -> ClassState:
            theta, v = position.tensor_split([size], -1)
            at = self.at(theta, tuning)
            further = v.unsqueeze(1).repeat(1, _TRAJECTORIES - 1, 1)
            return seen(theta, at, begun(at, at.coordinates.white(v, at.factor)), further)

        def steps_of(step_size: Tensor, generator: torch.Generator) -> int:
            length = _LENGTH * (1 + float(torch.rand((), generator=generator, device=generator.device)))
            return min(max(round(length / float(step_size)), 1), self.num_steps)

        def by_a_quadratic(state: ClassState, generator: torch.Generator) -> _Moved:
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
            theta, at, white = where(log_u < log_ratio, (other_theta, other_at, other), (theta, at, white))
            work = torch.full_like(log_ratio, float(len(self.points) + 1))
            failed = torch.isinf(log_ratio)
            return _Moved(theta, at, white, log_ratio.clamp_max(0.0).exp(), torch.zeros_like(failed), work, failed.to(work))

        def by_a_trajectory(state: ClassState, generator: torch.Generator) -> _Moved:
            theta, white = state.position[:, :size], state.white.position
            density = in_chunks(shared_by_threads(ThetaGivenWhite(self.joint, tuning, white)), len(white), self.chain_chunk)
            here = tuning.standardised(theta)
            start = HMCState(here, *density.value_and_grad(here))
            steps = steps_of(tuning.theta_step_size, generator)
            end, info, _, _ = transition(density, as_it_is, tuning.theta_step_size, steps, start, generator)
            theta = torch.where((end.position == here).all(-1, keepdim=True), theta, tuning.theta(end.position))
            at = self.at(theta, tuning)
            return _Moved(theta, at, begun(at, white), info.acceptance_rate, info.diverging, info.n_steps + 1, info.n_failures)

        theta_moved = by_a_trajectory if self.by_trajectories else by_a_quadratic

        def latents_moved(at: AtTheta, white: HMCState, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
            steps = steps_of(tuning.step_size, generator)
            exact = _OfWhite(self.joint, at)
            return transition(_NearlyOfWhite(exact), scale, tuning.step_size, steps, white, generator, exact)[:2]

        def step(state: ClassState, generator: torch.Generator) -> tuple[ClassState, ClassInfo]:
            theta, at, white, acceptance, diverging, work, failures = theta_moved(state, generator)
            whites, infos = [], []
            for _ in range(_TRAJECTORIES):
                white, info = latents_moved(at, white, generator)
                whites.append(white.position)
                infos.append(info)
            known = combined(infos)
            further = torch.stack([at.coordinates.latents(position, at.factor) for position in whites[:-1]], 1)
            work, failures = work + known["n_steps"], failures + known["n_failures"]
            of_sweep = ClassInfo(known["acceptance_rate"], acceptance, known["diverging"] | diverging, work, failures)
            return seen(theta, at, white, further), of_sweep

        return Sampler(init, step)

    def starts(self, tuning: ClassTuning, num_chains: int, generator: torch.Generator) -> Tensor:
        """Positions [theta, v] around the centre, theta twice as wide; there itself where that is impossible."""
        spread = _OVERDISPERSION * normal_like(tuning.centre.expand(num_chains, -1), generator)
        white = normal_like(tuning.centre.new_empty(num_chains, self.model.latent_size), generator)
        theta = tuning.theta(spread)
        possible = torch.isfinite(_OfWhite(self.joint, self.at(theta, tuning))(white)).unsqueeze(-1)
        theta = torch.where(possible, theta, tuning.centre)
        at = self.at(theta, tuning)
        return torch.cat([theta, at.coordinates.latents(white, at.factor)], -1)

    def first_tuning(self) -> ClassTuning:
        """From a search by the lower bound of p(y | theta)."""
        centre, deviation = rough_theta(self.model)
        step_size = centre.new_tensor(_LARGEST_STEP / self.model.latent_size**0.25)
        root = cholesky(deviation @ deviation.mT).factor
        sites = FollowingSites.around(self.model, centre, root, _SWEEPS, None)
        deviation = centre.new_ones(self.model.latent_size)
        return self.tuned(centre, root, sites, deviation, (step_size, centre.new_tensor(_THETA_STEP)))

    def tuned(
        self, centre: Tensor, root: Tensor, sites: FollowingSites, deviation: Tensor, step_sizes: tuple[Tensor, Tensor]
    ) -> ClassTuning:
        """With moments yet to be seen, and a basis at the centre where theta moves by trajectories.

        Quadratics are of few hyperparameters, of which w lets go anyway: five hundred data take twice the time with a basis.
        """
        basis = centre.new_zeros(0, 0)
        if self.by_trajectories:
            with torch.no_grad():
                prior = self.model.prior(centre[None])
                basis = class_basis(prior.factor, sites.at(torch.zeros_like(centre)[None]).precision)
        moments = start_moments(len(centre), len(centre) + len(deviation), centre)
        return ClassTuning(*step_sizes, centre, root, sites, basis, deviation, moments)


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
        theta_step_size = tuning.theta_step_size * (gain * (info.hyper_acceptance.mean() - self.target_acceptance)).exp()
        size = len(tuning.centre)
        position = torch.cat([state.position[:, :size], state.white.position], -1)
        moments = update_moments(tuning.moments, position)
        tuning = tuning._replace(step_size=step_size, theta_step_size=theta_step_size, moments=moments)
        if not self.restarts(iteration):
            return tuning
        weight = moments.num_seen + _KNOWN
        root, ok = cholesky((moments.dense + _KNOWN * tuning.root @ tuning.root.mT) / weight)
        root = torch.where(ok, root, tuning.root)
        deviation = ((moments.diagonal + _KNOWN * tuning.deviation.square()) / weight).sqrt()
        centre, before = moments.mean[:size], (tuning.sites, torch.cat([tuning.centre[None], tuning.root]))
        sites = FollowingSites.around(self.chains.model, centre, root, _MORE_SWEEPS, before)
        return self.chains.tuned(centre, root, sites, deviation, (step_size, theta_step_size))

    def restarts(self, iteration: int) -> bool:
        """At the ends of windows, since coordinates change."""
        return iteration in [share * self.steps // 20 for share in _WINDOWS]

    def statistics(self, tuning: ClassTuning) -> dict[str, Tensor]:
        """The step size."""
        return {"step_size": tuning.step_size}
