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

from torchgpmc.density import DrawnDensity, as_density
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.samplers.metropolis import IndependentProposal, MetropolisInfo, MetropolisState, accept, metropolis, propose
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.samplers.slice import SliceState, slice_sampler
from torchgpmc.trees import put, take
from torchgpmc.types import CountedDensity, Density, LogDensity, NoisyDensity, Sampler


class PseudoMarginalState(NamedTuple):
    """Position ``(C, D)``, the log of the density's estimate there ``(C,)``, and what the estimate was made from."""

    position: Tensor
    log_density: Tensor  # NaN where it is not estimated yet, see on_surrogate
    payload: Any  # NamedTuple of tensors (C, ...): latent draw and the like
    auxiliary: Tensor  # (C, A), the standard normals behind the estimate where a kernel needs them again; else (C, 0)
    surrogate: Tensor  # (C,), the cheap density at the position where a kernel uses one; else NaN


class PseudoMarginalInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor
    n_steps: Tensor  # estimates made
    n_failures: Tensor  # estimates of zero
    n_factorizations: Tensor  # that the estimates took, and what screened for them


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

    Example:
        >>> from typing import NamedTuple
        >>> import torch
        >>> from torchgpmc import samplers
        >>> class NoisyNormal(NamedTuple):  # N(0, 1), known through estimates with log-normal errors of mean one
        ...     auxiliary_size: int = 1
        ...
        ...     def evaluate(self, position, auxiliary):
        ...         return -0.5 * position.square().sum(-1) + 0.5 * auxiliary.sum(-1) - 0.125, ()
        ...
        ...     def draw(self, position, generator):
        ...         return self.evaluate(position, torch.randn(len(position), 1, generator=generator))
        ...
        ...     def work(self, payload):
        ...         return 0.0
        ...
        ...     def select(self, rows):
        ...         return self
        >>> walk = {"step_size": torch.tensor(2.0), "preconditioner": samplers.Preconditioner(torch.eye(1), torch.zeros(0))}
        >>> rough = lambda position: -0.4 * position.square().sum(-1)  # a little wider than the target
        >>> kernels = [
        ...     samplers.pseudo_marginal(NoisyNormal(), **walk),
        ...     samplers.correlated_pseudo_marginal(NoisyNormal(), correlation=0.9, **walk),
        ...     samplers.delayed_acceptance(NoisyNormal(), rough, **walk),
        ...     samplers.pseudo_marginal_slice(NoisyNormal(), width=torch.ones(1)),
        ... ]
        >>> for kernel in kernels:  # of 20,000 chains, which all start at zero
        ...     generator = torch.Generator().manual_seed(0)
        ...     state = kernel.init(torch.zeros(20_000, 1), generator)
        ...     for _ in range(20):
        ...         state, info = kernel.step(state, generator)
        ...     assert abs(float(state.position.var()) - 1) < 0.1
    """

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        log_density, payload = density.draw(position, generator)
        return PseudoMarginalState(position, log_density, payload, position[:, :0], torch.full_like(log_density, torch.nan))

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        move = propose(
            state.position, step_size=step_size, preconditioner=preconditioner, independent=independent, generator=generator
        )
        log_density, payload = density.draw(move.position, generator)
        proposed = state._replace(position=move.position, log_density=log_density, payload=payload)
        state, info = accept(move, proposed, state)
        if moves_latents:
            log_density, moved = density.move(state.position, state.payload, generator)
            state = state._replace(log_density=log_density, payload=moved)
        return state, PseudoMarginalInfo(*info, density.work(payload))

    return Sampler(init, step)


def correlated_pseudo_marginal(
    density: NoisyDensity, *, step_size: Tensor, preconditioner: Preconditioner, correlation: float
) -> Sampler:
    r"""Pseudo-marginal Metropolis-Hastings whose estimates at both ends of a move share most of their noise.

    The auxiliary normals move by :math:`u' = \rho u + \sqrt{1 - \rho^2} \epsilon`, which leaves their distribution invariant; the
    noise of the log ratio then largely cancels (Deligiannidis, Doucet & Pitt 2018).

    :func:`pseudo_marginal` has an example.

    Args:
        density: must be a continuous function of its normals for the correlation to help; exact in any case.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.
        correlation: rho, in [0, 1); 0 is :func:`pseudo_marginal`.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc import samplers
        >>> class NoisyNormal:  # N(0, 1), known through estimates with log-normal errors of mean one
        ...     auxiliary_size = 1
        ...
        ...     def evaluate(self, position, auxiliary):
        ...         return -0.5 * position.square().sum(-1) + auxiliary.sum(-1) - 0.5, ()
        ...
        ...     def work(self, payload):
        ...         return 0.0
        >>> walk = {"step_size": torch.tensor(0.5), "preconditioner": samplers.Preconditioner(torch.eye(1), torch.zeros(0))}
        >>> rates = []
        >>> for correlation in (0.0, 0.99):
        ...     generator = torch.Generator().manual_seed(0)
        ...     kernel = samplers.correlated_pseudo_marginal(NoisyNormal(), correlation=correlation, **walk)
        ...     state = kernel.init(torch.randn(4000, 1, generator=generator), generator)
        ...     for _ in range(10):
        ...         state, info = kernel.step(state, generator)
        ...     rates.append(round(float(info.acceptance_rate.mean()), 1))
        >>> rates  # noise that stays cancels in the ratio
        [0.5, 0.8]
    """
    fresh = math.sqrt(1 - correlation**2)

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        auxiliary = normal_like(position.new_empty(len(position), density.auxiliary_size), generator)
        log_density, payload = density.evaluate(position, auxiliary)
        return PseudoMarginalState(position, log_density, payload, auxiliary, torch.full_like(log_density, torch.nan))

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        move = propose(state.position, step_size=step_size, preconditioner=preconditioner, generator=generator)
        auxiliary = correlation * state.auxiliary + fresh * normal_like(state.auxiliary, generator)
        log_density, payload = density.evaluate(move.position, auxiliary)
        proposed = PseudoMarginalState(move.position, log_density, payload, auxiliary, state.surrogate)
        state, info = accept(move, proposed, state)
        return state, PseudoMarginalInfo(*info, density.work(payload))

    return Sampler(init, step)


def delayed_acceptance(
    density: NoisyDensity,
    surrogate: CountedDensity | Callable[[Tensor], Tensor],
    *,
    step_size: Tensor,
    preconditioner: Preconditioner,
) -> Sampler:
    """Pseudo-marginal Metropolis-Hastings that screens proposals by a cheap deterministic density (Christen & Fox 2005).

    A proposal is first accepted or not under ``surrogate``; only those that pass are estimated, and accepted with what is left of
    the ratio. Exact whatever the surrogate is.

    :func:`pseudo_marginal` has an example.

    Args:
        density: the target, estimated.
        surrogate: a deterministic approximation of it; its factorisations count where it states them.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`; ``acceptance_rate`` is the product of both
        stages' and ``n_steps`` counts estimates.

    Example:
        >>> import torch
        >>> from torchgpmc import samplers
        >>> class NoisyNormal:  # N(0, 1), known through estimates with log-normal errors of mean one
        ...     auxiliary_size = 1
        ...
        ...     def evaluate(self, position, auxiliary):
        ...         return -0.5 * position.square().sum(-1) + auxiliary.sum(-1) - 0.5, ()
        ...
        ...     def draw(self, position, generator):
        ...         return self.evaluate(position, torch.randn(len(position), 1, generator=generator))
        ...
        ...     def work(self, payload):
        ...         return 0.0
        ...
        ...     def select(self, rows):
        ...         return self
        >>> walk = {"step_size": torch.tensor(10.0), "preconditioner": samplers.Preconditioner(torch.eye(1), torch.zeros(0))}
        >>> kernel = samplers.delayed_acceptance(NoisyNormal(), lambda position: -0.4 * position.square().sum(-1), **walk)
        >>> generator = torch.Generator().manual_seed(0)
        >>> state, info = kernel.step(kernel.init(torch.zeros(1000, 1), generator), generator)
        >>> info.n_steps.mean() < 0.2  # steps so long that most proposals are screened out, at no estimate
        tensor(True)
    """
    screen: Any = as_density(surrogate)

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        log_density, payload = density.draw(position, generator)
        return PseudoMarginalState(position, log_density, payload, position[:, :0], screen.draw(position, generator)[0])

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        proposal = state.position + step_size * preconditioner.apply(normal_like(state.position, generator))
        screen_u, log_u = log_uniform((2, len(proposal)), state.log_density, generator)
        screened, screening = screen.draw(proposal, generator)
        first = torch.nan_to_num(screened - state.surrogate, nan=-torch.inf)
        rows = (screen_u < first).nonzero().squeeze(-1)
        acceptance, n_steps, n_failures, work = (torch.zeros_like(first) for _ in range(4))
        work += screen.work(screening)
        if len(rows) == 0:
            return state, PseudoMarginalInfo(acceptance, n_steps, n_failures, work)
        log_density, payload = density.select(rows).draw(proposal[rows], generator)
        second = torch.nan_to_num(log_density - state.log_density[rows] - first[rows], nan=-torch.inf)
        accepted = log_u[rows] < second
        # The mean over the screening step's outcome is estimated by its one outcome, which is unbiased.
        acceptance[rows] = second.clamp_max(0.0).exp()
        n_steps[rows], n_failures[rows], work[rows] = 1.0, torch.isinf(log_density).to(first), work[rows] + density.work(payload)
        taken, kept = rows[accepted], accepted.nonzero().squeeze(-1)
        proposed = PseudoMarginalState(proposal[rows], log_density, payload, state.auxiliary[rows], screened[rows])
        return put(state, taken, take(proposed, kept)), PseudoMarginalInfo(acceptance, n_steps, n_failures, work)

    return Sampler(init, step)


class _Counted:
    """Estimates of one transition as a known density of one argument, the other fixed; with their work added up."""

    def __init__(self, density: NoisyDensity, zero: Tensor):
        self.density = density
        self.work = zero

    def _evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, Any]:
        log_density, payload = self.density.evaluate(position, auxiliary)
        self.work = self.work + self.density.work(payload)
        return log_density, payload

    def of_position(self, auxiliary: Tensor) -> Density:
        """At fixed normals."""
        return DrawnDensity(lambda position, _: self._evaluate(position, auxiliary))

    def of_auxiliary(self, position: Tensor) -> Density:
        """At a fixed position."""
        return DrawnDensity(lambda auxiliary, _: self._evaluate(position, auxiliary))


def pseudo_marginal_slice(density: NoisyDensity, *, width: Tensor, max_steps_out: int = 8) -> Sampler:
    """Pseudo-marginal slice sampling: no rejections, so no sticking (Murray & Graham 2015).

    Elliptical slice sampling of the auxiliary normals given the position, then univariate slice updates of the position given the
    normals.

    :func:`pseudo_marginal` has an example.

    Args:
        density: as a function of position and normals.
        width: initial bracket of each coordinate ``(D,)``.
        max_steps_out: limit on the number of widths in a bracket.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`PseudoMarginalInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc import samplers
        >>> class NoisyNormal:  # N(0, 1), known through estimates with log-normal errors of mean one
        ...     auxiliary_size = 1
        ...
        ...     def evaluate(self, position, auxiliary):
        ...         return -0.5 * position.square().sum(-1) + auxiliary.sum(-1) - 0.5, ()
        ...
        ...     def work(self, payload):
        ...         return 0.0
        >>> kernel, generator = samplers.pseudo_marginal_slice(NoisyNormal(), width=torch.ones(1)), torch.Generator().manual_seed(0)
        >>> before = kernel.init(torch.zeros(1000, 1), generator)
        >>> after, info = kernel.step(before, generator)
        >>> (after.position != before.position).all(), (after.auxiliary != before.auxiliary).all()  # no chain stays
        (tensor(True), tensor(True))
    """

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        auxiliary = normal_like(position.new_empty(len(position), density.auxiliary_size), generator)
        log_density, payload = density.evaluate(position, auxiliary)
        return PseudoMarginalState(position, log_density, payload, auxiliary, torch.full_like(log_density, torch.nan))

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, PseudoMarginalInfo]:
        position = state.position
        counted = _Counted(density, torch.zeros_like(state.log_density))
        inner = elliptical_slice(counted.of_auxiliary(position))
        moved, first = inner.step(EllipticalSliceState(state.auxiliary, state.log_density, state.payload), generator)
        outer = slice_sampler(counted.of_position(moved.position), width=width, max_steps_out=max_steps_out)
        placed, second = outer.step(SliceState(position, moved.log_density, moved.payload), generator)
        new = PseudoMarginalState(placed.position, placed.log_density, placed.payload, moved.position, state.surrogate)
        n_steps, failures = first.n_steps + second.n_steps, first.n_failures + second.n_failures
        return new, PseudoMarginalInfo(second.acceptance_rate, n_steps, failures, counted.work)

    return Sampler(init, step)


def on_surrogate(estimated: Sampler, surrogate: LogDensity, *, step_size: Tensor, preconditioner: Preconditioner) -> Sampler:
    """Metropolis on a cheap density over the states of a pseudo-marginal kernel: what that kernel is tuned with.

    The density is not estimated meanwhile, and its log is NaN; ``estimated.init`` at the positions goes over to the target.

    Args:
        estimated: the kernel that is to run later.
        surrogate: a deterministic approximation of its target.
        step_size: ``()``.
        preconditioner: S, see :class:`Preconditioner`.

    Returns:
        A sampler with :class:`PseudoMarginalState` and :class:`MetropolisInfo`.
    """
    # Its value alone: states have a place for the estimate's payload, none for its own.
    kernel = metropolis(lambda position: surrogate(position), step_size=step_size, preconditioner=preconditioner)

    def init(position: Tensor, generator: torch.Generator) -> PseudoMarginalState:
        state = estimated.init(position, generator)  # for its payload, which belongs into every state
        return state._replace(log_density=torch.full_like(state.log_density, torch.nan), surrogate=surrogate(position))

    def step(state: PseudoMarginalState, generator: torch.Generator) -> tuple[PseudoMarginalState, MetropolisInfo]:
        moved, info = kernel.step(MetropolisState(state.position, state.surrogate), generator)
        return state._replace(position=moved.position, surrogate=moved.log_density), info

    return Sampler(init, step)
