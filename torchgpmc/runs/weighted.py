"""The run of importance methods: batches of weighted draws of theta, each with a latent vector, and the log evidence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import warn
from torchgpmc.diagnostics.weights import kish_effective_size, smoothed_log_weights
from torchgpmc.evidence import LatentEstimator, latents_kept
from torchgpmc.importance import (
    Adaptation,
    AdaptiveState,
    Mode,
    Proposal,
    adapt,
    add_to_each,
    along_axes,
    begun_again,
    draw_from_each,
    from_modes,
    hold_their_part,
    included,
    inclusion_probabilities,
    log_evidence,
    search_tails,
    start,
    streamed_log_weights,
    teach_each,
    with_defence,
    with_last_targets,
)
from torchgpmc.importance.streams import Streams
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.parameters.normal_scale import NormalScale, OnNormalScale
from torchgpmc.parameters.prior_mass import log_prior_mass
from torchgpmc.runs.beginnings import ARM, AtModes, AtPrior
from torchgpmc.runs.drawn_start import DrawnStart
from torchgpmc.runs.screening import Screening
from torchgpmc.runs.starts import Marginal, posterior_modes
from torchgpmc.storage.draws import Draw, Draws

_MAX_ANCHORS = 128
_FITTED_COMPONENTS = 4
_TAIL_SHARE = 0.4  # of the first draws, of what tails were found to hold
_ARMS_SHARE = 2 / 3  # of the draws, but for the defensive ones
_NO_EVIDENCE = (
    "the log evidence is NaN: a constraint cuts off part of a prior, or a transform distorts it, and how much of its mass remains "
    "is not known, as the prior has no cdf and cannot draw inside. The draws and their weights are right; for the evidence "
    "give the prior a cdf or a sample method, or a support that is the parameter's own."
)


class ImportanceState(NamedTuple):
    """State of a run: the weighted draws, dealt to streams, and where the latent approximations start: as at the nearest anchor."""

    iteration: int
    streams: Streams  # of the weighted draws, and of candidates that were refused, which weigh nothing
    estimated: Tensor  # (candidates,), which of those are draws
    anchors: Tensor  # (A, P), of z: the best mode, and some draws of the first batch
    starts: Tensor  # (A, ...), of the approximations there
    num_modes: Tensor  # (), that the run is around; 0 where none was found, or they have been left for the prior


class ImportanceRun(NamedTuple):
    """Batches from proposals that follow the weighted draws; one advance a batch."""

    model: GPModel
    estimator: LatentEstimator
    marginal: Marginal | None  # where modes are looked for
    scale: NormalScale  # of everything that is proposed
    plan: Adaptation
    plan_at_prior: Adaptation  # once modes have been left
    schedule: list[int]
    degrees_of_freedom: float
    begin: AtModes | AtPrior
    switch_after: int | None  # batch after which the plan becomes MAMIS
    effective_size: float | None
    smooth: bool
    num_streams: int
    screen: Screening | None = None
    drawn: DrawnStart | None = None  # what the first proposal is fitted to, in place of ``begin``

    @property
    def label(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior, through weights"

    @property
    def may_be_longer(self) -> bool:
        """Batches, and what is learned from them, are planned from the number of all draws."""
        return False

    def init(self, generator: torch.Generator) -> ImportanceState:
        first, num_modes = self._first_proposal(generator)
        mode = first.mean[:1]
        streams = (start(first),) * self.num_streams
        estimated = torch.zeros(0, dtype=torch.bool, device=mode.device)
        return ImportanceState(0, streams, estimated, mode, self._starts_at(mode), torch.tensor(num_modes, device=mode.device))

    def _starts_at(self, z: Tensor) -> Tensor:
        return torch.nan_to_num(self.estimator.start_at(self.scale.theta(z)[0]))

    def _nearest_start(self, state: ImportanceState, z: Tensor) -> Tensor:
        """The start of the nearest anchor: a function of thetas, so that an estimate stays unbiased given all of these."""
        factor = state.streams[0].first.factor[0]
        white, anchors = (solve_lower(factor, points.mT).mT for points in (z, state.anchors))
        return state.starts[torch.cdist(white, anchors).argmin(-1)]

    def _first_proposal(self, generator: torch.Generator) -> tuple[Proposal, int]:
        """The modes with their curvatures, shares by Laplace's integral, and the prior, twice: one learns, the other stays.

        The first goes where the modes' components do not reach, to a narrow lobe for instance that the search for modes missed; the
        last is the defensive component. Where no mode is found, or looked for, the prior stands in for one and needs no such help.
        With it the number of modes.
        """
        if self.drawn is not None:
            return self._with_prior(self._fitted_proposal(self.drawn), 2), _FITTED_COMPONENTS
        modes: list[Mode] = []
        if self.marginal is not None and isinstance(self.begin, AtModes):
            modes = posterior_modes(self.marginal, self.begin.count, generator, self.scale)
        if not modes:
            return self._prior(), 0
        return self._around(modes, [] if self._may_leave else self._tails_of(modes)), len(modes)

    def _tails_of(self, modes: list[Mode]) -> list[Mode]:
        """Mass far from the best mode, if it is to be looked for."""
        if self.marginal is None or not (isinstance(self.begin, AtModes) and self.begin.search_tails):
            return []
        best = max(modes, key=lambda mode: mode.log_mass)
        return search_tails(OnNormalScale(self.marginal, self.scale), best, resolution=self.marginal.resolution)

    def _around(self, modes: list[Mode], tails: list[Mode]) -> Proposal:
        """Modes, with shares by their mass, and mass in the tails."""
        mean, covariance = (torch.stack(parts) for parts in zip(*[(m.position, m.covariance) for m in modes + tails], strict=True))
        share = torch.stack([mode.log_mass for mode in modes])
        if tails:
            # Equal shares: a mass worked out from curvatures so far out may be a tenth of what it is.
            even = torch.full_like(mean[:1, 0], math.log(_TAIL_SHARE / len(tails))).expand(len(tails))
            share = torch.cat([torch.log_softmax(share, 0) + math.log1p(-_TAIL_SHARE), even])
        if self.plan.diagonal:
            covariance = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        return self._with_prior(from_modes(mean, covariance, share, self.degrees_of_freedom), 2)

    def _prior(self) -> Proposal:
        """One or more components that learn, and the defensive one."""
        unit = identity_matrix(self.scale.size, self.scale.coefficients)
        mean, covariance, share = 0 * unit[:1], unit[None], unit.new_zeros(1)
        if self.begin.at_prior.arms:
            far, narrow = along_axes(self.scale.size, *ARM, unit)
            mean, covariance = torch.cat([mean, far]), torch.cat([covariance, narrow])
            even = share.new_full((len(far),), math.log(_ARMS_SHARE / len(far)))
            share = torch.cat([share + math.log1p(-_ARMS_SHARE), even])
        return self._with_prior(from_modes(mean, covariance, share, self.degrees_of_freedom), 1)

    @property
    def _may_leave(self) -> bool:
        return isinstance(self.begin, AtModes) and self.begin.leave_for is not None and self.drawn is None

    def _after_first_batch(self, streams: Streams, num_modes: int) -> tuple[Streams, int]:
        """Begun again with the prior, where modes hold less of the weight than they made of the draws, and how many are left.

        Where modes stay, mass in their tails is looked for now: a search takes as long as some hundred draws, and where data say
        little its components lie where the modes do, away from most of the posterior.
        """
        if not (num_modes and self._may_leave) or self.marginal is None:
            return streams, num_modes
        if not hold_their_part(streams, num_modes):
            prior = self._prior()
            return tuple(begun_again(stream, prior) for stream in streams), 0
        mean, factor = (part[:num_modes] for part in (streams[0].first.mean, streams[0].first.factor))
        value = OnNormalScale(self.marginal, self.scale)(mean)
        modes = [Mode(*parts) for parts in zip(mean, value, factor @ factor.mT, strict=True)]
        tails = self._tails_of(modes)
        if not tails:
            return streams, num_modes
        around = self._around(modes, tails)
        return tuple(begun_again(stream, around) for stream in streams), num_modes

    def _with_prior(self, proposal: Proposal, times: int) -> Proposal:
        unit = identity_matrix(self.scale.size, self.scale.coefficients)
        for _ in range(times if self.plan.defensive_share else 0):
            proposal = with_defence(proposal, 0 * unit[0], unit, self.plan.defensive_share)
        return proposal

    def _fitted_proposal(self, drawn: DrawnStart) -> Proposal:
        """A mixture fitted to draws: a component at their mean, others at the draws that lie furthest from it and one another.

        An arm that holds a hundredth of the mass has a component of its own, which weighted draws then give its share.
        """
        drawn = drawn._replace(theta=self.scale.z(drawn.theta))
        covariance = drawn.covariance()
        factor = cholesky(covariance).factor
        white = solve_lower(factor, drawn.theta.mT).mT
        centres = (torch.softmax(drawn.log_weights, 0) @ drawn.theta)[None]
        for _ in range(_FITTED_COMPONENTS - 1):
            gaps = torch.cdist(white, solve_lower(factor, centres.mT).mT)
            centres = torch.cat([centres, drawn.theta[gaps.amin(1).argmax()][None]])
        share = torch.zeros_like(centres[:, 0])
        first = from_modes(centres, covariance.expand(len(centres), -1, -1), share, self.degrees_of_freedom)
        count = share.new_tensor([float(len(drawn.theta))])
        known = AdaptiveState(drawn.theta, drawn.log_weights, torch.zeros_like(drawn.log_weights), count, first, first, first)
        return adapt(known, self.plan._replace(modified=False, defensive_share=0.0)).current

    def num_advances(self) -> int:
        return len(self.schedule)

    def is_finished(self, state: ImportanceState) -> bool:
        """After all batches, or once the effective size that was asked for has been reached."""
        if self.effective_size is None or state.iteration in (0, len(self.schedule)):
            return state.iteration == len(self.schedule)
        return kish_effective_size(streamed_log_weights(state.streams)) >= self.effective_size

    def advance(self, state: ImportanceState, generator: torch.Generator) -> tuple[ImportanceState, Draw, dict[str, Tensor]]:
        count = self.schedule[state.iteration]
        candidates = draw_from_each(state.streams, count * self._candidates, generator)
        streams = add_to_each(state.streams, candidates, self._screened(candidates))
        rows, log_inclusion = self._chosen(streams, count, generator)
        z = candidates[rows]
        if state.iteration == 0 and len(self.schedule) > 1:
            anchors = torch.cat([state.anchors, z[: min(_MAX_ANCHORS, count // 4)]])
            state = state._replace(anchors=anchors, starts=self._starts_at(anchors))
        theta, log_slope = self.scale.theta(z)
        estimate = self.estimator.draw(theta, generator, self._nearest_start(state, z), latents_kept(self.model))
        log_prior = self.model.layout.log_prior(theta).detach()
        log_target = log_prior + log_slope + estimate.value
        log_target = torch.nan_to_num(log_target, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        refused = torch.full_like(candidates[:, 0], -torch.inf)
        streams = with_last_targets(streams, refused.index_copy(0, rows, log_target - log_inclusion))
        estimated = torch.zeros_like(refused, dtype=torch.bool).index_fill(0, rows, True)
        num_modes = int(state.num_modes)
        if state.iteration == 0:
            streams, num_modes = self._after_first_batch(streams, num_modes)
        if state.iteration + 1 < len(self.schedule):
            modified = self.plan.modified or (self.switch_after is not None and state.iteration + 1 >= self.switch_after)
            plan = self.plan if num_modes else self.plan_at_prior
            streams = teach_each(streams, plan._replace(modified=modified))
        stats = {
            "lp": log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "n_failures": torch.isinf(log_target).to(log_target),
            "n_factorizations": estimate.num_factorizations,
            "approximation_converged": estimate.converged,
            "n_candidates": torch.full_like(log_target, self._candidates),
        }
        stats = {name: value[None] for name, value in stats.items()}
        drawn = Draw(theta[None], estimate.whitened[None], further_whitened=estimate.further_whitened[None])
        state = state._replace(
            iteration=state.iteration + 1,
            streams=streams,
            estimated=torch.cat([state.estimated, estimated]),
            num_modes=torch.full_like(state.num_modes, num_modes),
        )
        return state, drawn, stats

    @property
    def _candidates(self) -> int:
        """For each draw."""
        return 1 if self.screen is None else self.screen.candidates

    def _screened(self, candidates: Tensor) -> Tensor:
        """Approximate log targets of candidates ``(B, P)``: ``(B,)``; zeros where all are estimated."""
        if self.screen is None:
            return torch.zeros_like(candidates[:, 0])
        theta, log_slope = self.scale.theta(candidates)
        return self.model.layout.log_prior(theta).detach() + log_slope + self.screen.log_evidence(theta)

    def _chosen(self, screened: Streams, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of the last batch of candidates that are estimated ``(count,)``, and logs of how probable that was."""
        log_weights = streamed_log_weights(screened)[-count * self._candidates :]
        if self.screen is None:
            return torch.arange(count, device=log_weights.device), torch.zeros_like(log_weights)
        probabilities = inclusion_probabilities(log_weights, count)
        rows = included(probabilities, count, generator)
        return rows, probabilities[rows].log()

    def finish(self, state: ImportanceState, draw: Draw) -> Draws:
        weights = streamed_log_weights(state.streams)[state.estimated]
        if not bool(torch.isfinite(weights).any()):
            raise ValueError(
                f"all {len(weights)} draws have evidence zero: every covariance failed to factorise. Expected some to succeed; "
                f"raise the model's jitter (now {self.model.jitter:g}) or use priors that keep lengthscales and scales moderate."
            )
        value, error = log_evidence(state.streams)
        if self.smooth:
            weights = smoothed_log_weights(weights)
        mass = log_prior_mass(self.model.layout)
        if math.isnan(mass.value):
            warn(_NO_EVIDENCE)
        known = {"log_evidence": float(value) - mass.value, "log_evidence_error": math.hypot(float(error), mass.error)}
        # Ctrl-C may have come between a batch's being kept and its being weighed.
        weighed = len(weights)
        further = None if draw.further_whitened is None else draw.further_whitened[:, :weighed]
        return Draws(draw.theta[:, :weighed], draw.whitened[:, :weighed], weights.cpu()[None], known, further)
