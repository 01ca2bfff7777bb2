"""Methods on a log density: of [theta, v], hyperparameters and whitened latents as one position, or of theta alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.approximations.base import check_approximation
from torchgpmc.checks import check_count, check_positive
from torchgpmc.models.base import GPModel
from torchgpmc.models.joint_density import joint_log_density
from torchgpmc.runs.base import Settings, chain_settings, check_mass_matrix, in_chunks
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, joint_target, marginal_target
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation
from torchgpmc.samplers.hmc import hmc
from torchgpmc.samplers.metropolis import metropolis
from torchgpmc.samplers.nuts import nuts
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.slice import slice_sampler
from torchgpmc.samplers.sweep import Block, SweepWarmUp, given_the_rest, sweep
from torchgpmc.types import LogDensity, Sampler


def _run(
    method: Any,
    target: ChainTarget,
    settings: Settings,
    kernel: Callable[[Any], Sampler],
    *,
    step_size: float | None,
    target_acceptance: float | None,
    search_on: LogDensity | None = None,
) -> ChainRun:
    warmup, _ = chain_settings(settings)
    dense_size = method.mass_matrix.dense_size(target.num_hyperparameters, target.dimension)
    warm_up = WindowedAdaptation(warmup, method.mass_matrix, dense_size, step_size, target_acceptance, search_on)
    return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, method.thinning)


def _target(method: Any, model: GPModel, settings: Settings, whitening: Approximation | None = None) -> ChainTarget:
    check_count("thinning", method.thinning)
    check_mass_matrix(method.mass_matrix)
    for option, approximation in (("marginal", method.marginal), ("whitening", whitening)):
        if approximation is not None:
            check_approximation(option, approximation)
    if whitening is not None and (method.marginal is not None or model.is_conjugate):
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
        if model.is_conjugate:
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

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_count("max_tree_depth", self.max_tree_depth)

        target = _target(self, model, settings, self.whitening)

        def kernel(tuning: Tuning) -> Sampler:
            return nuts(
                target.density,
                step_size=tuning.step_size,
                preconditioner=tuning.preconditioner,
                max_tree_depth=self.max_tree_depth,
            )

        return _run(
            self,
            target,
            settings,
            kernel,
            step_size=self.step_size,
            target_acceptance=self.target_accept_prob if self.adapt_step_size else None,
            search_on=target.density,
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

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_count("num_steps", self.num_steps)

        target = _target(self, model, settings, self.whitening)

        def kernel(tuning: Tuning) -> Sampler:
            return hmc(
                target.density,
                step_size=tuning.step_size,
                preconditioner=tuning.preconditioner,
                num_steps=self.num_steps,
                random_length=self.random_length,
            )

        return _run(
            self,
            target,
            settings,
            kernel,
            step_size=self.step_size,
            target_acceptance=self.target_accept_prob if self.adapt_step_size else None,
            search_on=target.density,
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

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v]."""
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

        target = _target(self, model, settings)

        def kernel(tuning: Tuning) -> Sampler:
            return metropolis(target.density, step_size=tuning.step_size, preconditioner=tuning.preconditioner)

        return _run(
            self,
            target,
            settings,
            kernel,
            step_size=0.238 / max(1, target.dimension) ** 0.5,  # a tenth of Roberts, Gelman & Gilks's optimum, for a unit start
            target_acceptance=self.target_accept_prob,
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

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v]."""
        check_count("max_steps_out", self.max_steps_out)
        target = _target(self, model, settings)
        size, dimension = target.num_hyperparameters, target.dimension
        if size in (0, dimension):
            return _run(self, target, settings, partial(self._kernel, target.density), step_size=None, target_acceptance=None)
        # Bracket by bracket as on [theta, v] as a whole, but each theta that is tried is factorised once, and no v is.
        warmup, chains = chain_settings(settings)
        parts = JointWithPrior(joint_log_density(model))
        density = in_chunks(parts, chains, settings.chain_chunk)
        columns = range(size), range(size, dimension)
        conditionals = given_the_rest(density, columns[0]), parts.latents

        def kernel(tunings: tuple[Tuning, Tuning]) -> Sampler:
            kernels = [lambda part, own=own: self._kernel(part, own) for own in tunings]
            return sweep(density, [Block(*block) for block in zip(columns, conditionals, kernels, strict=True)])

        widths = WindowedAdaptation(warmup, self.mass_matrix, 0, step_size=None, target_acceptance=None)
        return ChainRun(target, kernel, SweepWarmUp(columns, (widths, widths)), warmup, settings.num_samples, self.thinning)

    def _kernel(self, density: Any, tuning: Tuning) -> Sampler:
        # Two standard deviations each way: a bracket that rarely needs to grow or to shrink far.
        return slice_sampler(density, width=4 * tuning.preconditioner.standard_deviation(), max_steps_out=self.max_steps_out)
