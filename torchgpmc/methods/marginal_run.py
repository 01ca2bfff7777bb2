"""Runs on theta with the latents integrated out by unbiased estimates of p(y | theta)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.draws import Draw, Draws
from torchgpmc.evidence import LatentEstimate, LatentEstimator
from torchgpmc.methods.modes import start_at_mode
from torchgpmc.methods.targets import log_standard_normal, starting_thetas
from torchgpmc.models.base import GPModel
from torchgpmc.parameters import Layout
from torchgpmc.samplers.adaptation import WarmUp, WarmUpPlan
from torchgpmc.samplers.metropolis import MetropolisState, metropolis
from torchgpmc.samplers.pseudo_marginal import PseudoMarginalState
from torchgpmc.types import LogDensity, Sampler


class Anchors(NamedTuple):
    """Approximations at some thetas, frozen after tuning: others start from the nearest, a function of theta alone."""

    theta: Tensor  # (A, P)
    start: Tensor  # (A, ...)
    ready: Tensor  # (), whether they have been set


class MarginalDensity(NamedTuple):
    """p(theta, y) through unbiased estimates; what the pseudo-marginal samplers take."""

    layout: Layout
    estimator: LatentEstimator
    anchors: Anchors
    own_anchor: bool  # whether chain c may use anchor c alone, because every chain has data of its own
    num_latent_steps: int

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate."""
        return self.estimator.auxiliary_size

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Log of p(theta) times an estimate of p(y | theta) from fresh random numbers."""
        return self._with_prior(position, self.estimator.draw(position, generator, self._start(position)))

    def evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, LatentEstimate]:
        """The same as a function of standard normals."""
        return self._with_prior(position, self.estimator.evaluate(position, auxiliary, self._start(position)))

    def move(self, position: Tensor, payload: LatentEstimate, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Elliptical slice steps on the kept latent draw."""
        return self._with_prior(position, self.estimator.move(position, payload, self.num_latent_steps, generator))

    def work(self, payload: LatentEstimate) -> Tensor:
        """Factorisations an estimate took."""
        return payload.num_factorizations

    def select(self, rows: Tensor) -> MarginalDensity:
        """The same for some of the chains."""
        anchors = self.anchors
        if self.own_anchor:
            anchors = Anchors(anchors.theta[rows], anchors.start[rows], anchors.ready)
        return self._replace(estimator=self.estimator.select(rows), anchors=anchors)

    def _with_prior(self, theta: Tensor, estimate: LatentEstimate) -> tuple[Tensor, LatentEstimate]:
        return self.layout.log_prior(theta).detach() + estimate.value, estimate

    def _start(self, theta: Tensor) -> Tensor | None:
        if not bool(self.anchors.ready):
            return None
        if self.own_anchor:
            return self.anchors.start
        return self.anchors.start[torch.cdist(theta, self.anchors.theta).argmin(-1)]


class MarginalState(NamedTuple):
    """State of a pseudo-marginal run. While it is tuned, ``chain.log_density`` is the approximate density."""

    iteration: int
    chain: PseudoMarginalState
    warm_up: WarmUp
    anchors: Anchors


class MarginalRun(NamedTuple):
    """Tuning on the approximate marginal likelihood (paper A, section 4.4), then draws from the exact kernel."""

    model: GPModel
    approximate: LogDensity
    density: MarginalDensity
    kernel: Callable[[MarginalDensity, WarmUp], Sampler]
    plan: WarmUpPlan  # of the tuning alone
    warmup_steps: int
    num_samples: int
    num_chains: int
    thinning: int
    modes_of: ApproximateMarginal | None  # where to look for the mode to start from; None: start from the prior

    @property
    def target(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior"

    def init(self, generator: torch.Generator) -> MarginalState:
        found = None if self.modes_of is None else start_at_mode(self.modes_of, self.num_chains, generator)
        theta, covariance = found or (starting_thetas(self.model, self.approximate, self.num_chains, generator), None)
        warm_up = self.plan.start(0.238 / theta.shape[1] ** 0.5, theta, covariance)
        anchors = self._anchors(theta, ready=False)
        chain = self._sampler(warm_up, anchors).init(theta, generator)
        if self.plan.steps:
            chain = chain._replace(log_density=self.approximate(theta))
        return MarginalState(0, chain, warm_up, anchors)

    def _sampler(self, warm_up: WarmUp, anchors: Anchors) -> Sampler:
        return self.kernel(self.density._replace(anchors=anchors), warm_up)

    def _anchors(self, theta: Tensor, *, ready: bool) -> Anchors:
        """One anchor a chain: what its approximation at ``theta`` leaves to start from."""
        start = self.density.estimator.start_at(theta)
        usable = ready and bool(torch.isfinite(start).all())
        return Anchors(theta, torch.nan_to_num(start), torch.tensor(usable, device=theta.device))

    def num_advances(self) -> int:
        return self.warmup_steps + self.num_samples

    def advance(self, state: MarginalState, generator: torch.Generator) -> tuple[MarginalState, Draw | None, dict[str, Tensor]]:
        iteration = state.iteration + 1
        if iteration <= self.plan.steps:
            return self._tune(state, iteration, generator)
        chain, sampler = state.chain, self._sampler(state.warm_up, state.anchors)
        infos = []
        for _ in range(1 if iteration <= self.warmup_steps else self.thinning):
            chain, info = sampler.step(chain, generator)
            infos.append(info)
        estimate: LatentEstimate = chain.payload
        stats = {
            "lp": chain.log_density - estimate.value + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "acceptance_rate": torch.stack([info.acceptance_rate for info in infos]).mean(0),
            "step_size": state.warm_up.step_size.expand(self.num_chains),
            "n_steps": torch.stack([info.n_steps for info in infos]).sum(0),
            "n_failures": torch.stack([info.n_failures for info in infos]).sum(0),
            "n_factorizations": torch.stack([info.n_factorizations for info in infos]).sum(0),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "approximation_converged": estimate.converged,
        }
        draw = None
        if iteration > self.warmup_steps:
            draw = Draw(chain.position[:, None], estimate.whitened[:, None])
        return MarginalState(iteration, chain, state.warm_up, state.anchors), draw, stats

    def _tune(
        self, state: MarginalState, iteration: int, generator: torch.Generator
    ) -> tuple[MarginalState, None, dict[str, Tensor]]:
        """Adaptive Metropolis on the approximate density; its last step hands over to the estimate."""
        warm_up = state.warm_up
        kernel = metropolis(self.approximate, step_size=warm_up.step_size, preconditioner=warm_up.preconditioner)
        moved, info = kernel.step(MetropolisState(state.chain.position, state.chain.log_density), generator)
        stats = {**info._asdict(), "step_size": warm_up.step_size.expand(self.num_chains)}
        warm_up = self.plan.update(warm_up, iteration, moved.position, info.acceptance_rate)
        anchors = state.anchors
        chain = state.chain._replace(position=moved.position, log_density=moved.log_density)
        if iteration == self.plan.steps:
            anchors = self._anchors(moved.position, ready=True)
            chain = self._sampler(warm_up, anchors).init(moved.position, generator)
        return MarginalState(iteration, chain, warm_up, anchors), None, stats

    def is_finished(self, state: MarginalState) -> bool:
        """Runs its full length."""
        return False

    def finish(self, state: MarginalState, draw: Draw) -> Draws:
        return Draws(draw.theta, draw.whitened, None)
