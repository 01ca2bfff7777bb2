"""Metropolis-Hastings on regions of the latent function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgpmc.checks import check_count, check_positive
from torchgpmc.methods.latent_options import LatentOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.remedies import what_moves
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.partition import Partition, Refinement
from torchgpmc.samplers.regions import local_regions
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class LocalRegions(LatentOptions):
    """Metropolis-Hastings region by region, values proposed from their prior given all others (paper C, section 1.4.2).

    Warm-up splits regions by k-means on their inputs until each accepts as often as is asked for; all chains share them, and they
    are frozen before the first kept draw. Values near a border move little: where neighbours are strongly correlated
    :class:`ControlVariables` or :class:`EllipticalSlice` mix faster.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        num_regions: to begin with.
        target_accept_prob: regions that accept less often are split.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3
        >>> method = tg.LocalRegions(thinning=6)
        >>> posterior = tg.sample(model, method, num_samples=150, warmup_steps=50, num_chains=64, progress=False)
        >>> posterior.latents.shape
        torch.Size([64, 150, 4])
    """

    num_regions: int = 1
    target_accept_prob: float = 0.25
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Refuses one latent, and more regions than latents."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_count("num_regions", self.num_regions)
        count = len(model.latent_inputs)
        if count == 1:
            raise ValueError(
                f"LocalRegions parts the latents into regions, and this model has one of them. Expected at least two; "
                f"use {what_moves(model, 'EllipticalSlice()')}."
            )
        if self.num_regions > count:
            raise ValueError(f"num_regions is {self.num_regions} and there are {count} latents. Expected at most {count}.")

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The regions are tuned."""

        def kernel(density: Any, tuning: Partition) -> Sampler:
            return local_regions(density, factor=density.kept.at.prior.factor, labels=tuning.labels)

        return Move(kernel, Refinement(warmup_steps, model.latent_inputs, self.num_regions, self.target_accept_prob))
