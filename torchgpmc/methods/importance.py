"""Adaptive multiple importance sampling of theta, latents integrated out: weighted draws of (theta, f), and the log evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation, Laplace
from torchgpmc.approximations.base import check_approximation, check_model
from torchgpmc.checks import check_count, check_positive, warn
from torchgpmc.evidence import Evidence, LatentEstimator
from torchgpmc.importance import (
    Adaptation,
    AdaptiveState,
    Proposal,
    adapt,
    add_draws,
    draw_from,
    from_modes,
    log_evidence,
    log_weights,
    start,
    with_defence,
)
from torchgpmc.linalg import solve_lower
from torchgpmc.models.base import GPModel
from torchgpmc.parameters.normal_scale import NormalScale, linear_scale, normal_scale
from torchgpmc.parameters.prior_mass import log_prior_mass
from torchgpmc.runs.base import Settings, refuse_chain_options
from torchgpmc.runs.chain_targets import check_has_hyperparameters, estimator_for, suited_approximation
from torchgpmc.runs.starts import posterior_modes
from torchgpmc.special import log_standard_normal
from torchgpmc.storage.draws import Draw, Draws
from torchgpmc.weights import kish_effective_size, smoothed_log_weights

_MAX_ANCHORS = 128
_NO_EVIDENCE = (
    "the log evidence is NaN: a constraint cuts off part of a prior, or a transform distorts it, and how much of its mass remains "
    "is not known, as the prior has no cdf and cannot draw inside. The draws and their weights are right; for the evidence "
    "give the prior a cdf or a sample method, or a support that is the parameter's own."
)


class ImportanceState(NamedTuple):
    """State of a run: the weighted draws, and where the latent approximations start: as at the nearest anchor."""

    iteration: int
    draws: AdaptiveState
    anchors: Tensor  # (A, P), of z: the best mode, then some draws of the first batch
    starts: Tensor  # (A, ...), of the approximations there


class ImportanceRun(NamedTuple):
    """Batches from proposals that follow the weighted draws; one advance a batch."""

    model: GPModel
    estimator: LatentEstimator
    marginal: ApproximateMarginal
    scale: NormalScale  # of everything that is proposed
    plan: Adaptation
    schedule: list[int]
    degrees_of_freedom: float
    num_starts: int
    switch_after: int | None  # batch after which the plan becomes MAMIS
    effective_size: float | None
    smooth: bool

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior, through weights"

    def init(self, generator: torch.Generator) -> ImportanceState:
        first = self._first_proposal(generator)
        mode = first.mean[:1]
        return ImportanceState(0, start(first), mode, self._starts_at(mode))

    def _starts_at(self, z: Tensor) -> Tensor:
        return torch.nan_to_num(self.estimator.start_at(self.scale.theta(z)[0]))

    def _nearest_start(self, state: ImportanceState, z: Tensor) -> Tensor:
        """The start of the nearest anchor: a function of theta and of earlier batches, so that an estimate stays unbiased."""
        factor = state.draws.first.factor[0]
        white, anchors = (solve_lower(factor, points.mT).mT for points in (z, state.anchors))
        return state.starts[torch.cdist(white, anchors).argmin(-1)]

    def _first_proposal(self, generator: torch.Generator) -> Proposal:
        """The modes with their curvatures, shares by Laplace's integral, and the prior as the defensive component.

        Where no mode is found the prior stands in for one.
        """
        modes = posterior_modes(self.marginal, self.num_starts, generator, self.scale)
        unit = torch.eye(self.scale.size).to(self.scale.coefficients)
        mean, covariance, share = 0 * unit[:1], unit[None], unit.new_zeros(1)
        if modes:
            mean, covariance = torch.stack([m.position for m in modes]), torch.stack([m.covariance for m in modes])
            share = torch.stack([m.log_density for m in modes]) + 0.5 * torch.logdet(covariance)
        if self.plan.diagonal:
            covariance = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        proposal = from_modes(mean, covariance, share, self.degrees_of_freedom)
        if self.plan.defensive_share:
            proposal = with_defence(proposal, 0 * unit[0], unit, self.plan.defensive_share)
        return proposal

    def num_advances(self) -> int:
        return len(self.schedule)

    def is_finished(self, state: ImportanceState) -> bool:
        """After all batches, or once the effective size that was asked for has been reached."""
        if self.effective_size is None or state.iteration in (0, len(self.schedule)):
            return state.iteration == len(self.schedule)
        return kish_effective_size(log_weights(state.draws)) >= self.effective_size

    def advance(self, state: ImportanceState, generator: torch.Generator) -> tuple[ImportanceState, Draw, dict[str, Tensor]]:
        count = self.schedule[state.iteration]
        z = draw_from(state.draws.current, count, generator)
        theta, log_slope = self.scale.theta(z)
        estimate = self.estimator.draw(theta, generator, self._nearest_start(state, z))
        log_prior = self.model.layout.log_prior(theta).detach()
        log_target = log_prior + log_slope + estimate.value
        log_target = torch.nan_to_num(log_target, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        draws = add_draws(state.draws, z, log_target)
        if state.iteration + 1 < len(self.schedule):
            modified = self.plan.modified or (self.switch_after is not None and state.iteration + 1 >= self.switch_after)
            draws = adapt(draws, self.plan._replace(modified=modified))
        stats = {
            "lp": log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "n_failures": torch.isinf(log_target).to(log_target),
            "n_factorizations": estimate.num_factorizations,
            "approximation_converged": estimate.converged,
        }
        stats = {name: value[None] for name, value in stats.items()}
        anchors, starts = state.anchors, state.starts
        if state.iteration == 0 and len(self.schedule) > 1:
            anchors = z[torch.isfinite(log_target)][: min(_MAX_ANCHORS, count // 4)]
            anchors = torch.cat([state.anchors, anchors])
            starts = self._starts_at(anchors)
        return ImportanceState(state.iteration + 1, draws, anchors, starts), Draw(theta[None], estimate.whitened[None]), stats

    def finish(self, state: ImportanceState, draw: Draw) -> Draws:
        weights = log_weights(state.draws)
        if not bool(torch.isfinite(weights).any()):
            raise ValueError(
                f"all {len(weights)} draws have evidence zero: every covariance failed to factorise. Expected some to succeed; "
                f"raise the model's jitter (now {self.model.jitter:g}) or use priors that keep lengthscales and scales moderate."
            )
        value, error = log_evidence(state.draws)
        if self.smooth:
            weights = smoothed_log_weights(weights)
        mass = log_prior_mass(self.model.layout)
        if math.isnan(mass.value):
            warn(_NO_EVIDENCE)
        known = {"log_evidence": float(value) - mass.value, "log_evidence_error": math.hypot(float(error), mass.error)}
        # Ctrl-C may have come between a batch's being kept and its being weighed.
        weighed = len(weights)
        return Draws(draw.theta[:, :weighed], draw.whitened[:, :weighed], weights.cpu()[None], known)


def _growing_sizes(num_samples: int, batch_size: int, growth: float) -> list[int]:
    """Batch sizes that grow geometrically and sum to ``num_samples``.

    Example:
        >>> _growing_sizes(1000, 100, 1.5)
        [100, 150, 225, 337, 188]
    """
    sizes: list[int] = []
    left = num_samples
    while left > 0:
        size = min(left, round(batch_size * growth ** len(sizes) - 0.001))
        sizes.append(size)
        left -= size
    return sizes


def _given_sizes(num_samples: int, batch_sizes: Sequence[int]) -> list[int]:
    """The given sizes, the last of them as often as it takes to come to ``num_samples``.

    Example:
        >>> _given_sizes(1000, (100, 400))
        [100, 400, 400, 100]
    """
    sizes: list[int] = []
    left = num_samples
    while left > 0:
        size = min(left, batch_sizes[min(len(sizes), len(batch_sizes) - 1)])
        sizes.append(size)
        left -= size
    return sizes


@dataclass(frozen=True)
class _Options:
    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    degrees_of_freedom: int | None = 5
    normal_scale: bool = True
    diagonal: bool = False
    batch_size: int | None = None
    growth: float = 1.5
    batch_sizes: tuple[int, ...] | None = None
    prior_strength: float | None = None
    defensive_share: float = 0.2
    num_starts: int = 4
    effective_size: float | None = None
    smooth: bool = False
    evidence: Evidence | None = None


@dataclass(frozen=True)
class AMIS(_Options):
    """Adaptive multiple importance sampling of theta, exact or pseudo-marginal (paper E; Cornuet et al. 2012).

    Starts at the modes of the approximate posterior with their curvature, draws batches, weighs every draw against the mixture of
    all proposals used, and moves the proposal to the weighted moments. With an unbiased estimate in place of the evidence it stays
    exact (paper E, section 3.1). Every theta comes with a latent vector chosen by its importance weight.

    Args:
        approximation: :class:`Laplace` or :class:`EP`, for the modes and for drawing latents; exact for a :class:`GPRegression`.
        num_importance: latent vectors an estimate of the evidence.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        degrees_of_freedom: of Student t proposals, a whole number above 2; ``None`` for normal ones.
        normal_scale: propose on the scale on which each prior is standard normal, whose tails proposals can follow; ``False``:
            on that of theta, logarithms for positive parameters, as in paper E.
        diagonal: adapt variances alone, no correlations (AMIS-D of paper E).
        batch_size: draws of the first batch; by default a tenth of ``num_samples``, at least 10 a hyperparameter.
        growth: of batches.
        batch_sizes: all of them, in place of the two above, the last repeated as often as it takes.
        prior_strength: draws that the first proposal counts for when the next is learned; by default two a hyperparameter.
        defensive_share: of the draws, from a component with the prior's moments that is kept throughout, so that no region of the
            prior is left to the tails of what was learned (on the normal scale it is the prior itself, all but its heavier tails,
            and bounds the weights); 0 for none, as in paper E.
        num_starts: of the search for modes, the best of eight times as many draws from the prior.
        effective_size: stop once Kish's effective size reaches this; ``num_samples`` is then a limit.
        smooth: Pareto-smooth the weights (Vehtari et al. 2024): less variance, a little bias.
        evidence: another unbiased estimate in place of importance sampling: ``torchgpmc.evidence.SmoothProbit()`` or ``Orthant()``.
        switch_to_modified_after: batches after which to go on as :class:`MAMIS`; ``None``: never.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=4000, progress=False)
        >>> posterior.info["log_evidence"] < 0, posterior.log_weights.shape
        (True, torch.Size([1, 4000]))
    """

    growth: float = 1.2
    switch_to_modified_after: int | None = None

    def prepare(self, model: GPModel, settings: Settings) -> ImportanceRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, ``warmup_steps`` or ``num_chains`` given, or a model that cannot be served.
        """
        return _prepare(self, model, settings, modified=False, switch_after=self.switch_to_modified_after)


@dataclass(frozen=True)
class MAMIS(_Options):
    """Modified adaptive multiple importance sampling (Marin et al. 2014): each proposal is learned from the last batch alone.

    Consistent without AMIS's conditions, and slower to learn: batches grow faster. Arguments as for :class:`AMIS`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.MAMIS(effective_size=1000), num_samples=10000, progress=False)
        >>> posterior.num_draws < 10000  # enough effective draws came sooner
        True
    """

    def prepare(self, model: GPModel, settings: Settings) -> ImportanceRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, ``warmup_steps`` or ``num_chains`` given, or a model that cannot be served.
        """
        return _prepare(self, model, settings, modified=True, switch_after=None)


def _prepare(method: _Options, model: GPModel, settings: Settings, *, modified: bool, switch_after: int | None) -> ImportanceRun:
    name = type(method).__name__
    check_approximation("approximation", method.approximation)
    check_model(model, name, method.approximation)
    refuse_chain_options(name, settings)
    if model.targets.one_a_chain:
        raise ValueError(f"the model has several data sets and {name} samples one posterior. Expected train_y of shape (N,).")
    check_has_hyperparameters(model, name)
    check_count("num_starts", method.num_starts)
    check_positive("growth", method.growth, 0.999)
    degrees = math.inf
    if method.degrees_of_freedom is not None:
        check_count("degrees_of_freedom", method.degrees_of_freedom, 3)
        degrees = float(method.degrees_of_freedom)
    if method.effective_size is not None:
        check_positive("effective_size", method.effective_size)
    if switch_after is not None:
        check_count("switch_to_modified_after", switch_after)
    size = model.layout.size
    batch = method.batch_size
    if batch is None:
        batch = max(10 * size, 20, math.ceil(settings.num_samples / 10))
    check_count("batch_size", batch)
    sizes = _growing_sizes(settings.num_samples, batch, method.growth)
    if method.batch_sizes is not None:
        for given in method.batch_sizes or (0,):
            check_count("each of batch_sizes", given)
        sizes = _given_sizes(settings.num_samples, method.batch_sizes)
    strength = 2.0 * size if method.prior_strength is None else method.prior_strength
    check_positive("prior_strength", strength)
    if not isinstance(method.normal_scale, bool):
        raise ValueError(f"normal_scale is {method.normal_scale!r}. Expected True or False.")
    if not (isinstance(method.defensive_share, int | float) and 0 <= method.defensive_share < 1):
        raise ValueError(f"defensive_share is {method.defensive_share!r}. Expected a number of at least 0 and below 1.")
    approximation = suited_approximation(model, method.approximation)
    estimator = estimator_for(model, approximation, method.num_importance, method.antithetic, method.evidence)
    return ImportanceRun(
        model,
        estimator,
        ApproximateMarginal(model, approximation),
        (normal_scale if method.normal_scale else linear_scale)(model.layout),
        Adaptation(modified, method.diagonal, strength, float(method.defensive_share)),
        sizes,
        degrees,
        method.num_starts,
        switch_after,
        method.effective_size,
        method.smooth,
    )
