"""The contracts that samplers, densities and warm-ups meet: plain protocols and NamedTuples of tensors.

Every batched tensor has the chain dimension first. C chains, D dimensions of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Fields of an Info that add up over transitions; flags (bool) join, all others are averaged.
COUNTS = ("n_steps", "n_failures", "n_factorizations")


class LogDensity(Protocol):
    """An unnormalised log density of C independent rows; -inf outside the support or where algebra failed.

    Example:
        >>> import torch, torchgpmc as tg
        >>> class Normal:  # a gradient of one's own, where autograd would be slower
        ...     def __call__(self, position):
        ...         return -0.5 * position.square().sum(-1)
        ...
        ...     def value_and_grad(self, position):
        ...         return self(position), -position
        ...
        ...     def select(self, rows):
        ...         return self
        >>> start = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
        >>> draws = tg.sample_density(Normal(), start, tg.HMC(num_steps=3), num_samples=500, warmup_steps=100, progress=False)
        >>> draws.position.shape
        torch.Size([4, 500, 2])
    """

    def __call__(self, position: Tensor) -> Tensor:
        """Log density, ``(C, D) -> (C,)``."""
        ...

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and its gradient ``(C, D)``; a row of value -inf has gradient zero."""
        ...

    def select(self, rows: Tensor) -> LogDensity:
        """The same density for the chains in ``rows`` (indices) alone: lets finished chains leave the batch."""
        ...


class Resolution(NamedTuple):
    """What gradients of a log density tell of it, where values are found to a tolerance."""

    slope: float = 1e-3  # the least partial derivative that is told from nothing
    gain: float | None = None  # the least difference of log densities, if not that of rounding
    step: float = 1e-4  # how far apart gradients are that tell of curvature


class EstimatedLogDensity(Protocol):
    """A log density of C independent rows that can also be estimated from some of the data."""

    @property
    def centre(self) -> Tensor:
        """A position ``(D,)`` near the middle of the target."""
        ...

    def __call__(self, position: Tensor) -> Tensor:
        """Log density, ``(C, D) -> (C,)``."""
        ...

    def estimate(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Unbiased estimates of the log density ``(C,)`` and of its gradient ``(C, D)``; (-inf, 0) where algebra failed."""
        ...


class Density(Protocol):
    """A log density, known or estimated, that hands out what its value was made from; kernels keep what goes with where they are.

    A function of positions counts as one (:func:`torchgpmc.density.as_density`): it ignores the generator and hands out nothing.
    """

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        """Log density ``(C,)``, and a payload: nested NamedTuples of tensors ``(C, ...)``, or ``()``.

        Of an unbiased estimate (of the density, not of its logarithm) the logarithm, from fresh random numbers.
        """
        ...


class LinearDensity(Density, Protocol):
    """A density that sees positions through a linear map: kernels that move in a plane map two vectors, and combine the images."""

    def image(self, vectors: Tensor) -> Tensor:
        """B vectors a chain ``(C, B, D)`` under the map: ``(C, B, J)``, linear in each."""
        ...

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        """What :meth:`draw` gives at the position with this image ``(C, J)``."""
        ...


class ReusableDensity(Density, Protocol):
    """A known density whose payload holds what is costly: its value is cheap where only what the payload does not see has moved."""

    def value_at(self, position: Tensor, payload: Any) -> Tensor:
        """What :meth:`draw` would give at ``position``, from the ``payload`` that goes with it: ``(C,)``."""
        ...


class CountedDensity(Density, Protocol):
    """A density that knows what its values took."""

    def work(self, payload: Any) -> Any:
        """Factorisations behind what :meth:`draw` gave along with ``payload``, ``(C,)``, or a number that serves all."""
        ...


class NoisyDensity(CountedDensity, Protocol):
    """A log density of C rows known through unbiased estimates."""

    @property
    def auxiliary_size(self) -> int:
        """Standard normals that an estimate is made from."""
        ...

    def evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, Any]:
        """An estimate as a deterministic function of standard normals ``(C, auxiliary_size)``."""
        ...

    def move(self, position: Tensor, payload: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        """Moves the latent variables that go with an estimate, leaving the extended target invariant; the estimate changes too."""
        ...

    def select(self, rows: Tensor) -> NoisyDensity:
        """The same density for the chains in ``rows`` alone."""
        ...


class Sampler(NamedTuple):
    """A Markov kernel on C chains: two functions and no state of its own.

    State is what the next step needs, as a NamedTuple of tensors that has at least ``position`` ``(C, D)`` and ``log_density``
    ``(C,)``; a kernel that keeps its density's payload does so as ``payload``. Info is everything else that is known about a
    transition, and has at least ``acceptance_rate``, ``n_steps`` (evaluations of the density) and ``n_failures`` (those that gave
    -inf), each ``(C,)``; its other tensors of that shape become statistics too, and what is nested is for warm-up alone.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers import elliptical_slice
        >>> kernel, generator = elliptical_slice(lambda x: -0.5 * x.square().sum(-1)), torch.Generator().manual_seed(0)
        >>> state = kernel.init(torch.ones(3, 2), generator)
        >>> state, info = kernel.step(state, generator)
        >>> state.position.shape, state.log_density.shape, info.n_steps.shape
        (torch.Size([3, 2]), torch.Size([3]), torch.Size([3]))
    """

    init: Callable[[Tensor, torch.Generator], Any]
    step: Callable[[Any, torch.Generator], tuple[Any, Any]]


class LogEstimate(NamedTuple):
    """Log of an unbiased estimate ``(C,)`` and the relative variance of that estimate ``(C,)``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> model = tg.GP([0.0, 1.0], [0, 1], RBFKernel().requires_grad_(False), tg.likelihoods.Bernoulli())
        >>> found = tg.evidence.importance(model)(torch.zeros(3, 0).double(), torch.Generator().manual_seed(0))  # three times
        >>> bool((found.value.exp() - 0.222).abs().max() < 0.02), found.variance.shape
        (True, torch.Size([3]))
    """

    value: Tensor
    variance: Tensor


class WarmUp(Protocol):
    """How a kernel's tuning is learned. It has no state of its own: tuning, nested NamedTuples of tensors, holds everything."""

    @property
    def steps(self) -> int:
        """Iterations that tune."""
        ...

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Any:
        """The first tuning, for chains that start at ``position`` ``(C, D)``; the target's covariance ``(D, D)`` if it is known."""
        ...

    def update(self, tuning: Any, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Any:
        """The next tuning, after ``iteration`` (from 1) took the chains to ``state``, with the kernel's ``info`` of it."""
        ...

    def restarts(self, iteration: int) -> bool:
        """Whether the chains' state is made anew after ``iteration``, by the new kernel's ``init`` at their positions."""
        ...

    def statistics(self, tuning: Any) -> dict[str, Tensor]:
        """Numbers ``()`` of the tuning in force that belong into the draws' statistics."""
        ...
