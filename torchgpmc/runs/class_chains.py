"""Chains of [theta, v] for several classes: theta and the latents in turn, in coordinates that are white at every theta.

Given theta the latents move by Hamiltonian trajectories in w, which factorise nothing, and of which a theta gets several, for
predictions to average over their ends. Gradients are rough, values at the ends are not.

Given w few hyperparameters are proposed from a quadratic fitted to the density at some thetas that stay, whose factors are worked
out once, on the other side of it from where theta is: so each theta that is tried takes two factorisations, four of five are
accepted, and data that know of theta through w let go of it in half the sweeps. More, for ten of which quadratics would be fitted
to 201 thetas, move together with w, by :mod:`torchgpmc.runs.class_trajectories`.

Where w holds theta, roots are triangular in a basis in which it does less: of six classes and two hyperparameters a third of the
draws are then effective, a seventh in the data's own. Trajectories of ten gained nothing by it. Chains are shared by the cores.

Where w is wide, sites being too sure of some data, steps are longer. Sites follow theta, fitted to those of
:mod:`torchgpmc.approximations.class_variational` at some thetas, and are frozen with all else before the first kept draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import shared_by_rows
from torchgpmc.models.class_coordinates import class_map
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.runs.blocks import kept_prior
from torchgpmc.runs.chain import combined
from torchgpmc.runs.class_search import rough_theta
from torchgpmc.runs.class_trajectories import Phase, ThetaAndWhite, has_slope_in_theta, slope_in_theta, trajectory
from torchgpmc.runs.class_tuning import AtTheta, ClassTuning, FollowingSites
from torchgpmc.runs.class_white import NearlyOfWhite, OfWhite
from torchgpmc.samplers.adaptation import start_moments, update_moments
from torchgpmc.samplers.fitted_proposals import FEW, design, fitted_proposal
from torchgpmc.samplers.hmc import DIVERGENCE_THRESHOLD, HMCInfo, HMCState, transition_given
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import concatenate, take, where
from torchgpmc.types import Sampler

_SWEEPS, _MORE_SWEEPS = 25, 8
_WINDOWS = 1, 2, 4, 7, 11, 16  # their ends, in twentieths of warm-up: the lower bound may have theta far from where it lies
_KNOWN = 40.0  # positions that the covariance before a window counts for, and deviations
_OVERDISPERSION = 2.0
_LARGEST_STEP = 1.5  # times V^-1/4
_THETA_STEP, _THETA_SCALE = 0.4, 0.5  # before warm-up: of trajectories, and deviations of theta given w
# With 0.3 for theta, too, and its steps from 0.2 on, warm-up took half as long again, by too many short steps (six classes).
_ADAPTATION, _THETA_ADAPTATION, _SETTLING = 0.3, 0.6, 5.0
_TRAJECTORIES = 2  # of a sweep, after which latents are nearly independent of those before
# Mean precision of theta given w along its worst axis, in the posterior's, from which on a basis is worth its products. Those of
# two tables with twice to thrice the effective draws in a basis were 2.9 to 5.7, of one with as many a second 2.4 to 3.5, of two
# 1.3 to 2.3.
_HELD = 3.0
_FACTORISATIONS = 5  # N^3 of coordinates
_SHORTER = 0.5  # theta's steps, at most, by chance: where the density is narrow trajectories of the longest are all refused
# Of trajectories, at least, and twice that at most: a quarter of the period in w on average. After a half |w| is as before.
_LENGTH = math.pi / 3


class ClassState(NamedTuple):
    """Position [theta, v] and its log density; the latents as they move."""

    position: Tensor  # (C, P + V)
    log_density: Tensor  # (C,)
    at: AtTheta
    white: HMCState  # of w
    further: Tensor  # (C, J - 1, V): draws given this theta as well


class ClassInfo(NamedTuple):
    """What is known about one sweep of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # of the latents
    hyper_acceptance: Tensor
    diverging: Tensor
    n_steps: Tensor  # evaluations
    n_failures: Tensor


Step = Callable[[ClassState, torch.Generator], tuple[ClassState, ClassInfo]]


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
        self.size = len(model.train_x)
        self.products = 4.0 * model.latent_size * self.size  # operations of a step of w, of one chain
        self.by_trajectories = model.layout.size > FEW and has_slope_in_theta(model)
        self.points = design(model.layout.size, model.train_x)[: 0 if self.by_trajectories else None]
        self._designed: tuple[tuple[Tensor, ...], list[AtTheta]] | None = None

    def at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        """At ``theta`` ``(C, P)``."""
        return self._shared(lambda rows: self._at(theta[rows], tuning), theta, _FACTORISATIONS * self.size**3, self.chain_chunk)

    def _shared(self, function: Callable[[slice], Any], like: Tensor, work: float, chunk: int | None = None) -> Any:
        """``function`` of all chains, so many operations a chain, which are shared by the cores."""
        parts = shared_by_rows(function, len(like), work, like.device, self.size**2, chunk)
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def _at(self, theta: Tensor, tuning: ClassTuning) -> AtTheta:
        with torch.no_grad():
            hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
            kept = kept_prior(self.model, self.model.at_data(hyperparameters), log_prior)
            sites = tuning.sites.at(tuning.standardised(theta))
            return AtTheta(kept, class_map(kept.at.prior.factor, *sites, tuning.basis if len(tuning.basis) else None))

    def designed(self, tuning: ClassTuning) -> list[AtTheta]:
        """At each of the thetas that stay.

        No part of the tuning, though it follows from that alone: checkpoints and ranks would carry dozens of matrices of N rows.
        """
        if self._designed is None or not all(map(torch.equal, self._designed[0], tuning.coordinates)):
            thetas = tuning.theta(self.points)
            self._designed = tuning.coordinates, [self._at(theta[None], tuning) for theta in thetas]
        return self._designed[1]

    def _values_there(self, tuning: ClassTuning, white: Tensor) -> Tensor:
        """Log densities ``(C, J)`` of w ``(C, V)`` at these thetas."""
        designed = self.designed(tuning)

        def values(rows: slice) -> list[Tensor]:
            return [NearlyOfWhite(OfWhite(self.joint, there))(white) for there in designed[rows]]

        found = shared_by_rows(values, len(designed), len(white) * 0.5 * self.products, white.device)
        return torch.stack(list(chain.from_iterable(found)), -1)

    def held(self, tuning: ClassTuning, white: Tensor) -> Tensor:
        """Precision ``(C,)`` of theta given w ``(C, V)`` along its worst axis, by quadratics; zeros without, or in a basis."""
        if self.by_trajectories or len(tuning.basis):
            return torch.zeros_like(white[:, 0])
        return fitted_proposal(self.points, self._values_there(tuning, white)).precision.amax(-1)

    def slope(self, tuning: ClassTuning, state: ClassState) -> Tensor:
        """Of the density in theta, in deviations ``(C, P)``; zeros where trajectories do not take it."""
        along = tuning.standardised(state.position[:, : len(tuning.centre)])
        if not self.by_trajectories:
            return torch.zeros_like(along)
        return slope_in_theta(ThetaAndWhite(self.joint, tuning), along, state.white.position, self.chain_chunk)

    def kernel(self, tuning: ClassTuning) -> Sampler:
        """A theta, and some latent vectors that are draws given it."""

        def init(position: Tensor, generator: torch.Generator) -> ClassState:
            return self._first(position, tuning)

        return Sampler(init, self._together(tuning) if self.by_trajectories else self._in_turn(tuning))

    def _begun(self, at: AtTheta, white: Tensor) -> HMCState:
        density = OfWhite(self.joint, at)
        return HMCState(white, density(white), NearlyOfWhite(density).value_and_grad(white)[1])

    def _seen(self, theta: Tensor, at: AtTheta, white: HMCState, further: Tensor) -> ClassState:
        position = torch.cat([theta, at.coordinates.latents(white.position, at.factor)], -1)
        return ClassState(position, white.log_density - at.coordinates.log_volume, at, white, further)

    def _first(self, position: Tensor, tuning: ClassTuning) -> ClassState:
        theta, v = position.tensor_split([self.model.layout.size], -1)
        at = self.at(theta, tuning)
        further = v.unsqueeze(1).repeat(1, _TRAJECTORIES - 1, 1)
        return self._seen(theta, at, self._begun(at, at.coordinates.white(v, at.factor)), further)

    def _steps_of(self, step_size: Tensor | float, generator: torch.Generator, length: float = _LENGTH) -> int:
        length = length * (1 + float(torch.rand((), generator=generator, device=generator.device)))
        return min(max(round(length / float(step_size)), 1), self.num_steps)

    def _latents_moved(
        self, tuning: ClassTuning, at: AtTheta, white: HMCState, generator: torch.Generator
    ) -> tuple[HMCState, HMCInfo]:
        scale = Preconditioner(tuning.deviation.new_zeros(0, 0), tuning.deviation)
        steps, exact = self._steps_of(tuning.step_size, generator), OfWhite(self.joint, at)
        rho, log_u = normal_like(white.position, generator), log_uniform(white.log_density.shape, white.log_density, generator)

        def moved(rows: slice) -> tuple[HMCState, HMCInfo]:
            part, start = exact.select(rows), take(white, rows)
            given = transition_given(NearlyOfWhite(part), scale, tuning.step_size, steps, start, rho[rows], log_u[rows], part)
            return given[:2]

        found: tuple[HMCState, HMCInfo] = self._shared(moved, rho, steps * self.products)
        return found

    def _in_turn(self, tuning: ClassTuning) -> Step:
        """Theta from a quadratic, then trajectories of the latents, whose ends are all draws given it."""
        size = self.model.layout.size

        def theta_moved(state: ClassState, generator: torch.Generator) -> tuple[Tensor, AtTheta, HMCState, Tensor]:
            theta, at, white = state.position[:, :size], state.at, state.white
            proposal = fitted_proposal(self.points, self._values_there(tuning, white.position))
            here = tuning.standardised(theta)
            there = proposal.opposite(here, generator)
            log_u = log_uniform(white.log_density.shape, white.log_density, generator)
            other_theta = tuning.theta(there)
            other_at = self.at(other_theta, tuning)
            other = self._begun(other_at, white.position)
            log_ratio = other.log_density - white.log_density + proposal.log_density(here) - proposal.log_density(there)
            log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf)
            theta, at, white = where(log_u < log_ratio, (other_theta, other_at, other), (theta, at, white))
            return theta, at, white, log_ratio

        def step(state: ClassState, generator: torch.Generator) -> tuple[ClassState, ClassInfo]:
            theta, at, white, log_ratio = theta_moved(state, generator)
            whites, infos = [], []
            for _ in range(_TRAJECTORIES):
                white, info = self._latents_moved(tuning, at, white, generator)
                whites.append(white.position)
                infos.append(info)
            known = combined(infos)
            further = torch.stack([at.coordinates.latents(position, at.factor) for position in whites[:-1]], 1)
            work, failed = len(self.points) + 1 + known["n_steps"], torch.isinf(log_ratio).to(log_ratio)
            of_theta = log_ratio.clamp_max(0.0).exp()
            failures = failed + known["n_failures"]
            of_sweep = ClassInfo(known["acceptance_rate"], of_theta, known["diverging"], work, failures)
            return self._seen(theta, at, white, further), of_sweep

        return step

    def _together(self, tuning: ClassTuning) -> Step:
        """Theta and the latents by one trajectory, then the latents by another.

        The first may well be of half a period of w, after which |w| is as before; the second is of a quarter.
        """
        size, density = self.model.layout.size, ThetaAndWhite(self.joint, tuning)
        # A quarter of the period in the direction that w holds most, give or take a third.
        length = _LENGTH / float(torch.linalg.svdvals(tuning.scale).amin())

        def moved(state: ClassState, generator: torch.Generator) -> tuple[ClassState, ClassInfo]:
            theta, white = state.position[:, :size], state.white
            momenta = normal_like(theta, generator), normal_like(white.position, generator)
            start = Phase(tuning.standardised(theta), white.position, *momenta)
            log_u = log_uniform(white.log_density.shape, white.log_density, generator)
            shorter = 1 - _SHORTER * torch.rand((), generator=generator, device=generator.device)
            step_size = float(tuning.theta_step_size) * float(shorter)
            steps = self._steps_of(step_size, generator, length)
            end = trajectory(density, start, step_size, steps, self.chain_chunk)
            theta = tuning.theta(end.along)
            at = self.at(theta, tuning)
            other = self._begun(at, end.white)
            log_ratio = other.log_density - white.log_density + start.kinetic_energy - end.kinetic_energy
            log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf)
            acceptance, work = log_ratio.clamp_max(0.0).exp(), torch.full_like(log_ratio, steps)
            # What does not factorise on the way, by rough algebra, is no failure: only where it leads counts.
            failed = torch.isinf(other.log_density).to(log_ratio)
            info = ClassInfo(acceptance, acceptance, log_ratio < -DIVERGENCE_THRESHOLD, work, failed)
            return where(log_u < log_ratio, self._seen(theta, at, other, state.further), state), info

        def step(state: ClassState, generator: torch.Generator) -> tuple[ClassState, ClassInfo]:
            state, of_theta = moved(state, generator)
            further = state.at.coordinates.latents(state.white.position, state.at.factor).unsqueeze(1)
            white, info = self._latents_moved(tuning, state.at, state.white, generator)
            return self._seen(state.position[:, :size], state.at, white, further), ClassInfo(
                info.acceptance_rate,
                of_theta.hyper_acceptance,
                of_theta.diverging | info.diverging,
                of_theta.n_steps + info.n_steps,
                of_theta.n_failures + info.n_failures,
            )

        return step

    def starts(self, tuning: ClassTuning, num_chains: int, generator: torch.Generator) -> Tensor:
        """Positions [theta, v] around the centre, theta twice as wide; there itself where that is impossible."""
        spread = _OVERDISPERSION * normal_like(tuning.centre.expand(num_chains, -1), generator)
        white = normal_like(tuning.centre.new_empty(num_chains, self.model.latent_size), generator)
        theta = tuning.theta(spread)
        possible = torch.isfinite(OfWhite(self.joint, self.at(theta, tuning))(white)).unsqueeze(-1)
        theta = torch.where(possible, theta, tuning.centre)
        at = self.at(theta, tuning)
        return torch.cat([theta, at.coordinates.latents(white, at.factor)], -1)

    def first_tuning(self) -> ClassTuning:
        """From a search by the lower bound of p(y | theta)."""
        centre, deviation = rough_theta(self.model)
        step_sizes = centre.new_tensor(_LARGEST_STEP / self.model.latent_size**0.25), centre.new_tensor(_THETA_STEP)
        root = cholesky(deviation @ deviation.mT).factor
        sites = FollowingSites.around(self.model, centre, root, _SWEEPS, None)
        scale = _THETA_SCALE * identity_matrix(len(centre), centre)
        return self.tuned(centre, root, scale, sites, centre.new_ones(self.model.latent_size), step_sizes)

    def tuned(
        self,
        centre: Tensor,
        root: Tensor,
        scale: Tensor,
        sites: FollowingSites,
        deviation: Tensor,
        step_sizes: tuple[Tensor, Tensor],
        in_a_basis: bool = False,
    ) -> ClassTuning:
        """With moments yet to be seen."""
        moments = start_moments(len(centre), len(centre) + len(deviation), centre)
        basis = self._basis(centre) if in_a_basis else centre.new_zeros(0, self.size)
        held, slopes = centre.new_zeros(()), torch.zeros_like(root)
        return ClassTuning(*step_sizes, centre, root, scale, sites, basis, deviation, moments, held, slopes)

    def _basis(self, centre: Tensor) -> Tensor:
        """Eigenvectors ``(N, N)`` of one function's covariance at ``centre``, those of the largest eigenvalues first.

        None of them ``(0, N)`` where that does not factorise.
        """
        with torch.no_grad():
            prior = self.model.at_data(self.model.layout.raw_values_and_log_prior(centre[None])[0]).prior
            if not bool(prior.ok[0]):
                return centre.new_zeros(0, self.size)
            factor = prior.factor[0]
            return torch.linalg.eigh(factor @ factor.mT).eigenvectors.flip(-1).contiguous()


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
        settled = math.sqrt(1 + iteration / _SETTLING)
        too_often, theta_too_often = (
            rate.mean() - self.target_acceptance for rate in (info.acceptance_rate, info.hyper_acceptance)
        )
        step_size = tuning.step_size * (_ADAPTATION / settled * too_often).exp()
        theta_step_size = tuning.theta_step_size * (_THETA_ADAPTATION / settled * theta_too_often).exp()
        size = len(tuning.centre)
        position = torch.cat([state.position[:, :size], state.white.position], -1)
        moments = update_moments(tuning.moments, position)
        slope = self.chains.slope(tuning, state)
        held = tuning.held + self.chains.held(tuning, state.white.position).sum()
        tuning = tuning._replace(held=held, slopes=tuning.slopes + slope.mT @ slope, moments=moments)
        tuning = tuning._replace(step_size=step_size, theta_step_size=theta_step_size)
        if not self.restarts(iteration):
            return tuning
        weight = moments.num_seen + _KNOWN
        root, ok = cholesky((moments.dense + _KNOWN * tuning.root @ tuning.root.mT) / weight)
        root = torch.where(ok, root, tuning.root)
        deviation = ((moments.diagonal + _KNOWN * tuning.deviation.square()) / weight).sqrt()
        centre, before = moments.mean[:size], (tuning.sites, torch.cat([tuning.centre[None], tuning.root]))
        sites = FollowingSites.around(self.chains.model, centre, root, _MORE_SWEEPS, before)
        # Before half of warm-up theta may be far from where it lies, or not know how far it goes.
        is_held = 2 * iteration >= self.steps and float(held / moments.num_seen) > _HELD
        in_a_basis = is_held or len(tuning.basis) > 0
        scale = _scale(tuning, root, weight)
        return self.chains.tuned(centre, root, scale, sites, deviation, (step_size, theta_step_size), in_a_basis)

    def restarts(self, iteration: int) -> bool:
        """At the ends of windows, since coordinates change."""
        return iteration in [share * self.steps // 20 for share in _WINDOWS]

    def statistics(self, tuning: ClassTuning) -> dict[str, Tensor]:
        """The step size."""
        return {"step_size": tuning.step_size}


def _scale(tuning: ClassTuning, root: Tensor, weight: Tensor) -> Tensor:
    """Of the inverse mass matrix in deviations by a new ``root``: the mean product of slopes is the density's mean curvature."""
    curvature = (tuning.slopes + _KNOWN * torch.cholesky_inverse(tuning.scale)) / weight
    turned = solve_lower(tuning.root, root)
    lower, ok = cholesky(torch.linalg.inv(turned.mT @ curvature @ turned))
    return torch.where(ok, lower, tuning.scale)
