"""Runs of a sampler on a log density: warm-up shared by all chains, then draws from a fixed kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.draws import Draw, Draws
from torchgpmc.methods.targets import Target
from torchgpmc.samplers.adaptation import WarmUp, WarmUpPlan
from torchgpmc.samplers.hmc import HMCState, reasonable_step_size
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.types import Sampler


class DensityState(NamedTuple):
    """State of a run on a log density."""

    iteration: int
    chain: Any  # the sampler's own state
    warm_up: WarmUp


class DensityRun(NamedTuple):
    """Warm-up shared by all chains, then draws from a fixed kernel."""

    target_: Target
    kernel: Callable[[Tensor, Preconditioner], Sampler]  # from step size and preconditioner
    plan: WarmUpPlan
    num_samples: int
    thinning: int
    step_size: float
    finds_step_size: bool  # whether to search for the scale of the step size by single leapfrog steps

    @property
    def target(self) -> str:
        """What the draws are draws of."""
        return self.target_.label

    def _sampler(self, warm_up: WarmUp) -> Sampler:
        return self.kernel(warm_up.step_size, warm_up.preconditioner)

    def init(self, generator: torch.Generator) -> DensityState:
        position, covariance = self.target_.start(generator)
        warm_up = self.plan.start(self.step_size, position, covariance)
        chain = self._sampler(warm_up).init(position, generator)
        return DensityState(0, chain, self._search_step_size(warm_up, chain, generator))

    def _search_step_size(self, warm_up: WarmUp, chain: Any, generator: torch.Generator) -> WarmUp:
        step_size = warm_up.step_size
        if self.finds_step_size and self.plan.adapt_step_size and self.plan.steps > 0:
            assert isinstance(chain, HMCState)  # finds_step_size is set by the gradient methods alone
            step_size = reasonable_step_size(self.target_.density, warm_up.preconditioner, chain, step_size, generator)
        return self.plan.restart_step_size(warm_up, step_size)

    def num_advances(self) -> int:
        return self.plan.steps + self.num_samples

    def advance(self, state: DensityState, generator: torch.Generator) -> tuple[DensityState, Draw | None, dict[str, Tensor]]:
        iteration, chain, warm_up = state.iteration + 1, state.chain, state.warm_up
        warming_up = iteration <= self.plan.steps
        sampler = self._sampler(warm_up)
        infos = []
        for _ in range(1 if warming_up else self.thinning):
            chain, info = sampler.step(chain, generator)
            infos.append(info)
        stats = {"lp": chain.log_density, **_combine(infos)}
        if self.plan.adapt_step_size or self.finds_step_size:
            stats["step_size"] = warm_up.step_size.expand(len(chain.position))
        draw = None
        if warming_up:
            warm_up = self.plan.update(warm_up, iteration, chain.position, infos[-1].acceptance_rate)
            if self.plan.renews_mass_matrix(state.warm_up, iteration) and iteration < self.plan.steps:
                warm_up = self._search_step_size(warm_up, chain, generator)
        else:
            draw, known = self.target_.read(chain.position, chain.log_density, generator)
            stats |= known
        return DensityState(iteration, chain, warm_up), draw, stats

    def is_finished(self, state: DensityState) -> bool:
        """Runs its full length."""
        return False

    def finish(self, state: DensityState, draw: Draw) -> Draws:
        return Draws(draw.theta, draw.whitened, draw.log_weight)


def _combine(infos: list[Any]) -> dict[str, Tensor]:
    """Statistics of the transitions between two kept draws: counts add up, flags join, the rest is averaged."""
    combined = {}
    for name in infos[0]._fields:
        values = torch.stack([getattr(info, name) for info in infos])
        if values.dtype == torch.bool:
            combined[name] = values.any(0)
        else:
            combined[name] = values.sum(0) if name in ("n_steps", "n_failures") else values.mean(0)
    return combined
