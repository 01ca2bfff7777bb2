"""p(theta, y) through unbiased estimates whose work starts at frozen anchors, and the warm-up that sets these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.evidence import LatentEstimate, LatentEstimator
from torchgpmc.parameters.layout import Layout
from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation


class Anchors(NamedTuple):
    """Approximations at some thetas, frozen after tuning: others start from the nearest, a function of theta alone."""

    theta: Tensor  # (A, P)
    start: Tensor  # (A, ...)
    ready: Tensor  # (), whether they have been set


def no_anchors(like: Tensor) -> Anchors:
    """None yet: approximations start from nothing. ``like`` is of the dtype and device."""
    empty = like.new_zeros(0)
    return Anchors(empty, empty, torch.tensor(False, device=like.device))


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


class AnchoredTuning(NamedTuple):
    """The tuning of a pseudo-marginal chain."""

    adaptation: Tuning
    anchors: Anchors
    on_estimates: bool  # whether the chains have gone over to the target


class AnchoredAdaptation(NamedTuple):
    """Tuning on the approximate marginal likelihood (paper A, section 4.4); its last step hands over to the estimates."""

    adaptation: WindowedAdaptation
    estimator: LatentEstimator

    @property
    def steps(self) -> int:
        """Iterations on the approximate density."""
        return self.adaptation.steps

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> AnchoredTuning:
        """No anchors yet; on the estimates at once if there is nothing to tune."""
        adaptation = self.adaptation.start(position, covariance, generator)
        return AnchoredTuning(adaptation, self._anchors(position, ready=False), self.steps == 0)

    def _anchors(self, theta: Tensor, *, ready: bool) -> Anchors:
        """One anchor a chain: what its approximation at ``theta`` leaves to start from."""
        start = self.estimator.start_at(theta)
        usable = ready and bool(torch.isfinite(start).all())
        return Anchors(theta, torch.nan_to_num(start), torch.tensor(usable, device=theta.device))

    def update(self, tuning: AnchoredTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> AnchoredTuning:
        """Windowed adaptation; where chains are at the last step, their anchors stay."""
        adaptation = self.adaptation.update(tuning.adaptation, iteration, state, info, generator)
        if iteration < self.steps:
            return tuning._replace(adaptation=adaptation)
        return AnchoredTuning(adaptation, self._anchors(state.position, ready=True), True)

    def restarts(self, iteration: int) -> bool:
        """With the first estimates that start at the anchors."""
        return iteration == self.steps

    def statistics(self, tuning: AnchoredTuning) -> dict[str, Tensor]:
        """Those of the adaptation."""
        return self.adaptation.statistics(tuning.adaptation)
