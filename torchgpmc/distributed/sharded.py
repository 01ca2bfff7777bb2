"""A sparse model whose data lie on several ranks: rank 0 samples, and all ranks add up the density of their data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchgpmc.distributed.ranks import RankLostError, Ranks, held_interrupt
from torchgpmc.models.latents import LatentsAt
from torchgpmc.models.sparse import SparseGP
from torchgpmc.models.sparse_gradient import SparseDensity, automatic_chunk
from torchgpmc.models.targets import Targets
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.parameters.layout import Hyperparameters
from torchgpmc.storage.fingerprint import differences, model_fingerprint
from torchgpmc.trees import moved


class Request(NamedTuple):
    """What rank 0 asks of all: the log density of their data at C positions, and its gradient if ``with_slopes``."""

    theta: Tensor
    white: Tensor
    with_slopes: bool


class ShardedGP(SparseGP):
    r"""A :class:`SparseGP` of which every rank of ``torch.distributed`` holds some of the data.

    .. math:: \log q(v, \theta) = \sum_{r} \sum_{n \in r} E \log p(y_n | f_n) + \log N(v | 0, I) + \log p(\theta) + const

    Rank 0 samples: it sends positions, gets back a log likelihood and gradient a rank, and adds them up in their order, the prior
    once, so that the chains are those of one process that sums the same shards, to the last bit. Random numbers, checkpoint,
    progress and Ctrl-C are rank 0's alone. Each rank's density is worked out by one thread.

    ::

        model = tg.distributed.ShardedGP(own_x, own_y, kernel, likelihood, inducing_points=z)
        with model.leading() as leads:
            if leads:  # the others come here when rank 0 is done
                posterior = tg.sample(model, tg.NUTS())

    The methods are those on the density of [theta, v]: NUTS, HMC, ChEES and AdaptiveMH. Those that look at f at the data, and white
    coordinates, refuse it.

    Args:
        train_x: this rank's inputs ``(n, D)``.
        train_y: this rank's targets ``(n,)``.
        kernel: as :class:`SparseGP`; this and all that follows is the same on every rank.
        likelihood: as :class:`SparseGP`.
        inducing_points: Z ``(M, D)``, no more than this rank's data.
        **options: of :class:`SparseGP`.

    Raises:
        ValueError: as :class:`SparseGP`.

    Source: Hensman et al. 2015, eq. 7, whose first term is a sum over data.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> own = tg.likelihoods.Bernoulli()
        >>> model = tg.distributed.ShardedGP(x, (x > 0.5).int(), kernel, own, inducing_points=x[::3])
        >>> tg.sample(model, tg.NUTS())
        Traceback (most recent call last):
            ...
        ValueError: the data of a ShardedGP lie on several ranks, which are not at work. Expected ... with model.leading() ...
    """

    _ranks: Ranks | None = None

    @contextmanager
    def leading(self, timeout: float = 1800.0) -> Iterator[bool]:
        """Rank 0 goes on within the block, told so by ``True``; the others work for it until it leaves the block.

        Args:
            timeout: seconds that the others wait for rank 0, and rank 0 for them; one that ends is noticed at once.

        Raises:
            ValueError: models that differ in more than their data; no ranks.
            RankLostError: a rank has ended, or not answered in time; the checkpoint is that of the last save.
        """
        self.refresh()
        ranks = Ranks(timeout)
        try:
            self._check_alike(ranks)
            if not ranks.leads:
                self._work(ranks)
                yield False
                return
            self._ranks = ranks
            lost = False
            try:
                yield True
            except RankLostError:
                lost = True
                raise
            finally:
                self._ranks = None
                if not lost:
                    ranks.broadcast(None)
        finally:
            ranks.close()

    def _check_alike(self, ranks: Ranks) -> None:
        own = {name: part for name, part in model_fingerprint(self).items() if name in ("kernel", "mean", "parameters")}
        z = self.inducing_points
        theta = torch.linspace(-1, 1, self.layout.size).to(z)[None]
        own |= {"inducing_points": z.cpu(), "log_prior": self.layout.log_prior(theta).cpu()}
        given = ranks.all_gather(own)
        for rank, other in enumerate(given):
            if different := differences(given[0], other):
                raise ValueError(f"rank {rank} has another model than rank 0: {different}. Expected the same but for the data.")

    def _work(self, ranks: Ranks) -> None:
        """Answers rank 0's requests until there are no more; Ctrl-C is rank 0's to act upon."""
        with one_torch_thread(), held_interrupt():
            while (request := ranks.broadcast(None)) is not None:
                ranks.gather(self.shard(moved(request, self.train_x.device), with_prior=False))

    @torch.no_grad()
    def shard(self, request: Request, *, with_prior: bool) -> tuple[Tensor, ...]:
        """This rank's part of the log density ``(C,)``, NaN where it fails, and of its gradient ``(C, P + V)`` if asked for."""
        theta, white, with_slopes = request
        chunk = self.data_chunk or automatic_chunk(len(theta) * len(self.inducing_points), theta.device)
        density = SparseDensity(
            self, self.bindings.in_chunks, chunk, theta, white, self.targets, with_slopes=with_slopes, with_prior=with_prior
        )
        return density.value_and_grad() if with_slopes else (density.value(),)

    def shards(self, request: Request) -> list[tuple[Tensor, ...]]:
        """Every rank's part, rank 0's with the prior."""
        ranks = self._ranks
        if ranks is None:
            raise ValueError(
                "the data of a ShardedGP lie on several ranks, which are not at work. Expected tg.sample to be called on rank 0, "
                "within: with model.leading() as leads."
            )
        # Interrupted between question and answers, rank 0 would part from the others in the middle of a sentence.
        with held_interrupt() as held:
            ranks.broadcast(request)
            own = self.shard(request, with_prior=True)
            _, *others = ranks.gather(None)
        if held.seen:
            raise KeyboardInterrupt
        return [own, *(moved(other, request.theta.device) for other in others)]

    def value(self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None) -> Tensor:
        (value,) = self._summed(Request(theta, white, False), targets, sites)
        return value

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor]:
        value, gradient = self._summed(Request(theta, white, True), targets, sites)
        return value, gradient

    def _summed(self, request: Request, targets: Targets, sites: GaussianSites | None) -> tuple[Tensor, ...]:
        if sites is not None or targets.one_a_chain or targets.values is not self.train_y:
            self._refuse()
        total, *others = self.shards(request)
        for part in others:
            total = tuple(sum_ + more for sum_, more in zip(total, part, strict=True))
        return total

    @property
    def operations(self) -> float:
        """Next to none: questions to the ranks come one at a time, with all chains in each."""
        return 1.0

    def at_data(self, hyperparameters: Hyperparameters) -> LatentsAt:
        self._refuse()

    def log_likelihood(self, at: LatentsAt, v: Tensor, targets: Targets | None = None) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            "f at all data was asked for, and those of a ShardedGP lie on several ranks. Expected a method on the density of "
            "[theta, v] with sampled hyperparameters, for instance torchgpmc.NUTS() without whitening; or a SparseGP."
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies, as in a posterior, are one rank's, and not at work."""
        return {name: value for name, value in super().__getstate__().items() if name != "_ranks"}
