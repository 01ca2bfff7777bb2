"""The no-U-turn sampler on C chains in lock-step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.random import normal_like, uniform
from torchgpmc.samplers.hmc import DIVERGENCE_THRESHOLD, HMCInfo, HMCState, init_hmc, kinetic_energy, leapfrog
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.trees import put, where
from torchgpmc.trees import take as take_rows
from torchgpmc.types import LogDensity, Sampler


class _Tree(NamedTuple):
    """A trajectory and the state chosen from it, for the chains still at work (A of C rows).

    All of them are at the same depth and the same leaf: a chain only leaves the batch, never falls behind, because a subtree that
    turns or diverges ends its chain's transition.
    """

    rows: Tensor  # (A,), which chains these are
    start_energy: Tensor  # (A,)
    left: HMCState
    left_rho: Tensor
    right: HMCState
    right_rho: Tensor
    rho_sum: Tensor  # (A, D), over all states of the tree
    proposal: HMCState
    proposal_energy: Tensor  # (A,)
    log_weight: Tensor  # (A,), log of the sum of exp(start energy - energy)


class _Subtree(NamedTuple):
    """The half of the next doubling that is being built, grown one leaf at a time from one end of the tree."""

    end: HMCState
    end_rho: Tensor
    rho_sum: Tensor
    proposal: HMCState
    proposal_energy: Tensor
    log_weight: Tensor


class _Tally(NamedTuple):
    """Per-chain sums over a whole transition, for all C chains."""

    acceptance: Tensor
    n_steps: Tensor
    n_failures: Tensor
    diverging: Tensor
    depth: Tensor


def _turning(left_rho: Tensor, right_rho: Tensor, rho_sum: Tensor) -> Tensor:
    """The generalised criterion (Betancourt 2017, appendix A.4.2) on preconditioned momenta ``(A, D)``: ``(A,)``.

    The ends count half, as in a trapezoid rule, which keeps trajectories of two states from turning by their own momentum.
    """
    inner = rho_sum - 0.5 * (left_rho + right_rho)
    return ((inner * left_rho).sum(-1) <= 0) | ((inner * right_rho).sum(-1) <= 0)


def _checkpoint_range(leaf: int) -> tuple[int, int]:
    """Slots of the stored even leaves whose subtrees end at the odd ``leaf``; for an even leaf the slot to store it in, twice.

    Slot = number of ones in leaf // 2; an odd leaf closes as many subtrees as it has trailing ones.

    Example:
        >>> _checkpoint_range(6), _checkpoint_range(7), _checkpoint_range(5)
        ((2, 2), (0, 2), (1, 1))
    """
    last = (leaf >> 1).bit_count()
    if leaf % 2 == 0:
        return last, last
    trailing_ones = ((leaf + 1) & ~leaf).bit_length() - 1
    return last - trailing_ones + 1, last


def nuts(density: LogDensity, *, step_size: Tensor, preconditioner: Preconditioner, max_tree_depth: int = 10) -> Sampler:
    """The no-U-turn sampler: iterative, multinomial, generalised U-turn criterion (Hoffman & Gelman 2014; Betancourt 2017).

    Chains share every gradient evaluation; on CPU a chain that has finished leaves the batch, on CUDA it is masked until the tree
    is doubled. The host waits for the device once a leapfrog step, to learn whether any chain goes on. Uniform numbers are drawn
    for all chains whether or not they still move, so a chain's draws do not depend on when others finish.

    Args:
        density: target on ``(C, D)``.
        step_size: ``()``.
        preconditioner: see :class:`Preconditioner`.
        max_tree_depth: at most ``2 ** max_tree_depth - 1`` gradients a transition.

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
        >>> sampler = tg.samplers.nuts(density, step_size=torch.tensor(0.2), preconditioner=unit, max_tree_depth=6)
        >>> state, info = sampler.step(sampler.init(torch.zeros(4, 9).double(), generator), generator)
        >>> state.position.shape, bool(info.diverging.any())
        (torch.Size([4, 9]), False)
    """

    def init(position: Tensor, generator: torch.Generator) -> HMCState:
        return init_hmc(density, position)

    def step(state: HMCState, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
        return _transition(density, step_size, preconditioner, max_tree_depth, state, generator)

    return Sampler(init, step)


def _transition(
    density: LogDensity,
    step_size: Tensor,
    preconditioner: Preconditioner,
    max_tree_depth: int,
    state: HMCState,
    generator: torch.Generator,
) -> tuple[HMCState, HMCInfo]:
    chains = len(state.position)
    rho = normal_like(state.position, generator)
    choices = uniform((max_tree_depth, 2, chains), state.log_density, generator)  # direction and merge at each depth
    energy = kinetic_energy(rho) - state.log_density
    rows = torch.arange(chains, device=energy.device)
    tree = _Tree(rows, energy, state, rho, state, rho, rho, state, energy, torch.zeros_like(energy))
    result, result_energy = state, energy
    zero = torch.zeros_like(energy)
    tally = _Tally(zero, zero, zero, torch.zeros_like(energy, dtype=torch.bool), zero)
    working = density
    for depth in range(max_tree_depth):
        leaf_choices = uniform((2**depth, chains), energy, generator)
        forward = choices[depth, 0][tree.rows] < 0.5
        direction = torch.where(forward, 1.0, -1.0).to(energy).unsqueeze(-1)
        grown, subtree, running, tally, working = _grow(
            working, direction * step_size, preconditioner, depth, tree, forward, leaf_choices, tally
        )
        if grown is None or subtree is None:
            break
        tree = grown
        # Rows that stopped at the last leaf, on CUDA at any, are still here and keep their old proposal.
        forward = choices[depth, 0][tree.rows] < 0.5
        log_u = choices[depth, 1][tree.rows].log()
        take = running & (log_u < subtree.log_weight - tree.log_weight)
        tree = _merge(tree, subtree, forward, take)
        result, result_energy = _put_back(result, result_energy, tree, running)
        tally = tally._replace(depth=tally.depth.index_add(0, tree.rows, running.to(energy)))
        running = running & ~_turning(tree.left_rho, tree.right_rho, tree.rho_sum)
        still = running.nonzero().squeeze(-1)
        if len(still) == 0:
            break
        if len(still) < len(running):
            tree, working = take_rows(tree, still), working.select(still)
    info = HMCInfo(
        acceptance_rate=tally.acceptance / tally.n_steps.clamp_min(1.0),
        diverging=tally.diverging,
        energy=result_energy,
        n_steps=tally.n_steps,
        n_failures=tally.n_failures,
        tree_depth=tally.depth,
    )
    return result, info


def _grow(
    density: LogDensity,
    step_size: Tensor,
    preconditioner: Preconditioner,
    depth: int,
    tree: _Tree,
    forward: Tensor,
    leaf_choices: Tensor,
    tally: _Tally,
) -> tuple[_Tree | None, _Subtree | None, Tensor, _Tally, LogDensity]:
    """Grows a subtree of ``2 ** depth`` leaves from each chain's chosen end; checks every sub-subtree for U-turns.

    Returns the rows still in the batch (``None`` when none is), their finished subtrees, and which of them are still running.
    """
    column = forward.unsqueeze(-1)
    end, end_rho = where(forward, tree.right, tree.left), torch.where(column, tree.right_rho, tree.left_rho)
    compact = end_rho.device.type == "cpu"
    log_weight = torch.full_like(tree.log_weight, -torch.inf)
    subtree = _Subtree(end, end_rho, torch.zeros_like(end_rho), end, tree.start_energy, log_weight)
    running = torch.ones_like(forward)
    stored: list[tuple[Tensor, Tensor]] = [(end_rho, end_rho)] * (depth + 1)  # slot -> momentum, momentum sum before it
    for leaf in range(2**depth):
        end, end_rho = leapfrog(density, preconditioner, step_size, subtree.end, subtree.end_rho)
        energy = kinetic_energy(end_rho) - end.log_density
        gain = torch.nan_to_num(tree.start_energy - energy, nan=-torch.inf)
        log_weight = torch.logaddexp(subtree.log_weight, gain)
        take = (leaf_choices[leaf][tree.rows].log() < gain - log_weight) & running
        before = subtree.rho_sum
        subtree = _Subtree(
            end,
            end_rho,
            before + end_rho,
            where(take, end, subtree.proposal),
            torch.where(take, energy, subtree.proposal_energy),
            log_weight,
        )
        tally, running = _count(tally, tree.rows, running, end.log_density, gain)
        first, last = _checkpoint_range(leaf)
        if leaf % 2 == 0:
            stored[last] = (end_rho, before)
        else:
            for slot in range(last, first - 1, -1):
                start_rho, start_sum = stored[slot]
                running = running & ~_turning(start_rho, end_rho, subtree.rho_sum - start_sum)
        if leaf == 2**depth - 1:
            break  # the caller, who looks for a U-turn of the whole tree first, asks which chains go on
        still = running.nonzero().squeeze(-1)
        if len(still) == 0:
            return None, None, running, tally, density
        if compact and len(still) < len(running):
            tree, subtree, running = take_rows(tree, still), take_rows(subtree, still), running[still]
            step_size, density = step_size[still], density.select(still)
            stored = [(rho[still], rho_sum[still]) for rho, rho_sum in stored]
    return tree, subtree, running, tally, density


def _count(tally: _Tally, rows: Tensor, running: Tensor, log_density: Tensor, gain: Tensor) -> tuple[_Tally, Tensor]:
    """Books one leapfrog step of the running rows; returns the tally and the rows that did not diverge."""
    diverged = running & (gain < -DIVERGENCE_THRESHOLD)
    one = running.to(gain)
    counted = _Tally(
        tally.acceptance.index_add(0, rows, one * gain.clamp_max(0.0).exp()),
        tally.n_steps.index_add(0, rows, one),
        tally.n_failures.index_add(0, rows, one * torch.isinf(log_density)),
        tally.diverging.index_put((rows,), tally.diverging[rows] | diverged),
        tally.depth,
    )
    return counted, running & ~diverged


def _merge(tree: _Tree, subtree: _Subtree, forward: Tensor, take: Tensor) -> _Tree:
    """Joins a finished subtree to its tree; ``take`` says whose proposal moves to the new half (biased progressive sampling)."""
    column = forward.unsqueeze(-1)
    return tree._replace(
        left=where(forward, tree.left, subtree.end),
        left_rho=torch.where(column, tree.left_rho, subtree.end_rho),
        right=where(forward, subtree.end, tree.right),
        right_rho=torch.where(column, subtree.end_rho, tree.right_rho),
        rho_sum=tree.rho_sum + subtree.rho_sum,
        proposal=where(take, subtree.proposal, tree.proposal),
        proposal_energy=torch.where(take, subtree.proposal_energy, tree.proposal_energy),
        log_weight=torch.logaddexp(tree.log_weight, subtree.log_weight),
    )


def _put_back(result: HMCState, energy: Tensor, tree: _Tree, running: Tensor) -> tuple[HMCState, Tensor]:
    """Writes the proposals of the running rows into the states of all chains."""
    old, old_energy = take_rows(result, tree.rows), energy[tree.rows]
    chosen, chosen_energy = where(running, tree.proposal, old), torch.where(running, tree.proposal_energy, old_energy)
    return put(result, tree.rows, chosen), energy.index_put((tree.rows,), chosen_energy)
