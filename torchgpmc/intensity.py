"""The posterior of a rate exp(f): a weighted mixture of log-normal distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import is_number
from torchgpmc.numerics.special import ndtr
from torchgpmc.numerics.threads import one_torch_thread

_BISECTIONS = 60


class CentralInterval(NamedTuple):
    """Two ends, ``(T,)`` each.

    Example:
        >>> import torch
        >>> lower, upper = CentralInterval(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
        >>> upper - lower
        tensor([2., 3.])
    """

    lower: Tensor
    upper: Tensor


class Intensity:
    """The intensity exp(f), counts per unit of exposure, at T test points: averaged over draws by their weights.

    Args:
        moments: some test points to mean and variance of f there given each of S draws, ``(S, t)`` each.
        points: slices that together are the test points.
        log_weights: of the draws ``(S,)``, normalised.

    Example:
        >>> import torch
        >>> mean, variance = torch.zeros(1, 2).double(), torch.ones(1, 2).double()
        >>> intensity = Intensity(lambda points: (mean, variance), [slice(0, 2)], torch.zeros(1).double())
        >>> intensity.mean, intensity.quantile(0.5)
        (tensor([1.6487, 1.6487], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
        >>> intensity.variance  # exp(2) - exp(1)
        tensor([4.6708, 4.6708], dtype=torch.float64)
        >>> lower, upper = intensity.interval(0.9)
        >>> lower * upper  # exp(-1.645) and exp(1.645)
        tensor([1.0000, 1.0000], dtype=torch.float64)
    """

    def __init__(self, moments: Callable[[slice], tuple[Tensor, Tensor]], points: list[slice], log_weights: Tensor):
        self._moments = moments
        self._points = points
        self._log_weights = log_weights

    @property
    def mean(self) -> Tensor:
        """E exp(f), ``(T,)``."""
        return self._log_moment(1.0).exp()

    @property
    def variance(self) -> Tensor:
        """Var exp(f), ``(T,)``."""
        first, second = self._log_moment(1.0), self._log_moment(2.0)
        return second.exp() * -torch.expm1(2 * first - second)

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """The quantile at level ``q`` in (0, 1): ``(T,)``, or ``(Q, T)`` for Q levels; exact for the mixture.

        Raises:
            ValueError: a level outside (0, 1).
        """
        levels = check_levels(q).to(self._log_weights)
        with one_torch_thread():
            parts = [
                torch.stack(
                    [normal_mixture_quantile(*self._moments(points), self._log_weights.exp(), level) for level in levels.view(-1)]
                )
                for points in self._points
            ]
        return torch.cat(parts, -1).exp().view(*levels.shape, -1)

    def interval(self, level: float = 0.95) -> CentralInterval:
        """The central interval of probability ``level``, point by point."""
        return CentralInterval(*self.quantile(interval_levels(level)))

    def _log_moment(self, power: float) -> Tensor:
        """log E exp(power f)."""
        with one_torch_thread():
            parts = [self._moments(points) for points in self._points]
            logs = [power * mean + 0.5 * power**2 * variance + self._log_weights.unsqueeze(-1) for mean, variance in parts]
            return torch.cat([torch.logsumexp(part, 0) for part in logs])


def normal_mixture_quantile(mean: Tensor, variance: Tensor, weights: Tensor, level: Tensor) -> Tensor:
    """The quantile of a mixture of S normals at each of T points, by bisection to rounding.

    Args:
        mean: ``(S, T)``.
        variance: ``(S, T)``, not negative.
        weights: ``(S,)``, which add up to one.
        level: ``()``, in (0, 1).

    Example:
        >>> import torch
        >>> mean, half = torch.tensor([[-3.0], [3.0]]).double(), torch.tensor(0.5).double()
        >>> normal_mixture_quantile(mean, torch.ones_like(mean), half.expand(2), half).abs() < 1e-9
        tensor([True])
    """
    deviation = variance.sqrt().clamp_min(torch.finfo(mean.dtype).tiny)
    of_each = mean + deviation * torch.special.ndtri(level)
    low, high = of_each.amin(0), of_each.amax(0)  # the mixture's lies between its components'
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        below = weights @ ndtr((middle - mean) / deviation) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def check_levels(q: float | Sequence[float] | Tensor) -> Tensor:
    """Levels of quantiles as a tensor, ``()`` or ``(Q,)``.

    Raises:
        ValueError: one outside (0, 1), or a shape that is neither.
    """
    levels = torch.as_tensor(q, dtype=torch.float64)
    if levels.dim() > 1 or not levels.numel() or not bool(((levels > 0) & (levels < 1)).all()):
        raise ValueError(f"q is {q!r}. Expected levels above 0 and below 1: a number, or several, for instance [0.025, 0.975].")
    return levels


def interval_levels(level: float) -> tuple[float, float]:
    """The levels of the two ends of a central interval of probability ``level``.

    Raises:
        ValueError: a level outside (0, 1).
    """
    if not is_number(level) or not 0 < level < 1:
        raise ValueError(f"level is {level!r}. Expected a probability above 0 and below 1, for instance 0.95.")
    return 0.5 * (1 - level), 0.5 * (1 + level)
