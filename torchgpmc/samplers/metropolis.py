"""Random-walk Metropolis on C chains at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.random import log_uniform, normal_like
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.types import LogDensity, Sampler


class MetropolisState(NamedTuple):
    """Position ``(C, D)`` and its log density ``(C,)``."""

    position: Tensor
    log_density: Tensor


class MetropolisInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # min(1, density ratio)
    n_steps: Tensor  # density evaluations
    n_failures: Tensor  # evaluations that gave -inf


def metropolis(density: LogDensity, *, step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
    """Metropolis with proposals x + step_size S z, z standard normal and S S' the (adapted) covariance.

    With S learned in warm-up this is the adaptive Metropolis of Haario, Saksman & Tamminen (2001), frozen for the draws.

    Args:
        density: target on ``(C, D)``.
        step_size: ``()``; 2.38 / sqrt(D) is right for a normal target whose covariance is S S'.
        preconditioner: see :class:`Preconditioner`.

    Returns:
        A sampler with :class:`MetropolisState` and :class:`MetropolisInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import Preconditioner, metropolis
        >>> generator = torch.Generator().manual_seed(0)
        >>> unit = Preconditioner(torch.zeros(0, 0), torch.ones(2))  # S = I
        >>> sampler = metropolis(lambda x: -x.exp().sum(-1), step_size=torch.tensor(1.0), preconditioner=unit)
        >>> state = sampler.init(torch.zeros(5, 2), generator)  # five chains
        >>> state, info = sampler.step(state, generator)
        >>> state.position.shape, info.n_steps
        (torch.Size([5, 2]), tensor([1., 1., 1., 1., 1.]))
    """

    def init(position: Tensor, generator: torch.Generator) -> MetropolisState:
        return MetropolisState(position, density(position))

    def step(state: MetropolisState, generator: torch.Generator) -> tuple[MetropolisState, MetropolisInfo]:
        noise = preconditioner.apply(normal_like(state.position, generator))
        log_u = log_uniform(state.log_density.shape, state.log_density, generator)
        proposal = state.position + step_size * noise
        log_density = density(proposal)
        log_ratio = log_density - state.log_density
        accepted = log_u < log_ratio
        info = MetropolisInfo(
            acceptance_rate=log_ratio.clamp_max(0.0).exp(),
            n_steps=torch.ones_like(log_ratio),
            n_failures=torch.isinf(log_density).to(log_ratio),
        )
        position = torch.where(accepted.unsqueeze(-1), proposal, state.position)
        return MetropolisState(position, torch.where(accepted, log_density, state.log_density)), info

    return Sampler(init, step)
