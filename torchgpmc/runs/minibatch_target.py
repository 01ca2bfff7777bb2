"""[theta, w] around a variational fit, with gradients estimated from minibatches of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.models.affine import AffineJointLogDensity
from torchgpmc.models.control_variates import EstimatedJointLogDensity, fixed_point
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.chain_targets import ChainTarget, joint_target
from torchgpmc.runs.run import Settings, chain_settings, in_chunks
from torchgpmc.types import LogDensity
from torchgpmc.variational import Start


class MinibatchDensity:
    """The density of [theta, w], whose estimates all chains take from the same fresh minibatch, drawn without replacement.

    Args:
        whole: the density itself.
        model: whose.
        start: the fit, at whose mean estimates are exact.
        batch_size: data a minibatch; all of them where there are fewer.
        settings: with chains and those evaluated at once.
    """

    def __init__(self, whole: LogDensity, model: GPModel, start: Start, batch_size: int, settings: Settings):
        self.whole = whole
        self.model = model
        self.coordinates = start.white_coordinates()
        self.batch_size = batch_size
        self.chains = chain_settings(settings)[1], settings.chain_chunk
        origin, mean = start.theta.to(model.train_x), start.mean.flatten().to(model.train_x)
        self.centre = torch.cat([origin, torch.zeros_like(mean)])
        self.fixed = fixed_point(model, torch.cat([origin, mean])[None])

    def __call__(self, position: Tensor) -> Tensor:
        return self.whole(position)

    def estimate(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Log density and gradient in [theta, w], from one minibatch for all chains."""
        rows = torch.randperm(len(self.model.train_x), generator=generator, device=position.device)[: self.batch_size]
        joint = EstimatedJointLogDensity(self.model, self.fixed, rows)
        found: tuple[Tensor, Tensor] = in_chunks(AffineJointLogDensity(joint, self.coordinates), *self.chains).value_and_grad(
            position
        )
        return found


def minibatch_target(model: GPModel, settings: Settings, start: Start, batch_size: int, biased: str) -> ChainTarget:
    """The joint target around ``start``, with a :class:`MinibatchDensity`; ``biased`` says why its draws are."""
    target = joint_target(model, settings)
    density = MinibatchDensity(target.density, model, start, batch_size, settings)
    return target._replace(density=density, label=f"biased: {biased}", biased=biased)
