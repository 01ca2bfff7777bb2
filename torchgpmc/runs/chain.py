"""The one run of Markov chains: warm-up shared by all of them, then draws from a fixed kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.runs.chain_targets import ChainTarget
from torchgpmc.storage.draws import Draw, Draws
from torchgpmc.types import COUNTS, Sampler, WarmUp


class ChainState(NamedTuple):
    """State of a run of chains."""

    iteration: int
    chain: Any  # the kernel's own state
    tuning: Any  # the warm-up's


class ChainRun(NamedTuple):
    """Chains of one kernel on one target.

    Args:
        target: what is sampled, where chains start, and how their positions become draws.
        kernel: the sampler at a tuning.
        warm_up: how the tuning is learned.
        warmup_steps: transitions before the first draw; those after ``warm_up.steps`` are burn-in of the tuned kernel.
        num_samples: draws a chain.
        thinning: transitions a draw.
    """

    target: ChainTarget
    kernel: Callable[[Any], Sampler]
    warm_up: WarmUp
    warmup_steps: int
    num_samples: int
    thinning: int

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return self.target.label

    @property
    def may_be_longer(self) -> bool:
        """Nothing before the last draw depends on their number."""
        return True

    def init(self, generator: torch.Generator) -> ChainState:
        position, covariance = self.target.start(generator)
        tuning = self.warm_up.start(position, covariance, generator)
        return ChainState(0, self.kernel(tuning).init(position, generator), tuning)

    def num_advances(self) -> int:
        return self.warmup_steps + self.num_samples

    def is_finished(self, state: ChainState) -> bool:
        """After its full length."""
        return state.iteration >= self.num_advances()

    def advance(self, state: ChainState, generator: torch.Generator) -> tuple[ChainState, Draw | None, dict[str, Tensor]]:
        iteration, chain, tuning = state.iteration + 1, state.chain, state.tuning
        warming_up = iteration <= self.warmup_steps
        sampler = self.kernel(tuning)
        infos, seen = [], chain
        for _ in range(1 if warming_up else self.thinning):
            chain, info = sampler.step(chain, generator)
            seen = chain
            if self.target.refresh is not None:
                seen = self.target.refresh(chain.position, generator)
                chain = sampler.init(seen.position, generator)
                info = info._replace(n_steps=info.n_steps + 1)
            infos.append(info)
        stats = combined(infos)
        stats |= {name: value.expand(len(chain.position)) for name, value in self.warm_up.statistics(tuning).items()}
        if not warming_up:
            draw, known = self.target.read(seen, generator)
            return ChainState(iteration, chain, tuning), draw, {**stats, **known}
        if iteration <= self.warm_up.steps:
            tuning = self.warm_up.update(tuning, iteration, chain, infos[-1], generator)
            if self.warm_up.restarts(iteration):
                chain = self.kernel(tuning).init(chain.position, generator)
        return ChainState(iteration, chain, tuning), None, stats

    def finish(self, state: ChainState, draw: Draw) -> Draws:
        said = {"biased": self.target.biased, "begun": self.target.begun}
        info = {name: words for name, words in said.items() if words is not None}
        return Draws(draw.theta, draw.whitened, draw.log_weight, info, draw.further_whitened)


def combined(infos: Sequence[Any]) -> dict[str, Tensor]:
    """Statistics of the transitions between two kept draws, from the tensors of their Infos; see :data:`torchgpmc.types.COUNTS`."""
    statistics = {}
    for name, first in infos[0]._asdict().items():
        if not isinstance(first, Tensor):
            continue
        values = torch.stack([getattr(info, name) for info in infos])
        if values.dtype == torch.bool:
            statistics[name] = values.any(0)
        else:
            statistics[name] = values.sum(0) if name in COUNTS else values.mean(0)
    return statistics
