"""``sample`` with chains over ranks: one warm-up of all chains of all ranks, then chains that need not wait for one another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgpmc.calls.loop import Order
from torchgpmc.calls.settings import check_settings, checked_seed
from torchgpmc.checks import check_object, warn
from torchgpmc.distributed.ranks import HeldInterrupt, Ranks, held_interrupt
from torchgpmc.methods import NUTS
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.posterior import Posterior
from torchgpmc.runs.chain import ChainRun, ChainState
from torchgpmc.runs.run import Method, Settings
from torchgpmc.storage.checkpoint import Checkpoint, as_checkpoint
from torchgpmc.storage.draws import Draw, Draws
from torchgpmc.storage.fingerprint import Fingerprint, differences, model_fingerprint
from torchgpmc.trees import concatenate, moved, numbers_of
from torchgpmc.types import WarmUp

_CHAINS_A_RANK = 4
# Chains of NUTS take unequal trajectories; ranks that met after every draw would each time wait for the longest.
_DRAWS_BETWEEN_MEETINGS = 10


def sample(
    model: GPModel,
    method: Method | None = None,
    *,
    num_samples: int = 1000,
    warmup_steps: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    chain_chunk: int | None = None,
    timeout: float = 1800.0,
) -> Posterior:
    """:func:`torchgpmc.sample` with the chains shared by the ranks of ``torch.distributed``; every rank calls it alike.

    All chains of all ranks learn one tuning: rank 0 updates it from everyone's states, so that it is the same everywhere to the
    last bit, on unequal machines too. Each rank has random numbers of its own; the same seed and number of ranks give the same
    draws. The process group is the user's (of any backend), or made from torchrun's environment.

    Ctrl-C on any rank ends all of them after the same draw, at most ten later, and keeps the draws so far.

    Args:
        model: the same on every rank, each on its own device.
        method: one with chains; ``NUTS()`` by default.
        num_samples: kept draws a chain.
        warmup_steps: steps before the first kept draw; ``num_samples`` by default.
        num_chains: of all ranks together, a multiple of their number; 4 a rank by default.
        seed: of all randomness; rank 0 draws one for ``None``, and ``posterior.info["seed"]`` records it.
        progress: whether rank 0 shows a bar.
        checkpoint: a path (or :class:`Checkpoint`), to which each rank adds ``.rank0``, ``.rank1``, ...
        chain_chunk: evaluate at most this many chains of a rank at once.
        timeout: seconds that ranks wait for one another; one that ends is noticed at once.

    Returns:
        The draws of all chains, rank after rank, on every rank.

    Raises:
        ValueError: as :func:`torchgpmc.sample`; a number of chains that the ranks cannot share; models or settings that differ
            between ranks; checkpoints of ranks that do not fit together; no ranks.
        RankLostError: a rank has ended, or not answered in time. The others' checkpoints are those of their last saves.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> tg.distributed.sample(model, num_chains=8)  # in a program that torchrun has not started
        Traceback (most recent call last):
            ...
        ValueError: there are no ranks: ... Expected a program started by torchrun, for instance torchrun ...
    """
    settings = check_settings(num_samples, warmup_steps, num_chains, chain_chunk)
    method = NUTS() if method is None else method
    check_object("method", method, "prepare", "a method object, for instance torchgpmc.NUTS()")
    ranks = Ranks(timeout)
    try:
        with one_torch_thread(), held_interrupt() as held:
            posterior = _sampled(model, method, settings, seed, progress, checkpoint, ranks, held)
            found = posterior.complaints() if ranks.leads else []
    finally:
        ranks.close()
    for complaint in found:
        warn(complaint)
    return posterior


def _sampled(
    model: GPModel,
    method: Method,
    settings: Settings,
    seed: int | None,
    progress: bool,
    checkpoint: str | os.PathLike[str] | Checkpoint | None,
    ranks: Ranks,
    held: HeldInterrupt,
) -> Posterior:
    model.refresh()
    whole = settings._replace(num_chains=settings.num_chains or _CHAINS_A_RANK * ranks.size)
    own = whole._replace(num_chains=_chains_a_rank(whole, model, ranks))
    file = _rank_checkpoint(as_checkpoint(checkpoint), ranks.rank)
    # Rank 0's file knows the seed of all.
    seed = int(ranks.broadcast(checked_seed(None, file if ranks.leads else None)) if seed is None else checked_seed(seed, file))
    identity: Fingerprint = {"method": repr(method), "settings": repr(whole), "seed": str(seed), **model_fingerprint(model)}
    _check_alike(identity, ranks)
    run = method.prepare(model, own)
    if not isinstance(run, ChainRun):
        raise ValueError(f"{type(method).__name__} has no chains to share among ranks. Expected a method with chains, as NUTS().")
    # Rank 0 evaluates densities for all chains at once, where their number matters if they come in chunks.
    everyone: Any = method.prepare(model, whole) if ranks.leads else run
    shared = RankRun(run._replace(warm_up=PooledWarmUp(everyone.warm_up, ranks)), ranks, held)
    stream = rank_seed(seed, ranks.rank)
    order = Order(method, own, stream, model.train_x.device, file, progress and ranks.leads)
    place = {"rank": f"{ranks.rank} of {ranks.size}"}
    draws, stats, info = order.carry_out(shared, (model.layout.size, model.latent_size), lambda: {**identity, **place})
    return Posterior(model, *_joined(ranks.all_gather((draws._replace(info={}), stats, info)), seed))


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's stream, by numpy's rules for streams that have nothing in common.

    Example:
        >>> rank_seed(0, 0) != rank_seed(0, 1)
        True
    """
    return int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _chains_a_rank(whole: Settings, model: GPModel, ranks: Ranks) -> int:
    if model.targets.one_a_chain:
        raise ValueError("the model has one data set a chain. Expected one data set for all chains that ranks share.")
    total = whole.num_chains or 0
    if total % ranks.size:
        raise ValueError(
            f"num_chains is {total} with {ranks.size} ranks. Expected a multiple of {ranks.size}, so that each has as many."
        )
    return total // ranks.size


def _check_alike(identity: Fingerprint, ranks: Ranks) -> None:
    """Raises a ``ValueError``, on all ranks, unless all were asked for the same."""
    given = ranks.all_gather(identity)
    for rank, other in enumerate(given):
        if different := differences(given[0], other):
            raise ValueError(f"rank {rank} was asked for something else than rank 0: {different}. Expected the same on every rank.")


def _rank_checkpoint(checkpoint: Checkpoint | None, rank: int) -> Checkpoint | None:
    if checkpoint is None:
        return None
    path = Path(checkpoint.path)
    return checkpoint._replace(path=path.with_name(f"{path.name}.rank{rank}"))


def _joined(
    found: list[tuple[Draws, dict[str, Tensor], dict[str, Any]]], seed: int
) -> tuple[Draws, dict[str, Tensor], dict[str, Any]]:
    """All ranks' draws as those of one run."""
    draws, stats, infos = zip(*found, strict=True)
    evaluations = sum(info["num_evaluations"] for info in infos)
    info = {**infos[0], "seed": seed, "num_evaluations": evaluations, "ranks": len(infos)}
    return concatenate(draws), concatenate(stats), info


class PooledWarmUp(NamedTuple):
    """A warm-up of the chains of all ranks: rank 0 updates the tuning, with its own random numbers, and tells the others.

    Args:
        whole: the warm-up of all chains.
        ranks: who has them.
    """

    whole: WarmUp
    ranks: Ranks

    @property
    def steps(self) -> int:
        """Of the whole."""
        return self.whole.steps

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Any:
        """From everyone's positions, and rank 0's covariance."""
        given = self.ranks.gather(position)
        first = self.whole.start(concatenate(given).to(position), covariance, generator) if self.ranks.leads else None
        return moved(self.ranks.broadcast(first), position.device)

    def update(self, tuning: Any, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Any:
        """From everyone's states and Infos."""
        device = state.position.device
        given = self.ranks.gather((state, info))
        if self.ranks.leads:
            states, infos = moved(concatenate(given), device)
            tuning = self.whole.update(tuning, iteration, states, infos, generator)
        return moved(self.ranks.broadcast(tuning), device)

    def restarts(self, iteration: int) -> bool:
        """As the whole's."""
        return self.whole.restarts(iteration)

    def statistics(self, tuning: Any) -> dict[str, Tensor]:
        """As the whole's."""
        return self.whole.statistics(tuning)


class RankRun:
    """One rank's chains. Ranks meet at each step of warm-up, and now and then after it, to ask whether anyone was interrupted.

    Args:
        run: of this rank's chains, with a pooled warm-up.
        ranks: all of them.
        held: whether this rank was interrupted.
    """

    def __init__(self, run: ChainRun, ranks: Ranks, held: HeldInterrupt):
        self.run = run
        self.ranks = ranks
        self.held = held
        self._together_from: int | None = None

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return self.run.label

    @property
    def may_be_longer(self) -> bool:
        """As the chains are."""
        return self.run.may_be_longer

    def init(self, generator: torch.Generator) -> ChainState:
        state = self.run.init(generator)
        # A number in a state belongs to all chains alike, so to all ranks': ChEES counts its jittered lengths with one.
        return state._replace(chain=numbers_of(self.ranks.broadcast(state.chain), state.chain))

    def num_advances(self) -> int:
        return self.run.num_advances()

    def is_finished(self, state: ChainState) -> bool:
        """After its full length; first asked when it is known from where each rank goes on."""
        if self._together_from is None:
            self._together_from = self._meet_at_start(state.iteration)
        return self.run.is_finished(state)

    def _meet_at_start(self, iteration: int) -> int:
        """Where all ranks are again together: of checkpoints, one may have been saved when another no longer could."""
        iterations = self.ranks.all_gather(iteration)
        if min(iterations) != max(iterations) and min(iterations) < self.run.warmup_steps:
            raise ValueError(
                f"the ranks' checkpoints stand at iterations {iterations}, of which warm-up takes {self.run.warmup_steps}: a rank "
                f"ended between two saves, and chains that adapt together cannot go on apart. Expected equal ones; delete them all."
            )
        return max(iterations)

    def advance(self, state: ChainState, generator: torch.Generator) -> tuple[ChainState, Draw | None, dict[str, Tensor]]:
        done = state.iteration
        meets = done < self.run.warmup_steps or (done - self.run.warmup_steps) % _DRAWS_BETWEEN_MEETINGS == 0
        # Those behind catch up alone.
        if meets and done >= (self._together_from or 0) and any(self.ranks.all_gather(self.held.seen)):
            raise KeyboardInterrupt
        return self.run.advance(state, generator)

    def finish(self, state: ChainState, draw: Draw) -> Draws:
        return self.run.finish(state, draw)
