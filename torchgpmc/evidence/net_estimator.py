"""What estimates from one randomly shifted net of points a theta share, however the points become latents and weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpmc.evidence.latent_estimates import LatentEstimate, spread_levels
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import ndtr
from torchgpmc.numerics.threads import even_slices, side_by_side

_WORTH_A_THREAD = 4  # thetas
_Kind = TypeVar("_Kind", bound="NetEstimator")


@dataclass(frozen=True, eq=False)
class NetEstimator(ABC):
    """A :class:`LatentEstimator` whose points are one net a theta, shifted at random.

    A kind of it says how many normals an estimate takes, how many thetas are served at once, and what the estimates are.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> estimators = [kind(64).estimator(model) for kind in (tg.evidence.Orthant, tg.evidence.SequentialImportance)]
        >>> [(isinstance(estimator, NetEstimator), estimator.num_points) for estimator in estimators]
        [(True, 64), (True, 64)]
    """

    model: GPModel
    approximation: Any  # whose sites guide the points
    net: Tensor  # (n, P), the points before they are shifted; scrambling them anew would cost more than a small estimate
    targets: Targets

    @property
    def num_points(self) -> int:
        """P, points an estimate."""
        return self.net.shape[-1]

    @property
    @abstractmethod
    def auxiliary_size(self) -> int:
        """Standard normals an estimate."""

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates from fresh random numbers; ``start``, of the approximation at a nearby theta, saves iterations."""
        theta = self.model.layout.checked(theta)
        auxiliary = normal_like(theta.new_empty(len(theta), self._num_normals(num_latents)), generator)
        return self.evaluate(theta, auxiliary, start, num_latents)

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``."""

        def estimate(rows: slice) -> LatentEstimate:
            begun = None if start is None else start[rows]
            return self.select(rows)._evaluate(theta[rows], auxiliary[rows], begun, num_latents)

        parts = self._in_slices(estimate, theta)
        return LatentEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def start_at(self, theta: Tensor) -> Tensor:
        """What the approximation at ``theta`` leaves for those at nearby thetas to start from ``(C, ...)``."""

        def start(rows: slice) -> Tensor:
            targets = self.select(rows).targets
            return self.approximation.importance_density(self.model, self.model.prior(theta[rows]), targets).start

        return torch.cat(self._in_slices(start, theta))

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Not to be had: points share one shift, so that a kept draw cannot move alone."""
        evidence = type(self).__name__.removesuffix("Estimator")
        raise ValueError(f"evidence={evidence}() cannot be combined with latent_steps. Expected latent_steps=0.")

    def select(self: _Kind, rows: Tensor | slice) -> _Kind:
        """The same for some of the chains, each with targets of its own."""
        return replace(self, targets=self.targets.select(rows)) if self.targets.one_a_chain else self

    def _in_slices(self, found: Callable[[slice], Any], theta: Tensor) -> list[Any]:
        slices = even_slices(len(theta), max(1, self._thetas_at_once), theta.device, _WORTH_A_THREAD)
        with torch.no_grad():
            return side_by_side(found, slices, theta.device)

    def _num_normals(self, num_latents: int) -> int:
        """Standard normals an estimate with so many latent draws."""
        return self.auxiliary_size

    @property
    @abstractmethod
    def _thetas_at_once(self) -> int:
        """Whose arrays are no more than memory has room for."""

    @abstractmethod
    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int) -> LatentEstimate:
        """The estimates of one slice of thetas."""


class WeighedPoints(NamedTuple):
    """The estimates that points make, and which points are latent draws."""

    value: Tensor  # (C,), log of the mean weight
    variance: Tensor  # (C,), relative variance, had the points been independent; the net's are better
    chosen: Tensor  # (C, J), each by its weight


def weighed(log_weight: Tensor, normal: Tensor, num_latents: int) -> WeighedPoints:
    """Of log weights ``(C, P)``, with standard normals ``(C,)`` to choose J = ``num_latents`` points by.

    Example:
        >>> found = weighed(torch.tensor([[0.0, 0.0, -torch.inf, 0.0]]), torch.zeros(1), 2)
        >>> found.value.exp(), found.chosen
        (tensor([0.7500]), tensor([[1, 0]]))
    """
    num_points = log_weight.shape[-1]
    value = torch.logsumexp(log_weight, -1) - math.log(num_points)
    relative = (log_weight - value.unsqueeze(-1)).exp()
    cumulative = relative.cumsum(-1)
    level = spread_levels(ndtr(normal), num_latents) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, level).clamp_max(num_points - 1)
    return WeighedPoints(value, relative.var(-1) / num_points, chosen)
