"""Methods on the whitened latents v at fixed hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.checks import check_count
from torchgpmc.models.base import GPModel
from torchgpmc.runs.base import Settings, chain_settings
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import latent_target
from torchgpmc.samplers.adaptation import BurnIn
from torchgpmc.samplers.elliptical_slice import elliptical_slice


@dataclass(frozen=True)
class EllipticalSlice:
    """Elliptical slice sampling of the latents at fixed hyperparameters (Murray, Adams & MacKay 2010); nothing to tune.

    Every hyperparameter must be fixed with ``requires_grad_(False)``.

    Args:
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

    thinning: int = 1

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on v; K(X, X) is factorised once."""
        check_count("thinning", self.thinning)
        if model.layout.size:
            raise ValueError(
                f"EllipticalSlice samples latents alone, but {model.layout.names} have priors. Expected every hyperparameter "
                f"fixed; fix them with .requires_grad_(False), or sample both together with NUTS()."
            )
        warmup, _ = chain_settings(settings)
        target = latent_target(model, settings)
        sampler = elliptical_slice(target.density)
        return ChainRun(target, lambda _: sampler, BurnIn(), warmup, settings.num_samples, self.thinning)
