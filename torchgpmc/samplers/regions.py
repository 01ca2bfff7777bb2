"""Whitened latents moved region by region: each is drawn anew from its prior given the rest, on C chains at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.numerics.linalg import inverse_lower
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.metropolis import Attempt, MetropolisState, accept
from torchgpmc.types import Density, Sampler


class RegionsState(NamedTuple):
    """Position ``(C, K N)``, its log likelihood ``(C,)``, what that was made from, and the directions in which regions move."""

    position: Tensor
    log_density: Tensor
    payload: Any
    bases: Tensor  # (C, N, N), or (1, N, N) for all chains


class RegionRates(NamedTuple):
    """Acceptance region by region, for warm-up."""

    acceptance: Tensor  # (C, R)


class RegionsInfo(NamedTuple):
    """What is known about one sweep over the regions of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # mean over regions
    n_steps: Tensor  # likelihood evaluations: one a region
    n_failures: Tensor  # those that gave -inf
    regions: RegionRates


def region_bases(factor: Tensor, labels: Tensor) -> Tensor:
    """Orthonormal directions of v in which the values of one region move while all others stay: columns, region after region.

    f_k moves alone where v moves within the span of those columns of L^-1. What v has within it is standard normal a priori and
    independent of what it has across, which the other values are functions of: refreshed, it makes f_k a draw from p(f_k | f_rest).

    Args:
        factor: L ``(C, N, N)``.
        labels: the region of each value ``(N,)``, from 0.

    Returns:
        ``(C, N, N)``; columns of one region are orthonormal, those of different regions need not be.

    Example:
        >>> import torch
        >>> region_bases(torch.tensor([[[1.0, 0.0], [3.0, 4.0]]]), torch.tensor([0, 1]))[..., 1].abs()  # the second value's
        tensor([[0., 1.]])
    """
    inverse = inverse_lower(factor)
    members = labels.argsort(stable=True).split(labels.bincount().tolist())
    return torch.cat([torch.linalg.qr(inverse[..., rows]).Q for rows in members], -1)


def local_regions(log_likelihood: Density | Callable[[Tensor], Tensor], *, factor: Tensor, labels: Tensor) -> Sampler:
    r"""Metropolis-Hastings region by region, proposals from the prior of its values given all others (paper C, section 1.4.2).

    .. math:: f_k' \sim p(f_k | f_{\setminus k}), \quad A = p(y | f_k', f_{\setminus k}) / p(y | f)

    One region is a proposal from the prior, independence Metropolis-Hastings; N regions of one value are the Gibbs-like sampler
    of Diggle, Tawn & Moyeed 1998. A step is a sweep over all regions.

    Args:
        log_likelihood: ``(C, K N) -> (C,)``, of whitened latents v ~ N(0, I).
        factor: L ``(C, N, N)``, lower triangular, with f = m + L v for each of K latent functions; ``(1, N, N)`` for all chains.
        labels: the region of each of the N values ``(N,)``, from 0, none empty.

    Returns:
        A sampler with :class:`RegionsState` and :class:`RegionsInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import local_regions
        >>> generator = torch.Generator().manual_seed(0)
        >>> factor = torch.tensor([[[1.0, 0.0], [0.6, 0.8]]])
        >>> log_likelihood = lambda v: -0.5 * (v - 1).square().sum(-1)  # the posterior of v is N(1/2, 1/2)
        >>> sampler = local_regions(log_likelihood, factor=factor, labels=torch.tensor([0, 1]))
        >>> state = sampler.init(torch.zeros(1000, 2), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> (state.position.mean(0) - 0.5).abs() < 0.11, (state.position.var(0) - 0.5).abs() < 0.11  # five standard errors
        (tensor([True, True]), tensor([True, True]))
    """
    density = as_density(log_likelihood)
    sizes = labels.bincount().tolist()

    def init(position: Tensor, generator: torch.Generator) -> RegionsState:
        return RegionsState(position, *density.draw(position, generator), region_bases(factor, labels))

    def step(state: RegionsState, generator: torch.Generator) -> tuple[RegionsState, RegionsInfo]:
        here = MetropolisState(*state[:3])
        infos = []
        for basis in state.bases.split(sizes, -1):
            v = here.position.view(len(here.position), -1, len(labels))
            inside = v @ basis
            there = (v + (normal_like(inside, generator) - inside) @ basis.mT).flatten(1)
            move = Attempt(there, log_uniform(there.shape[:1], there, generator))
            here, info = accept(move, MetropolisState(there, *density.draw(there, generator)), here)
            infos.append(info)
        rates = torch.stack([info.acceptance_rate for info in infos], -1)
        steps, failures = (torch.stack(parts).sum(0) for parts in zip(*(info[1:] for info in infos), strict=True))
        return RegionsState(*here, state.bases), RegionsInfo(rates.mean(-1), steps, failures, RegionRates(rates))

    return Sampler(init, step)
