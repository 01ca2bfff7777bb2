"""Chains of hyperparameters and a noise variance for each datum, whose states become draws of hyperparameters and latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.variances_density import VariancesLogDensity
from torchgpmc.runs.chain_targets import EXACT, ChainTarget, shared
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.runs.starts import starting_positions
from torchgpmc.storage.draws import Draw


def variances_target(model: GPModel, settings: Settings) -> ChainTarget:
    """The exact posterior of theta and the latents by chains of [theta, w]: see :class:`VariancesLogDensity`."""
    _, chains = chain_settings(settings)
    variances = VariancesLogDensity(model)
    density, joint = (in_chunks(shared(part, model), chains, settings.chain_chunk) for part in (variances, JointLogDensity(model)))
    parts = torch.arange(chains).split(settings.chain_chunk or chains)

    def start(generator: torch.Generator) -> tuple[Tensor, None]:
        return starting_positions(model, density, chains, generator), None

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        position = state.position
        v = torch.cat([variances.select(rows).draw_latents(position[rows], generator) for rows in parts])
        theta, _ = variances.split(position)
        return Draw(theta[:, None], v[:, None]), {"lp": joint(torch.cat([theta, v], -1))}

    return ChainTarget(density, model.layout.size, model.layout.size + model.latent_size, start, read, EXACT)
