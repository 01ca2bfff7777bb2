"""Hamiltonian Monte Carlo of many chains with a learned trajectory length."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchgpmc.checks import check_count, warn
from torchgpmc.methods.density_options import Scope
from torchgpmc.methods.gradient_options import GradientOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget
from torchgpmc.runs.run import Settings, chain_settings
from torchgpmc.samplers.chees import ChEESAdaptation, ChEESTuning, chees
from torchgpmc.types import LogDensity, Sampler, WarmUp

_MANY_CHAINS = 64
_FEWEST_CHAINS = 8


@dataclass(frozen=True)
class ChEES(GradientOptions):
    """ChEES-HMC on [theta, v] (Hoffman, Radul & Sountsov 2021; see :func:`torchgpmc.samplers.chees`).

    Every chain takes the same number of leapfrog steps a transition, so none waits for another, and warm-up learns from all of them
    at once: for many chains, 64 unless ``num_chains`` says otherwise, and few draws of each.

    Args:
        max_steps: at most this many gradients a transition.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.ChEES(), num_samples=500, warmup_steps=200, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, len(posterior.stats["trajectory_length"].unique())
        (torch.Size([16, 500, 1, 1]), 1)
    """

    max_steps: int = 1000
    target_accept_prob: float = field(default=0.651, kw_only=True)

    def check_options(self) -> None:
        super().check_options()
        check_count("max_steps", self.max_steps)

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v], or on theta alone."""
        if settings.num_chains is None and not model.targets.one_a_chain:
            settings = settings._replace(num_chains=_MANY_CHAINS)
        return super().prepare(model, settings)

    def run_on(self, target: ChainTarget, settings: Settings) -> ChainRun:
        _, chains = chain_settings(settings)
        if chains < _FEWEST_CHAINS:
            warn(
                f"ChEES learns the trajectory length from how its chains spread, and {chains} of them say little: draws stay "
                f"exact, but may mix slowly. Use num_chains={_MANY_CHAINS}, at least {_FEWEST_CHAINS}, or NUTS() for a few chains."
            )
        return super().run_on(target, settings)

    def _kernel(self, density: LogDensity, tuning: ChEESTuning) -> Sampler:
        return chees(
            density,
            step_size=tuning.adaptation.step_size,
            preconditioner=tuning.adaptation.preconditioner,
            trajectory_length=tuning.trajectory.log_length.exp(),
            max_steps=tuning.max_steps,
        )

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        return ChEESAdaptation(self._windows_on_gradients(target, steps), self.max_steps)
