"""Preconditioned Crank-Nicolson proposals of the latents."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.approximations import Approximation
from torchgpmc.checks import check_positive
from torchgpmc.methods.latent_options import LatentOptions, step_size_alone
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.white_moves import white_move
from torchgpmc.samplers.pcn import pcn

_OF_PRIOR, _WHITE = 0.25, 0.8  # acceptance to aim at


@dataclass(frozen=True)
class PCN(LatentOptions):
    """Metropolis on the latents whose proposals leave their prior invariant (Cotter et al. 2013; Neal 1999), step size tuned.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the step size to; by default 0.25, with ``whitening`` 0.8: there
            proposals may be taken more often than a lower target asks for however far they go, and those that keep nothing of where
            they come from leave chains in the tails for thousands of steps.
        whitening: :class:`Laplace` or :class:`EP`, whose posterior at the mode of theta takes the prior's place in the proposals;
            steps are large where it is near the posterior. For likelihoods of one latent function that factorise over data.
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

    target_accept_prob: float | None = None
    whitening: Approximation | None = None
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Every model will do; without ``whitening``."""
        if self.target_accept_prob is not None:
            check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The step size is tuned."""
        target = self.target_accept_prob or (_OF_PRIOR if self.whitening is None else _WHITE)
        warm_up = step_size_alone(warmup_steps, target)
        return white_move(model, self.whitening, lambda density, tuning: pcn(density, step_size=tuning.step_size), warm_up)
