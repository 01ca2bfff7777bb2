"""Methods on the whitened latents v at fixed hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.draws import Draw, Draws
from torchgpmc.methods.base import Settings, chain_settings, check_count
from torchgpmc.models.base import GPModel
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.types import Sampler

_LOG_2PI = math.log(2 * math.pi)


class LatentState(NamedTuple):
    """State of a run on v."""

    iteration: int
    chain: EllipticalSliceState


class LatentRun(NamedTuple):
    """Draws of v from a kernel that needs no tuning; warm-up steps are burn-in."""

    sampler: Sampler
    latent_size: int
    like: Tensor
    warmup_steps: int
    num_samples: int
    num_chains: int
    thinning: int

    @property
    def target(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior"

    def init(self, generator: torch.Generator) -> LatentState:
        shape = (self.num_chains, self.latent_size)
        v = torch.randn(shape, dtype=self.like.dtype, device=self.like.device, generator=generator)
        return LatentState(0, self.sampler.init(v, generator))

    def num_advances(self) -> int:
        return self.warmup_steps + self.num_samples

    def advance(self, state: LatentState, generator: torch.Generator) -> tuple[LatentState, Draw | None, dict[str, Tensor]]:
        iteration, chain = state.iteration + 1, state.chain
        warming_up = iteration <= self.warmup_steps
        infos = []
        for _ in range(1 if warming_up else self.thinning):
            chain, info = self.sampler.step(chain, generator)
            infos.append(info)
        v = chain.position
        stats = {
            "lp": chain.log_density - 0.5 * v.square().sum(-1) - 0.5 * _LOG_2PI * v.shape[-1],
            "acceptance_rate": torch.stack([info.acceptance_rate for info in infos]).mean(0),
            "n_steps": torch.stack([info.n_steps for info in infos]).sum(0),
            "n_failures": torch.stack([info.n_failures for info in infos]).sum(0),
        }
        draw = None if warming_up else Draw(v.new_zeros(self.num_chains, 1, 0), v[:, None])
        return LatentState(iteration, chain), draw, stats

    def is_finished(self, state: LatentState) -> bool:
        """Runs its full length."""
        return False

    def finish(self, state: LatentState, draw: Draw) -> Draws:
        return Draws(draw.theta, draw.whitened, None)


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

    def prepare(self, model: GPModel, settings: Settings) -> LatentRun:
        """A run on v; K(X, X) is factorised once."""
        check_count("thinning", self.thinning)
        if model.layout.size:
            raise ValueError(
                f"EllipticalSlice samples latents alone, but {model.layout.names} have priors. Expected every hyperparameter "
                f"fixed; fix them with .requires_grad_(False), alternate the two with Gibbs, or sample both together with NUTS()."
            )
        warmup, chains = chain_settings(settings)
        with torch.no_grad():
            at = model.at_data(model.layout.raw_values(model.train_x.new_zeros(1, 0)))
        if not bool(at.prior.ok.all()):
            raise ValueError(
                f"the covariance at the fixed hyperparameters could not be factorised. Expected it to be positive definite; "
                f"raise jitter (now {model.jitter:g})."
            )
        chunk = chains if settings.chain_chunk is None else settings.chain_chunk

        def log_likelihood(v: Tensor) -> Tensor:
            parts = []
            for start in range(0, len(v), chunk):
                rows = slice(start, start + chunk)
                parts.append(model.log_likelihood(at, v[rows], model.targets.select(rows)))
            value = torch.cat(parts)
            return torch.where(torch.isfinite(value), value, -torch.inf)

        sampler = elliptical_slice(log_likelihood)
        return LatentRun(sampler, model.latent_size, model.train_x, warmup, settings.num_samples, chains, self.thinning)
