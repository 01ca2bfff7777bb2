"""Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.checks import check_count
from torchgpmc.methods.gradient_options import GradientOptions
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.hmc import hmc
from torchgpmc.types import LogDensity, Sampler


@dataclass(frozen=True)
class HMC(GradientOptions):
    """Hamiltonian Monte Carlo on [theta, v] (see :func:`torchgpmc.samplers.hmc`).

    Args:
        num_steps: leapfrog steps a trajectory.
        random_length: draw the number of steps uniformly from 1 to ``num_steps`` at each transition.
        target_accept_prob: mean acceptance that warm-up steers the step size to.
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
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GPRegression(x, torch.sin(6 * x), kernel, GaussianLikelihood().requires_grad_(False))
        >>> method = tg.HMC(num_steps=3, from_mode=True)  # on theta alone, since p(y | theta) is known
        >>> posterior = tg.sample(model, method, num_samples=500, warmup_steps=100, num_chains=8, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape
        (torch.Size([8, 500, 1, 1]), torch.Size([8, 500, 8]))
    """

    num_steps: int = 16
    random_length: bool = True

    def check_options(self) -> None:
        super().check_options()
        check_count("num_steps", self.num_steps)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        return hmc(
            density,
            step_size=tuning.step_size,
            preconditioner=tuning.preconditioner,
            num_steps=self.num_steps,
            random_length=self.random_length,
        )
