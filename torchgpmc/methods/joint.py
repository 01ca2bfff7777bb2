"""Methods on a log density: of [theta, v], hyperparameters and whitened latents as one position, or of theta alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.draws import Draw, Draws
from torchgpmc.methods.base import Settings, chain_settings, check_count, check_positive
from torchgpmc.methods.sites import posterior_sites
from torchgpmc.methods.targets import Target, joint_target, marginal_target
from torchgpmc.models.base import GPModel, JointLogDensity, joint_log_density
from torchgpmc.models.regression import GPRegression
from torchgpmc.samplers.adaptation import WarmUp, WarmUpPlan
from torchgpmc.samplers.hmc import HMCState, hmc, reasonable_step_size
from torchgpmc.samplers.metropolis import metropolis
from torchgpmc.samplers.nuts import nuts
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner
from torchgpmc.samplers.slice import Block, slice_sampler
from torchgpmc.types import Sampler


class JointState(NamedTuple):
    """State of a run on a log density."""

    iteration: int
    chain: Any  # the sampler's own state
    warm_up: WarmUp


class JointRun(NamedTuple):
    """Warm-up shared by all chains, then draws from a fixed kernel."""

    target_: Target
    kernel: Callable[[Tensor, Preconditioner], Sampler]  # from step size and preconditioner
    plan: WarmUpPlan
    num_samples: int
    thinning: int
    step_size: float
    finds_step_size: bool  # whether to search for the scale of the step size by single leapfrog steps

    @property
    def target(self) -> str:
        """What the draws are draws of."""
        return self.target_.label

    def _sampler(self, warm_up: WarmUp) -> Sampler:
        return self.kernel(warm_up.step_size, warm_up.preconditioner)

    def init(self, generator: torch.Generator) -> JointState:
        position, covariance = self.target_.start(generator)
        warm_up = self.plan.start(self.step_size, position, covariance)
        chain = self._sampler(warm_up).init(position, generator)
        return JointState(0, chain, self._search_step_size(warm_up, chain, generator))

    def _search_step_size(self, warm_up: WarmUp, chain: Any, generator: torch.Generator) -> WarmUp:
        step_size = warm_up.step_size
        if self.finds_step_size and self.plan.adapt_step_size and self.plan.steps > 0:
            assert isinstance(chain, HMCState)  # finds_step_size is set by the gradient methods alone
            step_size = reasonable_step_size(self.target_.density, warm_up.preconditioner, chain, step_size, generator)
        return self.plan.restart_step_size(warm_up, step_size)

    def num_advances(self) -> int:
        return self.plan.steps + self.num_samples

    def advance(self, state: JointState, generator: torch.Generator) -> tuple[JointState, Draw | None, dict[str, Tensor]]:
        iteration, chain, warm_up = state.iteration + 1, state.chain, state.warm_up
        warming_up = iteration <= self.plan.steps
        sampler = self._sampler(warm_up)
        infos = []
        for _ in range(1 if warming_up else self.thinning):
            chain, info = sampler.step(chain, generator)
            infos.append(info)
        stats = {"lp": chain.log_density, **_combine(infos)}
        if self.plan.adapt_step_size or self.finds_step_size:
            stats["step_size"] = warm_up.step_size.expand(len(chain.position))
        draw = None
        if warming_up:
            warm_up = self.plan.update(warm_up, iteration, chain.position, infos[-1].acceptance_rate)
            if self.plan.renews_mass_matrix(state.warm_up, iteration) and iteration < self.plan.steps:
                warm_up = self._search_step_size(warm_up, chain, generator)
        else:
            draw, known = self.target_.read(chain.position, chain.log_density, generator)
            stats |= known
        return JointState(iteration, chain, warm_up), draw, stats

    def is_finished(self, state: JointState) -> bool:
        """Runs its full length."""
        return False

    def finish(self, state: JointState, draw: Draw) -> Draws:
        return Draws(draw.theta, draw.whitened, draw.log_weight)


def _combine(infos: list[Any]) -> dict[str, Tensor]:
    """Statistics of the transitions between two kept draws: counts add up, flags join, the rest is averaged."""
    combined = {}
    for name in infos[0]._fields:
        values = torch.stack([getattr(info, name) for info in infos])
        if values.dtype == torch.bool:
            combined[name] = values.any(0)
        else:
            combined[name] = values.sum(0) if name in ("n_steps", "n_failures") else values.mean(0)
    return combined


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
) -> JointRun:
    warmup, _ = chain_settings(settings)
    check_count("thinning", method.thinning)
    dense_size = method.mass_matrix.dense_size(target.num_hyperparameters, target.dimension)
    plan = WarmUpPlan(warmup, target_acceptance, method.mass_matrix, adapts_step_size, dense_size)
    return JointRun(target, kernel, plan, settings.num_samples, method.thinning, step_size, finds_step_size)


def _target(method: Any, model: GPModel, settings: Settings, whitening: Approximation | None = None) -> Target:
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

    def prepare(self, model: GPModel, settings: Settings) -> JointRun:
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

    def prepare(self, model: GPModel, settings: Settings) -> JointRun:
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
    """

    target_accept_prob: float = 0.25
    mass_matrix: MassMatrix = MassMatrix.DENSE
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False

    def prepare(self, model: GPModel, settings: Settings) -> JointRun:
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

    def prepare(self, model: GPModel, settings: Settings) -> JointRun:
        """A run on [theta, v]."""
        check_count("max_steps_out", self.max_steps_out)
        target = _target(self, model, settings)
        size = target.num_hyperparameters
        blocks = [Block(range(size), lambda _: target.density)]
        if target.dimension > size:
            blocks.append(Block(range(size, target.dimension), _latents_given_theta(joint_log_density(model))))

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


def _latents_given_theta(joint: JointLogDensity) -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    """The joint density as a function of v alone, p(f | theta) being worked out once."""
    model, size = joint.model, joint.model.layout.size

    def conditional(position: Tensor) -> Callable[[Tensor], Tensor]:
        with torch.no_grad():
            prior = model.prior(position[:, :size])

        def log_density(moved: Tensor) -> Tensor:
            v = moved[:, size:]
            with torch.no_grad():
                value = model.log_likelihood(prior, v, joint.targets) - 0.5 * v.square().sum(-1)
            return torch.where(torch.isfinite(value), value, -torch.inf)

        return log_density

    return conditional
