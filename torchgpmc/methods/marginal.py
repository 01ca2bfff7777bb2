"""Pseudo-marginal methods: exact draws of (theta, f) from unbiased estimates of p(y | theta)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation, Laplace
from torchgpmc.draws import Draw, Draws
from torchgpmc.evidence import Evidence, LatentEstimate, LatentEstimator
from torchgpmc.methods.base import Settings, chain_settings, check_count, check_positive, in_chunks
from torchgpmc.methods.modes import check_one_data_set, start_at_mode
from torchgpmc.methods.targets import (
    check_has_hyperparameters,
    estimator_for,
    log_standard_normal,
    starting_thetas,
    suited_approximation,
)
from torchgpmc.models.base import GPModel
from torchgpmc.parameters import Layout
from torchgpmc.samplers.adaptation import WarmUp, WarmUpPlan
from torchgpmc.samplers.metropolis import MetropolisState, metropolis
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.pseudo_marginal import (
    IndependentProposal,
    PseudoMarginalState,
    correlated_pseudo_marginal,
    delayed_acceptance,
    pseudo_marginal,
    pseudo_marginal_slice,
)
from torchgpmc.types import LogDensity, Sampler

# The rest of warm-up runs the tuned kernel on the estimate, so that draws do not begin where the approximation left them.
_TUNING_SHARE = 0.8


class Anchors(NamedTuple):
    """Approximations at some thetas, frozen after tuning: others start from the nearest, a function of theta alone."""

    theta: Tensor  # (A, P)
    start: Tensor  # (A, ...)
    ready: Tensor  # (), whether they have been set


class MarginalDensity(NamedTuple):
    """p(theta, y) through unbiased estimates; what the pseudo-marginal samplers take."""

    layout: Layout
    estimator: LatentEstimator
    anchors: Anchors
    own_anchor: bool  # whether chain c may use anchor c alone, because every chain has data of its own
    num_latent_steps: int

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate."""
        return self.estimator.auxiliary_size

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Log of p(theta) times an estimate of p(y | theta) from fresh random numbers."""
        return self._with_prior(position, self.estimator.draw(position, generator, self._start(position)))

    def evaluate(self, position: Tensor, auxiliary: Tensor) -> tuple[Tensor, LatentEstimate]:
        """The same as a function of standard normals."""
        return self._with_prior(position, self.estimator.evaluate(position, auxiliary, self._start(position)))

    def move(self, position: Tensor, payload: LatentEstimate, generator: torch.Generator) -> tuple[Tensor, LatentEstimate]:
        """Elliptical slice steps on the kept latent draw."""
        return self._with_prior(position, self.estimator.move(position, payload, self.num_latent_steps, generator))

    def work(self, payload: LatentEstimate) -> Tensor:
        """Factorisations an estimate took."""
        return payload.num_factorizations

    def select(self, rows: Tensor) -> MarginalDensity:
        """The same for some of the chains."""
        anchors = self.anchors
        if self.own_anchor:
            anchors = Anchors(anchors.theta[rows], anchors.start[rows], anchors.ready)
        return self._replace(estimator=self.estimator.select(rows), anchors=anchors)

    def _with_prior(self, theta: Tensor, estimate: LatentEstimate) -> tuple[Tensor, LatentEstimate]:
        return self.layout.log_prior(theta).detach() + estimate.value, estimate

    def _start(self, theta: Tensor) -> Tensor | None:
        if not bool(self.anchors.ready):
            return None
        if self.own_anchor:
            return self.anchors.start
        return self.anchors.start[torch.cdist(theta, self.anchors.theta).argmin(-1)]


class MarginalState(NamedTuple):
    """State of a pseudo-marginal run. While it is tuned, ``chain.log_density`` is the approximate density."""

    iteration: int
    chain: PseudoMarginalState
    warm_up: WarmUp
    anchors: Anchors


class MarginalRun(NamedTuple):
    """Tuning on the approximate marginal likelihood (paper A, section 4.4), then draws from the exact kernel."""

    model: GPModel
    approximate: LogDensity
    density: MarginalDensity
    kernel: Callable[[MarginalDensity, WarmUp], Sampler]
    plan: WarmUpPlan  # of the tuning alone
    warmup_steps: int
    num_samples: int
    num_chains: int
    thinning: int
    modes_of: ApproximateMarginal | None  # where to look for the mode to start from; None: start from the prior

    @property
    def target(self) -> str:
        """What the draws are draws of."""
        return "the exact posterior"

    def init(self, generator: torch.Generator) -> MarginalState:
        found = None if self.modes_of is None else start_at_mode(self.modes_of, self.num_chains, generator)
        theta, covariance = found or (starting_thetas(self.model, self.approximate, self.num_chains, generator), None)
        warm_up = self.plan.start(0.238 / theta.shape[1] ** 0.5, theta, covariance)
        anchors = self._anchors(theta, ready=False)
        chain = self._sampler(warm_up, anchors).init(theta, generator)
        if self.plan.steps:
            chain = chain._replace(log_density=self.approximate(theta))
        return MarginalState(0, chain, warm_up, anchors)

    def _sampler(self, warm_up: WarmUp, anchors: Anchors) -> Sampler:
        return self.kernel(self.density._replace(anchors=anchors), warm_up)

    def _anchors(self, theta: Tensor, *, ready: bool) -> Anchors:
        """One anchor a chain: what its approximation at ``theta`` leaves to start from."""
        start = self.density.estimator.start_at(theta)
        usable = ready and bool(torch.isfinite(start).all())
        return Anchors(theta, torch.nan_to_num(start), torch.tensor(usable, device=theta.device))

    def num_advances(self) -> int:
        return self.warmup_steps + self.num_samples

    def advance(self, state: MarginalState, generator: torch.Generator) -> tuple[MarginalState, Draw | None, dict[str, Tensor]]:
        iteration = state.iteration + 1
        if iteration <= self.plan.steps:
            return self._tune(state, iteration, generator)
        chain, sampler = state.chain, self._sampler(state.warm_up, state.anchors)
        infos = []
        for _ in range(1 if iteration <= self.warmup_steps else self.thinning):
            chain, info = sampler.step(chain, generator)
            infos.append(info)
        estimate: LatentEstimate = chain.payload
        stats = {
            "lp": chain.log_density - estimate.value + estimate.log_likelihood + log_standard_normal(estimate.whitened),
            "acceptance_rate": torch.stack([info.acceptance_rate for info in infos]).mean(0),
            "step_size": state.warm_up.step_size.expand(self.num_chains),
            "n_steps": torch.stack([info.n_steps for info in infos]).sum(0),
            "n_failures": torch.stack([info.n_failures for info in infos]).sum(0),
            "n_factorizations": torch.stack([info.n_factorizations for info in infos]).sum(0),
            "log_evidence": estimate.value,
            "log_evidence_variance": estimate.variance,
            "approximation_converged": estimate.converged,
        }
        draw = None
        if iteration > self.warmup_steps:
            draw = Draw(chain.position[:, None], estimate.whitened[:, None])
        return MarginalState(iteration, chain, state.warm_up, state.anchors), draw, stats

    def _tune(
        self, state: MarginalState, iteration: int, generator: torch.Generator
    ) -> tuple[MarginalState, None, dict[str, Tensor]]:
        """Adaptive Metropolis on the approximate density; its last step hands over to the estimate."""
        warm_up = state.warm_up
        kernel = metropolis(self.approximate, step_size=warm_up.step_size, preconditioner=warm_up.preconditioner)
        moved, info = kernel.step(MetropolisState(state.chain.position, state.chain.log_density), generator)
        stats = {**info._asdict(), "step_size": warm_up.step_size.expand(self.num_chains)}
        warm_up = self.plan.update(warm_up, iteration, moved.position, info.acceptance_rate)
        anchors = state.anchors
        chain = state.chain._replace(position=moved.position, log_density=moved.log_density)
        if iteration == self.plan.steps:
            anchors = self._anchors(moved.position, ready=True)
            chain = self._sampler(warm_up, anchors).init(moved.position, generator)
        return MarginalState(iteration, chain, warm_up, anchors), None, stats

    def is_finished(self, state: MarginalState) -> bool:
        """Runs its full length."""
        return False

    def finish(self, state: MarginalState, draw: Draw) -> Draws:
        return Draws(draw.theta, draw.whitened, None)


def _marginal_run(
    model: GPModel,
    settings: Settings,
    approximation: Approximation,
    num_importance: int,
    antithetic: bool | None,
    evidence: Evidence | None,
    latent_steps: int,
    thinning: int,
    target_acceptance: float,
    mass_matrix: MassMatrix,
    from_mode: bool,
    kernel: Callable[[LogDensity], Callable[[MarginalDensity, WarmUp], Sampler]],
) -> MarginalRun:
    check_count("thinning", thinning)
    check_count("latent_steps", latent_steps, 0)
    check_has_hyperparameters(model, "the pseudo-marginal method")
    approximation = suited_approximation(model, approximation)
    check_one_data_set(model, from_mode)
    warmup, chains = chain_settings(settings)
    own_data = model.train_y.dim() == 2
    targets = model.train_y if own_data else None
    estimator = estimator_for(model, approximation, num_importance, antithetic, evidence, targets)
    approximate = in_chunks(ApproximateMarginal(model, approximation, loose=True), chains, settings.chain_chunk)
    size = model.layout.size
    plan = WarmUpPlan(int(_TUNING_SHARE * warmup), target_acceptance, mass_matrix, True, mass_matrix.dense_size(size, size))
    like = torch.zeros(0, dtype=model.train_x.dtype, device=model.train_x.device)
    empty = Anchors(like, like, torch.tensor(False, device=like.device))
    density = MarginalDensity(model.layout, estimator, empty, own_data, latent_steps)
    modes_of = ApproximateMarginal(model, approximation) if from_mode else None
    return MarginalRun(
        model, approximate, density, kernel(approximate), plan, warmup, settings.num_samples, chains, thinning, modes_of
    )


def _check_options(method: PseudoMarginal) -> None:
    check_positive("target_accept_prob", method.target_accept_prob, 0.0, 1.0)
    if not 0 <= method.correlation < 1:
        raise ValueError(f"correlation is {method.correlation!r}. Expected a number of at least 0 and below 1, for instance 0.99.")
    if method.correlation and (method.delayed_acceptance or method.latent_steps):
        raise ValueError(
            "correlation cannot be combined with delayed_acceptance or latent_steps. Expected one of them; "
            "the correlated estimate keeps its random numbers, which the others replace."
        )
    share = method.independent_share
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"independent_share is {share!r}. Expected a number from 0 to 1, for instance 0.9.")
    if share and (method.correlation or method.delayed_acceptance):
        raise ValueError(
            "independent_share cannot be combined with correlation or delayed_acceptance, which are for small steps. "
            "Expected one of them."
        )
    if method.delayed_acceptance and method.latent_steps:
        raise ValueError("delayed_acceptance cannot be combined with latent_steps. Expected one of them.")
    if method.evidence is not None and method.latent_steps:
        raise ValueError("evidence cannot be combined with latent_steps, which move importance samples. Expected latent_steps=0.")


@dataclass(frozen=True)
class PseudoMarginal:
    """Pseudo-marginal Metropolis-Hastings on theta, latents integrated out by importance sampling (paper A, algorithm 1).

    Exact for any ``num_importance``; more samples only make it stick less. Every kept theta comes with a latent draw chosen by its
    importance weight, so that (theta, f) are joint posterior draws.

    Args:
        approximation: :class:`Laplace` or :class:`EP`: what importance samples are drawn from.
        num_importance: latent vectors an estimate, N_imp.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        correlation: of the random numbers of successive estimates; above 0 this is the correlated pseudo-marginal method
            (Deligiannidis, Doucet & Pitt 2018), which needs far fewer importance samples where estimates are noisy.
        delayed_acceptance: screen proposals by the approximate evidence, and estimate only those that pass.
        latent_steps: elliptical slice steps on the kept latents after each transition.
        independent_share: of transitions, from 0 to 1, whose proposal is drawn from a Student t density with the mean and scale
            that tuning found, in place of a random walk's: with a few hyperparameters several times as many effective draws (0.9
            serves well), with many of them hardly ever accepted.
        target_accept_prob: that tuning on the approximate evidence steers to.
        mass_matrix: which covariances of the proposal tuning estimates.
        thinning: keep one draw in this many.
        evidence: another unbiased estimate, ``torchgpmc.evidence.Orthant()`` or ``SmoothProbit()``, in place of this sampling; the
            approximation then serves tuning alone.
        from_mode: start at draws from the normal approximation at the mode of the approximate posterior, and keep its covariance
            for the proposal in place of learning one (PM-MH of paper E).
    """

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    correlation: float = 0.0
    delayed_acceptance: bool = False
    latent_steps: int = 0
    independent_share: float = 0.0
    target_accept_prob: float = 0.25
    mass_matrix: MassMatrix = MassMatrix.DENSE
    thinning: int = 1
    evidence: Evidence | None = None
    from_mode: bool = False

    def prepare(self, model: GPModel, settings: Settings) -> MarginalRun:
        """A run on theta.

        Raises:
            ValueError: options out of range or at odds with one another, or a model that cannot be approximated so.
        """
        _check_options(self)

        def kernel(approximate: LogDensity) -> Callable[[MarginalDensity, WarmUp], Sampler]:
            def made(density: MarginalDensity, warm_up: WarmUp) -> Sampler:
                tuning: Any = {"step_size": warm_up.step_size, "preconditioner": warm_up.preconditioner}
                if self.correlation:
                    return correlated_pseudo_marginal(density, correlation=self.correlation, **tuning)
                if self.delayed_acceptance:
                    return delayed_acceptance(density, approximate, **tuning)
                independent = IndependentProposal(self.independent_share, warm_up.mean) if self.independent_share else None
                return pseudo_marginal(density, moves_latents=self.latent_steps > 0, independent=independent, **tuning)

            return made

        return _marginal_run(
            model,
            settings,
            self.approximation,
            self.num_importance,
            self.antithetic,
            self.evidence,
            self.latent_steps,
            self.thinning,
            self.target_accept_prob,
            self.mass_matrix,
            self.from_mode,
            kernel,
        )


@dataclass(frozen=True)
class PseudoMarginalSlice:
    """Pseudo-marginal slice sampling of theta (Murray & Graham 2015): never sticks, at several estimates a transition.

    Args:
        approximation: :class:`Laplace` or :class:`EP`: what importance samples are drawn from.
        num_importance: latent vectors an estimate.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        max_steps_out: limit on the number of initial widths in a bracket.
        thinning: keep one draw in this many.
        evidence: another unbiased estimate in place of importance sampling.
    """

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    max_steps_out: int = 8
    thinning: int = 1
    evidence: Evidence | None = None

    def prepare(self, model: GPModel, settings: Settings) -> MarginalRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, or a model that cannot be approximated so.
        """
        check_count("max_steps_out", self.max_steps_out)

        def kernel(_: LogDensity) -> Callable[[MarginalDensity, WarmUp], Sampler]:
            return lambda density, warm_up: pseudo_marginal_slice(
                density, width=4 * warm_up.preconditioner.standard_deviation(), max_steps_out=self.max_steps_out
            )

        return _marginal_run(
            model,
            settings,
            self.approximation,
            self.num_importance,
            self.antithetic,
            self.evidence,
            0,
            self.thinning,
            0.25,
            MassMatrix.DIAGONAL,
            False,
            kernel,
        )
