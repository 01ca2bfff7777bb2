"""How an engine enters the one loop over draws (``loop.py``): a Method prepares a Run, and the Run advances."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.density import ChunkedDensity
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.drawn_start import DrawnStart
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.storage.draws import Draw, Draws
from torchgpmc.variational import Start


class Settings(NamedTuple):
    """What the user asked of :func:`torchgpmc.sample`, checked; ``None`` where the user said nothing.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from torchgpmc.methods import Settings
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> settings = Settings(num_samples=100, warmup_steps=None, num_chains=None, chain_chunk=None)
        >>> tg.EllipticalSlice().prepare(model, settings).num_advances()  # as many to warm up, where the user said nothing
        200
    """

    num_samples: int
    warmup_steps: int | None
    num_chains: int | None
    chain_chunk: int | None
    start: Start | None = None
    draws: DrawnStart | None = None  # of an earlier run, in place of a start, for chains and weighted draws of theta alone


class Run(Protocol):
    """One run of an engine on one model. Its state holds everything that changes, adaptation included.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from torchgpmc.methods import Settings
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> run = tg.EllipticalSlice().prepare(model, Settings(num_samples=2, warmup_steps=1, num_chains=4, chain_chunk=None))
        >>> generator = torch.Generator().manual_seed(0)
        >>> state, found = run.init(generator), []
        >>> while not run.is_finished(state):
        ...     state, draw, statistics = run.advance(state, generator)
        ...     found.append(None if draw is None else draw.whitened.shape)
        >>> found  # a step to warm up, then draws of four chains
        [None, torch.Size([4, 1, 8]), torch.Size([4, 1, 8])]
        >>> run.label
        'the exact posterior'
    """

    @property
    def label(self) -> str:
        """What the draws are draws of, in words: "the exact posterior", or what is approximate about it."""
        ...

    @property
    def may_be_longer(self) -> bool:
        """Whether a run of more draws begins with these, so that a checkpoint may go on to more."""
        ...

    def init(self, generator: torch.Generator) -> Any:
        """The first state: a NamedTuple of tensors, numbers and NamedTuples, which is what a checkpoint saves."""
        ...

    def num_advances(self) -> int:
        """How many advances make a complete run, warm-up included; it may finish earlier."""
        ...

    def advance(self, state: Any, generator: torch.Generator) -> tuple[Any, Draw | None, dict[str, Tensor]]:
        """The next state, the draws it yields (``None`` during warm-up) and statistics ``(C,)``."""
        ...

    def is_finished(self, state: Any) -> bool:
        """Whether what was asked for has been reached."""
        ...

    def finish(self, state: Any, draw: Draw) -> Draws:
        """All draws with their weights, if the engine weights them."""
        ...


class Method(Protocol):
    """An engine's options.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from torchgpmc.methods import Settings
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> class Patient:  # one of your own, which tg.sample takes
        ...     def prepare(self, model, settings):
        ...         return tg.EllipticalSlice().prepare(model, settings._replace(warmup_steps=10 * settings.num_samples))
        >>> Patient().prepare(model, Settings(num_samples=100, warmup_steps=None, num_chains=4, chain_chunk=None)).num_advances()
        1100
    """

    def prepare(self, model: GPModel, settings: Settings) -> Run:
        """A run of this engine.

        Raises:
            ValueError: the engine cannot sample this model, or not with these settings.
        """
        ...


class MethodOptions:
    """Base of the package's own methods: what the rest asks of them. A :class:`Method` need not be one, and then has none of it."""

    takes_start: ClassVar[bool] = False  # whether ``tg.sample(..., start=)`` has a meaning
    takes_draws: ClassVar[bool] = False  # whether it may be a posterior
    needs_gradients: ClassVar[bool] = False  # of the density, in all that it moves

    def prepare(self, model: GPModel, settings: Settings) -> Run:
        """See :meth:`Method.prepare`."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(model, settings)")

    def at_draws(self, model: GPModel) -> MethodOptions | None:
        """Itself as it begins at draws of theta; ``None`` where on this model it cannot."""
        return None


def chain_settings(settings: Settings) -> tuple[int, int]:
    """Warm-up steps and chains of a Markov chain method, with the defaults filled in: ``num_samples`` and 4."""
    warmup = settings.num_samples if settings.warmup_steps is None else settings.warmup_steps
    return warmup, 4 if settings.num_chains is None else settings.num_chains


def refuse_chain_options(method: str, settings: Settings) -> None:
    """Raises a ``ValueError`` for options that only methods with chains have."""
    for option in ("warmup_steps", "num_chains", "chain_chunk"):
        if getattr(settings, option) is not None:
            raise ValueError(
                f"{option} is {getattr(settings, option)} with {method}, which has no chains and no warm-up. "
                f"Expected None; num_samples counts all draws."
            )


def in_chunks(density: Any, num_chains: int, chain_chunk: int | None) -> Any:
    """``density`` evaluated at most ``chain_chunk`` chains at once."""
    if chain_chunk is None or chain_chunk >= num_chains:
        return density
    return ChunkedDensity(density, num_chains, chain_chunk)


def check_mass_matrix(value: Any) -> None:
    """Raises a ``TypeError`` unless ``value`` is a :class:`MassMatrix`."""
    if not isinstance(value, MassMatrix):
        raise TypeError(f"mass_matrix is {value!r}. Expected one of torchgpmc.samplers.MassMatrix, for instance MassMatrix.DENSE.")
