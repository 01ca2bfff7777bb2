"""Likelihood parameters that belong to parts, such as the genes of ``Transcription``: each part a block of its own, in one batch.

Given f, a likelihood with parts is a product over them, and each part's parameters are in its own factor alone. So a sweep may move
all parts at once, each accepted or not on its own account: C chains of G parts are C G independent rows, which any sampler takes.
f stays where it is, and nothing is factorised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.density import AutogradDensity
from torchgpmc.models.gp_model import GPModel, likelihood_parameters
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.runs.blocks import KeptPrior
from torchgpmc.samplers.sweep import Block, BlockStep, Conditional, SweepState
from torchgpmc.types import WarmUp


class Parts(NamedTuple):
    """Where the parameters of parts are in theta: B of each of G parts, one parameter of all parts after another."""

    columns: range
    num_parts: int

    @property
    def size(self) -> int:
        """B."""
        return len(self.columns) // self.num_parts

    def rows(self, columns: Tensor) -> Tensor:
        """From ``(C, B G)``, as theta has them, a row a part ``(C G, B)``."""
        return columns.reshape(len(columns), self.size, self.num_parts).mT.reshape(-1, self.size)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        return rows.view(-1, self.num_parts, self.size).mT.flatten(1)


def parts_of(model: GPModel) -> Parts | None:
    """The parts of the model's likelihood; ``None`` where there are none, or none that are independent a priori."""
    count = as_likelihood(model.likelihood).num_parts
    entries = [entry for entry in model.layout.entries if entry.raw_name.startswith("likelihood.")]
    # Priors with a closed form are products over elements; of others one cannot know.
    if count < 2 or not entries or any(entry.shape != (count,) or entry.prior.closed_form is None for entry in entries):
        return None
    return Parts(model.layout.columns("likelihood"), count)


class PartsGivenF(AutogradDensity):
    """The joint log density as a function of each part's parameters ``(C G, B)``, all others where they are; up to constants.

    ``chosen`` are the rows it is asked for, if not all.
    """

    def __init__(self, joint: JointLogDensity, parts: Parts, theta: Tensor, f: Tensor, chosen: Tensor | None = None):
        self.joint, self.parts, self.theta, self.f, self.chosen = joint, parts, theta, f, chosen
        super().__init__(self._evaluate)

    def _evaluate(self, rows: Tensor) -> Tensor:
        columns = slice(self.parts.columns.start, self.parts.columns.stop)
        if self.chosen is not None:
            rows = self.parts.rows(self.theta[:, columns]).index_put((self.chosen,), rows)
        value = self._prior_alone(rows) + self.likelihoods(rows).flatten()
        return value if self.chosen is None else value[self.chosen]

    def _prior_alone(self, rows: Tensor) -> Tensor:
        """log p(theta) with one part's parameters from each row, ``(C G,)``."""
        own = torch.arange(self.parts.columns.start, self.parts.columns.stop, device=rows.device)
        own = self.parts.rows(own.unsqueeze(0)).repeat(len(self.theta), 1)
        whole = self.theta.repeat_interleave(self.parts.num_parts, 0).scatter(1, own, rows)
        return self.joint.model.layout.log_prior(whole)

    def likelihoods(self, rows: Tensor) -> Tensor:
        """log p(y_g | f, parameters of g), ``(C, G)``."""
        columns = self.parts.columns
        whole = torch.cat([self.theta[:, : columns.start], self.parts.from_rows(rows), self.theta[:, columns.stop :]], -1)
        model, y = self.joint.model, self.joint.targets.values
        values = likelihood_parameters(model.layout.raw_values(whole).by_module["likelihood"])
        logs: Tensor = model.likelihood_function(values, lambda likelihood: likelihood.log_prob_by_part(self.f, y))
        return logs

    def select(self, rows: Tensor) -> PartsGivenF:
        chosen = rows if self.chosen is None else self.chosen[rows]
        return PartsGivenF(self.joint, self.parts, self.theta, self.f, chosen)


class PartsUpdate(NamedTuple):
    """The part of a sweep that moves the likelihood's parameters, given f.

    Args:
        joint: the whole density.
        parts: where its likelihood's parts are.
        kernel: from a density of ``(C G, B)`` to a sampler.
        steps: the kernel's, a sweep.
    """

    joint: JointLogDensity
    parts: Parts
    kernel: Any
    steps: int

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The kernel's steps on every part."""
        model, kept, columns = self.joint.model, state.payload, self.parts.columns
        theta, v = state.position.split([model.layout.size, model.latent_size], -1)
        with torch.no_grad():
            given = PartsGivenF(self.joint, self.parts, theta, model.latents(kept.at.prior, v))
            here = self.parts.rows(theta[:, columns.start : columns.stop])
            before = (kept.log_prior.unsqueeze(-1) + given.likelihoods(here)).flatten()
        conditional = Conditional(given, before)
        step, _ = Block(columns, lambda *_: conditional, self.kernel, self.steps).moved(
            conditional, here, state.log_density, generator
        )
        moved = self.parts.from_rows(step.state.position)
        theta = torch.cat([theta[:, : columns.start], moved, theta[:, columns.stop :]], -1)
        values, log_prior = model.layout.raw_values_and_log_prior(theta)
        prior = kept.at.prior._replace(values=values.by_module)
        kept = KeptPrior(torch.where(prior.ok, log_prior, torch.nan), kept.at._replace(prior=prior))
        position = torch.cat([theta, v], -1)
        info = step.info._replace(
            acceptance_rate=self._of_chains(step.info.acceptance_rate).mean(-1),
            n_steps=self._of_chains(step.info.n_steps).mean(-1),
            n_failures=self._of_chains(step.info.n_failures).sum(-1),
        )
        # A row's density is the joint one as a function of its part: what a part gains, the joint density does.
        log_density = state.log_density + self._of_chains(step.state.log_density - before).sum(-1)
        return SweepState(position, log_density, kept), BlockStep(step.state, info, torch.zeros_like(log_density))

    def _of_chains(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.parts.num_parts)


class PartsWarmUp(NamedTuple):
    """The warm-up of one tuning for all parts."""

    inner: WarmUp
    parts: Parts

    @property
    def steps(self) -> int:
        """The inner one's."""
        return self.inner.steps

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Any:
        """From a row a part."""
        return self.inner.start(self.parts.rows(position), None, generator)

    def update(self, tuning: Any, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Any:
        """The inner one's: the states it gets are rows."""
        return self.inner.update(tuning, iteration, state, info, generator)

    def restarts(self, iteration: int) -> bool:
        """The inner one's."""
        return self.inner.restarts(iteration)

    def statistics(self, tuning: Any) -> dict[str, Tensor]:
        """None: blocks would share names."""
        return {}
