"""From draws of the hyperparameters and latents to function values and expected responses at the data, draw by draw."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.numerics.threads import one_torch_thread, side_by_side
from torchgpmc.posterior.function_draws import draws_at_once


def latents_of_draws(model: GPModel, theta: Tensor, v: Tensor) -> Tensor:
    """Function values at the latent inputs, on the CPU: ``(S, P)`` and ``(S, V)`` to ``(S, M)``, then K for several.

    One factorisation a draw, or one for all of fixed hyperparameters.
    """
    if not theta.shape[1]:
        with one_torch_thread():
            return model.latents(model.prior(theta[:1]), v).cpu()
    pieces = list(zip(*(part.split(draws_at_once(model)) for part in (theta, v)), strict=True))
    with one_torch_thread():
        return torch.cat(side_by_side(lambda piece: model.latents(model.prior(piece[0]), piece[1]).cpu(), pieces, theta.device))


def expected_responses(model: GPModel, theta: Tensor, latents: Tensor) -> Tensor:
    """What the likelihood expects at the data under each draw ``(S, *target_shape)``, noise left out, on the CPU.

    Args:
        model: whose latents settle f at the data.
        theta: ``(S, P)``.
        latents: f at the data as ``model.latents`` gives it, if that is what they are; else whitened, ``(S, V)``.
    """
    parts = []
    with one_torch_thread(), torch.no_grad():
        for t, f in zip(*(part.split(draws_at_once(model)) for part in (theta, latents)), strict=True):
            if not model.has_latents_at_data:
                mean = model.marginals(model.at(model.prior(t)), f).mean
                f = mean.squeeze(1) if model.num_latents == 1 else mean.mT
            values = likelihood_parameters(model.layout.raw_values(t).by_module["likelihood"])
            parts.append(model.likelihood_function(values, lambda likelihood, f=f: likelihood.expected_response(f)).cpu())
    return torch.cat(parts)
