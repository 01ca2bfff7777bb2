r"""Theta moved through unbiased estimates of p(y | theta), as a part of a sweep whose other parts move the latents given theta.

An estimate is made from M draws f_j ~ q(f | theta), and the target of a pseudo-marginal chain is

.. math:: \pi(\theta, f_1, ..., f_M, k) \propto p(\theta) \frac{1}{M} w_k \prod_j q(f_j | \theta), \quad
    w_j = \frac{p(y | f_j) \, p(f_j | \theta)}{q(f_j | \theta)}

in which (theta, f_k) has the posterior's density, k is uniform given them, and the other draws are from q. So a part of a sweep
that begins where others have moved f_k given theta leaves this target as it is if it first draws k and the other f_j given theta
and f_k, and then makes pseudo-marginal steps, which leave at (theta', f_k') with k' drawn by the weights (Andrieu, Doucet &
Holenstein 2010, section 4.5, with one step in place of a particle filter). An estimate all of whose draws are fresh would not do:
theta would be accepted for the sake of latents that the sweep then does without.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.evidence import CollapsedEstimator, ImportanceEstimator
from torchgpmc.runs.anchors import MarginalDensity, no_anchors
from torchgpmc.runs.parameterizations import ThetaBlock
from torchgpmc.samplers.sweep import Block, BlockStep, Conditional, SweepState
from torchgpmc.types import WarmUp


class ThroughEstimates(NamedTuple):
    """What theta is moved given, where that is nothing: a part of a sweep, as parameterisations make them.

    Args:
        estimator: of p(y | theta); approximations start from nothing, and so are functions of theta alone.
    """

    estimator: ImportanceEstimator | CollapsedEstimator

    def warm_up(self, own: WarmUp) -> WarmUp:
        """The sampler's own."""
        return own

    def update(self, block: ThetaBlock) -> _EstimatedUpdate:
        """The part, whose kernel is one for a :class:`torchgpmc.types.NoisyDensity`."""
        return _EstimatedUpdate(self.estimator, block)


class _EstimatedUpdate(NamedTuple):
    """The part of a sweep that moves theta, and leaves with other latents."""

    estimator: ImportanceEstimator | CollapsedEstimator
    block: ThetaBlock

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The kernel's steps on theta, from an estimate that holds the latents where the chains are."""
        model = self.block.joint.model
        theta, v = state.position.split([model.layout.size, model.latent_size], -1)
        estimated = MarginalDensity(model.layout, self.estimator, no_anchors(theta), False, 0)
        payload = self.estimator.given(theta, v, generator)
        here = model.layout.log_prior(theta).detach() + payload.value
        conditional = Conditional(estimated, here, payload)
        inner = Block(self.block.columns, lambda *_: conditional, self.block.kernel, self.block.steps)
        step, found = inner.moved(conditional, theta, here, generator)
        position = torch.cat([step.state.position, found.whitened], -1)
        log_density, kept = density.draw(position, generator)
        work: Tensor = payload.num_factorizations + step.info.n_factorizations + 1
        return SweepState(position, log_density, kept), step._replace(n_factorizations=work)
