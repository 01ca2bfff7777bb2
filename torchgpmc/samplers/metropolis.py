"""Metropolis-Hastings on C chains at once, and the parts that pseudo-marginal kernels share with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.numerics.random import log_uniform, normal_like, uniform
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import where
from torchgpmc.types import Density, Sampler

_DEGREES_OF_FREEDOM = 5  # of independent proposals


class MetropolisState(NamedTuple):
    """Position ``(C, D)``, its log density ``(C,)``, and what that was made from."""

    position: Tensor
    log_density: Tensor
    payload: Any = ()


class MetropolisInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # min(1, density ratio)
    n_steps: Tensor  # density evaluations
    n_failures: Tensor  # evaluations that gave -inf


class IndependentProposal(NamedTuple):
    """A Student t density with 5 degrees of freedom and scale S S', some of whose draws stand in for random-walk proposals.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import IndependentProposal, Preconditioner
        >>> unit = Preconditioner(torch.eye(2), torch.zeros(0))
        >>> position = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> IndependentProposal(0.9, torch.zeros(2)).log_density(unit, position)  # -3.5 log(1 + 25 / 5), up to a constant
        tensor([-0.0000, -6.2712])
    """

    share: float  # of the transitions, in [0, 1]
    mean: Tensor  # (D,)

    def draw(self, preconditioner: Preconditioner, position: Tensor, generator: torch.Generator) -> Tensor:
        """Draws ``(C, D)``, whatever ``position`` ``(C, D)``."""
        noise = normal_like(position, generator)
        chi_square = normal_like(position.new_empty(len(position), _DEGREES_OF_FREEDOM), generator).square().sum(-1, keepdim=True)
        return self.mean + preconditioner.apply(noise * (_DEGREES_OF_FREEDOM / chi_square).sqrt())

    def log_density(self, preconditioner: Preconditioner, position: Tensor) -> Tensor:
        """Up to a constant, ``(C,)``."""
        square = preconditioner.solve(position - self.mean).square().sum(-1)
        return -0.5 * (_DEGREES_OF_FREEDOM + position.shape[-1]) * torch.log1p(square / _DEGREES_OF_FREEDOM)


class Attempt(NamedTuple):
    """Where the chains may go, and the number that decides whether they do."""

    position: Tensor  # (C, D)
    log_u: Tensor  # (C,)
    correction: Tensor | None = None  # (C,), log ratio of the proposal densities; None where they are symmetric


def propose(
    position: Tensor,
    *,
    step_size: Tensor,
    preconditioner: Preconditioner,
    independent: IndependentProposal | None = None,
    generator: torch.Generator,
) -> Attempt:
    """x + step_size S z from ``position`` ``(C, D)``; in some chains a draw of ``independent`` instead."""
    there = position + step_size * preconditioner.apply(normal_like(position, generator))
    log_u = log_uniform(position.shape[:1], position, generator)
    if independent is None:
        return Attempt(there, log_u)
    jumps = uniform(position.shape[:1], position, generator) < independent.share
    there = torch.where(jumps.unsqueeze(-1), independent.draw(preconditioner, there, generator), there)
    before, after = (independent.log_density(preconditioner, end) for end in (position, there))
    return Attempt(there, log_u, torch.where(jumps, before - after, 0.0))


def accept(move: Attempt, proposed: Any, state: Any) -> tuple[Any, MetropolisInfo]:
    """Each chain's row of ``proposed`` or of ``state``, two like NamedTuples with a ``log_density``."""
    log_ratio = proposed.log_density - state.log_density
    log_ratio = torch.nan_to_num(log_ratio if move.correction is None else log_ratio + move.correction, nan=-torch.inf)
    info = MetropolisInfo(
        acceptance_rate=log_ratio.clamp_max(0.0).exp(),
        n_steps=torch.ones_like(log_ratio),
        n_failures=torch.isinf(proposed.log_density).to(log_ratio),
    )
    return where(move.log_u < log_ratio, proposed, state), info


def metropolis(density: Density | Callable[[Tensor], Tensor], *, step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
    """Metropolis with proposals x + step_size S z, z standard normal and S S' the (adapted) covariance.

    With S learned in warm-up this is the adaptive Metropolis of Haario, Saksman & Tamminen (2001), frozen for the draws.

    Args:
        density: target on ``(C, D)``; its payload is kept with the position. With unbiased estimates this is exact too (paper A,
            algorithm 1); :func:`pseudo_marginal` also counts their work and moves their latents.
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
    target = as_density(density)

    def init(position: Tensor, generator: torch.Generator) -> MetropolisState:
        return MetropolisState(position, *target.draw(position, generator))

    def step(state: MetropolisState, generator: torch.Generator) -> tuple[MetropolisState, MetropolisInfo]:
        move = propose(state.position, step_size=step_size, preconditioner=preconditioner, generator=generator)
        proposed = MetropolisState(move.position, *target.draw(move.position, generator))
        return accept(move, proposed, state)

    return Sampler(init, step)
