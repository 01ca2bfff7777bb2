"""Preconditioned Crank-Nicolson proposals for whitened latents on C chains at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.metropolis import Attempt, MetropolisInfo, MetropolisState, accept
from torchgpmc.types import Density, Sampler


def pcn(log_likelihood: Density | Callable[[Tensor], Tensor], *, step_size: Tensor) -> Sampler:
    r"""Metropolis with proposals that leave a standard normal prior invariant (Cotter, Roberts, Stuart & White 2013, eq. 4.2).

    .. math:: v' = (v + s z) / \sqrt{1 + s^2}, \quad z \sim N(0, I)

    so that the likelihood ratio alone decides. In their letters s / sqrt(1 + s^2) is beta.

    Args:
        log_likelihood: ``(C, D) -> (C,)``; the prior is N(0, I), so latents come whitened.
        step_size: s ``()``, any positive number; from infinity proposals are draws from the prior.

    Returns:
        A sampler with :class:`MetropolisState`, whose ``log_density`` is the log likelihood, and :class:`MetropolisInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import pcn
        >>> generator = torch.Generator().manual_seed(0)
        >>> sampler = pcn(lambda v: -0.5 * (v - 1).square().sum(-1), step_size=torch.tensor(1.0))  # the posterior is N(1/2, 1/2)
        >>> state = sampler.init(torch.zeros(1000, 1), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> abs(state.position.mean() - 0.5) < 0.11, abs(state.position.var() - 0.5) < 0.11  # five standard errors
        (tensor(True), tensor(True))
    """
    density = as_density(log_likelihood)
    shrinkage = (1 + step_size.square()).rsqrt()

    def init(position: Tensor, generator: torch.Generator) -> MetropolisState:
        return MetropolisState(position, *density.draw(position, generator))

    def step(state: MetropolisState, generator: torch.Generator) -> tuple[MetropolisState, MetropolisInfo]:
        there = (state.position + step_size * normal_like(state.position, generator)) * shrinkage
        move = Attempt(there, log_uniform(there.shape[:1], there, generator))
        return accept(move, MetropolisState(there, *density.draw(there, generator)), state)

    return Sampler(init, step)
