"""What a method on a fixed log density samples: [theta, v], or theta alone under an approximate marginal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation, Conjugate
from torchgpmc.draws import Draw
from torchgpmc.evidence import Evidence, LatentEstimator, importance
from torchgpmc.methods.base import Settings, chain_settings, check_count, in_chunks, starting_positions
from torchgpmc.methods.modes import check_one_data_set, start_at_mode
from torchgpmc.models.base import GPModel, JointLogDensity
from torchgpmc.models.regression import GPRegression
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.types import LogDensity

_LOG_2PI = math.log(2 * math.pi)


class Target(NamedTuple):
    """A density with its starting points, and how its positions become posterior draws."""

    density: LogDensity
    num_hyperparameters: int  # leading columns of a position
    dimension: int
    start: Callable[[torch.Generator], tuple[Tensor, Tensor | None]]  # positions, and the covariance there if it is known
    read: Callable[[Tensor, Tensor, torch.Generator], tuple[Draw, dict[str, Tensor]]]  # from positions and their log densities
    label: str  # what the draws are draws of


def joint_target(model: GPModel, settings: Settings, sites: GaussianSites | None = None) -> Target:
    """The exact posterior of [theta, v]; with ``sites``, in coordinates that are white under the posterior that they give."""
    _, chains = chain_settings(settings)
    joint = JointLogDensity(model, sites=sites)
    density = in_chunks(joint, chains, settings.chain_chunk)
    size = model.layout.size
    parts = torch.arange(chains).split(settings.chain_chunk or chains)

    def read(position: Tensor, log_density: Tensor, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        if sites is None:
            return Draw(position[:, None, :size], position[:, None, size:]), {"lp": log_density}
        found = [joint.select(rows).whitened(position[rows]) for rows in parts]
        v, log_volume = (torch.cat(part) for part in zip(*found, strict=True))
        return Draw(position[:, None, :size], v[:, None]), {"lp": log_density - log_volume}

    def start(generator: torch.Generator) -> tuple[Tensor, None]:
        return starting_positions(model, density, chains, generator), None

    return Target(density, size, size + model.latent_size, start, read, "the exact posterior")


def marginal_target(
    model: GPModel, settings: Settings, approximation: Approximation, num_importance: int, from_mode: bool
) -> Target:
    """The approximate marginal posterior of theta; latents are drawn for kept thetas, weighted if ``num_importance`` is not 0.

    Raises:
        ValueError: nothing to sample, or a model that cannot be approximated so.
    """
    check_count("importance_weights", num_importance, 0)
    check_has_hyperparameters(model, "marginal=" + type(approximation).__name__)
    check_one_data_set(model, from_mode)
    _, chains = chain_settings(settings)
    density = in_chunks(ApproximateMarginal(model, approximation), chains, settings.chain_chunk)
    targets = model.train_y if model.train_y.dim() == 2 else None
    estimator = importance(model, approximation, num_importance=max(1, num_importance), targets=targets)

    def read(theta: Tensor, log_density: Tensor, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        estimate = estimator.draw(theta, generator)
        log_prior = model.layout.log_prior(theta).detach()
        stats = {
            "lp": log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": log_density - log_prior,
            "log_evidence_variance": estimate.variance,
        }
        log_weight = None
        if num_importance:
            log_weight = (estimate.value + log_prior - log_density)[:, None]
        return Draw(theta[:, None], estimate.whitened[:, None], log_weight), stats

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        found = start_at_mode(ApproximateMarginal(model, approximation), chains, generator) if from_mode else None
        return found or (starting_thetas(model, density, chains, generator), None)

    if isinstance(approximation, Conjugate):
        return Target(density, model.layout.size, model.layout.size, start, read, "the exact posterior")
    kind = "weighted to the exact posterior" if num_importance else "an approximation, not the exact posterior"
    label = f"{type(approximation).__name__}'s approximate marginal posterior: {kind}"
    return Target(density, model.layout.size, model.layout.size, start, read, label)


def suited_approximation(model: GPModel, approximation: Approximation) -> Approximation:
    """The exact conditional of a :class:`GPRegression`, the given approximation for other models."""
    return Conjugate() if isinstance(model, GPRegression) else approximation


def estimator_for(
    model: GPModel,
    approximation: Approximation,
    num_importance: int,
    antithetic: bool | None,
    evidence: Evidence | None,
    targets: Tensor | None = None,
) -> LatentEstimator:
    """The estimator of p(y | theta) that a method's options ask for."""
    if evidence is None:
        return importance(model, approximation, num_importance=num_importance, antithetic=antithetic, targets=targets)
    if isinstance(evidence, type) or not hasattr(evidence, "estimator"):
        raise TypeError(f"evidence is {evidence!r}. Expected options such as torchgpmc.evidence.Orthant(), or None.")
    return evidence.estimator(model, targets)


def log_standard_normal(v: Tensor) -> Tensor:
    """log N(v | 0, I) of each row ``(C, V)``: ``(C,)``."""
    return -0.5 * (v.square().sum(-1) + _LOG_2PI * v.shape[-1])


def check_has_hyperparameters(model: GPModel, method: str) -> None:
    """Raises a ``ValueError`` if every hyperparameter is fixed, so that there is no theta to sample."""
    if not model.layout.size:
        raise ValueError(
            f"{method} samples hyperparameters, and all of this model's are fixed. Expected at least one with a prior; "
            f"sample the latents alone with EllipticalSlice() or NUTS()."
        )


def starting_thetas(
    model: GPModel, density: Callable[[Tensor], Tensor], num_chains: int, generator: torch.Generator, max_attempts: int = 100
) -> Tensor:
    """Draws of theta from the prior ``(C, P)`` at which ``density`` is not zero.

    Raises:
        ValueError: some chain found none in many draws.
    """
    theta = model.layout.starting_points(num_chains, generator)
    for _ in range(max_attempts):
        bad = torch.isinf(density(theta))
        if not bool(bad.any()):
            return theta
        theta = torch.where(bad.unsqueeze(-1), model.layout.starting_points(num_chains, generator), theta)
    raise ValueError(
        f"the approximation failed for {int(bad.sum())} of {num_chains} chains in each of {max_attempts} draws of the "
        f"hyperparameters from their prior. Expected it to converge somewhere; try the other of Laplace() and EP(), raise "
        f"max_iterations or the model's jitter (now {model.jitter:g}), or sample with NUTS()."
    )
