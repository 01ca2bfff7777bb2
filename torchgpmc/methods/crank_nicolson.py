"""Preconditioned Crank-Nicolson proposals of the latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgpmc.checks import check_positive
from torchgpmc.methods.latent_options import LatentOptions, step_size_alone
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.latent_moves import Move
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.pcn import pcn
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class PCN(LatentOptions):
    """Metropolis on the latents whose proposals leave their prior invariant (Cotter et al. 2013; Neal 1999), step size tuned.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the step size to.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3
        >>> posterior = tg.sample(model, tg.PCN(thinning=3), num_samples=1000, warmup_steps=200, num_chains=8, progress=False)
        >>> posterior.latents.shape
        torch.Size([8, 1000, 4])
    """

    target_accept_prob: float = 0.25
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Every model will do."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The step size is tuned."""

        def kernel(density: Any, tuning: Tuning) -> Sampler:
            return pcn(density, step_size=tuning.step_size)

        return Move(kernel, step_size_alone(warmup_steps, self.target_accept_prob))
