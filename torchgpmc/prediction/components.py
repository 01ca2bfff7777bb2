"""What each posterior draw says at test points: f there, and the responses that follow from it, a few draws at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import JointGaussian
from torchgpmc.numerics.quadrature import FIRST_NODES
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.threads import one_torch_thread, side_by_side, slices

# Elements in the largest temporary; quadrature multiplies a draw's test points by its number of nodes.
CHUNK_ELEMENTS = 2_000_000

# Draws to test points to mean and variance of f (s, K, t): what depends on the draws alone is worked out by the first call.
Given = Callable[[slice], Callable[[slice], tuple[Tensor, Tensor]]]
# Draws, by their indices, to f at all test points together.
Jointly = Callable[[Tensor], JointGaussian]


class Components:
    """The distributions whose mixture a prediction is, one a draw, at T test points; made as :class:`Prediction` is."""

    def __init__(
        self,
        model: GPModel,
        given: Given,
        num_points: int,
        chunk: int,
        draws_at_once: int,
        likelihood_values: dict[str, Tensor],
        log_weights: Tensor,
        *,
        exposure: Tensor | None = None,
        jointly: Jointly | None = None,
        each: int = 1,
    ):
        self._model = model
        self._num_points = num_points
        self._likelihood_values = likelihood_values
        self._log_weights = log_weights
        self._exposure = exposure
        self._jointly = jointly
        self._each = each
        self._points = slices(num_points, chunk)
        self._draws = slices(len(log_weights), draws_at_once)
        self._given = given
        if len(self._points) == 1:
            mean, variance = self._of_all_draws(self._points[0])
            self._draws = [slice(0, len(log_weights))]
            self._given = lambda _: lambda _: (mean, variance)

    def _responses(self, rows: Tensor, points: slice, f: Tensor, generator: torch.Generator) -> Tensor:
        """Draws of y* ``(s, t)`` given f* ``(s, K, t)`` of the posterior draws ``rows``."""
        values = {name: value[rows] for name, value in self._likelihood_values.items()}
        at = self._boundary(f)
        return self._model.likelihood_function(values, lambda likelihood: self._at(likelihood, points).sample(at, generator))

    def _at(self, likelihood: Any, points: slice) -> Any:
        """The likelihood of responses at some of the test points."""
        exposure = self._exposure
        return likelihood.at_test_points(exposure[points] if exposure is not None and exposure.dim() else exposure)

    def _of_all_draws(self, points: slice) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at some of the test points given every draw, ``(S, K, t)`` each; on every core some draws."""
        with one_torch_thread():
            parts = side_by_side(lambda rows: self._given(rows)(points), self._draws, self._log_weights.device)
        mean, variance = (torch.cat(part) for part in zip(*parts, strict=True))
        return mean, variance

    def _parts(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Some draws, some test points, mean and variance of f ``(s, K, t)``; what depends on draws alone is worked out once."""
        for rows in self._draws:
            given = self._given(rows)
            for points in self._points:
                yield rows, points, *given(points)

    def _boundary(self, f: Tensor) -> Tensor:
        return f.squeeze(-2) if f.shape[-2] == 1 else f.mT

    def _per_draw(self, draws: slice, points: slice, mean: Tensor, variance: Tensor, function: Any) -> Tensor:
        """``function(likelihood, mean, variance)`` at each of the draws, a few at a time."""
        count, latents, size = mean.shape
        parts = []
        for rows in slices(count, max(1, CHUNK_ELEMENTS // (FIRST_NODES * latents * size))):
            marginal = self._boundary(mean[rows]), self._boundary(variance[rows])
            values = {name: value[draws][rows] for name, value in self._likelihood_values.items()}
            parts.append(
                self._model.likelihood_function(values, lambda likelihood, at=marginal: function(self._at(likelihood, points), *at))
            )
        return torch.cat(parts)


def independent_normals(mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of that shape."""
    return mean + variance.sqrt() * normal_like(mean, generator)
