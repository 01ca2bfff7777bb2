"""Where the posterior of theta has its modes, under an approximate evidence: for proposals, mass matrices and starting points."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.diagnostics import SamplingWarning
from torchgpmc.importance import Mode, find_modes
from torchgpmc.linalg import cholesky
from torchgpmc.models.base import GPModel
from torchgpmc.normal_scale import NormalScale, OnNormalScale
from torchgpmc.random import normal_like
from torchgpmc.types import LogDensity

_NUM_STARTS = 4
_CANDIDATES_A_START = 8
_CHUNK_ELEMENTS = 400_000  # of covariance matrices


def posterior_modes(
    marginal: ApproximateMarginal, num_starts: int, generator: torch.Generator, scale: NormalScale | None = None
) -> list[Mode]:
    """Distinct modes, best first; empty, after a warning, where none has a positive definite curvature.

    Args:
        marginal: the approximate posterior of theta.
        num_starts: of the search, the best of eight times as many draws from the prior.
        generator: of those draws.
        scale: if given, what is searched is the density of z on that scale, whose modes and curvatures are others.
    """
    model, count = marginal.model, _CANDIDATES_A_START * num_starts
    density: LogDensity = marginal
    rough: LogDensity = ApproximateMarginal(model, marginal.approximation, loose=True)
    candidates = model.layout.starting_points(count, generator)
    if scale is not None:
        density, rough = OnNormalScale(density, scale), OnNormalScale(rough, scale)
        candidates = normal_like(candidates, generator)
    # Far out a search takes many steps, and slow ones.
    value = torch.cat([rough(part) for part in candidates.split(max(1, _CHUNK_ELEMENTS // model.latent_size**2))])
    modes = find_modes(density, candidates[value.argsort(descending=True)[:num_starts]])
    if not modes:
        warnings.warn(
            f"no mode of the approximate posterior with a positive definite curvature was found in {num_starts} starts: "
            f"sampling begins from the prior instead, and may need more draws.",
            SamplingWarning,
            stacklevel=6,
        )
    return modes


def start_at_mode(marginal: ApproximateMarginal, num_chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """Draws of theta ``(C, P)`` from the normal approximation at the best mode, and its covariance; ``None`` if there is none."""
    modes = posterior_modes(marginal, _NUM_STARTS, generator)
    if not modes:
        return None
    mode = modes[0]
    noise = normal_like(mode.position.new_empty(num_chains, len(mode.position)), generator)
    theta = mode.position + noise @ cholesky(mode.covariance).factor.mT
    possible = torch.isfinite(marginal(theta)).unsqueeze(-1)
    return torch.where(possible, theta, mode.position), mode.covariance


def check_one_data_set(model: GPModel, from_mode: bool) -> None:
    """Raises a ``ValueError`` if every chain has a posterior of its own, and so no common mode to start from."""
    if from_mode and model.targets.one_a_chain:
        raise ValueError(
            "from_mode=True starts all chains from one mode, and the model has several data sets, each with its own posterior. "
            "Expected from_mode=False."
        )
