"""What the engines on hyperparameters alone take: an unbiased estimate of p(y | theta), with a latent draw to go with it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets


class LatentEstimate(NamedTuple):
    """Estimates at C thetas, with one of the latent vectors each was made from, chosen by its weight."""

    value: Tensor  # (C,), log of the unbiased estimate of p(y | theta); -inf where K could not be factorised
    variance: Tensor  # (C,), relative variance of the estimate
    whitened: Tensor  # (C, N), the kept draw
    log_likelihood: Tensor  # (C,), log p(y | f) of the kept draw
    num_factorizations: Tensor  # (C,)
    converged: Tensor  # (C,), whether the density it was drawn from is as good as it can be


class LatentEstimator(Protocol):
    """An unbiased estimator with latent draws; what it returns has at least the fields of :class:`LatentEstimate`."""

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate."""
        ...

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None) -> Any:
        """Estimates at ``theta`` ``(C, P)`` from fresh random numbers; ``start`` may save work."""
        ...

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> Any:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``."""
        ...

    def start_at(self, theta: Tensor) -> Tensor:
        """What estimates near ``theta`` may start from ``(C, ...)``."""
        ...

    def move(self, theta: Tensor, estimate: Any, num_steps: int, generator: torch.Generator) -> Any:
        """Moves the kept draws, leaving the extended target of a pseudo-marginal chain invariant."""
        ...

    def select(self, rows: Any) -> LatentEstimator:
        """The same for some of the chains."""
        ...


class Evidence(Protocol):
    """Options of one kind of unbiased estimate, in place of an engine's own importance sampling."""

    def estimator(self, model: GPModel, targets: Targets | None = None) -> LatentEstimator:
        """The estimator for a model; its own targets by default.

        Raises:
            ValueError: a model that cannot be served.
        """
        ...
