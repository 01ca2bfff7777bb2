"""Trajectories of theta and w together, for several classes: theta takes long steps, between which w takes short ones.

A step of theta is a factorisation and its adjoint, steps of w are products with a few rows; and while w, of hundreds of variables,
must take short ones, theta bears longer ones. So at one theta w moves by some steps, and theta's momentum by the slopes at all of
them, whose sum costs what one does, since adjoints are linear; then theta moves, and so on; at both ends w moves for half as long
(after Tuckerman, Berne & Martyna 1992, with their long-range forces along the whole of the short steps). Each part is a shear, and
the whole its own inverse with momenta reversed: volumes are kept, whatever the slopes are. By slopes where w begins and ends alone,
steps of theta that are accepted as often are a third shorter (of six classes and ten hyperparameters).

Given w, theta would wander: of ten hyperparameters one is held by w to a quarter of its deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpmc.density import shared_by_rows
from torchgpmc.models.class_coordinates import ClassMap, class_map
from torchgpmc.models.class_reverse import AtWhite, at_white, class_slopes, weighted_sum
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.reverse import LikelihoodPart, PriorPart, likelihood_part, prior_part
from torchgpmc.numerics.linalg import cholesky_in_place, in_single_precision
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.parameters.layout import Evaluated
from torchgpmc.runs.class_tuning import ClassTuning, FollowingSites
from torchgpmc.samplers.hmc import kinetic_energy
from torchgpmc.trees import concatenate, take

Result = TypeVar("Result")

_OPERATIONS = 12  # N^3 of a step of theta, of one chain
# Operations of a step of one thread's chains, which is hundreds of torch's: with less these wait for Python's lock. Four chains on
# two threads take 1.1 times as long as on one, of 150 data, as long of 200, and 0.78 and 0.65 of that of 250 and 300.
_WORTH_A_THREAD = 2e8
_JITTER = 100.0  # of the mean variance, in units of its rounding; 1000 cost a tenth of the acceptances (six classes, 183 data)
_FINER = 1.5  # steps of w than trajectories of w alone take, about: they are cheap


class Phase(NamedTuple):
    """Where trajectories are, of C chains."""

    along: Tensor  # (C, P), theta in deviations
    white: Tensor  # (C, V), w
    along_momentum: Tensor  # (C, P), standard normal, as all momenta
    white_momentum: Tensor  # (C, V)

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


class _Seen(NamedTuple):
    """What depends on w, too."""

    at: AtWhite
    in_white: Tensor  # (C, V), slope of the log density in w
    likelihood: LikelihoodPart


class ThetaAndWhite:
    """log p(theta, v(w; theta), y) + log |dv / dw| of theta in deviations ``(C, P)`` and w ``(C, V)``: its slopes.

    Of models of which :func:`has_slope_in_theta` holds. Slopes are nearly the density's, under as much more jitter as rounding asks
    for, and zero where something does not factorise: they only lead somewhere.

    Args:
        joint: density of [theta, v], without sites.
        tuning: of the coordinates.
        precision: of the algebra; a step takes half the time in single precision.
    """

    def __init__(self, joint: JointLogDensity, tuning: ClassTuning, precision: torch.dtype = torch.float32):
        self.joint = joint
        self.tuning = tuning
        self.precision = precision
        self._sites = FollowingSites(*(part.to(precision) for part in tuning.sites))

    def there(self, along: Tensor) -> _There:
        """At theta."""
        model = self.joint.model
        evaluated = model.layout.evaluate(self.tuning.theta(along))
        values: dict[str, Any] = evaluated.hyperparameters.by_module
        prior = prior_part(model, model.bindings.among_latents, model.train_x, values, len(along))
        covariance = (prior.covariance + model.bindings.jitter).expand(len(along), -1, -1)
        single = self.precision == torch.float32
        covariance = in_single_precision(covariance) if single else covariance.to(self.precision, copy=True)
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        variances.add_(_JITTER * torch.finfo(self.precision).eps * variances.mean(-1, keepdim=True))
        factor, ok = cholesky_in_place(covariance)
        coordinates = class_map(factor, *self._sites.at(along.to(self.precision)))
        return _There(evaluated, prior, coordinates, ~(ok & coordinates.log_volume.isfinite()))

    def seen(self, there: _There, white: Tensor) -> _Seen:
        """At w, with the slope there."""
        model, near, coordinates = self.joint.model, white.to(self.precision), there.coordinates
        differences = coordinates.differences(near)
        values = there.evaluated.hyperparameters.by_module["likelihood"]
        f = there.prior.mean.unsqueeze(1) + differences
        likelihood = likelihood_part(model, values, model.layout.sampled_names("likelihood"), f.mT, self.joint.targets)
        at = at_white(coordinates, near, differences, likelihood.latent_slope.mT.to(near))
        in_white = at.back.flatten(1) - near - coordinates.explained
        return _Seen(at, _zero_where(there.failed, in_white).to(white), likelihood)

    def in_theta(self, there: _There, along: Tensor, seen: list[_Seen], weights: list[float]) -> Tensor:
        """The slope in theta, in deviations ``(C, P)``: a sum over several w, which costs what one does."""
        layout, evaluated, total = self.joint.model.layout, there.evaluated, sum(weights)
        found = class_slopes(there.coordinates, [point.at for point in seen], weights)
        of_f = [point.likelihood.latent_slope.sum(-1) for point in seen]
        of_prior = there.prior.slopes(found.covariance.to(there.prior.covariance), weighted_sum(of_f, weights))
        of_likelihood = {
            name: weighted_sum([point.likelihood.slopes[name] for point in seen], weights) for name in seen[0].likelihood.slopes
        }
        slopes = layout.gather({**of_prior, "likelihood": of_likelihood}, along)
        of_theta = torch.addcmul(total * evaluated.log_prior_slope, evaluated.derivative, slopes)
        of_sites = self._sites.slopes(along.to(self.precision), found.log_precision, found.shift)
        return _zero_where(there.failed, of_theta @ self.tuning.root + of_sites)

    def select(self, rows: Tensor) -> ThetaAndWhite:
        """Of some chains."""
        return ThetaAndWhite(self.joint.select(rows), self.tuning, self.precision)


def slope_in_theta(density: ThetaAndWhite, along: Tensor, white: Tensor, chunk: int | None) -> Tensor:
    """The slope in theta ``(C, P)``; chains are shared by the cores, ``chunk`` at most at once."""

    def found(rows: Tensor) -> Tensor:
        part = density.select(rows)
        there = part.there(along[rows])
        return part.in_theta(there, along[rows], [part.seen(there, white[rows])], [1.0])

    return torch.cat(_shared(found, along, density, 1, chunk))


def trajectory(density: ThetaAndWhite, phase: Phase, step_size: float, num_steps: int, chunk: int | None) -> Phase:
    """Where ``num_steps`` steps of theta lead, of ``step_size`` in its mass matrix's deviations."""

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
    worth = _WORTH_A_THREAD * num_steps

    def of(rows: slice) -> Result:
        with torch.no_grad():
            return function(index[rows])

    return shared_by_rows(of, len(along), work, along.device, size**2, chunk, worth)


def _followed(density: ThetaAndWhite, phase: Phase, step_size: float, num_steps: int) -> Phase:
    tuning = density.tuning
    scale, deviation = tuning.scale, tuning.deviation
    steps_of_half = max(1, round(_FINER * 0.5 * step_size / float(tuning.step_size)))
    inner = 0.5 * step_size / steps_of_half
    along, white, rho, sigma = phase

    for index in range(num_steps + 1):
        if index > 0:
            along = along + step_size * rho @ scale.mT
        at_an_end, there = index in (0, num_steps), density.there(along)
        seen = [density.seen(there, white)]
        for _ in range(steps_of_half if at_an_end else 2 * steps_of_half):
            sigma = sigma + 0.5 * inner * seen[-1].in_white * deviation
            white = white + inner * sigma * deviation
            seen.append(density.seen(there, white))
            sigma = sigma + 0.5 * inner * seen[-1].in_white * deviation
        weights = [0.5 * inner, *[inner] * (len(seen) - 2), 0.5 * inner]
        rho = rho + density.in_theta(there, along, seen, weights) @ scale
    return Phase(along, white, rho, sigma)


def _zero_where(failed: Tensor, slope: Tensor) -> Tensor:
    return torch.where(failed.unsqueeze(-1), 0.0, slope).nan_to_num(0.0, 0.0, 0.0)


_OF_THE_MODEL = methods_of(GPModel, ("prior_at", "latents", "log_likelihood", "log_likelihood_of_f"))


def has_slope_in_theta(model: GPModel) -> bool:
    """Whether the density is the one whose slopes :class:`ThetaAndWhite` writes out."""
    return keeps_methods(model, _OF_THE_MODEL)
