"""Methods on a log density: of [theta, v], hyperparameters and whitened latents as one position, or of theta alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.approximations.base import check_approximation
from torchgpmc.methods.base import Settings, chain_settings, check_count, check_mass_matrix, check_positive
from torchgpmc.methods.density_run import DensityRun
from torchgpmc.methods.sites import posterior_sites
from torchgpmc.methods.targets import Target, joint_target, marginal_target
from torchgpmc.models.base import GPModel, JointLogDensity, joint_log_density
from torchgpmc.models.regression import GPRegression
from torchgpmc.samplers.adaptation import WarmUpPlan
from torchgpmc.samplers.hmc import hmc
from torchgpmc.samplers.metropolis import metropolis
from torchgpmc.samplers.nuts import nuts
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner
from torchgpmc.samplers.slice import Block, slice_sampler
from torchgpmc.types import Sampler


def _run(
    method: Any,
    target: Target,
    settings: Settings,
    kernel: Callable[[Tensor, Preconditioner], Sampler],
    *,
    target_acceptance: float,
    step_size: float,
    adapts_step_size: bool,
    finds_step_size: bool,
) -> DensityRun:
    warmup, _ = chain_settings(settings)
    check_count("thinning", method.thinning)
    dense_size = method.mass_matrix.dense_size(target.num_hyperparameters, target.dimension)
    plan = WarmUpPlan(warmup, target_acceptance, method.mass_matrix, adapts_step_size, dense_size)
    return DensityRun(target, kernel, plan, settings.num_samples, method.thinning, step_size, finds_step_size)


def _target(method: Any, model: GPModel, settings: Settings, whitening: Approximation | None = None) -> Target:
    check_mass_matrix(method.mass_matrix)
    for option, approximation in (("marginal", method.marginal), ("whitening", whitening)):
        if approximation is not None:
            check_approximation(option, approximation)
    if whitening is not None and (method.marginal is not None or isinstance(model, GPRegression)):
        raise ValueError(
            f"whitening is {whitening!r}, and this samples theta alone, which has no latents to whiten. Expected whitening=None, "
            f"or a GP without marginal."
        )
    if method.marginal is None:
        if method.importance_weights:
            raise ValueError(
                f"importance_weights is {method.importance_weights} without a marginal: draws of [theta, v] are exact and need no "
                f"weights. Expected 0, or marginal=torchgpmc.Laplace()."
            )
        if isinstance(model, GPRegression):
            return marginal_target(model, settings, Conjugate(), 0, method.from_mode)
        if method.from_mode:
            raise ValueError(
                "from_mode=True looks for the mode of theta, and this samples [theta, v], whose joint mode is far from where "
                "the posterior lies. Expected from_mode=False, a GPRegression, or marginal=torchgpmc.Laplace()."
            )
        return joint_target(model, settings, None if whitening is None else posterior_sites(model, whitening))
    return marginal_target(model, settings, method.marginal, method.importance_weights, method.from_mode)


@dataclass(frozen=True)
class NUTS:
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
    mass_matrix: MassMatrix = MassMatrix.BLOCK
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False
    whitening: Approximation | None = None

    def prepare(self, model: GPModel, settings: Settings) -> DensityRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_count("max_tree_depth", self.max_tree_depth)

        target = _target(self, model, settings, self.whitening)

        def kernel(step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
            return nuts(target.density, step_size=step_size, preconditioner=preconditioner, max_tree_depth=self.max_tree_depth)

        return _run(
            self,
            target,
            settings,
            kernel,
            target_acceptance=self.target_accept_prob,
            step_size=self.step_size,
            adapts_step_size=self.adapt_step_size,
            finds_step_size=True,
        )


@dataclass(frozen=True)
class HMC:
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
    target_accept_prob: float = 0.8
    step_size: float = 0.1
    adapt_step_size: bool = True
    mass_matrix: MassMatrix = MassMatrix.BLOCK
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False
    whitening: Approximation | None = None

    def prepare(self, model: GPModel, settings: Settings) -> DensityRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_count("num_steps", self.num_steps)

        target = _target(self, model, settings, self.whitening)

        def kernel(step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
            return hmc(
                target.density,
                step_size=step_size,
                preconditioner=preconditioner,
                num_steps=self.num_steps,
                random_length=self.random_length,
            )

        return _run(
            self,
            target,
            settings,
            kernel,
            target_acceptance=self.target_accept_prob,
            step_size=self.step_size,
            adapts_step_size=self.adapt_step_size,
            finds_step_size=True,
        )


@dataclass(frozen=True)
class AdaptiveMH:
    """Adaptive Metropolis on [theta, v] (Haario, Saksman & Tamminen 2001), frozen after warm-up.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the proposal's scale to.
        mass_matrix: which covariances of the proposal warm-up estimates.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the proposal in place of learning one (paper E, section 4.3.1).

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
    mass_matrix: MassMatrix = MassMatrix.DENSE
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False

    def prepare(self, model: GPModel, settings: Settings) -> DensityRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

        target = _target(self, model, settings)

        def kernel(step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
            return metropolis(target.density, step_size=step_size, preconditioner=preconditioner)

        return _run(
            self,
            target,
            settings,
            kernel,
            target_acceptance=self.target_accept_prob,
            step_size=0.238 / max(1, target.dimension) ** 0.5,  # a tenth of Roberts, Gelman & Gilks's optimum, for a unit start
            adapts_step_size=True,
            finds_step_size=False,
        )


@dataclass(frozen=True)
class Slice:
    """Component-wise slice sampling of [theta, v]; the latents' updates share one factorisation (Neal 2003).

    Args:
        max_steps_out: limit on the number of initial widths in a bracket.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the widths in place of learning one (paper E, section 4.3.1).

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
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False

    @property
    def mass_matrix(self) -> MassMatrix:
        """Warm-up learns each coordinate's scale, for the width of its bracket."""
        return MassMatrix.DIAGONAL

    def prepare(self, model: GPModel, settings: Settings) -> DensityRun:
        """A run on [theta, v]."""
        check_count("max_steps_out", self.max_steps_out)
        target = _target(self, model, settings)
        size = target.num_hyperparameters
        blocks = [Block(range(size), lambda _: target.density)]
        if target.dimension > size:
            blocks.append(Block(range(size, target.dimension), _latents_given_theta(joint_log_density(model), settings)))

        def kernel(_: Tensor, preconditioner: Preconditioner) -> Sampler:
            return slice_sampler(
                target.density,
                # Two standard deviations each way: a bracket that rarely needs to grow or to shrink far.
                width=4 * preconditioner.standard_deviation(),
                max_steps_out=self.max_steps_out,
                blocks=blocks,
            )

        return _run(
            self,
            target,
            settings,
            kernel,
            target_acceptance=0.5,
            step_size=1.0,
            adapts_step_size=False,
            finds_step_size=False,
        )


def _latents_given_theta(joint: JointLogDensity, settings: Settings) -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    """The joint density as a function of v alone, p(f | theta) being worked out once, ``chain_chunk`` chains at a time."""
    model, size = joint.model, joint.model.layout.size
    _, chains = chain_settings(settings)
    parts = [(rows, joint.select(rows).targets) for rows in torch.arange(chains).split(settings.chain_chunk or chains)]

    def conditional(position: Tensor) -> Callable[[Tensor], Tensor]:
        with torch.no_grad():
            priors = [model.prior(position[rows, :size]) for rows, _ in parts]

        def log_density(moved: Tensor) -> Tensor:
            v = moved[:, size:]
            with torch.no_grad():
                found = [model.log_likelihood(prior, v[rows], y) for prior, (rows, y) in zip(priors, parts, strict=True)]
                value = torch.cat(found) - 0.5 * v.square().sum(-1)
            return torch.where(torch.isfinite(value), value, -torch.inf)

        return log_density

    return conditional
