"""A move of noise: the likelihood's parameters given f, the variances integrated out, and the variances given both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.variances_density import VariancesLogDensity
from torchgpmc.overriding import is_newest
from torchgpmc.samplers.slice import slice_sampler

_WIDTH = 1.0  # of slices, on the scale of theta


class NoiseUpdate(NamedTuple):
    r"""Leaves the posterior of [theta, w] as it is: see :class:`torchgpmc.models.variances_density.VariancesLogDensity`.

    .. math:: f \sim p(f | y, \theta, w), \quad \eta \sim p(\eta | y, f), \quad w \sim p(w | y, f, \eta)

    eta are the likelihood's parameters, which slices move under p(y | f, eta) itself: w, which all hang on, is out. Given w they
    hardly move: of 300 data by trajectories alone degrees of freedom had half of the effective draws of lengthscales or less. It
    takes two factorisations, and no gradient (a collapsed Gibbs sampler, van Dyk & Park 2008, with w drawn right after eta).

    Args:
        density: of [theta, w].
    """

    density: VariancesLogDensity

    def __call__(self, position: Tensor, generator: torch.Generator) -> Tensor:
        """Other positions ``(C, P + N)``."""
        density, model = self.density, self.density.model
        theta, _ = density.split(position)
        prior, v = density.draw_with_prior(position, generator)
        f, columns = model.latents(prior, v), torch.tensor(_columns(model), dtype=torch.long, device=theta.device)

        def with_parameters(eta: Tensor) -> tuple[Any, Tensor]:
            values, log_prior = model.layout.raw_values_and_log_prior(theta.index_copy(-1, columns, eta))
            return prior._replace(values=values.by_module), log_prior

        def log_density(eta: Tensor) -> Tensor:
            there, log_prior = with_parameters(eta)
            return log_prior + model.log_likelihood_of_f(there, f, density.targets)

        with torch.no_grad():
            if len(columns):
                sampler = slice_sampler(log_density, width=theta.new_full((len(columns),), _WIDTH))
                state, _ = sampler.step(sampler.init(theta[:, columns], generator), generator)
                theta = theta.index_copy(-1, columns, state.position)
            there, _ = with_parameters(theta[:, columns])
            white = model.likelihood_function(
                likelihood_values(there),
                lambda likelihood: likelihood.white_given_noise(density.targets.values - f, generator),
            )
        usable = (prior.ok & torch.isfinite(white.sum(-1))).unsqueeze(-1)
        return torch.where(usable, torch.cat([theta, white], -1), position)


def _columns(model: GPModel) -> list[int]:
    """Of theta, that hold the likelihood's parameters."""
    sampled = any(name.startswith("likelihood.") for name in model.layout.names)
    return list(model.layout.columns("likelihood")) if sampled else []


def draws_variances(model: GPModel) -> bool:
    """Whether the likelihood knows how variances are drawn given noise."""
    kind: Any = type(model.likelihood)
    return is_newest(kind, "white_given_noise", ("noise_variances",))
