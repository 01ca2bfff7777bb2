"""From draws of the hyperparameters and latents to f at test inputs, given each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import JointGaussian, likelihood_parameters
from torchgpmc.prediction.components import Given, Jointly

_CHUNK_ELEMENTS = 1_000_000  # of the matrices of a block of draws: passes over larger ones wait for memory


def draws_at_once(model: GPModel, num_points: int = 0) -> int:
    """Draws whose covariances, among latents, data and ``num_points`` test points, are worked out at once."""
    inner = model.latent_shape[1]
    return max(1, _CHUNK_ELEMENTS // (inner * (inner + len(model.train_x) + num_points)))


class FunctionDraws(NamedTuple):
    """Some draws of theta with J latent vectors each: S J functions in a row, normal in what their latents leave open.

    Args:
        model: of the draws.
        theta: ``(S, P)``.
        latents: whitened, ``(S, J, V)``.
        integrates_out: whether f given theta and the data is normal, so that the latent vectors are not needed; J is then 1.
    """

    model: GPModel
    theta: Tensor
    latents: Tensor
    integrates_out: bool

    @property
    def each(self) -> int:
        """J."""
        return self.latents.shape[1]

    def at_once(self, num_points: int) -> int:
        """How many functions to take at once, a multiple of J; hyperparameters that are all fixed are factorised once for all."""
        num_thetas = draws_at_once(self.model, num_points) if self.theta.shape[1] else max(1, _CHUNK_ELEMENTS // num_points)
        return self.each * num_thetas

    def likelihood_values(self) -> dict[str, Tensor]:
        """The likelihood's parameters for each function, ``(S J, ...)``."""
        with torch.no_grad():
            values = likelihood_parameters(self.model.layout.raw_values(self.theta).by_module["likelihood"])
        return {name: value.repeat_interleave(self.each, 0) for name, value in values.items()}

    def marginals(self, x: Tensor) -> Given:
        """Some of the functions, then some of the test inputs ``(T, D)``, to mean and variance of f ``(s, K, t)``.

        The first call factorises; a slice of functions begins and ends with a theta.
        """
        model, theta, latents, integrates_out = self
        with torch.no_grad():
            shared = None if theta.shape[1] else model.prior(theta[:1])

        def given(functions: slice) -> Callable[[slice], tuple[Tensor, Tensor]]:
            draws = slice(functions.start // self.each, functions.stop // self.each)
            with torch.no_grad():
                prior = model.prior(theta[draws]) if shared is None else shared

            def moments(points: slice) -> tuple[Tensor, Tensor]:
                with torch.no_grad():
                    at = model.at(prior, x[points])
                    if integrates_out:
                        mean, variance = model.given_data(at)
                        count = draws.stop - draws.start
                        return mean.expand(count, -1, -1), variance.expand(count, -1, -1)
                    parts = [model.marginals(at, v) for v in latents[draws].unbind(1)]
                mean, variance = (torch.stack(part, 1).flatten(0, 1) for part in zip(*parts, strict=True))
                return mean, variance

            return moments

        return given

    def jointly(self, x: Tensor) -> Jointly:
        """Some of the functions, by their indices, to f at all test inputs ``(T, D)`` together."""

        def jointly(functions: Tensor) -> JointGaussian:
            with torch.no_grad():
                prior = self.model.prior(self.theta[functions // self.each] if self.theta.shape[1] else self.theta[:1])
                return self.model.predict_jointly(prior, self.latents.flatten(0, 1)[functions], x)

        return jointly
