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
from torchgpmc.runs.chain_targets import EXACT, ChainTarget, check_has_hyperparameters, shared
from torchgpmc.runs.noise_update import MovedNoise, NoiseUpdate, draws_variances
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.runs.starts import check_one_data_set, positions_around, starting_positions
from torchgpmc.storage.draws import Draw
from torchgpmc.trees import concatenate

_CANDIDATES, _SEARCHES, _ITERATIONS, _FURTHEST = 8, 2, 60, 30.0
_DIFFERENCE = 1e-3  # in theta, for curvatures
# Rounds of the noise's move and slices a round, where trajectories leave w alone. Of 500 x 7 under Student-t noise degrees of
# freedom had 17 effective draws of 100 by one round of one slice, 20 of two, 30 by three rounds of one and 34 of two, where
# lengthscales have 50 to 80. They take a fifth of a transition's time.
_OF_THETA_ALONE = (3, 2)
_CHUNK_ELEMENTS = 10_000_000  # of covariance matrices at once


def variances_target(model: GPModel, settings: Settings, *, from_mode: bool = False, given_variances: bool = False) -> ChainTarget:
    """The exact posterior of theta and the latents by chains of [theta, w]: see :class:`VariancesLogDensity`.

    Args:
        model: a :class:`GP` whose likelihood mixes variances.
        settings: of the run.
        from_mode: begin around a mode of the density.
        given_variances: for kernels that move theta alone; w is drawn by ``refresh``.

    Raises:
        ValueError: ``given_variances`` of a likelihood that does not say how these are drawn, or with no hyperparameter to move.
    """
    check_one_data_set(model, from_mode)
    if given_variances:
        _check_given_variances(model)
    _, chains = chain_settings(settings)
    variances = VariancesLogDensity(model)
    density, joint = (in_chunks(shared(part, model), chains, settings.chain_chunk) for part in (variances, JointLogDensity(model)))
    parts = torch.arange(chains).split(settings.chain_chunk or chains)
    repeats = _OF_THETA_ALONE if given_variances else (1, 1)

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

    def refresh(position: Tensor, generator: torch.Generator) -> MovedNoise:
        moves = (NoiseUpdate(variances.select(rows), *repeats) for rows in parts)
        return concatenate([move(position[rows], generator) for move, rows in zip(moves, parts, strict=True)])

    def read_moved(moved: MovedNoise, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        theta, _ = variances.split(moved.position)
        return Draw(theta[:, None], moved.whitened[:, None]), {"lp": moved.log_density}

    dimension = model.layout.size + (0 if given_variances else model.latent_size)
    target = ChainTarget(density, model.layout.size, dimension, start, read, EXACT, is_guess=from_mode)
    return target._replace(refresh=refresh, read=read_moved) if draws_variances(model) else target


def _check_given_variances(model: GPModel) -> None:
    check_has_hyperparameters(model, "given_variances=True")
    if not draws_variances(model):
        kind = type(model.likelihood).__name__
        raise ValueError(
            f"given_variances=True leaves variances to be drawn given f, and {kind} does not say how. Expected a likelihood that "
            f"defines white_given_noise(noise, generator), or given_variances=False."
        )


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
