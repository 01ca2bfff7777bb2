"""Adaptive Metropolis."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchgpmc.checks import check_positive
from torchgpmc.methods.density_options import DensityOptions, Scope
from torchgpmc.runs.chain_targets import ChainTarget
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.metropolis import metropolis
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.types import LogDensity, Sampler, WarmUp


@dataclass(frozen=True)
class AdaptiveMH(DensityOptions):
    """Adaptive Metropolis on [theta, v] (Haario, Saksman & Tamminen 2001), frozen after warm-up.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the proposal's scale to.
        mass_matrix: which covariances of the proposal warm-up estimates.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the proposal in place of learning one (paper E, section 4.3.1).
        normal_scale: of methods on theta alone: begin at draws from the prior and move on the scale on which it is standard normal.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GPRegression(x, torch.sin(6 * x), kernel, GaussianLikelihood().requires_grad_(False))
        >>> posterior = tg.sample(model, tg.AdaptiveMH(), num_samples=1500, warmup_steps=200, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape
        torch.Size([16, 1500, 1, 1])
    """

    target_accept_prob: float = 0.25
    mass_matrix: MassMatrix = field(default=MassMatrix.DENSE, kw_only=True)

    def check_options(self) -> None:
        super().check_options()
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        return metropolis(density, step_size=tuning.step_size, preconditioner=tuning.preconditioner)

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        # A tenth of Roberts, Gelman & Gilks's optimum, for a unit start.
        first = 0.238 / max(1, target.dimension) ** 0.5
        return self._windows(target, steps, step_size=first, target_acceptance=self.target_accept_prob)
