"""Gibbs sampling of hyperparameters and latents in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchgpmc.checks import check_count
from torchgpmc.methods.adaptive_metropolis import AdaptiveMH
from torchgpmc.methods.gradient_moves import AuxiliaryGradient
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import joint_log_density
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import check_has_hyperparameters, joint_target
from torchgpmc.runs.latent_moves import LatentMove
from torchgpmc.runs.parameterizations import Interwoven, Parameterization, ThetaBlock
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.samplers.sweep import Block, SweepWarmUp, Update, sweep
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class Gibbs:
    """Theta and the latents in turn: theta by any sampler in a parameterisation, the latents by any of their moves.

    K is factorised for each theta that is tried, and never for the latents; ``stats["n_factorizations"]`` counts. Every part has a
    warm-up of its own.

    Args:
        hyper: the sampler of theta: :class:`AdaptiveMH`, :class:`Slice`, :class:`HMC` or :class:`NUTS`.
        latent: the move of the latents: :class:`AuxiliaryGradient`, :class:`EllipticalSlice`, :class:`PCN`, or :class:`HMC` and its
            kin, on v.
        parameterization: what theta is moved given: the latents (:class:`Sufficient`), the whitened latents (:class:`Ancillary`),
            both in turn (:class:`Interwoven`), or noisy latents (:class:`Surrogate`).
        hyper_steps: of ``hyper``, a sweep.
        latent_steps: of ``latent``, a sweep.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.Gibbs(hyper=tg.Slice(), parameterization=tg.Surrogate(), latent_steps=2)
        >>> posterior = tg.sample(model, method, num_samples=300, warmup_steps=60, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape
        (torch.Size([16, 300, 1, 1]), torch.Size([16, 300, 4]))
    """

    hyper: Any = AdaptiveMH()  # noqa: RUF009  (frozen, so it may be shared)
    latent: LatentMove = AuxiliaryGradient()  # noqa: RUF009
    parameterization: Parameterization = Interwoven()  # noqa: RUF009
    hyper_steps: int = 1
    latent_steps: int = 10
    thinning: int = 1

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v].

        Raises:
            ValueError: nothing to sample, options out of range, or a model that a part cannot serve.
            TypeError: an option of the wrong kind.
        """
        self._check(model)
        warmup, chains = chain_settings(settings)
        target = joint_target(model, settings)
        joint = joint_log_density(model)
        parts = JointWithPrior(joint)
        density = in_chunks(parts, chains, settings.chain_chunk)
        size, dimension = target.num_hyperparameters, target.dimension
        hyper, latent = self.hyper.hyper_move(size, warmup), self.latent.move(model, warmup)
        conditional = parts.latents if latent.needs_prior_density else parts.latents_likelihood
        given = self.parameterization.parts

        def kernel(tunings: tuple[Any, ...]) -> Sampler:
            *of_theta, of_v = tunings
            updates: list[Update] = []
            for part, own in zip(given, of_theta, strict=True):
                tuned = partial(_at, hyper.kernel, own)
                updates.append(part.update(ThetaBlock(joint, tuned, self.hyper_steps, chains, settings.chain_chunk)))
            move = partial(_at, latent.kernel, of_v)
            first_work = latent.num_factorizations
            updates.append(Block(range(size, dimension), conditional, move, self.latent_steps, first_work=first_work))
            return sweep(density, updates)

        columns = [range(size)] * len(given) + [range(size, dimension)]
        warm_up = SweepWarmUp(columns, (hyper.warm_up,) * len(given) + (latent.warm_up,))
        return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, self.thinning)

    def _check(self, model: GPModel) -> None:
        for option in ("hyper_steps", "latent_steps", "thinning"):
            check_count(option, getattr(self, option))
        if isinstance(self.hyper, type) or not hasattr(self.hyper, "hyper_move"):
            raise TypeError(
                f"hyper is {self.hyper!r}. Expected AdaptiveMH(), Slice(), HMC() or NUTS(); a pseudo-marginal move of theta "
                f"carries its latents along, and PseudoMarginal(latent_steps=10) alone moves these too."
            )
        if isinstance(self.latent, type) or not hasattr(self.latent, "move"):
            raise TypeError(
                f"latent is {self.latent!r}. Expected AuxiliaryGradient(), EllipticalSlice() or another move of the latents."
            )
        if not isinstance(self.parameterization, Parameterization):
            raise TypeError(
                f"parameterization is {self.parameterization!r}. Expected Sufficient(), Ancillary(), Surrogate() or Interwoven()."
            )
        check_has_hyperparameters(model, "Gibbs")
        self.latent.check(model)
        self.parameterization.check(model)


def _at(kernel: Any, tuning: Any, density: Any) -> Sampler:
    """The kernel of a density, at a tuning."""
    sampler: Sampler = kernel(density, tuning)
    return sampler
