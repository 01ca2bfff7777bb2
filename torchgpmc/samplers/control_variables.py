"""Whitened latents moved through a few control variables that nearly determine them, on C chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_density
from torchgpmc.linalg import cholesky, solve_lower
from torchgpmc.random import log_uniform, normal_like
from torchgpmc.samplers.metropolis import Attempt, accept
from torchgpmc.types import Density, Sampler


class ControlPrior(NamedTuple):
    """M control variables c beside whitened latents v, jointly normal: cov(c) = K, cov(v, c) = P, v standard normal."""

    projection: Tensor  # P (C, N, M)
    rest: Tensor  # lower factor of K - P'P, what of c is not a function of v (C, M, M)
    factor: Tensor  # lower factor of K (C, M, M)
    precision: Tensor  # K^-1 (C, M, M)
    gain: Tensor  # P K^-1 (C, N, M): the mean of v given c


def control_prior(factor: Tensor, cross: Tensor, covariance: Tensor) -> ControlPrior:
    """From the prior of f = m + L v and c: NaN, with which every proposal is refused, where K - P'P is not positive definite.

    Args:
        factor: L ``(C, N, N)``.
        cross: cov(f, c) ``(C, N, M)``.
        covariance: cov(c) ``(C, M, M)``; some noise of the control variables' own keeps it away from singularity, and any amount
            is exact.

    Example:
        >>> import torch
        >>> prior = control_prior(torch.eye(2)[None], torch.tensor([[[0.6], [0.0]]]), torch.ones(1, 1, 1))
        >>> prior.rest, prior.gain.squeeze()
        (tensor([[[0.8000]]]), tensor([0.6000, 0.0000]))
    """
    projection = solve_lower(factor, cross)
    rest, ok = cholesky(covariance - projection.mT @ projection)
    outer, outer_ok = cholesky(covariance)
    precision = torch.cholesky_inverse(outer)
    rest = torch.where((ok & outer_ok)[:, None, None], rest, torch.nan)
    return ControlPrior(projection, rest, outer, precision, projection @ precision)


class ControlsState(NamedTuple):
    """Position ``(C, K N)``, its log likelihood ``(C,)``, what that was made from, and the control variables."""

    position: Tensor
    log_density: Tensor
    payload: Any
    controls: Tensor  # (M, C, K), less their means


class ControlsInfo(NamedTuple):
    """What is known about one sweep over the control variables of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # mean over proposals
    n_steps: Tensor  # likelihood evaluations: one a proposal
    n_failures: Tensor  # those that gave -inf


class _Proposal(NamedTuple):
    controls: Tensor  # (C, K, M)
    correction: Tensor | None  # of the log acceptance ratio (C,)


def control_variables(
    log_likelihood: Density | Callable[[Tensor], Tensor],
    *,
    prior: ControlPrior,
    underrelaxation: float = 0.0,
    walk: Tensor | None = None,
) -> Sampler:
    r"""Metropolis-Hastings on f through control variables c (Titsias, Lawrence & Rattray 2009; paper C, algorithm 1).

    For each control variable in turn

    .. math:: c_i' \sim p(c_i | c_{\setminus i}), \quad f' \sim p(f | c'), \quad A = p(y | f') / p(y | f).

    With ``underrelaxation`` u both halves are autoregressive moves with the same invariant densities (Neal 1998; the combination
    that paper C's section 1.5 leaves open): deviations from E(c_i | rest) and from E(f | c) are multiplied by u, and new ones
    added with weight sqrt(1 - u^2).

    With ``walk`` all control variables move at once, c' = c + s K^{1/2} z, and the acceptance ratio has p(c') / p(c) as a factor
    (eq. 1.15 with a symmetric q).

    Given a position alone, ``init`` draws c from p(c | f).

    Args:
        log_likelihood: ``(C, K N) -> (C,)``, of whitened latents v ~ N(0, I) of K latent functions, f = m + L v.
        prior: of v and c; see :func:`control_prior`.
        underrelaxation: u, at least 0 and below 1.
        walk: s ``()``.

    Returns:
        A sampler with :class:`ControlsState` and :class:`ControlsInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import control_variables
        >>> from torchgpmc.samplers.control_variables import control_prior
        >>> generator = torch.Generator().manual_seed(0)
        >>> prior = control_prior(torch.eye(2)[None], torch.tensor([[[0.9, 0.0], [0.0, 0.9]]]), torch.eye(2)[None])
        >>> sampler = control_variables(lambda v: -0.5 * (v - 1).square().sum(-1), prior=prior)  # the posterior is N(1/2, 1/2)
        >>> state = sampler.init(torch.zeros(1000, 2), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> (state.position.mean(0) - 0.5).abs() < 0.11, (state.position.var(0) - 0.5).abs() < 0.11  # five standard errors
        (tensor([True, True]), tensor([True, True]))
    """
    density = as_density(log_likelihood)
    size = prior.projection.shape[-2]
    fresh = math.sqrt(1 - underrelaxation**2)
    conditional_deviation = prior.precision.diagonal(dim1=-2, dim2=-1).rsqrt()

    def shaped(position: Tensor) -> Tensor:
        return position.view(len(position), -1, size)

    def noise(like: Tensor, generator: torch.Generator) -> Tensor:
        return normal_like(like, generator) @ prior.rest.mT

    def one(controls: Tensor, number: int, generator: torch.Generator) -> _Proposal:
        deviation = conditional_deviation[..., number, None]
        here = controls[..., number]
        centre = here - (controls @ prior.precision[..., number, None]).squeeze(-1) * deviation.square()
        there = centre + underrelaxation * (here - centre) + fresh * deviation * normal_like(here, generator)
        moved = controls.clone()
        moved[..., number] = there
        return _Proposal(moved, None)

    def walked(controls: Tensor, step_size: Tensor, generator: torch.Generator) -> _Proposal:
        moved = controls + step_size * (normal_like(controls, generator) @ prior.factor.mT)
        before, after = (solve_lower(prior.factor, part.mT).square().sum((-2, -1)) for part in (controls, moved))
        return _Proposal(moved, 0.5 * (before - after))

    def latents(v: Tensor, controls: Tensor, moved: Tensor, generator: torch.Generator) -> Tensor:
        """A draw from p(v | c') by Matheron's rule; what v deviates by from its mean given c is kept in part."""
        drawn = normal_like(v, generator)
        with_it = drawn @ prior.projection + noise(controls, generator)
        gain = prior.gain.mT
        return moved @ gain + underrelaxation * (v - controls @ gain) + fresh * (drawn - with_it @ gain)

    def init(position: Tensor, generator: torch.Generator) -> ControlsState:
        mean = shaped(position) @ prior.projection
        controls = mean + noise(mean, generator)
        return ControlsState(position, *density.draw(position, generator), controls.permute(2, 0, 1))

    def step(state: ControlsState, generator: torch.Generator) -> tuple[ControlsState, ControlsInfo]:
        here = state._replace(controls=state.controls.permute(1, 2, 0))
        infos = []
        for number in range(len(state.controls) if walk is None else 1):
            controls = here.controls
            proposed = one(controls, number, generator) if walk is None else walked(controls, walk, generator)
            there = latents(shaped(here.position), controls, proposed.controls, generator).flatten(1)
            move = Attempt(there, log_uniform(there.shape[:1], there, generator), proposed.correction)
            here, info = accept(move, ControlsState(there, *density.draw(there, generator), proposed.controls), here)
            infos.append(info)
        rates, steps, failures = (torch.stack(parts) for parts in zip(*infos, strict=True))
        moved = here._replace(controls=here.controls.permute(2, 0, 1))
        return moved, ControlsInfo(rates.mean(0), steps.sum(0), failures.sum(0))

    return Sampler(init, step)
