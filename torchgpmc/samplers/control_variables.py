"""Whitened latents moved through a few control variables that nearly determine them, on C chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_linear
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.metropolis import Attempt, MetropolisInfo, accept
from torchgpmc.types import Density, LinearDensity, Sampler

_AT_ONCE = 16  # proposals whose random numbers are drawn together: what they take stays in a core's cache


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


class _Here(NamedTuple):
    """Where chains are within a sweep: v in two parts, each with what the likelihood sees of it."""

    of_controls: Tensor  # E(v | c), what is seen of it, c, and how far c is from its conditional means: all linear in c
    rest: Tensor  # v - E(v | c), and what is seen of it
    log_density: Tensor
    payload: Any
    has_moved: Tensor  # (C,)


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
    moves = _Moves(as_linear(log_likelihood), prior, underrelaxation)

    def init(position: Tensor, generator: torch.Generator) -> ControlsState:
        mean = position.view(len(position), -1, prior.projection.shape[-2]) @ prior.projection
        controls = mean + _noise(prior, mean, generator)
        return ControlsState(position, *moves.density.draw(position, generator), controls.permute(2, 0, 1))

    def step(state: ControlsState, generator: torch.Generator) -> tuple[ControlsState, ControlsInfo]:
        there, infos = moves.sweep(state, generator) if walk is None else moves.walk(state, walk, generator)
        rates, steps, failures = (torch.stack(parts) for parts in zip(*infos, strict=True))
        return there, ControlsInfo(rates.mean(0), steps.sum(0), failures.sum(0))

    return Sampler(init, step)


def _noise(prior: ControlPrior, like: Tensor, generator: torch.Generator) -> Tensor:
    """Of control variables, what is no function of v: ``(C, B, M)``."""
    return normal_like(like, generator) @ prior.rest.mT


class _Moves:
    """A walk of all control variables at once, and a sweep over them; see :func:`control_variables`."""

    def __init__(self, density: LinearDensity, prior: ControlPrior, underrelaxation: float):
        self.density = density
        self.prior = prior
        self.kept = underrelaxation
        self.fresh = math.sqrt(1 - underrelaxation**2)
        self.variance = 1 / prior.precision.diagonal(dim1=-2, dim2=-1)  # of each control variable given the others
        self.slopes = cache(self._slopes)

    def walk(
        self, state: ControlsState, step_size: Tensor, generator: torch.Generator
    ) -> tuple[ControlsState, list[MetropolisInfo]]:
        prior, controls = self.prior, state.controls.permute(1, 2, 0)
        moved = controls + step_size * (normal_like(controls, generator) @ prior.factor.mT)
        before, after = (solve_lower(prior.factor, part.mT).square().sum((-2, -1)) for part in (controls, moved))
        mean, new_mean = ((part @ prior.gain.mT).flatten(1) for part in (controls, moved))
        rest = self.kept * (state.position - mean) + self.fresh * self._deviations(1, mean, generator).squeeze(1)
        move = Attempt(new_mean + rest, log_uniform(before.shape, mean, generator), 0.5 * (before - after))
        there = ControlsState(move.position, *self.density.draw(move.position, generator), moved)
        new, info = accept(move, there, state._replace(controls=controls))
        return new._replace(controls=new.controls.permute(2, 0, 1)), [info]

    def sweep(self, state: ControlsState, generator: torch.Generator) -> tuple[ControlsState, list[MetropolisInfo]]:
        """One control variable after another; v and what the likelihood sees of it follow by additions alone."""
        count, _, num_latents = state.controls.shape
        width = state.position.shape[-1]
        start = self._follows(state.controls.permute(1, 2, 0).unsqueeze(1)).squeeze(1)
        rest = self._seen((state.position - start[:, :width]).unsqueeze(1)).squeeze(1)
        moves = torch.ones_like(state.log_density, dtype=torch.bool)
        here, along, infos = _Here(start, rest, state.log_density, state.payload, ~moves), self.slopes(num_latents), []
        for some in torch.arange(count).split(_AT_ONCE):
            new = self.fresh * self._seen(self._deviations(len(some), state.position, generator))
            changes = normal_like(new.new_empty(len(new), num_latents, len(some)), generator)
            changes = self.fresh * self.variance[:, None, some].sqrt() * changes
            log_u = log_uniform((len(new), len(some)), new, generator)
            for row, number in enumerate(some.tolist()):
                offset = here.of_controls[:, number - num_latents * count :: count]
                change = torch.sub(changes[..., row], offset, alpha=1 - self.kept)
                of_controls = here.of_controls + (change.unsqueeze(-2) @ along[number]).squeeze(-2)
                rest = torch.add(new[:, row], here.rest, alpha=self.kept)
                image = of_controls[:, width : rest.shape[-1]] + rest[:, width:]
                there = _Here(of_controls, rest, *self.density.draw_at(image, generator), moves)
                here, info = accept(Attempt(image, log_u[:, row]), there, here)
                infos.append(info)
        moved = here.of_controls[:, :width] + here.rest[:, :width]
        position = torch.where(here.has_moved.unsqueeze(-1), moved, state.position)
        controls = here.of_controls[:, rest.shape[-1] : -num_latents * count].unflatten(1, (num_latents, count))
        return ControlsState(position, here.log_density, here.payload, controls.permute(2, 0, 1)), infos

    def _deviations(self, count: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """B draws of v - E(v | c) by Matheron's rule, ``(C, B, V)`` like v ``(C, V)``: its density does not depend on c."""
        prior, size = self.prior, self.prior.projection.shape[-2]
        drawn = normal_like(like.new_empty(len(like), count * (like.shape[-1] // size), size), generator)
        controls = drawn @ prior.projection
        controls = controls + _noise(prior, controls, generator)
        return (drawn - controls @ prior.gain.mT).view(len(like), count, -1)

    def _seen(self, vectors: Tensor) -> Tensor:
        """Vectors v ``(C, B, V)``, and what the likelihood sees of them beside."""
        return torch.cat([vectors, self.density.image(vectors)], -1)

    def _follows(self, controls: Tensor) -> Tensor:
        """What is kept of control variables ``(C, B, K, M)`` within a sweep; see :class:`_Here`."""
        offsets = controls @ (self.prior.precision * self.variance.unsqueeze(-2)).unsqueeze(1)
        mean = (controls @ self.prior.gain.mT.unsqueeze(1)).flatten(2)
        return torch.cat([self._seen(mean), controls.flatten(2), offsets.flatten(2)], -1)

    def _slopes(self, num_latents: int) -> tuple[Tensor, ...]:
        """Of what follows from a control variable's value in each of K latents, ``(C, K, J)`` for each of M."""
        chains, _, count = self.prior.gain.shape
        unit = identity_matrix(num_latents * count, self.prior.gain).view(1, -1, num_latents, count)
        return self._follows(unit.expand(chains, -1, -1, -1)).unflatten(1, (num_latents, count)).unbind(2)
