"""Stochastic-gradient Hamiltonian Monte Carlo: noisy gradients, friction, and no Metropolis test."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.random import normal_like
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import where
from torchgpmc.types import EstimatedLogDensity, Sampler


class StochasticGradientState(NamedTuple):
    """Where the chains are, how they move, and the slope that they feel."""

    position: Tensor  # (C, D)
    log_density: Tensor  # (C,), not an estimate
    rho: Tensor  # (C, D), preconditioned momenta
    gradient: Tensor  # (C, D), an estimate


class StochasticGradientInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # 1: nothing is tested; 0 where a chain was put back
    n_steps: Tensor  # estimates of the gradient
    n_failures: Tensor  # estimates and densities that gave -inf
    temperature: Tensor  # mean of (centre - x) . gradient / D, whose expectation is 1 under the target


def stochastic_gradient_hmc(
    density: EstimatedLogDensity, *, step_size: Tensor, preconditioner: Preconditioner, friction: float, num_steps: int
) -> Sampler:
    r"""Stochastic-gradient HMC (Chen, Fox & Guestrin 2014, eq. 9, no noise estimate): Langevin's equation with noisy gradients.

    .. math:: dx = S \rho \, dt, \quad d\rho = S^T \widehat{\nabla \log p}(x) \, dt - \gamma \rho \, dt + \sqrt{2 \gamma} \, dW

    **Biased**: nothing is accepted or rejected. Steps are by the splitting of Leimkuhler & Matthews (2013, "BAOAB"), whose error in
    a normal target's variance is zero where gradients are exact; with noisy ones draws are too wide by a share that is proportional
    to the step size and to the variance of the gradient, and inverse to the friction. A chain that ends a transition where the
    density is zero is put back to where it began.

    Under the target the expectation of (centre - x) . gradient is D, wherever the centre is (Stein's identity): the average of
    ``temperature`` over draws is 1 but for the bias.

    Args:
        density: with estimates of the gradient on ``(C, D)``; the density itself is evaluated once a transition.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.
        friction: gamma, per unit of time.
        num_steps: estimates of the gradient a transition.

    Returns:
        A sampler with :class:`StochasticGradientState` and :class:`StochasticGradientInfo`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> class Normal:  # noise of standard deviation 0.1 in each slope
        ...     centre = torch.zeros(2)
        ...     def __call__(self, x):
        ...         return -0.5 * x.square().sum(-1)
        ...     def estimate(self, x, generator):
        ...         return self(x), -x + 0.1 * torch.randn(x.shape, generator=generator)
        >>> unit = tg.samplers.Preconditioner(torch.zeros(0, 0), torch.ones(2))
        >>> step_size, generator = torch.tensor(0.2), torch.Generator().manual_seed(0)
        >>> sampler = tg.samplers.stochastic_gradient_hmc(
        ...     Normal(), step_size=step_size, preconditioner=unit, friction=1.0, num_steps=50
        ... )
        >>> state, info = sampler.step(sampler.init(torch.zeros(2000, 2), generator), generator)
        >>> state.position.std(0)
        tensor([1.0..., 1.0...])
    """
    keep = torch.exp(-friction * step_size)
    fresh = (1 - keep.square()).sqrt()

    def init(position: Tensor, generator: torch.Generator) -> StochasticGradientState:
        _, gradient = density.estimate(position, generator)
        return StochasticGradientState(position, density(position), normal_like(position, generator), gradient)

    def step(state: StochasticGradientState, generator: torch.Generator) -> tuple[StochasticGradientState, StochasticGradientInfo]:
        position, _, rho, gradient = state
        n_failures, virial = torch.zeros_like(state.log_density), torch.zeros_like(state.log_density)
        for _ in range(num_steps):
            rho = rho + 0.5 * step_size * preconditioner.apply_transpose(gradient)
            position = position + 0.5 * step_size * preconditioner.apply(rho)
            rho = keep * rho + fresh * normal_like(rho, generator)
            position = position + 0.5 * step_size * preconditioner.apply(rho)
            value, gradient = density.estimate(position, generator)
            rho = rho + 0.5 * step_size * preconditioner.apply_transpose(gradient)
            n_failures = n_failures + torch.isinf(value)
            virial = virial + ((density.centre - position) * gradient).sum(-1)
        log_density = density(position)
        lost = torch.isinf(log_density)
        new = StochasticGradientState(position, log_density, rho, gradient)
        back = state._replace(rho=normal_like(rho, generator))
        info = StochasticGradientInfo(
            acceptance_rate=(~lost).to(log_density),
            n_steps=torch.full_like(log_density, float(num_steps)),
            n_failures=n_failures + lost,
            temperature=torch.where(lost, torch.nan, virial / (num_steps * position.shape[-1])),
        )
        return where(~lost, new, back), info

    return Sampler(init, step)
