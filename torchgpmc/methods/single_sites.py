"""Gibbs sampling of the latents, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.methods.latent_options import LatentOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_values
from torchgpmc.models.remedies import what_moves
from torchgpmc.models.targets import Targets
from torchgpmc.runs.blocks import sees_f_alone
from torchgpmc.runs.latent_moves import Move
from torchgpmc.samplers.adaptation import BurnIn
from torchgpmc.samplers.gibbs_like import SiteUpdates, by_normals, by_slices, gibbs_like
from torchgpmc.samplers.regions import local_regions
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class GibbsLike(LatentOptions):
    """The latents one after another, each given all others (Neal 1997; Diggle et al. 1998; paper C, section 1.4.1).

    From p(f_n | f_rest, y_n): exactly where that is normal, else by a slice. Where f is smooth beside the spacing of its inputs a
    latent hardly moves given its neighbours: this is what other methods are compared with.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        exact: ``False`` proposes from p(f_n | f_rest) and accepts by the likelihood ratio, for any likelihood: the paper's
            Gibbs-like algorithm.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.1
        >>> posterior = tg.sample(model, tg.GibbsLike(thinning=2), num_samples=150, warmup_steps=50, num_chains=64, progress=False)
        >>> posterior.latents.shape
        torch.Size([64, 150, 4])
    """

    exact: bool = True
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Exact draws need f at the data among the latents, and the likelihood's own product over them."""
        if self.exact and not (sees_f_alone(model) and model.has_latents_at_data and model.factorises):
            raise ValueError(
                f"GibbsLike draws each latent given the others and its own datum, and {type(model.likelihood).__name__} of "
                f"{type(model).__name__} is not a product over its latents. Expected a model of f at the data, such as "
                f"torchgpmc.GP, with a likelihood that factorises over data; use "
                f"{what_moves(model, 'GibbsLike(exact=False)', 'EllipticalSlice()')}."
            )

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """Nothing is tuned."""

        def kernel(density: Any, tuning: Any) -> Sampler:
            prior: LatentPrior = density.kept.at.prior
            if not self.exact:
                singles = torch.arange(prior.mean.shape[-1], device=prior.mean.device)
                return local_regions(density, factor=prior.factor, labels=singles)
            updates = site_updates(density.joint.model, prior, density.joint.targets)
            return gibbs_like(density, factor=prior.factor, mean=prior.mean, updates=updates)

        return Move(kernel, BurnIn())


def site_updates(model: GPModel, prior: LatentPrior, targets: Targets) -> SiteUpdates:
    """Draws of each latent given the others and its datum, under the likelihood's parameters at C settings."""
    values = likelihood_values(prior)
    if as_likelihood(model.likelihood).has_normal_sites:
        origin = torch.zeros_like(prior.mean)
        slopes = model.likelihood_function(values, lambda likelihood: likelihood.derivatives(origin, targets.values))
        return by_normals(-slopes.second, slopes.first)

    def pointwise(f: Tensor) -> Tensor:
        at_boundary = f.squeeze(1) if f.shape[1] == 1 else f.mT
        with torch.no_grad():
            value: Tensor = model.likelihood_function(
                values, lambda likelihood: likelihood.pointwise_log_prob(at_boundary, targets.values)
            )
        return value

    return by_slices(pointwise)
