"""The density of theta given w, for several classes: trajectories in it take a factorisation and its adjoint a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.density import SharedDensity, mask_failures
from torchgpmc.models.class_coordinates import class_root
from torchgpmc.models.class_reverse import class_slopes
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.reverse import likelihood_part, prior_part
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.runs.class_tuning import ClassTuning


class ThetaGivenWhite:
    """log p(theta, v(w; theta), y) + log |dv / dw| of theta in deviations ``(C, P)``, w ``(C, V)`` held, with its gradient.

    Of models of which :func:`has_slope_in_theta` holds.
    """

    def __init__(self, joint: JointLogDensity, tuning: ClassTuning, white: Tensor):
        self.joint = joint
        self.tuning = tuning
        self.white = white

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The density ``(C,)`` and its gradient ``(C, P)``; -inf and zeros where something does not factorise."""
        model, tuning, along = self.joint.model, self.tuning, position
        with torch.no_grad():
            theta = tuning.theta(along)
            at = model.layout.evaluate(theta)
            values: dict[str, Any] = at.hyperparameters.by_module
            prior = prior_part(model, model.bindings.among_latents, model.train_x, values, len(theta))
            factor, ok = cholesky((prior.covariance + model.bindings.jitter).expand(len(theta), -1, -1))
            sites = tuning.sites.at(along)
            root = class_root(factor, tuning.basis, sites.precision)
            coordinates = root.coordinates(*sites)
            differences = coordinates.differences(self.white)
            f = prior.mean.unsqueeze(1) + differences
            likelihood = likelihood_part(
                model, values["likelihood"], model.layout.sampled_names("likelihood"), f.mT, self.joint.targets
            )
            slope = likelihood.latent_slope.mT
            value = at.log_prior + likelihood.log_prob + coordinates.log_prior(self.white, differences)
            found = class_slopes(root, tuning.basis, coordinates, sites.shift, self.white, differences, slope)
            slopes = {**prior.slopes(found.covariance, slope.sum(1)), "likelihood": likelihood.slopes}
            of_theta = torch.addcmul(at.log_prior_slope, at.derivative, model.layout.gather(slopes, theta))
            gradient = of_theta @ tuning.root + tuning.sites.slopes(along, found.log_precision, found.shift)
            return mask_failures(torch.where(ok, value, torch.nan), gradient)

    def select(self, rows: Tensor) -> ThetaGivenWhite:
        """Of some chains."""
        return ThetaGivenWhite(self.joint.select(rows), self.tuning, self.white[rows])


_OPERATIONS = 25  # N^3 of a value and its gradient


def shared_by_threads(density: ThetaGivenWhite) -> SharedDensity:
    """The density, whose chains are shared by the cores where each has enough to do."""
    x = density.joint.model.train_x
    return SharedDensity(density, _OPERATIONS * float(len(x)) ** 3, x.device, len(x) ** 2)


_OF_THE_MODEL = methods_of(GPModel, ("prior_at", "latents", "log_likelihood", "log_likelihood_of_f"))


def has_slope_in_theta(model: GPModel) -> bool:
    """Whether the density is the one that :class:`ThetaGivenWhite` writes out."""
    return keeps_methods(model, _OF_THE_MODEL)
