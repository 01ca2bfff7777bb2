"""The approximate marginal posterior on the scale on which each prior is standard normal, with work that begins at one theta."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import EP, Approximation, Laplace, marginal_of
from torchgpmc.approximations.held_sites import HeldSitesMarginal, can_hold_sites
from torchgpmc.evidence import LatentEstimator
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import OnNormalScale, normal_scale
from torchgpmc.runs.starts import Marginal, posterior_modes
from torchgpmc.types import LogDensity

_SEED = 0
_MAX_ATTEMPTS = 100


class OnScale(NamedTuple):
    """The density of z, and where estimates at its thetas begin: functions of the model alone, found alike by a resumed run."""

    density: OnNormalScale
    start: Tensor | None  # (1, ...), of estimates


def begun_at_mode(model: GPModel, approximation: Approximation, estimator: LatentEstimator) -> OnScale:
    """EP's sites and estimates begin at those of a mode of Laplace's density of z; of other approximations at nothing.

    A search from nothing takes seven sweeps for three from there, where labels leave 34 hyperparameters open.
    """
    scale = normal_scale(model.layout)
    if not (isinstance(approximation, EP) and can_hold_sites(model)):
        return OnScale(OnNormalScale(marginal_of(model, approximation), scale), None)
    z = model.train_x.new_zeros(1, model.layout.size)
    with torch.enable_grad():
        modes = posterior_modes(marginal_of(model, Laplace()), 1, make_generator(_SEED, model.train_x.device), scale)
    theta = scale.theta(modes[0].position[None] if modes else z)[0]
    with torch.no_grad():
        start = torch.nan_to_num(estimator.start_at(theta))
    return OnScale(OnNormalScale(HeldSitesMarginal.at(model, approximation, theta), scale), start)


def searched_marginal(model: GPModel, approximation: Approximation) -> Marginal:
    """The approximate posterior in which modes are looked for; EP's from the sites at the prior's median, where sites can be held.

    From nothing, a search for modes of EP's density takes longer at 500 data than all draws.
    """
    if not (isinstance(approximation, EP) and can_hold_sites(model)):
        return marginal_of(model, approximation)
    middle = normal_scale(model.layout).theta(model.train_x.new_zeros(1, model.layout.size))[0]
    return HeldSitesMarginal.at(model, approximation, middle)


def starts_on_scale(density: LogDensity, num_chains: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of z from the prior ``(C, P)`` at which the density is not zero.

    Raises:
        ValueError: some chain found none in many draws.
    """
    z = normal_like(like.expand(num_chains, -1), generator)
    for _ in range(_MAX_ATTEMPTS):
        bad = torch.isinf(density(z))
        if not bool(bad.any()):
            return z
        z = torch.where(bad.unsqueeze(-1), normal_like(z, generator), z)
    raise ValueError(
        f"the approximation failed for {int(bad.sum())} of {num_chains} chains in each of {_MAX_ATTEMPTS} draws of the "
        f"hyperparameters from their prior. Expected it to converge somewhere; raise max_iterations or the model's jitter, "
        f"or sample with NUTS()."
    )
