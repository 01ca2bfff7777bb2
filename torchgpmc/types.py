"""The contracts that samplers, densities and estimators meet: plain protocols and NamedTuples of tensors.

Every batched tensor has the chain dimension first. C chains, D dimensions of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class LogDensity(Protocol):
    """An unnormalised log density of C independent rows; -inf outside the support or where algebra failed."""

    def __call__(self, position: Tensor) -> Tensor:
        """Log density, ``(C, D) -> (C,)``."""
        ...

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and its gradient ``(C, D)``; a row of value -inf has gradient zero."""
        ...

    def select(self, rows: Tensor) -> LogDensity:
        """The same density for the chains in ``rows`` (indices) alone: lets finished chains leave the batch."""
        ...


class Sampler(NamedTuple):
    """A Markov kernel on C chains: two functions and no state of its own.

    State is what the next step needs, as a NamedTuple of tensors that has a ``position``; Info is everything else that is
    known about a transition, and has at least ``acceptance_rate``, ``n_steps`` and ``n_failures``, each ``(C,)``.
    """

    init: Callable[[Tensor, torch.Generator], Any]
    step: Callable[[Any, torch.Generator], tuple[Any, Any]]


class LogEstimate(NamedTuple):
    """Log of an unbiased estimate ``(C,)`` and the relative variance of that estimate ``(C,)``."""

    value: Tensor
    variance: Tensor


class LogEstimator(Protocol):
    """An unbiased estimator of p(y | theta) at C thetas at once."""

    def __call__(self, theta: Tensor, generator: torch.Generator) -> LogEstimate:
        """Its value at ``(C, P)`` with fresh random numbers."""
        ...


class NoisyDensity(Protocol):
    """A log density of C rows known through unbiased estimates (of the density, not of its logarithm)."""

    @property
    def auxiliary_size(self) -> int:
        """Standard normals that an estimate is made from."""
        ...

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        """Log estimates ``(C,)`` from fresh random numbers, and a NamedTuple of tensors ``(C, ...)`` that goes with them."""
        ...

    def evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, Any]:
        """The same as a deterministic function of standard normals ``(C, auxiliary_size)``."""
        ...

    def move(self, position: Tensor, payload: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        """Moves the latent variables that go with an estimate, leaving the extended target invariant; the estimate changes too."""
        ...

    def work(self, payload: Any) -> Tensor:
        """Factorisations that an estimate took ``(C,)``."""
        ...

    def select(self, rows: Tensor) -> NoisyDensity:
        """The same density for the chains in ``rows`` alone."""
        ...


class WeightedSamples(NamedTuple):
    """Draws ``(S, D)`` with unnormalised log weights ``(S,)`` and the log evidence they estimate ``()``."""

    position: Tensor
    log_weight: Tensor
    log_evidence: Tensor
