"""The density of w given theta, for several classes, exact and nearly."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.density import AutogradDensity, mask_failures, mask_value
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.runs.blocks import LatentsGivenTheta
from torchgpmc.runs.class_tuning import AtTheta
from torchgpmc.trees import take


class OfWhite(AutogradDensity):
    """log p(theta, v(w), y) + log |dv / dw| of w ``(C, V)``."""

    def __init__(self, joint: JointLogDensity, at: AtTheta):
        self.joint = joint
        self.at = at
        self.given = LatentsGivenTheta(joint, at.kept, with_prior=False)
        super().__init__(self._evaluate)

    def _evaluate(self, white: Tensor) -> Tensor:
        coordinates = self.at.coordinates
        differences = coordinates.differences(white)
        given = self.given
        likelihood = given.at_deviation(differences) if given.sees_f_alone else given(coordinates.latents(white, self.at.factor))
        return self.value_at(white, differences, likelihood)

    def value_at(self, white: Tensor, differences: Tensor, likelihood: Tensor) -> Tensor:
        """From differences of functions and the log likelihood ``(C,)``."""
        return self.at.kept.log_prior + likelihood + self.at.coordinates.log_prior(white, differences)

    def select(self, rows: Tensor | slice) -> OfWhite:
        """Of some chains."""
        return OfWhite(self.joint.select(rows), take(self.at, rows))


class NearlyOfWhite:
    """The same but for rounding, in a third of the time, where the likelihood is one of f: products in single precision."""

    def __init__(self, exact: OfWhite):
        self.exact = exact

    def __call__(self, position: Tensor) -> Tensor:
        if not self.exact.given.sees_f_alone:
            return self.exact(position)
        with torch.no_grad():
            differences = self.exact.at.coordinates.near_differences(position)
            return mask_value(self.exact.value_at(position, differences, self.exact.given.at_deviation(differences)))

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """By two products where the likelihood has its slope in f, else not nearly."""
        coordinates = self.exact.at.coordinates
        with torch.no_grad():
            differences = coordinates.near_differences(position)
            found = self.exact.given.value_and_slope_at_deviation(differences)
            if found is None:
                return self.exact.value_and_grad(position)
            value = self.exact.value_at(position, differences, found[0])
            return mask_failures(value, coordinates.gradient(position, differences, found[1]))

    def select(self, rows: Tensor | slice) -> NearlyOfWhite:
        """Of some chains."""
        return NearlyOfWhite(self.exact.select(rows))
