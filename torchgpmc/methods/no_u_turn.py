"""The no-U-turn sampler."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.checks import check_count
from torchgpmc.methods.gradient_options import GradientOptions
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.nuts import nuts
from torchgpmc.types import LogDensity, Sampler

_ROUGH_DEPTH = 6  # a step size far too small is found by trees of 63 gradients, not of a thousand


@dataclass(frozen=True)
class NUTS(GradientOptions):
    """The no-U-turn sampler on [theta, v], chains in lock-step (see :func:`torchgpmc.samplers.nuts`).

    With ``marginal``, on theta alone under an approximate evidence: fast, and labelled approximate in ``posterior.info["target"]``.

    Args:
        max_tree_depth: at most ``2 ** max_tree_depth - 1`` gradients a transition; in the first steps of warm-up, while a step size
            that is far off is put right, at most 63.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.NUTS(), num_samples=500, warmup_steps=100, num_chains=8, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.info["target"]
        (torch.Size([8, 500, 1, 1]), 'the exact posterior')
    """

    max_tree_depth: int = 10

    def check_options(self) -> None:
        super().check_options()
        check_count("max_tree_depth", self.max_tree_depth)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        depth = min(self.max_tree_depth, _ROUGH_DEPTH) if tuning.is_rough else self.max_tree_depth
        return nuts(density, step_size=tuning.step_size, preconditioner=tuning.preconditioner, max_tree_depth=depth)
