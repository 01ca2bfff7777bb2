"""A move of noise: the likelihood's parameters given f, the variances integrated out, and the variances given both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_values
from torchgpmc.models.variances_density import VariancesLogDensity
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.overriding import is_newest
from torchgpmc.samplers.slice import slice_sampler

_WIDTH = 1.0  # of slices, on the scale of theta


class MovedNoise(NamedTuple):
    """Where a move ended, with the latents it went by: a draw of the posterior where it began at one."""

    position: Tensor  # (C, P + N), [theta, w]
    whitened: Tensor  # (C, N), v
    log_density: Tensor  # (C,), of [theta, v], as :class:`torchgpmc.models.joint_density.JointLogDensity` has it


class NoiseUpdate(NamedTuple):
    r"""Leaves the posterior of [theta, w] as it is: see :class:`torchgpmc.models.variances_density.VariancesLogDensity`.

    .. math:: f \sim p(f | y, \theta, w), \quad \eta \sim p(\eta | y, f), \quad w \sim p(w | y, f, \eta)

    eta are the likelihood's parameters, which slices move under p(y | f, eta) itself: w, which all hang on, is out. Given w they
    hardly move: of 300 data by trajectories alone degrees of freedom had half of the effective draws of lengthscales or less (a
    collapsed Gibbs sampler, van Dyk & Park 2008, with w drawn right after eta). Some rounds of the three have one factorisation
    of the prior, one each besides, and no gradient.

    Args:
        density: of [theta, w].
        num_rounds: of the three draws.
        num_slices: of each parameter a round.
    """

    density: VariancesLogDensity
    num_rounds: int = 1
    num_slices: int = 1

    def __call__(self, position: Tensor, generator: torch.Generator) -> MovedNoise:
        """Other positions, and v, of which they are draws together."""
        with torch.no_grad():
            theta, white = self.density.split(position)
            prior = self.density.model.prior(theta)
            moved = MovedNoise(position, white, white[:, 0])  # replaced below
            for _ in range(self.num_rounds):
                moved = self._round(prior, *self.density.split(moved.position), generator)
        return moved

    def _round(self, prior: LatentPrior, theta: Tensor, white: Tensor, generator: torch.Generator) -> MovedNoise:
        density, model = self.density, self.density.model
        columns = torch.tensor(_columns(model), dtype=torch.long, device=theta.device)

        def with_parameters(eta: Tensor) -> tuple[LatentPrior, Tensor]:
            values, log_prior = model.layout.raw_values_and_log_prior(theta.index_copy(-1, columns, eta))
            return prior._replace(values=values.by_module), log_prior

        def log_density(eta: Tensor) -> Tensor:
            there, log_prior = with_parameters(eta)
            return log_prior + model.log_likelihood_of_f(there, f, density.targets)

        v = density.draw_given(with_parameters(theta[:, columns])[0], white, generator)
        f = model.latents(prior, v)
        sampler = slice_sampler(log_density, width=theta.new_full((len(columns),), _WIDTH))
        begun = sampler.init(theta[:, columns], generator)
        ended = begun
        for _ in range(self.num_slices):
            ended, _ = sampler.step(ended, generator)
        drawn = model.likelihood_function(
            likelihood_values(with_parameters(ended.position)[0]),
            lambda likelihood: likelihood.white_given_noise(density.targets.values - f, generator),
        )
        usable = prior.ok & torch.isfinite(drawn.sum(-1))
        other = torch.cat([theta.index_copy(-1, columns, ended.position), drawn], -1)
        position = torch.where(usable.unsqueeze(-1), other, torch.cat([theta, white], -1))
        of_f = torch.where(usable, ended.log_density, begun.log_density)
        return MovedNoise(position, v, torch.where(prior.ok, of_f + log_standard_normal(v), -torch.inf))


def _columns(model: GPModel) -> list[int]:
    """Of theta, that hold the likelihood's parameters."""
    sampled = any(name.startswith("likelihood.") for name in model.layout.names)
    return list(model.layout.columns("likelihood")) if sampled else []


def draws_variances(model: GPModel) -> bool:
    """Whether the likelihood knows how variances are drawn given noise."""
    kind: Any = type(model.likelihood)
    return is_newest(kind, "white_given_noise", ("noise_variances",))
