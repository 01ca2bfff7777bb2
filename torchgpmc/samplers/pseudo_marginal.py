"""Pseudo-marginal samplers on C chains: Metropolis-Hastings, correlated, with delayed acceptance, and slice sampling.

All leave p(theta | y) exactly invariant although the density is only estimated, because the estimate is unbiased and its random
numbers are part of the state (Andrieu & Roberts 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.random import log_uniform, normal_like, uniform
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.samplers.slice import SliceState, slice_sampler
from torchgpmc.types import LogDensity, NoisyDensity, Sampler

_DEGREES_OF_FREEDOM = 5  # of independent proposals


class PseudoMarginalState(NamedTuple):
    """Position ``(C, D)``, the log of the density's estimate there ``(C,)``, and what the estimate was made from."""

    position: Tensor
    log_density: Tensor
    payload: Any  # NamedTuple of tensors (C, ...): latent draw and the like
    auxiliary: Tensor  # (C, A), the standard normals behind the estimate where a kernel needs them again; else (C, 0)
    surrogate: Tensor  # (C,), the cheap density at the position for delayed acceptance; else (C, 0)


class PseudoMarginalInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor
    n_steps: Tensor  # estimates made
    n_failures: Tensor  # estimates of zero
    n_factorizations: Tensor  # that the estimates took


def select_payload(mask: Tensor, yes: Any, no: Any) -> Any:
    """Rows of ``yes`` where ``mask`` ``(C,)`` holds, rows of ``no`` elsewhere, in every tensor of two like NamedTuples."""
    if isinstance(yes, Tensor):
        return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)
    return type(yes)(*(select_payload(mask, a, b) for a, b in zip(yes, no, strict=True)))


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


def pseudo_marginal(
    density: NoisyDensity,
    *,
    step_size: Tensor,
    preconditioner: Preconditioner,
    moves_latents: bool = False,
    independent: IndependentProposal | None = None,
) -> Sampler:
    """Pseudo-marginal Metropolis-Hastings (paper A, algorithm 1) with random-walk proposals x + step_size S z.

    Args:
        density: estimated with fresh random numbers at every proposal.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.
        moves_latents: whether ``density.move`` follows each transition.
        independent: if given, each chain's transition is with this probability one whose proposal is drawn from this density,
            wherever the chain is (Tierney 1994, section 2.3); a mixture of two exact kernels.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`.
    """

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        log_density, payload = density.draw(position, generator)
        return PseudoMarginalState(position, log_density, payload, position[:, :0], position[:, :0])

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        proposal = state.position + step_size * preconditioner.apply(normal_like(state.position, generator))
        log_u = log_uniform(state.log_density.shape, state.log_density, generator)
        correction: Tensor | float = 0.0
        if independent is not None:
            jumps = uniform(state.log_density.shape, state.log_density, generator) < independent.share
            proposal = torch.where(jumps.unsqueeze(-1), independent.draw(preconditioner, proposal, generator), proposal)
            here, there = (independent.log_density(preconditioner, position) for position in (state.position, proposal))
            correction = torch.where(jumps, here - there, 0.0)
        log_density, payload = density.draw(proposal, generator)
        state, info = _accept(density, state, proposal, log_density, payload, state.auxiliary, log_u, correction)
        if moves_latents:
            log_density, payload = density.move(state.position, state.payload, generator)
            state = state._replace(log_density=log_density, payload=payload)
        return state, info

    return Sampler(init, step)


def _accept(
    density: NoisyDensity,
    state: PseudoMarginalState,
    proposal: Tensor,
    log_density: Tensor,
    payload: Any,
    auxiliary: Tensor,
    log_u: Tensor,
    correction: Tensor | float = 0.0,
) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
    """Takes the proposal or not; ``correction`` is the log ratio of proposal densities, back over forth."""
    log_ratio = torch.nan_to_num(log_density - state.log_density + correction, nan=-torch.inf)
    accepted = log_u < log_ratio
    column = accepted.unsqueeze(-1)
    new = PseudoMarginalState(
        torch.where(column, proposal, state.position),
        torch.where(accepted, log_density, state.log_density),
        select_payload(accepted, payload, state.payload),
        torch.where(column, auxiliary, state.auxiliary),
        state.surrogate,
    )
    failures = torch.isinf(log_density).to(log_ratio)
    info = PseudoMarginalInfo(log_ratio.clamp_max(0.0).exp(), torch.ones_like(log_ratio), failures, density.work(payload))
    return new, info


def correlated_pseudo_marginal(
    density: NoisyDensity, *, step_size: Tensor, preconditioner: Preconditioner, correlation: float
) -> Sampler:
    r"""Pseudo-marginal Metropolis-Hastings whose estimates at both ends of a move share most of their noise.

    The auxiliary normals move by :math:`u' = \rho u + \sqrt{1 - \rho^2} \epsilon`, which leaves their distribution invariant; the
    noise of the log ratio then largely cancels (Deligiannidis, Doucet & Pitt 2018).

    Args:
        density: must be a continuous function of its normals for the correlation to help; exact in any case.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.
        correlation: rho, in [0, 1); 0 is :func:`pseudo_marginal`.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`.
    """
    fresh = math.sqrt(1 - correlation**2)

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        auxiliary = normal_like(position.new_empty(len(position), density.auxiliary_size), generator)
        log_density, payload = density.evaluate(position, auxiliary)
        return PseudoMarginalState(position, log_density, payload, auxiliary, position[:, :0])

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        proposal = state.position + step_size * preconditioner.apply(normal_like(state.position, generator))
        log_u = log_uniform(state.log_density.shape, state.log_density, generator)
        auxiliary = correlation * state.auxiliary + fresh * normal_like(state.auxiliary, generator)
        log_density, payload = density.evaluate(proposal, auxiliary)
        return _accept(density, state, proposal, log_density, payload, auxiliary, log_u)

    return Sampler(init, step)


def delayed_acceptance(
    density: NoisyDensity, surrogate: LogDensity, *, step_size: Tensor, preconditioner: Preconditioner
) -> Sampler:
    """Pseudo-marginal Metropolis-Hastings that screens proposals by a cheap deterministic density (Christen & Fox 2005).

    A proposal is first accepted or not under ``surrogate``; only those that pass are estimated, and accepted with what is left of
    the ratio. Exact whatever the surrogate is.

    Args:
        density: the target, estimated.
        surrogate: a deterministic approximation of it.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`; ``acceptance_rate`` is the product of both
        stages' and ``n_steps`` counts estimates.
    """

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        log_density, payload = density.draw(position, generator)
        return PseudoMarginalState(position, log_density, payload, position[:, :0], surrogate(position))

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        proposal = state.position + step_size * preconditioner.apply(normal_like(state.position, generator))
        screen_u, log_u = log_uniform((2, len(proposal)), state.log_density, generator)
        screened = surrogate(proposal)
        first = torch.nan_to_num(screened - state.surrogate, nan=-torch.inf)
        rows = (screen_u < first).nonzero().squeeze(-1)
        acceptance, n_steps, n_failures, work = (torch.zeros_like(first) for _ in range(4))
        if len(rows) == 0:
            return state, PseudoMarginalInfo(acceptance, n_steps, n_failures, work)
        log_density, payload = density.select(rows).draw(proposal[rows], generator)
        second = torch.nan_to_num(log_density - state.log_density[rows] - first[rows], nan=-torch.inf)
        accepted = log_u[rows] < second
        # The mean over the screening step's outcome is estimated by its one outcome, which is unbiased.
        acceptance[rows] = second.clamp_max(0.0).exp()
        n_steps[rows], n_failures[rows], work[rows] = 1.0, torch.isinf(log_density).to(first), density.work(payload)
        taken, kept = rows[accepted], accepted.nonzero().squeeze(-1)
        new = PseudoMarginalState(
            state.position.index_put((taken,), proposal[taken]),
            state.log_density.index_put((taken,), log_density[kept]),
            _put_rows(state.payload, taken, payload, kept),
            state.auxiliary,
            state.surrogate.index_put((taken,), screened[taken]),
        )
        return new, PseudoMarginalInfo(acceptance, n_steps, n_failures, work)

    return Sampler(init, step)


def _put_rows(old: Any, rows: Tensor, new: Any, kept: Tensor) -> Any:
    if isinstance(old, Tensor):
        return old.index_put((rows,), new[kept])
    return type(old)(*(_put_rows(a, rows, b, kept) for a, b in zip(old, new, strict=True)))


class _Counted:
    """Evaluations of one transition as functions of one argument, with their work added up."""

    def __init__(self, density: NoisyDensity, zero: Tensor):
        self.density = density
        self.work = zero

    def evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, Any]:
        """An estimate and its payload."""
        log_density, payload = self.density.evaluate(position, auxiliary)
        self.work = self.work + self.density.work(payload)
        return log_density, payload

    def of_position(self, auxiliary: Tensor) -> Callable[[Tensor], Tensor]:
        """The log estimate at fixed normals."""
        return lambda position: self.evaluate(position, auxiliary)[0]

    def of_auxiliary(self, position: Tensor) -> Callable[[Tensor], Tensor]:
        """The log estimate at a fixed position."""
        return lambda auxiliary: self.evaluate(position, auxiliary)[0]


def pseudo_marginal_slice(density: NoisyDensity, *, width: Tensor, max_steps_out: int = 8) -> Sampler:
    """Pseudo-marginal slice sampling: no rejections, so no sticking (Murray & Graham 2015).

    Elliptical slice sampling of the auxiliary normals given the position, then univariate slice updates of the position given the
    normals.

    Args:
        density: as a function of position and normals.
        width: initial bracket of each coordinate ``(D,)``.
        max_steps_out: limit on the number of widths in a bracket.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`.
    """

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        auxiliary = normal_like(position.new_empty(len(position), density.auxiliary_size), generator)
        log_density, payload = density.evaluate(position, auxiliary)
        return PseudoMarginalState(position, log_density, payload, auxiliary, position[:, :0])

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        position = state.position
        counted = _Counted(density, torch.zeros_like(state.log_density))
        inner = elliptical_slice(counted.of_auxiliary(position))
        moved, first = inner.step(EllipticalSliceState(state.auxiliary, state.log_density), generator)
        frozen = counted.of_position(moved.position)
        outer = slice_sampler(frozen, width=width, max_steps_out=max_steps_out)
        placed, second = outer.step(SliceState(position, moved.log_density), generator)
        log_density, payload = counted.evaluate(placed.position, moved.position)
        new = PseudoMarginalState(placed.position, log_density, payload, moved.position, state.surrogate)
        n_steps, failures = first.n_steps + second.n_steps + 2, first.n_failures + second.n_failures
        return new, PseudoMarginalInfo(second.acceptance_rate, n_steps, failures, counted.work)

    return Sampler(init, step)
