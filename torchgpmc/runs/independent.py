"""The run of independent, exact draws of the latents at fixed hyperparameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import warn
from torchgpmc.evidence import Orthant, exact_latents
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.storage.draws import Draw, Draws


class IndependentState(NamedTuple):
    """State of a run at fixed hyperparameters."""

    iteration: int
    exact: bool
    acceptance_rate: float


class IndependentRun(NamedTuple):
    """All draws in one advance: they are independent."""

    model: GPModel
    num_samples: int
    evidence: Orthant

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior"

    @property
    def may_be_longer(self) -> bool:
        """All are drawn at once."""
        return False

    def init(self, generator: torch.Generator) -> IndependentState:
        return IndependentState(0, True, 1.0)

    def num_advances(self) -> int:
        return 1

    def is_finished(self, state: IndependentState) -> bool:
        """After its one advance."""
        return state.iteration == 1

    def advance(self, state: IndependentState, generator: torch.Generator) -> tuple[IndependentState, Draw, dict[str, Tensor]]:
        theta = self.model.train_x.new_zeros(1, 0)
        found = exact_latents(self.model, theta, self.num_samples, generator)
        exact, rate = bool(found.exact), float(found.acceptance_rate)
        if not exact:
            warn(
                f"only {rate:.1g} of the proposals would be accepted, too few for exact draws: these are weighted. Use them with "
                f"their log_weights, or sample with EllipticalSlice()."
            )
        with torch.no_grad():
            prior = self.model.prior(theta.expand(len(found.whitened), -1))
            log_likelihood = self.model.log_likelihood(self.model.at(prior), found.whitened)
        stats = {
            "lp": (log_likelihood + log_standard_normal(found.whitened))[None],
            "acceptance_rate": torch.full_like(log_likelihood, rate)[None],
            "n_failures": torch.zeros_like(log_likelihood)[None],
        }
        draw = Draw(theta.expand(self.num_samples, 0)[None], found.whitened[None], None if exact else found.log_weight[None])
        return IndependentState(1, exact, rate), draw, stats

    def finish(self, state: IndependentState, draw: Draw) -> Draws:
        with torch.no_grad():
            prior = self.model.prior(self.model.train_x.new_zeros(1, 0))
            value = float(self.evidence.evidence(self.model, prior).log_evidence)
        return Draws(draw.theta, draw.whitened, draw.log_weight, {"log_evidence": value})
