"""Hamiltonian Monte Carlo on C chains at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import FollowedDensity
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import where
from torchgpmc.types import LogDensity, Sampler

# An energy error beyond this means the integrator has left the level set (Betancourt 2017, section 6.2).
DIVERGENCE_THRESHOLD = 1000.0


class HMCState(NamedTuple):
    """Position ``(C, D)`` with its log density ``(C,)`` and gradient ``(C, D)``."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class HMCInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # mean acceptance probability along the trajectory (NUTS), or at its end (HMC)
    diverging: Tensor
    energy: Tensor  # Hamiltonian at the new position and the momentum drawn at the start
    n_steps: Tensor  # gradient evaluations
    n_failures: Tensor  # evaluations that gave -inf
    tree_depth: Tensor  # doublings (NUTS); 0 for HMC


def init_hmc(density: LogDensity, position: Tensor) -> HMCState:
    """The state at ``position``, one gradient evaluation."""
    return HMCState(position, *density.value_and_grad(position))


def kinetic_energy(rho: Tensor) -> Tensor:
    """|rho|^2 / 2 of preconditioned momenta ``(C, D)``: ``(C,)``."""
    return 0.5 * rho.square().sum(-1)


def leapfrog(
    density: LogDensity, preconditioner: Preconditioner, step_size: Tensor, state: HMCState, rho: Tensor
) -> tuple[HMCState, Tensor]:
    """One leapfrog step of every chain (Neal 2011, eqs 2.28-2.30) with preconditioned momentum.

    Args:
        density: its gradient is evaluated once.
        preconditioner: S, see :class:`Preconditioner`.
        step_size: ``()`` or ``(C, 1)``, negative to go back in time.
        state: where the chains are.
        rho: their momenta ``(C, D)``.
    """
    rho = rho + 0.5 * step_size * preconditioner.apply_transpose(state.gradient)
    position = state.position + step_size * preconditioner.apply(rho)
    log_density, gradient = density.value_and_grad(position)
    rho = rho + 0.5 * step_size * preconditioner.apply_transpose(gradient)
    return HMCState(position, log_density, gradient), rho


def hmc(
    density: LogDensity,
    *,
    step_size: Tensor,
    preconditioner: Preconditioner,
    num_steps: int,
    random_length: bool = False,
    least_steps: int = 1,
    followed: LogDensity | None = None,
) -> Sampler:
    """Hamiltonian Monte Carlo (Neal 2011): a trajectory of leapfrog steps, then a Metropolis test.

    Args:
        density: target on ``(C, D)``.
        step_size: ``()``.
        preconditioner: see :class:`Preconditioner`.
        num_steps: leapfrog steps a trajectory, L.
        random_length: draw the number of steps uniformly from ``least_steps``..L at each transition (one number for all chains),
            which breaks the resonance of a fixed length with the target's periods.
        least_steps: of those.
        followed: another density, near ``density``, whose gradients trajectories follow in place of its own; the test is of
            ``density``, which is sampled exactly whatever they follow.

    Returns:
        A sampler with :class:`HMCState` and :class:`HMCInfo`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> density, generator = tg.joint_log_density(model), torch.Generator().manual_seed(0)
        >>> unit = tg.samplers.Preconditioner(torch.zeros(0, 0), torch.ones(9))  # one hyperparameter, eight latents
        >>> sampler = tg.samplers.hmc(density, step_size=torch.tensor(0.2), preconditioner=unit, num_steps=10)
        >>> state, info = sampler.step(sampler.init(torch.zeros(4, 9).double(), generator), generator)
        >>> state.position.shape, bool(info.diverging.any())
        (torch.Size([4, 9]), False)
    """

    def init(position: Tensor, generator: torch.Generator) -> HMCState:
        return init_hmc(density if followed is None else FollowedDensity(density, followed), position)

    def step(state: HMCState, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
        length = num_steps
        if random_length:
            # Drawn on the generator's own device; one synchronisation a transition.
            length = int(torch.randint(least_steps, num_steps + 1, (), generator=generator, device=generator.device))
        if followed is None:
            return transition(density, preconditioner, step_size, length, state, generator)[:2]
        return transition(followed, preconditioner, step_size, length, state, generator, value=density)[:2]

    return Sampler(init, step)


def transition(
    density: LogDensity,
    preconditioner: Preconditioner,
    step_size: Tensor,
    num_steps: int,
    state: HMCState,
    generator: torch.Generator,
    value: Callable[[Tensor], Tensor] | None = None,
) -> tuple[HMCState, HMCInfo, HMCState, Tensor]:
    """Fresh momenta, ``num_steps`` leapfrog steps, a Metropolis test: the new state, its info, the proposal, its momenta.

    Where ``density`` is only near the one to sample from, ``value`` is that one, whose value ``state`` has: trajectories are
    reversible, and keep volumes, whatever function of position is their gradient.
    """
    rho = normal_like(state.position, generator)
    log_u = log_uniform(state.log_density.shape, state.log_density, generator)
    return transition_given(density, preconditioner, step_size, num_steps, state, rho, log_u, value)


def transition_given(
    density: LogDensity,
    preconditioner: Preconditioner,
    step_size: Tensor,
    num_steps: int,
    state: HMCState,
    rho: Tensor,
    log_u: Tensor,
    value: Callable[[Tensor], Tensor] | None = None,
) -> tuple[HMCState, HMCInfo, HMCState, Tensor]:
    """:func:`transition` at momenta ``(C, D)`` and logs of uniform numbers ``(C,)``: of any chains alone, as of all."""
    energy = kinetic_energy(rho) - state.log_density
    end, end_rho, n_failures = _trajectory(density, preconditioner, step_size, state, rho, num_steps)
    if value is not None:
        end = end._replace(log_density=value(end.position))
    end_energy = kinetic_energy(end_rho) - end.log_density
    log_ratio = torch.nan_to_num(energy - end_energy, nan=-torch.inf)
    accepted = log_u < log_ratio
    info = HMCInfo(
        acceptance_rate=log_ratio.clamp_max(0.0).exp(),
        diverging=log_ratio < -DIVERGENCE_THRESHOLD,
        energy=torch.where(accepted, end_energy, energy),
        n_steps=torch.full_like(energy, float(num_steps)),
        n_failures=n_failures,
        tree_depth=torch.zeros_like(energy),
    )
    return where(accepted, end, state), info, end, end_rho


def _trajectory(
    density: LogDensity, preconditioner: Preconditioner, step_size: Tensor, state: HMCState, rho: Tensor, length: int
) -> tuple[HMCState, Tensor, Tensor]:
    """``length`` leapfrog steps, the half kicks between two steps joined into one."""
    position, log_density, gradient = state
    n_failures = torch.zeros_like(log_density)
    rho = rho + 0.5 * step_size * preconditioner.apply_transpose(gradient)
    for index in range(length):
        position = position + step_size * preconditioner.apply(rho)
        log_density, gradient = density.value_and_grad(position)
        n_failures = n_failures + torch.isinf(log_density)
        kick = step_size if index < length - 1 else 0.5 * step_size
        rho = rho + kick * preconditioner.apply_transpose(gradient)
    return HMCState(position, log_density, gradient), rho, n_failures


def reasonable_step_size(
    density: LogDensity, preconditioner: Preconditioner, state: HMCState, step_size: Tensor, generator: torch.Generator
) -> Tensor:
    """A step size whose single leapfrog step is accepted with probability near 0.8, averaged over chains.

    Doubles or halves ``step_size`` ``()`` until the mean acceptance crosses 0.8 (after Hoffman & Gelman 2014, algorithm 4).
    """
    rho = normal_like(state.position, generator)
    energy = kinetic_energy(rho) - state.log_density
    direction = 0.0
    for _ in range(60):
        end, end_rho = leapfrog(density, preconditioner, step_size, state, rho)
        log_ratio = torch.nan_to_num(energy - kinetic_energy(end_rho) + end.log_density, nan=-torch.inf)
        wanted = 1.0 if float(log_ratio.clamp_max(0.0).exp().mean()) > 0.8 else -1.0
        if direction not in (0.0, wanted):
            break
        direction = wanted
        step_size = step_size * 2.0**direction
    return step_size
