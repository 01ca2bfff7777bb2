"""Lobes of a kernel's period: where the data have one, its multiples and parts have lobes, too narrow for any lines to meet."""

from __future__ import annotations

import torch
from gpytorch.kernels import CosineKernel, PeriodicKernel, SpectralMixtureKernel
from torch import Tensor

from torchgpmc.importance import Mode, modes_from
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.parameters.normal_scale import NormalScale
from torchgpmc.types import LogDensity, Resolution

_ONE_PERIOD = PeriodicKernel, CosineKernel
_WITH_PERIODS = *_ONE_PERIOD, SpectralMixtureKernel
_FACTORS = 1 / 3, 1 / 2, 2.0, 3.0
_NEAR = 30.0  # nats below the best mode from where searches begin, for the other hyperparameters are not yet what they will be
_MOST_ROUNDS = 3  # a best mode at four times the period takes two
_FINE = 1e-3  # step of a curvature's differences


def has_a_period(model: GPModel) -> bool:
    """Whether a part of the kernel comes back."""
    return any(isinstance(module, _WITH_PERIODS) for module in model.kernel.modules())


def with_multiples(
    model: GPModel, density: LogDensity, modes: list[Mode], scale: NormalScale, resolution: Resolution
) -> list[Mode]:
    """``modes``, and those that searches from multiples and parts of the best one's periods end at, best first.

    Of 500 data over 36 periods a search had ended at twice the period and nowhere else: the lobe at the period itself is a
    hundredth of a deviation of a prior from 2 to 40 wide.

    Args:
        model: with a kernel that has a period, or without: then ``modes`` are returned.
        density: of z on ``scale``.
        modes: on that scale.
        scale: on which the prior is standard normal.
        resolution: as of :func:`torchgpmc.importance.find_modes`.
    """
    names = _periods(model)
    for _ in range(_MOST_ROUNDS if names else 0):
        best = modes[0]
        starts = _at_multiples(model, names, best.position, scale)
        value = density(starts)
        near = starts[value > best.log_density - _NEAR]
        modes = modes_from(density, modes, near, resolution=resolution) if len(near) else modes
        if modes[0] is best and len(value) and float(value.max()) > float(best.log_density):
            modes = [_around(density, starts[value.argmax()]), *modes]
        if modes[0] is best:
            break
    return modes


def _around(density: LogDensity, position: Tensor) -> Mode:
    """A point above all modes from which no search found one, with its curvature, whatever the sign: a proposal's centre.

    A lobe of a period may be a two-thousandth as wide as the prior (36 of them, 400 counts), where searches among held sites end
    too soon and steps for their curvatures lead out of it.
    """
    size = len(position)
    steps = _FINE * identity_matrix(size, position)
    value, gradient = density.value_and_grad(torch.cat([position[None], position + steps, position - steps]))
    hessian = (gradient[1 : size + 1] - gradient[size + 1 :]) / (2 * _FINE)
    precision, axes = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
    return Mode(position, value[0], (axes / precision.abs().clamp_min(1.0)) @ axes.mT)


def _periods(model: GPModel) -> list[str]:
    """Names of the sampled periods."""
    owners = (name for name, module in model.named_modules() if isinstance(module, _ONE_PERIOD))
    return [name for owner in owners if (name := f"{owner}.period_length") in model.layout.names]


def _at_multiples(model: GPModel, names: list[str], z: Tensor, scale: NormalScale) -> Tensor:
    """The point ``z`` ``(P,)`` with one period after another times each of some factors ``(number, P)``, where that is allowed."""
    values = model.layout.constrain(scale.theta(z[None])[0])
    points = [scale.z(model.layout.unconstrain({**values, name: factor * values[name]})) for name in names for factor in _FACTORS]
    found = torch.cat(points)
    return found[torch.isfinite(found).all(-1)]
