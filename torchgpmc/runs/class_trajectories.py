"""Trajectories of theta and w together, for several classes: theta takes long steps, between which w takes short ones.

A step of theta is a factorisation and its adjoint, steps of w are products with a few rows; and while w, of hundreds of variables,
must take short ones, theta bears longer ones. So a step is: theta's momentum by half a step's slope, w by half a
step's time at that theta, theta, w by the other half at the new one, and theta's momentum again (Tuckerman, Berne & Martyna 1992).
Each part is a shear, and the whole its own inverse with momenta reversed: volumes are kept, whatever the slopes are.

Given w, theta would wander: of ten hyperparameters one is held by w to a quarter of its deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpmc.density import shared_by_rows
from torchgpmc.models.class_coordinates import ClassMap, class_map
from torchgpmc.models.class_reverse import class_slopes
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.reverse import LikelihoodPart, PriorPart, likelihood_part, prior_part
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.parameters.layout import Evaluated
from torchgpmc.runs.class_tuning import ClassTuning
from torchgpmc.samplers.hmc import kinetic_energy
from torchgpmc.trees import concatenate, take

Result = TypeVar("Result")

_OPERATIONS = 12  # N^3 of a step of theta, of one chain
_FINER = 1.5  # steps of w than trajectories of w alone take, about: they are cheap


class Phase(NamedTuple):
    """Where trajectories are, of C chains."""

    along: Tensor  # (C, P), theta in deviations
    white: Tensor  # (C, V), w
    along_momentum: Tensor  # (C, P), standard normal, as all momenta
    white_momentum: Tensor  # (C, V)
    slope: Tensor  # (C, P), of the log density in theta, in deviations
    n_failures: Tensor  # (C,)

    @property
    def kinetic_energy(self) -> Tensor:
        """Of all momenta ``(C,)``."""
        return kinetic_energy(self.along_momentum) + kinetic_energy(self.white_momentum)


class _There(NamedTuple):
    """What depends on theta alone."""

    evaluated: Evaluated
    prior: PriorPart
    coordinates: ClassMap
    failed: Tensor  # (C,)


class ThetaAndWhite:
    """log p(theta, v(w; theta), y) + log |dv / dw| of theta in deviations ``(C, P)`` and w ``(C, V)``: its slopes.

    Of models of which :func:`has_slope_in_theta` holds. Slopes in w are in single precision, and both are zero where something
    does not factorise: they only lead somewhere.

    Args:
        joint: density of [theta, v], without sites.
        tuning: of the coordinates.
    """

    def __init__(self, joint: JointLogDensity, tuning: ClassTuning):
        self.joint = joint
        self.tuning = tuning

    def there(self, along: Tensor) -> _There:
        """At theta."""
        model, tuning = self.joint.model, self.tuning
        theta = tuning.theta(along)
        evaluated = model.layout.evaluate(theta)
        values: dict[str, Any] = evaluated.hyperparameters.by_module
        prior = prior_part(model, model.bindings.among_latents, model.train_x, values, len(theta))
        factor, ok = cholesky((prior.covariance + model.bindings.jitter).expand(len(theta), -1, -1))
        coordinates = class_map(factor, *tuning.sites.at(along))
        return _There(evaluated, prior, coordinates, ~(ok & coordinates.log_volume.isfinite()))

    def in_theta(self, there: _There, along: Tensor, white: Tensor) -> Tensor:
        """The slope in theta, in deviations ``(C, P)``."""
        layout, coordinates, prior = self.joint.model.layout, there.coordinates, there.prior
        differences = coordinates.differences(white)
        likelihood = self._likelihood(there, differences)
        slope = likelihood.latent_slope.mT
        found = class_slopes(coordinates, white, differences, slope)
        slopes = {**prior.slopes(found.covariance, slope.sum(1)), "likelihood": likelihood.slopes}
        evaluated = there.evaluated
        of_theta = torch.addcmul(evaluated.log_prior_slope, evaluated.derivative, layout.gather(slopes, along))
        total = of_theta @ self.tuning.root + self.tuning.sites.slopes(along, found.log_precision, found.shift)
        return _zero_where(there.failed, total)

    def in_white(self, there: _There, white: Tensor) -> Tensor:
        """The slope in w ``(C, V)``."""
        differences = there.coordinates.near_differences(white)
        slope = self._likelihood(there, differences).latent_slope.mT
        return _zero_where(there.failed, there.coordinates.gradient(white, differences, slope))

    def _likelihood(self, there: _There, differences: Tensor) -> LikelihoodPart:
        model = self.joint.model
        f = there.prior.mean.unsqueeze(1) + differences
        values = there.evaluated.hyperparameters.by_module["likelihood"]
        return likelihood_part(model, values, model.layout.sampled_names("likelihood"), f.mT, self.joint.targets)

    def select(self, rows: Tensor) -> ThetaAndWhite:
        """Of some chains."""
        return ThetaAndWhite(self.joint.select(rows), self.tuning)


def slope_in_theta(density: ThetaAndWhite, along: Tensor, white: Tensor, chunk: int | None) -> Tensor:
    """The slope in theta ``(C, P)``, where trajectories begin; chains are shared by the cores, ``chunk`` at most at once."""

    def found(rows: Tensor) -> Tensor:
        part = density.select(rows)
        return part.in_theta(part.there(along[rows]), along[rows], white[rows])

    return torch.cat(_shared(found, along, density, 1, chunk))


def trajectory(density: ThetaAndWhite, phase: Phase, step_size: float, num_steps: int, chunk: int | None) -> Phase:
    """Where ``num_steps`` steps of theta lead, of ``step_size`` in its mass matrix's deviations.

    Steps of w are some two thirds of what w alone takes.
    """

    def followed(rows: Tensor) -> Phase:
        return _followed(density.select(rows), take(phase, rows), step_size, num_steps)

    found = _shared(followed, phase.along, density, num_steps, chunk)
    return found[0] if len(found) == 1 else concatenate(found)


def _shared(
    function: Callable[[Tensor], Result], along: Tensor, density: ThetaAndWhite, num_steps: int, chunk: int | None
) -> list[Result]:
    """``function`` of chains, which are shared by the cores."""
    size, index = len(density.joint.model.train_x), torch.arange(len(along), device=along.device)
    work = _OPERATIONS * float(size) ** 3 * num_steps

    def of(rows: slice) -> Result:
        with torch.no_grad():
            return function(index[rows])

    return shared_by_rows(of, len(along), work, along.device, size**2, chunk)


def _followed(density: ThetaAndWhite, phase: Phase, step_size: float, num_steps: int) -> Phase:
    tuning = density.tuning
    scale, deviation = tuning.scale, tuning.deviation
    inner_steps = max(1, round(_FINER * 0.5 * step_size / float(tuning.step_size)))
    inner = 0.5 * step_size / inner_steps
    along, white, rho, sigma, slope, n_failures = phase
    there = density.there(along)
    rho = rho + 0.5 * step_size * slope @ scale
    pull = density.in_white(there, white) * deviation

    for index in range(num_steps):
        for half in range(2):
            if half == 1:
                along = along + step_size * rho @ scale.mT
                there = density.there(along)
                n_failures = n_failures + there.failed
                pull = density.in_white(there, white) * deviation
            for _ in range(inner_steps):
                sigma = sigma + 0.5 * inner * pull
                white = white + inner * sigma * deviation
                pull = density.in_white(there, white) * deviation
                sigma = sigma + 0.5 * inner * pull
        slope = density.in_theta(there, along, white)
        rho = rho + (1.0 if index < num_steps - 1 else 0.5) * step_size * slope @ scale
    return Phase(along, white, rho, sigma, slope, n_failures)


def _zero_where(failed: Tensor, slope: Tensor) -> Tensor:
    return torch.where(failed.unsqueeze(-1), 0.0, slope).nan_to_num(0.0, 0.0, 0.0)


_OF_THE_MODEL = methods_of(GPModel, ("prior_at", "latents", "log_likelihood", "log_likelihood_of_f"))


def has_slope_in_theta(model: GPModel) -> bool:
    """Whether the density is the one whose slopes :class:`ThetaAndWhite` writes out."""
    return keeps_methods(model, _OF_THE_MODEL)
