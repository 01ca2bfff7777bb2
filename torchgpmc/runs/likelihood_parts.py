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
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.ridges import Ridges
from torchgpmc.runs.blocks import decided_by_parameters, kept_prior
from torchgpmc.runs.part_coordinates import PartCoordinates, Parts
from torchgpmc.samplers.sweep import Block, BlockStep, Conditional, SweepState
from torchgpmc.trees import take


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
        super().__init__(self.value)

    def value(self, rows: Tensor) -> Tensor:
        """What the density is, NaN where algebra failed."""
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
        return self.parts.of(self.theta).index_put((self.chosen,), rows)

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
        return self.joint.model.layout.raw_values(self.parts.within(self.theta, rows)).by_module

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


class PartsInCoordinates(AutogradDensity):
    """:class:`PartsGivenF` as a function of rows x ``(C G, B)`` in coordinates of constant volume.

    Args:
        given: of all rows.
        coordinates: of each part.
        ridges: which z is straight along; each part's of its own parameters alone.
        chosen: as in :class:`PartsGivenF`.
    """

    def __init__(self, given: PartsGivenF, coordinates: PartCoordinates, ridges: Ridges | None, chosen: Tensor | None = None):
        self.given, self.coordinates, self.ridges, self.chosen = given, coordinates, ridges, chosen
        super().__init__(self._evaluate)

    def white(self, rows: Tensor) -> Tensor:
        """x of all rows of theta."""
        if self.ridges is not None:
            rows = self.given.parts.of(self.ridges.straight(self.given.parts.within(self.given.theta, rows)))
        return self.coordinates.white(rows)

    def original(self, white: Tensor) -> Tensor:
        """All rows of theta from x of the chosen ones."""
        if self.chosen is not None:
            white = self.white(self.given.parts.of(self.given.theta)).index_put((self.chosen,), white)
        rows = self.coordinates.straight(white)
        if self.ridges is not None:
            rows = self.given.parts.of(self.ridges.original(self.given.parts.within(self.given.theta, rows)))
        return rows

    def _evaluate(self, white: Tensor) -> Tensor:
        value = self.given.value(self.original(white))
        return value if self.chosen is None else value[self.chosen]

    def draw(self, white: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        """The value, and the payload of :class:`PartsGivenF`."""
        with torch.no_grad():
            value, payload = self.given.draw(self.original(white), generator)
        return (value, payload) if self.chosen is None else (value[self.chosen], take(payload, self.chosen))

    def select(self, rows: Tensor) -> PartsInCoordinates:
        chosen = rows if self.chosen is None else self.chosen[rows]
        return PartsInCoordinates(self.given, self.coordinates, self.ridges, chosen)


class PartsUpdate(NamedTuple):
    """The part of a sweep that moves the likelihood's parameters, given f.

    Args:
        joint: the whole density.
        parts: where its likelihood's parts are.
        kernel: from a density of ``(C G, B)`` to a sampler.
        steps: the kernel's, a sweep.
        coordinates: of each part, in which the kernel moves.
        ridges: along which these are straight, if any.
    """

    joint: JointLogDensity
    parts: Parts
    kernel: Any
    steps: int
    coordinates: PartCoordinates
    ridges: Ridges | None = None

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The kernel's steps on every part."""
        model, kept, columns = self.joint.model, state.payload, self.parts.columns
        theta, v = state.position.split([model.layout.size, model.latent_size], -1)
        with torch.no_grad():
            of_rows = PartsGivenF(self.joint, self.parts, theta, model.latents(kept.at.prior, v))
            given, rows = PartsInCoordinates(of_rows, self.coordinates, self.ridges), self.parts.of(theta)
            here = given.white(rows)
            before = (kept.log_prior.unsqueeze(-1) + of_rows.likelihoods(kept.likelihood, rows)).flatten()
        decided = None if kept.likelihood is None else self.parts.flattened(kept.likelihood)
        conditional = Conditional(given, before, payload=decided)
        step, found = Block(columns, lambda *_: conditional, self.kernel, self.steps).moved(
            conditional, here, state.log_density, generator
        )
        with torch.no_grad():  # what stays is not to be rounded: it would drift from what it decides
            stayed = (step.state.position == here).all(-1, keepdim=True)
            theta = self.parts.within(theta, torch.where(stayed, rows, given.original(step.state.position)))
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
