"""Chains of theta that move on an emulator of the evidence, and the warm-up in which it is learned.

Between two draws a chain makes Hamiltonian trajectories on the emulator, which cost next to nothing, and then one estimate of the
evidence where they end: warm-up learns from it, and a draw is weighed by it. After warm-up the emulator stays, so that chains keep
its density invariant and weights make the draws exact, however far off it is; good weights are what it is learned for.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.evidence import LatentEstimate, LatentEstimator, latents_kept
from torchgpmc.importance import Emulator, Proposal, draw_from, empty_emulator, emulated
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.parameters.normal_scale import NormalScale
from torchgpmc.samplers.hmc import hmc
from torchgpmc.samplers.preconditioner import identity_preconditioner
from torchgpmc.storage.draws import Draw
from torchgpmc.trees import concatenate
from torchgpmc.types import Sampler

_DEPTH = 150.0  # nats below the highest evidence found from where on all is taken for as bad: white noise for everything, say
_GROWTH = 1.25  # of the points between two fits
_ANCHORS = 32
_FLATTENED = 3.0  # what log weights are divided by, where chains begin: wider than the target
_FIRST_STEP, _ADAPTATION, _SETTLING = 0.2, 0.5, 5.0
_TARGET_ACCEPTANCE = 0.8
_LEAST_STEPS, _MOST_STEPS = 4, 8


class EmulatedTuning(NamedTuple):
    """What has been learned."""

    step_size: Tensor  # ()
    position: Tensor  # (n, P), of z, wherever evidence was estimated
    log_target: Tensor  # (n,), of z, estimated
    emulator: Emulator  # of the first some of these; of none while points are spread
    starts: Tensor  # (C, P), where chains are put before their next step; (0, P) for where they are
    anchors: Tensor  # (A, P), of z
    sites: Tensor  # (A, ...), where estimates begin near these


class EmulatedState(NamedTuple):
    """Where chains are, with the estimates there."""

    position: Tensor  # (C, P), of z
    log_density: Tensor  # (C,), the emulator's
    log_target: Tensor  # (C,), log p(z, y), estimated
    estimate: LatentEstimate


class EmulatedInfo(NamedTuple):
    """What is known about one step of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # of the trajectories on the emulator
    n_steps: Tensor  # estimates made
    n_failures: Tensor
    n_factorizations: Tensor


class EmulatedChains(NamedTuple):
    """The kernel at a tuning, and how its states become draws.

    Args:
        model: whose posterior.
        estimator: of p(y | theta).
        scale: on which chains move.
        spread: where the first points are drawn.
        num_trajectories: on the emulator between two estimates.
        chain_chunk: thetas whose evidence is estimated at once, at most.
    """

    model: GPModel
    estimator: LatentEstimator
    scale: NormalScale
    spread: Proposal
    num_trajectories: int
    chain_chunk: int | None

    def kernel(self, tuning: EmulatedTuning) -> Sampler:
        """Trajectories on the emulator and one estimate; points of the spread while there is none."""
        emulator = tuning.emulator
        unit = identity_preconditioner(0, self.scale.size, tuning.position)
        lengths: Any = {"num_steps": _MOST_STEPS, "random_length": True, "least_steps": _LEAST_STEPS}
        inner = hmc(emulator, step_size=tuning.step_size, preconditioner=unit, **lengths)

        def init(position: Tensor, generator: torch.Generator) -> EmulatedState:
            log_target, estimate = self._estimated(position, tuning, generator)
            return EmulatedState(position, emulator(position), log_target, estimate)

        def step(state: EmulatedState, generator: torch.Generator) -> tuple[EmulatedState, EmulatedInfo]:
            acceptance = torch.full_like(state.log_density, _TARGET_ACCEPTANCE)
            if not len(emulator.points):
                position = draw_from(self.spread, len(state.position), generator)
            else:
                chain = inner.init(tuning.starts if len(tuning.starts) else state.position, generator)
                rates = []
                for _ in range(self.num_trajectories):
                    chain, info = inner.step(chain, generator)
                    rates.append(info.acceptance_rate)
                position, acceptance = chain.position, torch.stack(rates).mean(0)
            new = init(position, generator)
            failed = torch.isinf(new.log_target).to(acceptance)
            ones = torch.ones_like(acceptance)
            return new, EmulatedInfo(acceptance, ones, failed, new.estimate.num_factorizations.to(acceptance))

        return Sampler(init, step)

    def _estimated(self, z: Tensor, tuning: EmulatedTuning, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Log p(z, y) ``(C,)``, and the estimates that it rests on."""
        nearest = tuning.sites[torch.cdist(z, tuning.anchors).argmin(-1)]
        theta, log_slope = self.scale.theta(z)
        chunk, count = self.chain_chunk or len(z), latents_kept(self.model)
        parts = zip(theta.split(chunk), nearest.split(chunk), strict=True)
        estimate = concatenate([self.estimator.draw(part, generator, sites, count) for part, sites in parts])
        log_target = self.model.layout.log_prior(theta).detach() + log_slope + estimate.value
        return torch.nan_to_num(log_target, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf), estimate

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
        steps: iterations.
        spread_steps: of those, at the beginning.
        chains: what is tuned.
    """

    steps: int
    spread_steps: int
    chains: EmulatedChains

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> EmulatedTuning:
        """Nothing learned."""
        none = position[:0]
        anchor = self.chains.spread.mean[:1]
        step_size = position.new_tensor(_FIRST_STEP)
        empty = empty_emulator(position[0])
        return EmulatedTuning(step_size, none, none[:, 0], empty, none, anchor, self.chains.sites_at(anchor))

    def update(self, tuning: EmulatedTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> EmulatedTuning:
        """From the estimates at the positions; the step size from acceptance rates ``(C,)``."""
        gain = _ADAPTATION / math.sqrt(1 + max(0, iteration - self.spread_steps) / _SETTLING)
        tuning = tuning._replace(
            step_size=tuning.step_size * (gain * (info.acceptance_rate.mean() - _TARGET_ACCEPTANCE)).exp(),
            position=torch.cat([tuning.position, state.position]),
            log_target=torch.cat([tuning.log_target, state.log_target]),
            starts=state.position[:0],
        )
        if iteration == self.spread_steps:
            return self._begun(_learned(tuning), len(state.position), generator)
        is_due = len(tuning.position) >= _GROWTH * len(tuning.emulator.points) or iteration == self.steps
        return _learned(tuning) if iteration > self.spread_steps and is_due else tuning

    def _begun(self, tuning: EmulatedTuning, num_chains: int, generator: torch.Generator) -> EmulatedTuning:
        """With chains at points that are good, for points so spread, and anchors at the best of them."""
        weights = torch.softmax(tuning.log_target / _FLATTENED, 0)
        chosen = torch.multinomial(weights, num_chains, replacement=True, generator=generator)
        best = tuning.log_target.argsort(descending=True)[: max(1, min(_ANCHORS, len(tuning.position) // 4))]
        anchors = tuning.position[best]
        return tuning._replace(starts=tuning.position[chosen], anchors=anchors, sites=self.chains.sites_at(anchors))

    def restarts(self, iteration: int) -> bool:
        """Never: chains are where they were on any emulator."""
        return False

    def statistics(self, tuning: EmulatedTuning) -> dict[str, Tensor]:
        """The step size."""
        return {"step_size": tuning.step_size}


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
