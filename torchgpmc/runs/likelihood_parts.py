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
from torchgpmc.density import AutogradDensity, mask_value
from torchgpmc.models.gp_model import GPModel, likelihood_parameters
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.runs.blocks import decided_by_parameters, kept_prior
from torchgpmc.samplers.sweep import Block, BlockStep, Conditional, SweepState
from torchgpmc.trees import mapped, take
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

    def flattened(self, tree: Any) -> Any:
        """Tensors ``(C, G, ...)`` with a row a part ``(C G, ...)``."""
        return mapped(lambda leaf: leaf.flatten(0, 1), tree)

    def unflattened(self, tree: Any) -> Any:
        """The inverse of :meth:`flattened`."""
        return mapped(lambda leaf: leaf.unflatten(0, (-1, self.num_parts)), tree)


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
        rows = self._of_all(rows)
        return self._of_chosen(self._prior_alone(rows) + self._likelihoods(rows).flatten())

    def draw(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        """The value, and what each row's parameters decide of its part's likelihood of f; ``()`` if that is little."""
        with torch.no_grad():
            rows = self._of_all(rows)
            decided = decided_by_parameters(self.joint.model, self._values(rows))
            value = self._prior_alone(rows) + self.likelihoods(decided, rows).flatten()
        payload = () if decided is None else self.parts.flattened(decided)
        return mask_value(self._of_chosen(value)), payload if self.chosen is None else take(payload, self.chosen)

    def _of_all(self, rows: Tensor) -> Tensor:
        """These rows, and the others where they are."""
        if self.chosen is None:
            return rows
        columns = slice(self.parts.columns.start, self.parts.columns.stop)
        return self.parts.rows(self.theta[:, columns]).index_put((self.chosen,), rows)

    def _of_chosen(self, value: Tensor) -> Tensor:
        return value if self.chosen is None else value[self.chosen]

    def _prior_alone(self, rows: Tensor) -> Tensor:
        """log p(theta) with one part's parameters from each row, ``(C G,)``."""
        own = torch.arange(self.parts.columns.start, self.parts.columns.stop, device=rows.device)
        own = self.parts.rows(own.unsqueeze(0)).repeat(len(self.theta), 1)
        whole = self.theta.repeat_interleave(self.parts.num_parts, 0).scatter(1, own, rows)
        return self.joint.model.layout.log_prior(whole)

    def _values(self, rows: Tensor) -> dict[str, dict[str, Tensor]]:
        """Constrained values of all parameters, these rows' among them."""
        columns = self.parts.columns
        whole = torch.cat([self.theta[:, : columns.start], self.parts.from_rows(rows), self.theta[:, columns.stop :]], -1)
        return self.joint.model.layout.raw_values(whole).by_module

    def _likelihoods(self, rows: Tensor) -> Tensor:
        values, y = likelihood_parameters(self._values(rows)["likelihood"]), self.joint.targets.values
        logs: Tensor = self.joint.model.likelihood_function(values, lambda likelihood: likelihood.log_prob_by_part(self.f, y))
        return logs

    def likelihoods(self, decided: Any, rows: Tensor) -> Tensor:
        """log p(y_g | f, parameters of g), ``(C, G)``, from what these decide, if that is at hand."""
        if decided is None:
            return self._likelihoods(rows)
        y = self.joint.targets.values
        logs: Tensor = self.joint.model.likelihood_function(
            {}, lambda likelihood: likelihood.log_prob_by_part_at(decided, self.f, y)
        )
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
            before = (kept.log_prior.unsqueeze(-1) + given.likelihoods(kept.likelihood, here)).flatten()
        decided = None if kept.likelihood is None else self.parts.flattened(kept.likelihood)
        conditional = Conditional(given, before, payload=decided)
        step, found = Block(columns, lambda *_: conditional, self.kernel, self.steps).moved(
            conditional, here, state.log_density, generator
        )
        moved = self.parts.from_rows(step.state.position)
        theta = torch.cat([theta[:, : columns.start], moved, theta[:, columns.stop :]], -1)
        values, log_prior = model.layout.raw_values_and_log_prior(theta)
        prior = kept.at.prior._replace(values=values.by_module)
        kept = kept_prior(
            model, kept.at._replace(prior=prior), log_prior, None if decided is None else self.parts.unflattened(found)
        )
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
