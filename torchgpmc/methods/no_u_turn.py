"""The no-U-turn sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgpmc.approximations import Approximation
from torchgpmc.checks import check_count, check_positive
from torchgpmc.methods.density_options import DensityOptions
from torchgpmc.models.base import GPModel
from torchgpmc.runs.base import Settings
from torchgpmc.runs.chain import ChainRun
from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation
from torchgpmc.samplers.nuts import nuts
from torchgpmc.types import LogDensity, Sampler


@dataclass(frozen=True)
class NUTS(DensityOptions):
    """The no-U-turn sampler on [theta, v], chains in lock-step (see :func:`torchgpmc.samplers.nuts`).

    With ``marginal``, on theta alone under an approximate evidence: fast, and labelled approximate in ``posterior.info["target"]``.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the step size to; raise it if transitions diverge.
        max_tree_depth: at most ``2 ** max_tree_depth - 1`` gradients a transition.
        step_size: where the search for a step size begins; kept if ``adapt_step_size`` is false.
        adapt_step_size: whether warm-up tunes the step size.
        mass_matrix: which covariances warm-up estimates.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the mass matrix in place of learning one (paper E, section 4.3.1).
        whitening: :class:`Laplace` or :class:`EP` to sample [theta, w], w being white under the posterior of the latents that this
            approximation's sites give (see :mod:`torchgpmc.models.whitening`): the same posterior from far fewer gradients, each at
            one and a half to three times the cost (Murray & Adams 2010). For one latent function; of a SparseGP, Laplace alone.
            ``None`` samples [theta, v], v being white under the prior.

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

    target_accept_prob: float = 0.8
    max_tree_depth: int = 10
    step_size: float = 0.1
    adapt_step_size: bool = True
    whitening: Approximation | None = None

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v]."""
        self._check()
        target = self._target(model, settings, self.whitening)
        return self._run(target, settings, search_on=target.density)

    def _check(self) -> None:
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_count("max_tree_depth", self.max_tree_depth)

    def _kernel(self, density: Any, tuning: Tuning) -> Sampler:
        return nuts(
            density,
            step_size=tuning.step_size,
            preconditioner=tuning.preconditioner,
            max_tree_depth=self.max_tree_depth,
        )

    def _adaptation(
        self, warmup: int, num_hyperparameters: int, dimension: int, search_on: LogDensity | None = None
    ) -> WindowedAdaptation:
        dense_size = self.mass_matrix.dense_size(num_hyperparameters, dimension)
        target_acceptance = self.target_accept_prob if self.adapt_step_size else None
        return WindowedAdaptation(warmup, self.mass_matrix, dense_size, self.step_size, target_acceptance, search_on)
