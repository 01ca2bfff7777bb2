"""Moves along what the likelihood does not see: latents that go up together, and parameters that take it back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.runs.blocks import kept_prior, sees_f_alone
from torchgpmc.samplers.slice import slice_sampler
from torchgpmc.samplers.sweep import BlockStep, SweepState

_WIDTH = 1.0  # of the first bracket, in units of f; the slice steps out from it, and shrinks


def direction_of(model: GPModel) -> Tensor:
    """How theta ``(P,)`` goes with a number that is added to all of f, so that the likelihood stays as it is.

    Raises:
        ValueError: the likelihood knows of no such parameters, some of them are fixed, or f is not the latents.
    """
    levels = model.likelihood.levels() if hasattr(model.likelihood, "levels") else None
    kind = type(model.likelihood).__name__
    if levels is None:
        raise ValueError(f"invariance_steps is of likelihoods with levels(), and {kind} has none. Expected invariance_steps=0.")
    names = [f"likelihood.{name}" for name, power in levels.items() if power]
    fixed = [name for name in names if name not in model.layout.names]
    if fixed or not (model.has_latents_at_data and sees_f_alone(model)):
        why = f"{', '.join(fixed)} of {kind} is fixed" if fixed else f"f of this {type(model).__name__} is not the latents"
        raise ValueError(f"invariance_steps moves f and the likelihood's parameters, and {why}. Expected invariance_steps=0.")
    direction = model.train_x.new_zeros(model.layout.size)
    for name, power in levels.items():
        direction[list(model.layout.columns(f"likelihood.{name}"))] = power
    return direction


class InvarianceUpdate(NamedTuple):
    r"""The part of a sweep that moves f and theta together, likelihoods staying what they are: by slices, under the priors alone.

    .. math:: f \to f + c, \quad \theta \to \theta + c \, d

    That is a translation of [theta, v], v going along :math:`L^{-1} 1`, with no volume. Nothing is factorised.

    Args:
        joint: the whole density.
        direction: d ``(P,)``, zero for what p(f | theta) depends on; see :func:`direction_of`.
        steps: slices, a sweep.
    """

    joint: JointLogDensity
    direction: Tensor
    steps: int

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The slices of c, from zero."""
        model, kept = self.joint.model, state.payload
        theta, v = state.position.split([model.layout.size, model.latent_size], -1)
        with torch.no_grad():
            along = model.whiten(kept.at.prior, model.latents(kept.at.prior, torch.zeros_like(v)) + 1)

            def of_priors(shift: Tensor) -> Tensor:
                return model.layout.log_prior(theta + shift * self.direction) + log_standard_normal(v + shift * along)

            sampler = slice_sampler(of_priors, width=v.new_full((1,), _WIDTH))
            step = sampler.init(v.new_zeros(len(v), 1), generator)
            before, rates, n_steps, n_failures = step.log_density, [], 0.0, 0.0
            for _ in range(self.steps):
                step, info = sampler.step(step, generator)
                rates.append(info.acceptance_rate)
                n_steps, n_failures = n_steps + info.n_steps, n_failures + info.n_failures
            theta, v = theta + step.position * self.direction, v + step.position * along
            values, log_prior = model.layout.raw_values_and_log_prior(theta)
            prior = kept.at.prior._replace(values=values.by_module)
            kept = kept_prior(model, kept.at._replace(prior=prior), log_prior)
        info = info._replace(acceptance_rate=torch.stack(rates).mean(0), n_steps=n_steps, n_failures=n_failures)
        moved = SweepState(torch.cat([theta, v], -1), state.log_density + step.log_density - before, kept)
        return moved, BlockStep(step, info, torch.zeros_like(log_prior))
