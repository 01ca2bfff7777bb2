"""Probit GP classification by orthant integrals: exact latents at fixed hyperparameters, weighted draws over sampled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import check_count, warn
from torchgpmc.evidence import Orthant, exact_latents
from torchgpmc.evidence.orthants import check_probit
from torchgpmc.methods.importance import AMIS, MAMIS
from torchgpmc.models.base import GPModel
from torchgpmc.runs.base import Run, Settings, refuse_chain_options
from torchgpmc.special import log_standard_normal
from torchgpmc.storage.draws import Draw, Draws


class LatentsState(NamedTuple):
    """State of a run at fixed hyperparameters."""

    iteration: int
    exact: bool
    acceptance_rate: float


class LatentsRun(NamedTuple):
    """All draws in one advance: they are independent."""

    model: GPModel
    num_samples: int
    evidence: Orthant

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior"

    def init(self, generator: torch.Generator) -> LatentsState:
        return LatentsState(0, True, 1.0)

    def num_advances(self) -> int:
        return 1

    def is_finished(self, state: LatentsState) -> bool:
        """After its one advance."""
        return state.iteration == 1

    def advance(self, state: LatentsState, generator: torch.Generator) -> tuple[LatentsState, Draw, dict[str, Tensor]]:
        theta = self.model.train_x.new_zeros(1, 0)
        found = exact_latents(self.model, theta, self.num_samples, generator)
        exact, rate = bool(found.exact), float(found.acceptance_rate)
        if not exact:
            warn(
                f"only {rate:.1g} of the proposals would be accepted, too few for exact draws: these are weighted. Use them with "
                f"their log_weights, or sample with EllipticalSlice().",
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
        return LatentsState(1, exact, rate), draw, stats

    def finish(self, state: LatentsState, draw: Draw) -> Draws:
        with torch.no_grad():
            prior = self.model.prior(self.model.train_x.new_zeros(1, 0))
            value = float(self.evidence.evidence(self.model, prior).log_evidence)
        return Draws(draw.theta, draw.whitened, draw.log_weight, {"log_evidence": value})


@dataclass(frozen=True)
class OrthantGPC:
    """Probit GP classification through the ratio of orthant integrals (paper B).

    With every hyperparameter fixed: independent, exact draws of the latents, by truncated normals (weighted where acceptance falls
    below 1e-4). With hyperparameters to sample: weighted draws by :class:`AMIS`, the orthant integral being the evidence.

    Args:
        num_points: points an integral; at fixed hyperparameters of ``posterior.info["log_evidence"]`` alone.
        proposals: how hyperparameters are proposed.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.OrthantGPC(num_points=16), num_samples=3000, progress=False)
        >>> posterior.predict(torch.tensor([0.1, 0.9])).probs > 0.5
        tensor([False,  True])
    """

    num_points: int = 256
    proposals: AMIS | MAMIS = AMIS()  # noqa: RUF009  (frozen, so it may be shared)

    def prepare(self, model: GPModel, settings: Settings) -> Run:
        """A run on the latents, or on theta.

        Raises:
            ValueError: not a probit GP, options out of range, or ``warmup_steps`` or ``num_chains`` given.
        """
        check_probit(model, "OrthantGPC")
        if not isinstance(self.proposals, AMIS | MAMIS):
            raise TypeError(f"proposals is {self.proposals!r}. Expected torchgpmc.AMIS() or torchgpmc.MAMIS().")
        check_count("num_points", self.num_points, 8)
        if model.layout.size:
            return replace(self.proposals, evidence=Orthant(self.num_points)).prepare(model, settings)
        refuse_chain_options("OrthantGPC", settings)
        if model.targets.one_a_chain:
            raise ValueError(
                "the model has several data sets and OrthantGPC samples one posterior. Expected train_y of shape (N,)."
            )
        return LatentsRun(model, settings.num_samples, Orthant(self.num_points))
