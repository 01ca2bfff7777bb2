"""Chains of hyperparameters and a noise variance for each datum, whose states become draws of hyperparameters and latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.density import FollowedDensity
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.variances_density import VariancesLogDensity, rough_variances
from torchgpmc.numerics.ascent import ascend
from torchgpmc.runs.chain_targets import EXACT, ChainTarget, shared
from torchgpmc.runs.noise_update import NoiseUpdate, draws_variances
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.runs.starts import check_one_data_set, positions_around, starting_positions
from torchgpmc.storage.draws import Draw

_CANDIDATES, _SEARCHES, _ITERATIONS, _FURTHEST = 8, 2, 60, 30.0
_DIFFERENCE = 1e-3  # in theta, for curvatures
_CHUNK_ELEMENTS = 10_000_000  # of covariance matrices at once


def variances_target(model: GPModel, settings: Settings, *, from_mode: bool = False) -> ChainTarget:
    """The exact posterior of theta and the latents by chains of [theta, w]: see :class:`VariancesLogDensity`."""
    check_one_data_set(model, from_mode)
    _, chains = chain_settings(settings)
    variances = VariancesLogDensity(model)
    density, joint = (in_chunks(shared(part, model), chains, settings.chain_chunk) for part in (variances, JointLogDensity(model)))
    parts = torch.arange(chains).split(settings.chain_chunk or chains)

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        found = _mode(variances, generator) if from_mode else None
        if found is None:
            return starting_positions(model, density, chains, generator), None
        return positions_around(*found, model.layout.size, density, chains, generator), found[1]

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        position = state.position
        v = torch.cat([variances.select(rows).draw_latents(position[rows], generator) for rows in parts])
        theta, _ = variances.split(position)
        return Draw(theta[:, None], v[:, None]), {"lp": joint(torch.cat([theta, v], -1))}

    def refresh(position: Tensor, generator: torch.Generator) -> Tensor:
        return torch.cat([NoiseUpdate(variances.select(rows))(position[rows], generator) for rows in parts])

    dimension = model.layout.size + model.latent_size
    target = ChainTarget(density, model.layout.size, dimension, start, read, EXACT, is_guess=from_mode)
    return target._replace(refresh=refresh) if draws_variances(model) else target


def with_rough_slopes(target: ChainTarget, model: GPModel, settings: Settings) -> ChainTarget:
    """The same, for trajectories that follow slopes in single precision."""
    _, chains = chain_settings(settings)
    followed = shared(rough_variances(VariancesLogDensity(model)), model)
    return target._replace(density=FollowedDensity(target.density, in_chunks(followed, chains, settings.chain_chunk)))


def _mode(variances: VariancesLogDensity, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """The highest of some modes of [theta, w] ``(P + N,)``, and the covariance to begin with there; ``None`` where none is found.

    In theta that is by the curvature given w, in which no deviation is above one; of w it is the prior's.
    """
    model = variances.model
    theta = model.layout.starting_points(_CANDIDATES, generator)
    position = torch.cat([theta, theta.new_zeros(_CANDIDATES, model.latent_size)], -1)
    rows = max(1, _CHUNK_ELEMENTS // model.latent_size**2)
    best = torch.cat([variances(part) for part in position.split(rows)]).argsort(descending=True)[:_SEARCHES]
    searches = (ascend(variances, position[row], bound=_FURTHEST, max_iterations=_ITERATIONS) for row in best)
    found = [search for search in searches if search is not None]
    if not found:
        return None
    mode = max(found, key=lambda search: search.log_density).position
    size = model.layout.size
    steps = _DIFFERENCE * torch.eye(size, len(mode), dtype=mode.dtype, device=mode.device)
    beside = torch.cat([mode + steps, mode - steps]).split(rows)
    slopes = torch.cat([variances.value_and_grad(part)[1][:, :size] for part in beside])
    curvature = (slopes[size:] - slopes[:size]) / (2 * _DIFFERENCE)
    if not bool(torch.isfinite(curvature).all()):
        return None
    values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    covariance = torch.eye(len(mode), dtype=mode.dtype, device=mode.device)
    covariance[:size, :size] = (vectors / values.abs().clamp_min(1.0)) @ vectors.mT
    return mode, covariance
