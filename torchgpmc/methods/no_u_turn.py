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
        target_accept_prob: mean acceptance that warm-up steers the step size to; raise it if transitions diverge.
        step_size: where the search for a step size begins; kept if ``adapt_step_size`` is false.
        adapt_step_size: whether warm-up tunes the step size.
        mass_matrix: which covariances warm-up estimates.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them. Exact for a
            :class:`SparseGP` with Gaussian noise, whichever it is.
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

    max_tree_depth: int = 10

    def check_options(self) -> None:
        super().check_options()
        check_count("max_tree_depth", self.max_tree_depth)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        depth = min(self.max_tree_depth, _ROUGH_DEPTH) if tuning.is_rough else self.max_tree_depth
        return nuts(
            density,
            step_size=tuning.step_size,
            preconditioner=tuning.preconditioner,
            max_tree_depth=depth,
        )
