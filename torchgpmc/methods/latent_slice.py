"""Elliptical slice sampling of the latents."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.approximations import Approximation
from torchgpmc.methods.latent_options import LatentOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.white_moves import white_move
from torchgpmc.samplers.adaptation import BurnIn
from torchgpmc.samplers.elliptical_slice import elliptical_slice


@dataclass(frozen=True)
class EllipticalSlice(LatentOptions):
    """Elliptical slice sampling of the latents (Murray, Adams & MacKay 2010); nothing to tune.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        whitening: :class:`Laplace` or :class:`EP`, whose posterior at the mode of theta takes the prior's place: ellipses that are
            about as wide as the posterior, so that the first angle is taken more often. For likelihoods of one latent function that
            factorise over data.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3
        >>> posterior = tg.sample(model, tg.EllipticalSlice(), num_samples=1000, warmup_steps=100, num_chains=8, progress=False)
        >>> posterior.latents.shape
        torch.Size([8, 1000, 4])
    """

    whitening: Approximation | None = None
    thinning: int = 1

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """Nothing is tuned."""
        return white_move(model, self.whitening, lambda density, _: elliptical_slice(density), BurnIn())
