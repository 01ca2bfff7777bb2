r"""Chains of theta that move on an emulator of the evidence, and the warm-up in which it is learned.

Between two draws a chain makes Hamiltonian trajectories on the emulator, which cost next to nothing, and then one estimate of the
evidence where they end: warm-up learns from it, and a draw is weighed by it. Warm-up may end its work early, once the latest
thetas, weighed by what was found over what the emulator had said, are worth enough. Chains are then put at some of these, not
where one may be astray.

After warm-up the emulator S stays. Chains keep :math:`\min(S, \hat T / c)`, T being the target estimated, on theta and the numbers
that the estimate is made from (Andrieu & Roberts 2009): a Metropolis test refuses what has less than c times the emulator's say, so
that chains leave places where S is far too high, and no other. Weights :math:`\max(\hat T / S, c)` make the draws exact, however
far off S is (rejection control, Liu, Chen & Wong 1998, whose draws are independent). A draw of great weight is kept no longer than
others are, as it would be by a test of a power of the weights, which makes means of the same draws half as precise.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.evidence import LatentEstimate, LatentEstimator, latents_kept
from torchgpmc.importance import Emulator, Proposal, draw_from, empty_emulator, emulated
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.random import uniform
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.parameters.normal_scale import CentredScale, NormalScale
from torchgpmc.runs.quick_evidence import QuickEvidence
from torchgpmc.samplers.hmc import hmc
from torchgpmc.samplers.preconditioner import identity_preconditioner
from torchgpmc.storage.draws import Draw
from torchgpmc.trees import concatenate, where
from torchgpmc.types import Sampler

_DEPTH = 150.0  # nats below the highest evidence found from where on all is taken for as bad: white noise for everything, say
_GROWTH = 1.25  # of the points between two fits
_ANCHORS = 32
_FLATTENED = 3.0  # what log weights are divided by, where chains begin: wider than the target
_FIRST_STEP, _ADAPTATION, _SETTLING = 0.2, 0.5, 5.0
_TARGET_ACCEPTANCE = 0.8
_LEAST_STEPS, _MOST_STEPS = 4, 8
_LEAST_WEIGHT = math.exp(-2)  # c: of even weights next to none are less
_LATEST = 64  # thetas that tell what weights will be
_HARDLY = -50.0  # of a log weight that is as good as none, and more than nothing where all are so


class EmulatedTuning(NamedTuple):
    """What has been learned."""

    step_size: Tensor  # ()
    position: Tensor  # (n, P), of z, wherever evidence was estimated
    log_target: Tensor  # (n,), of z, estimated
    log_density: Tensor  # (n,), of z, what the emulator had said
    variance: Tensor  # (n,), relative, of the estimates
    emulator: Emulator  # of the first some of these; of none while points are spread
    starts: Tensor  # (C, P), where chains are put before their next step, if it is one; (0, P) for where they are
    anchors: Tensor  # (A, P), of z: points of the spread, then the best of what it gave
    sites: Tensor  # (A, ...), where estimates begin near these
    least_weight: Tensor  # (), c: zero while there is anything to learn
    stage: Tensor  # (0,) while it learns, (1,) till warm-up ends, then (2,): a length, which no device is asked for

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn."""
        return len(self.stage) == 0

    @property
    def waits(self) -> bool:
        """Whether all is learned and the end of warm-up awaited."""
        return len(self.stage) == 1


class EmulatedState(NamedTuple):
    """Where chains are, with the estimates there."""

    position: Tensor  # (C, P), of z
    log_density: Tensor  # (C,), what the kernel keeps invariant
    log_target: Tensor  # (C,), log p(z, y), estimated
    estimate: LatentEstimate


class EmulatedInfo(NamedTuple):
    """What is known about one step of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # of the trajectories on the emulator
    n_steps: Tensor  # estimates made
    n_failures: Tensor
    n_factorizations: Tensor


class Known(NamedTuple):
    """What an earlier run's draws tell."""

    position: Tensor  # (n, P), of z
    log_target: Tensor  # (n,)


class EmulatedChains(NamedTuple):
    """The kernel at a tuning, and how its states become draws.

    Args:
        model: whose posterior.
        estimator: of p(y | theta).
        scale: on which chains move.
        spread: where the first points are drawn.
        num_trajectories: on the emulator between two estimates.
        chain_chunk: thetas whose evidence is estimated at once, at most.
        teacher: whose evidence is learned, if not estimates.
    """

    model: GPModel
    estimator: LatentEstimator
    scale: NormalScale | CentredScale
    spread: Proposal
    num_trajectories: int
    chain_chunk: int | None
    teacher: QuickEvidence | None = None

    def kernel(self, tuning: EmulatedTuning) -> Sampler:
        """Trajectories on the emulator and one estimate; points of the spread while there is none."""
        emulator = tuning.emulator
        unit = identity_preconditioner(0, self.scale.size, tuning.position)
        lengths: Any = {"num_steps": _MOST_STEPS, "random_length": True, "least_steps": _LEAST_STEPS}
        inner = hmc(emulator, step_size=tuning.step_size, preconditioner=unit, **lengths)

        def between(emulated: Tensor, log_target: Tensor) -> Tensor:
            kept = torch.minimum(emulated, log_target - tuning.least_weight.log())
            return torch.where(tuning.least_weight > 0, kept, emulated)  # not infinity less infinity

        def init(position: Tensor, generator: torch.Generator) -> EmulatedState:
            log_target, estimate = self._estimated(position, tuning, generator)
            return EmulatedState(position, between(emulator(position), log_target), log_target, estimate)

        def told(proposed: EmulatedState, acceptance: Tensor) -> EmulatedInfo:
            failed = torch.isinf(proposed.log_target).to(acceptance)
            factorizations = proposed.estimate.num_factorizations.to(acceptance)
            return EmulatedInfo(acceptance, torch.ones_like(acceptance), failed, factorizations)

        def step(state: EmulatedState, generator: torch.Generator) -> tuple[EmulatedState, EmulatedInfo]:
            as_wanted = torch.full_like(state.log_density, _TARGET_ACCEPTANCE)
            if tuning.waits:
                none = torch.zeros_like(as_wanted)
                if not len(tuning.starts):
                    return state, EmulatedInfo(as_wanted, none, none, none)
                put = init(tuning.starts, generator)
                return put, told(put, as_wanted)
            if not len(emulator.points):
                spread = init(draw_from(self.spread, len(state.position), generator), generator)
                return spread, told(spread, as_wanted)
            begun = inner.init(tuning.starts if len(tuning.starts) else state.position, generator)
            chain, rates = begun, []
            for _ in range(self.num_trajectories):
                chain, info = inner.step(chain, generator)
                rates.append(info.acceptance_rate)
            proposed = init(chain.position, generator)
            # As this emulator has it: when warm-up ends, the state is of the one before.
            state = state._replace(log_density=between(begun.log_density, state.log_target))
            log_ratio = (proposed.log_density - chain.log_density) - (state.log_density - begun.log_density)
            log_ratio = torch.nan_to_num(log_ratio, nan=0.0)  # where both have evidence zero
            accepted = uniform(log_ratio.shape, log_ratio, generator).log() < log_ratio
            return where(accepted, proposed, state), told(proposed, torch.stack(rates).mean(0))

        return Sampler(init, step)

    def _estimated(self, z: Tensor, tuning: EmulatedTuning, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Log p(z, y) ``(C,)``, and the estimates that it rests on."""
        theta, log_slope = self.scale.theta(z)
        if self.teacher is not None and tuning.learns:
            estimate = _without_latents(self.teacher(theta), self.model)
        else:
            estimate = self._estimates(theta, tuning.sites[torch.cdist(z, tuning.anchors).argmin(-1)], generator)
        log_target = self.model.layout.log_prior(theta).detach() + log_slope + estimate.value
        return torch.nan_to_num(log_target, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf), estimate

    def _estimates(self, theta: Tensor, sites: Tensor, generator: torch.Generator) -> LatentEstimate:
        chunk, count = self.chain_chunk or len(theta), latents_kept(self.model)
        parts = zip(theta.split(chunk), sites.split(chunk), strict=True)
        found: LatentEstimate = concatenate([self.estimator.draw(part, generator, near, count) for part, near in parts])
        # Some kinds have more parts, and states have the same ones in learning and after.
        return found if self.teacher is None else LatentEstimate(*(getattr(found, name) for name in LatentEstimate._fields))

    def sites_at(self, z: Tensor) -> Tensor:
        """Where estimates at ``z`` ``(A, P)`` begin."""
        return torch.nan_to_num(self.estimator.start_at(self.scale.theta(z)[0]))

    def start(self, num_chains: int, generator: torch.Generator) -> Tensor:
        """Points of the spread ``(C, P)``."""
        return draw_from(self.spread, num_chains, generator)

    def read(self, state: EmulatedState, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        """Draws with their weights: what was estimated over what the emulator says."""
        theta, estimate = self.scale.theta(state.position)[0], state.estimate
        log_prior = self.model.layout.log_prior(theta).detach()
        stats = {
            "lp": log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "approximation_converged": estimate.converged,
        }
        log_weight = (state.log_target - state.log_density)[:, None]
        return Draw(theta[:, None], estimate.whitened[:, None], log_weight, estimate.further_whitened[:, None]), stats


class EmulatedWarmUp(NamedTuple):
    """Points are spread first; then chains move on what these tell, and it is learned again as they grow in number.

    Args:
        steps: iterations, at most.
        spread_steps: of those, at the beginning.
        chains: what is tuned.
        enough: share of their number that the latest thetas are worth when it is done, by their weights; 1: never before the end.
        most_noise: relative variance of the latest estimates that ends it, too.
        known: to be learned from besides.
    """

    steps: int
    spread_steps: int
    chains: EmulatedChains
    enough: float = 1.0
    most_noise: float = math.inf
    known: Known | None = None

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> EmulatedTuning:
        """Nothing learned."""
        none = position[:0]
        known = Known(none, none[:, 0]) if self.known is None else self.known
        anchors = self.chains.start(_num_anchors(self.spread_steps * len(position)), generator)
        step_size = position.new_tensor(_FIRST_STEP)
        empty = empty_emulator(position[0])
        values = known.position, known.log_target, known.log_target, 0 * known.log_target
        return EmulatedTuning(step_size, *values, empty, none, anchors, self.chains.sites_at(anchors), 0 * step_size, none[:, 0])

    def update(self, tuning: EmulatedTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> EmulatedTuning:
        """From the estimates at the positions; the step size from acceptance rates ``(C,)``."""
        if tuning.waits:
            tuning = tuning._replace(starts=tuning.starts[:0])
            return tuning if iteration < self.steps else _done(tuning, self._level(state))
        gain = _ADAPTATION / math.sqrt(1 + max(0, iteration - self.spread_steps) / _SETTLING)
        tuning = tuning._replace(
            step_size=tuning.step_size * (gain * (info.acceptance_rate.mean() - _TARGET_ACCEPTANCE)).exp(),
            position=torch.cat([tuning.position, state.position]),
            log_target=torch.cat([tuning.log_target, state.log_target]),
            log_density=torch.cat([tuning.log_density, state.log_density]),
            variance=torch.cat([tuning.variance, state.estimate.variance]),
            starts=state.position[:0],
        )
        if iteration == self.spread_steps:
            return self._begun(_learned(tuning), len(state.position), generator)
        if iteration < self.spread_steps:
            return tuning
        if iteration == self.steps:
            return _done(_learned(tuning), self._level(state))
        num_followed = (iteration - self.spread_steps) * len(state.position)
        if iteration == self.steps - 1 or self._is_enough(tuning, num_followed):
            starts = _not_astray(tuning, len(state.position), min(num_followed, _LATEST), generator)
            return _learned(tuning)._replace(starts=starts, stage=tuning.step_size.new_ones(1))
        return _learned(tuning) if len(tuning.position) >= _GROWTH * len(tuning.emulator.points) else tuning

    def _level(self, state: EmulatedState) -> Tensor:
        """What log weights are near to ``()``: none where estimates have taught, else what those are above the teacher's."""
        if self.chains.teacher is None:
            return torch.zeros_like(state.log_target.sum())
        gaps = state.log_target - state.log_density
        return torch.nan_to_num(torch.where(torch.isfinite(gaps), gaps, torch.nan).nanmedian(), nan=0.0)

    def _is_enough(self, tuning: EmulatedTuning, num_followed: int) -> bool:
        """Whether the latest of the points that chains came to have even weights, or estimates too noisy to go on with."""
        if num_followed < _LATEST:
            return False
        if float(tuning.variance[-_LATEST:].nan_to_num(nan=math.inf).median()) > self.most_noise:
            return True
        if self.enough >= 1:
            return False
        log_weights = (tuning.log_target - tuning.log_density)[-_LATEST:]
        return float(kish_effective_size(log_weights)) >= self.enough * _LATEST

    def _begun(self, tuning: EmulatedTuning, num_chains: int, generator: torch.Generator) -> EmulatedTuning:
        """With chains at points that are good, for points so spread, and anchors at the best of them."""
        weights = torch.softmax(tuning.log_target / _FLATTENED, 0)
        chosen = torch.multinomial(weights, num_chains, replacement=True, generator=generator)
        best = tuning.log_target.argsort(descending=True)[: _num_anchors(len(tuning.position))]
        anchors = tuning.position[best]
        return tuning._replace(starts=tuning.position[chosen], anchors=anchors, sites=self.chains.sites_at(anchors))

    def restarts(self, iteration: int) -> bool:
        """Never: chains are where they were on any emulator."""
        return False

    def statistics(self, tuning: EmulatedTuning) -> dict[str, Tensor]:
        """The step size."""
        return {"step_size": tuning.step_size}


def _num_anchors(num_points: int) -> int:
    return max(1, min(_ANCHORS, num_points // 4))


def _not_astray(tuning: EmulatedTuning, num_chains: int, count: int, generator: torch.Generator) -> Tensor:
    """Of the latest points those that weights of at least one would keep ``(C, P)``: where chains begin to be draws.

    A chain may be where the emulator, far from all points, was far too high, and need not come back from there.
    """
    latest = slice(-max(count, num_chains), None)
    log_weight = torch.nan_to_num(tuning.log_target - tuning.log_density, nan=-torch.inf)[latest]
    probability = torch.softmax(log_weight.clamp(_HARDLY, 0.0), 0)
    return tuning.position[latest][torch.multinomial(probability, num_chains, generator=generator)]


def _done(tuning: EmulatedTuning, level: Tensor) -> EmulatedTuning:
    """For the draws, whose log weights are near ``level`` ``()``."""
    least_weight = _LEAST_WEIGHT * level.exp().to(tuning.least_weight)
    return tuning._replace(least_weight=least_weight, stage=least_weight.new_ones(2))


def _without_latents(log_evidence: Tensor, model: GPModel) -> LatentEstimate:
    """A log evidence ``(C,)`` that is no estimate in the place of one; no draw is made of it."""
    zero = torch.zeros_like(log_evidence)
    vector = zero[:, None].expand(-1, model.latent_size)
    further = vector[:, None].expand(-1, latents_kept(model) - 1, -1)
    return LatentEstimate(log_evidence, zero, vector, further, zero, zero + 1, zero == 0)


def _learned(tuning: EmulatedTuning) -> EmulatedTuning:
    """With an emulator of all points.

    Raises:
        ValueError: the evidence was zero at all of them.
    """
    finite = torch.isfinite(tuning.log_target)
    if not bool(finite.any()):
        raise ValueError(
            f"all {len(finite)} thetas tried have evidence zero: every covariance failed to factorise. Expected some to succeed; "
            f"raise the model's jitter or use priors that keep lengthscales and scales moderate."
        )
    log_prior = -0.5 * tuning.position.square().sum(-1)
    evidence = tuning.log_target - log_prior
    evidence = evidence.clamp_min(evidence[finite].max() - _DEPTH)
    bends = tuning.emulator.bends if len(tuning.emulator.points) else None
    return tuning._replace(emulator=emulated(tuning.position, evidence + log_prior, bends))
