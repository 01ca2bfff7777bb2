"""Slice sampling of one coordinate after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchgpmc.checks import check_count
from torchgpmc.methods.density_options import DensityOptions, Scope
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import joint_log_density
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.slice import slice_sampler
from torchgpmc.samplers.sweep import Block, SweepWarmUp, given_the_rest, sweep
from torchgpmc.types import Sampler, WarmUp


@dataclass(frozen=True)
class Slice(DensityOptions):
    """Component-wise slice sampling of [theta, v]; the latents' updates share one factorisation (Neal 2003).

    Args:
        max_steps_out: limit on the number of initial widths in a bracket.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the widths in place of learning one (paper E, section 4.3.1).
        normal_scale: of methods on theta alone: begin at draws from the prior and move on the scale on which it is standard normal.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GPRegression(x, torch.sin(6 * x), kernel, GaussianLikelihood().requires_grad_(False))
        >>> posterior = tg.sample(model, tg.Slice(), num_samples=300, warmup_steps=50, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape
        torch.Size([16, 300, 1, 1])
    """

    max_steps_out: int = 8

    mass_matrix: MassMatrix = field(default=MassMatrix.DIAGONAL, init=False)  # warm-up learns scales, for the widths of brackets

    def check_options(self) -> None:
        super().check_options()
        check_count("max_steps_out", self.max_steps_out)

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v], or on theta alone."""
        whole = super().prepare(model, settings)
        size, dimension = whole.target.num_hyperparameters, whole.target.dimension
        if size in (0, dimension):
            return whole
        # Bracket by bracket as on [theta, v] as a whole, but each theta that is tried is factorised once, and no v is.
        _, chains = chain_settings(settings)
        parts = JointWithPrior(joint_log_density(model))
        density = in_chunks(parts, chains, settings.chain_chunk)
        columns = range(size), range(size, dimension)
        conditionals = given_the_rest(density, columns[0]), parts.latents

        def kernel(tunings: tuple[Tuning, Tuning]) -> Sampler:
            of_theta, of_v = (lambda part, own=own: self._kernel(part, own) for own in tunings)
            first = Block(columns[0], conditionals[0], of_theta, work=1)
            return sweep(density, [first, Block(columns[1], conditionals[1], of_v)])

        return whole._replace(kernel=kernel, warm_up=SweepWarmUp(columns, (whole.warm_up, whole.warm_up)))

    def _kernel(self, density: Any, tuning: Tuning) -> Sampler:
        # Two standard deviations each way: a bracket that rarely needs to grow or to shrink far.
        return slice_sampler(density, width=4 * tuning.preconditioner.standard_deviation(), max_steps_out=self.max_steps_out)

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        return self._windows(target, steps, step_size=None, target_acceptance=None)
