"""Metropolis-Hastings on the latent function through control variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import check_positive
from torchgpmc.kept_rows import KeptRows
from torchgpmc.methods.latent_options import LatentOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.runs.control_inputs import ControlSearch, ControlTuning, prior_of_controls
from torchgpmc.runs.latent_moves import Move
from torchgpmc.samplers.control_variables import ControlPrior, control_variables
from torchgpmc.trees import take
from torchgpmc.types import Sampler


class ControlsAtInfo(NamedTuple):
    """The kernel's Info, and the hyperparameters that the next control variables are to serve."""

    acceptance_rate: Tensor
    n_steps: Tensor
    n_failures: Tensor
    values: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class ControlVariables(LatentOptions):
    """Metropolis-Hastings on the latent function as a whole, through control variables (Titsias, Lawrence & Rattray 2009; paper C).

    Control variables are function values at a few inputs X_c of their own. Each in turn is proposed from its prior given the
    others, and with it the whole function from its prior given them all; the likelihood ratio decides. Warm-up puts X_c where least
    of the prior variance is left, adds to them until that is little enough, and goes on adding while too few proposals are
    accepted; all chains share them, and they are frozen before the first kept draw.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        explained: share of the prior variance of the latents that control variables are to explain, below 1.
        target_accept_prob: while the mean acceptance is below it (below half of it with ``all_at_once``), control variables are
            added.
        underrelaxation: from 0 to 1, share of the present deviation from the conditional prior's mean that a proposal keeps: larger
            ones make smaller moves, accepted more often with fewer control variables (the paper's section 1.5 leaves it open).
        all_at_once: propose all control variables by a random walk with their prior's covariance, its step size tuned, and the
            prior's ratio in the acceptance probability (eq. 1.15), in place of one after another from their conditional priors.
            A step is then one evaluation of the likelihood; on hundreds of labels, with an ``underrelaxation`` of 0.95 and 20 steps
            a draw, this mixed several times as fast.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 12), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3
        >>> method = tg.ControlVariables(thinning=3)
        >>> posterior = tg.sample(model, method, num_samples=150, warmup_steps=50, num_chains=64, progress=False)
        >>> posterior.latents.shape, posterior.stats["num_controls"][0, 0]
        (torch.Size([64, 150, 12]), tensor(3., dtype=torch.float64))
    """

    explained: float = 0.95
    target_accept_prob: float = 0.25
    underrelaxation: float = 0.0
    all_at_once: bool = False
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Every model will do."""
        check_positive("explained", self.explained, 0.0, 1.0)
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        if self.underrelaxation != 0:
            check_positive("underrelaxation", self.underrelaxation, 0.0, 1.0)

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The control variables' inputs are tuned, and a walk's step size."""
        kept = _Kept(model)

        def kernel(density: Any, tuning: ControlTuning) -> Sampler:
            prior: LatentPrior = density.kept.at.prior
            sampler = control_variables(
                density,
                prior=kept(prior, tuning.inputs),
                underrelaxation=self.underrelaxation,
                walk=tuning.step_size if self.all_at_once else None,
            )

            def step(state: Any, generator: torch.Generator) -> tuple[Any, ControlsAtInfo]:
                state, info = sampler.step(state, generator)
                return state, ControlsAtInfo(info.acceptance_rate, info.n_steps, info.n_failures, prior.values)

            return Sampler(sampler.init, step)

        search = ControlSearch(warmup_steps, model, self.explained, self.target_accept_prob, self.all_at_once)
        return Move(kernel, search)


class _Kept:
    """The prior of latents and control variables, worked out anew for chains whose theta moved, and for all with new inputs."""

    def __init__(self, model: GPModel):
        self.model = model
        self.inputs: Tensor | None = None

    def __call__(self, prior: LatentPrior, inputs: Tensor) -> ControlPrior:
        if self.inputs is not inputs:
            self.inputs, self.rows = inputs, KeptRows()
        found: ControlPrior = self.rows(prior.factor, lambda rows: prior_of_controls(self.model, take(prior, rows), inputs))
        return found
