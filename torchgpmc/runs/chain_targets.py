"""What chains sample: [theta, v]; v alone; theta, the latents integrated out approximately, exactly or by unbiased estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation, CollapsedMarginal, Conjugate, Variational, marginal_of
from torchgpmc.approximations.conjugate import has_normal_latents
from torchgpmc.checks import check_count, check_object
from torchgpmc.density import SharedDensity
from torchgpmc.evidence import (
    CollapsedEstimator,
    Evidence,
    ExactEstimator,
    LatentEstimate,
    LatentEstimator,
    importance,
    latents_kept,
)
from torchgpmc.models.affine import AffineJointLogDensity, white_at_fixed_theta
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.remedies import what_samples
from torchgpmc.models.ridges import StraightDensity, ridges_of
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.runs.blocks import LatentsGivenTheta, kept_prior
from torchgpmc.runs.fits import Fits, around_fit
from torchgpmc.runs.on_normal_scale import OnScale, begun_at_mode, starts_on_scale
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.runs.starts import check_one_data_set, start_at_mode, starting_positions, starting_thetas
from torchgpmc.storage.draws import Draw
from torchgpmc.types import LogDensity, NoisyDensity

EXACT = "the exact posterior"


class ChainTarget(NamedTuple):
    """What chains sample, where they start, and how their states become posterior draws."""

    density: Any  # what kernels take: a log density, or one with a payload
    num_hyperparameters: int  # leading columns of a position
    dimension: int  # leading columns that kernels move, all but where ``refresh`` draws the others
    start: Callable[[torch.Generator], tuple[Tensor, Tensor | None]]  # positions, and the covariance there if it is known
    # From a kernel's state, or from what ``refresh`` gave; statistics with "lp".
    read: Callable[[Any, torch.Generator], tuple[Draw, dict[str, Tensor]]]
    label: str  # what the draws are draws of
    is_guess: bool = False  # whether the covariance at the start is only where learning begins
    biased: str | None = None  # what keeps the draws from being exact, in words, however long the chains
    begun: str | None = None  # at which of several optima of a fit chains begin, in words
    # To what has another position, after each transition of a kernel that knows position and density alone: it leaves the target as
    # it is.
    refresh: Callable[[Tensor, torch.Generator], Any] | None = None


def shared(density: Any, model: GPModel) -> SharedDensity:
    """A density of the model's, rows of which are matrices as large as its prior's covariance."""
    return SharedDensity(density, model.operations, model.train_x.device, len(model.latent_inputs) ** 2)


def joint_target(
    model: GPModel, settings: Settings, sites: GaussianSites | None = None, *, along_ridges: bool = False
) -> ChainTarget:
    """The exact posterior of [theta, v]; with ``sites``, in coordinates that are white under the posterior that they give.

    With ``settings.start``, in coordinates that are white under its q(v), from positions around it. With ``along_ridges``, in
    coordinates of theta in which the ridges that the likelihood knows of are straight, if it does.
    """
    _, chains = chain_settings(settings)
    fit = settings.start
    plain = JointLogDensity(model, sites=sites)
    ridges = ridges_of(model) if along_ridges else None
    straight = plain if ridges is None else StraightDensity(plain, ridges)
    joint: JointLogDensity | StraightDensity | AffineJointLogDensity = straight
    if fit is not None:
        joint = around_fit(fit, straight, ridges)
    elif sites is not None and plain.fixed is not None and not model.targets.one_a_chain:
        joint = AffineJointLogDensity(JointLogDensity(model, fixed=plain.fixed), white_at_fixed_theta(plain.fixed, sites))
    density = in_chunks(shared(joint, model), chains, settings.chain_chunk)
    size = model.layout.size
    parts = torch.arange(chains).split(settings.chain_chunk or chains)

    def original(theta: Tensor) -> Tensor:
        return theta if ridges is None else ridges.original(theta)

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        position, log_density = state.position, state.log_density
        theta = original(position[:, :size])
        if fit is None and sites is None:
            return Draw(theta[:, None], position[:, None, size:]), {"lp": log_density}
        found = [joint.select(rows).whitened(position[rows]) for rows in parts]
        v, log_volume = (torch.cat(part) for part in zip(*found, strict=True))
        return Draw(theta[:, None], v[:, None]), {"lp": log_density - log_volume}

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        if fit is None:
            position = starting_positions(model, in_chunks(shared(plain, model), chains, settings.chain_chunk), chains, generator)
            theta, v = position.tensor_split([size], -1)
            return torch.cat([theta if ridges is None else ridges.straight(theta), v], -1), None
        fits = Fits(fit, straight, ridges, lambda one, count: in_chunks(shared(one, model), count, settings.chain_chunk))
        return fits.positions(chains, generator)

    begun = None if fit is None else fit.chains_began(chains)
    return ChainTarget(density, size, size + model.latent_size, start, read, EXACT, is_guess=fit is not None, begun=begun)


def original_target(model: GPModel, settings: Settings) -> ChainTarget:
    """The exact posterior of [theta, v] in v itself, for sweeps; with ``settings.start``, from the same positions around it."""
    target, fit = joint_target(model, settings._replace(start=None)), settings.start
    if fit is None:
        return target
    white = joint_target(model, settings)

    def start(generator: torch.Generator) -> tuple[Tensor, None]:
        theta, w = white.start(generator)[0].tensor_split([model.layout.size], -1)
        return torch.cat([theta, fit.white_coordinates().latents(theta, w)], -1), None

    return target._replace(start=start, begun=white.begun)


def latent_target(model: GPModel, settings: Settings, *, with_prior: bool) -> ChainTarget:
    """v at fixed hyperparameters; p(f) is factorised once for all chains.

    Args:
        model: whose posterior.
        settings: of the run.
        with_prior: whether the density holds log N(v | 0, I), or is the likelihood alone, for kernels with that prior of their own.

    Raises:
        ValueError: a covariance that is not positive definite.
    """
    _, chains = chain_settings(settings)
    with torch.no_grad():
        at = model.at_data(model.layout.raw_values(model.train_x.new_zeros(1, 0)))
    if not bool(at.prior.ok.all()):
        raise ValueError(
            f"the covariance at the fixed hyperparameters could not be factorised. Expected it to be positive definite; "
            f"raise jitter (now {model.jitter:g})."
        )
    kept = kept_prior(model, at, at.mean.new_zeros(1))
    given = LatentsGivenTheta(JointLogDensity(model, fixed=at), kept, with_prior=with_prior)

    def start(generator: torch.Generator) -> tuple[Tensor, None]:
        return normal_like(model.train_x.new_empty(chains, model.latent_size), generator), None

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        v, log_density = state.position, state.log_density
        log_prior = 0.0 if with_prior else log_standard_normal(v)
        return Draw(v.new_zeros(chains, 1, 0), v[:, None]), {"lp": log_density + log_prior}

    return ChainTarget(in_chunks(given, chains, settings.chain_chunk), 0, model.latent_size, start, read, EXACT)


def marginal_target(
    model: GPModel,
    settings: Settings,
    approximation: Approximation,
    importance_weights: int | Evidence,
    from_mode: bool,
    normal_scale: bool = False,
) -> ChainTarget:
    """The approximate marginal posterior of theta; latents are drawn for kept thetas, weighted if ``importance_weights`` is not 0.

    Chains begin around ``settings.draws`` if there are any, at the mode, or at draws from the prior. With ``normal_scale`` they
    move in z, of which theta is a function (:class:`torchgpmc.parameters.normal_scale.NormalScale`).

    Raises:
        ValueError: nothing to sample, or a model that cannot be approximated so.
        TypeError: weights from something that is neither a number nor an evidence.
    """
    num_importance, evidence = (importance_weights, None) if isinstance(importance_weights, int) else (1, importance_weights)
    check_count("importance_weights", num_importance, 0)
    check_has_hyperparameters(model, "marginal=" + type(approximation).__name__)
    check_one_data_set(model, from_mode)
    drawn = settings.draws
    if drawn is not None and from_mode:
        raise ValueError("from_mode=True looks for a mode to begin at, and start= brings draws. Expected one of them.")
    _, chains = chain_settings(settings)
    estimator = estimator_for(model, approximation, max(1, num_importance), None, evidence)
    on_scale = begun_at_mode(model, approximation, estimator) if normal_scale else None
    marginal = marginal_of(model, approximation) if on_scale is None else on_scale.density
    density = in_chunks(shared(marginal, model), chains, settings.chain_chunk)

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        if on_scale is not None:
            if drawn is None:
                return starts_on_scale(density, chains, model.train_x.new_zeros(1, model.layout.size), generator), None
            return drawn._replace(theta=on_scale.density.scale.z(drawn.theta)).positions(density, chains, generator)
        if drawn is not None:
            return drawn.positions(density, chains, generator)
        found = start_at_mode(marginal_of(model, approximation), chains, generator) if from_mode else None
        return found or (starting_thetas(model, density, chains, generator), None)

    label = EXACT
    if not (model.collapses or isinstance(approximation, Conjugate)):
        kind = "weighted to the exact posterior" if num_importance else "an approximation, not the exact posterior"
        label = f"{type(approximation).__name__}'s approximate marginal posterior: {kind}"
    is_guess = drawn is not None and drawn.is_guess
    read = _reader_of_theta(model, estimator, num_importance > 0, on_scale)
    return ChainTarget(density, model.layout.size, model.layout.size, start, read, label, is_guess)


def _reader_of_theta(
    model: GPModel, estimator: LatentEstimator, is_weighted: bool, on_scale: OnScale | None
) -> Callable[[Any, torch.Generator], tuple[Draw, dict[str, Tensor]]]:
    """Draws of latents for the thetas, or z, of chains on an approximate marginal, with weights that make them exact."""

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        theta, log_density, begun = state.position, state.log_density, None
        if on_scale is not None:
            theta, log_slope = on_scale.density.scale.theta(theta)
            log_density = log_density - log_slope
            begun = None if on_scale.start is None else on_scale.start.repeat_interleave(len(theta), 0)
        estimate = estimator.draw(theta, generator, begun, latents_kept(model))
        log_prior = model.layout.log_prior(theta).detach()
        stats = {
            "lp": log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": log_density - log_prior,
            "log_evidence_variance": estimate.variance,
        }
        log_weight = (estimate.value + log_prior - log_density)[:, None] if is_weighted else None
        return Draw(theta[:, None], estimate.whitened[:, None], log_weight, estimate.further_whitened[:, None]), stats

    return read


def estimated_target(
    model: GPModel,
    settings: Settings,
    density: NoisyDensity,
    surrogate: LogDensity,
    modes_of: ApproximateMarginal | CollapsedMarginal | None,
) -> ChainTarget:
    """The exact posterior of theta through unbiased ``density`` estimates, each of which comes with a draw of v.

    Args:
        model: whose posterior.
        settings: for the number of chains.
        density: p(theta, y), with a :class:`LatentEstimate` as payload.
        surrogate: approximates it; chains start where it is not zero.
        modes_of: if given, chains start near a mode of this.
    """
    _, chains = chain_settings(settings)

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        found = None if modes_of is None else start_at_mode(modes_of, chains, generator)
        return found or (starting_thetas(model, surrogate, chains, generator), None)

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        estimate: LatentEstimate = state.payload
        stats = {
            "lp": state.log_density - estimate.value + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "approximation_converged": estimate.converged,
        }
        return Draw(state.position[:, None], estimate.whitened[:, None]), stats

    return ChainTarget(density, model.layout.size, model.layout.size, start, read, EXACT)


def density_target(density: LogDensity, start: Tensor) -> ChainTarget:
    """Any density of positions, from ``start`` ``(C, D)`` on; the draws are positions alone."""

    def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
        position = state.position[:, None]
        return Draw(position, position[..., :0]), {"lp": state.log_density}

    return ChainTarget(density, 0, start.shape[1], lambda _: (start, None), read, "the given density")


def suited_approximation(model: GPModel, approximation: Approximation) -> Approximation:
    """The exact conditional where the model has one; where inducing values are the latents, what serves those."""
    if model.is_conjugate or model.collapses or has_normal_latents(model):
        return Conjugate()
    return Variational() if model.takes_expectations else approximation


def estimator_for(
    model: GPModel, approximation: Approximation, num_importance: int, antithetic: bool | None, evidence: Evidence | None
) -> LatentEstimator:
    """The estimator of p(y | theta) that a method's options ask for."""
    if evidence is None and model.collapses:
        return CollapsedEstimator(CollapsedMarginal(model))
    if evidence is None and isinstance(approximation, Conjugate):
        return ExactEstimator(model, model.targets)
    if evidence is None:
        return importance(model, approximation, num_importance=num_importance, antithetic=antithetic)
    check_object("evidence", evidence, "estimator", "options such as torchgpmc.evidence.Orthant(), or None")
    return evidence.estimator(model)


def check_has_hyperparameters(model: GPModel, method: str) -> None:
    """Raises a ``ValueError`` if every hyperparameter is fixed, so that there is no theta to sample."""
    if not model.layout.size:
        raise ValueError(
            f"{method} samples hyperparameters, and all of this model's are fixed. Expected at least one with a prior; "
            f"sample the latents alone with {what_samples(model)}."
        )


def check_smooth(model: GPModel, method: str) -> None:
    """Raises a ``ValueError`` where the density of [theta, v] has no slopes that a method by gradients could follow."""
    if not model.is_smooth:
        raise ValueError(
            f"{method} follows gradients, and {type(model.likelihood).__name__} is a step in f, which a {type(model).__name__} has "
            f"among its latents. Expected a SparseGP, whose expectations are smooth; sample this model with {what_samples(model)}."
        )
