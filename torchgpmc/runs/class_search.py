"""Where theta of several classes lies, by the lower bound of :mod:`torchgpmc.approximations.class_variational`."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.approximations.class_variational import FittedSites, SharedSites, fitted_class_sites
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import NormalScale, normal_scale
from torchgpmc.samplers.fitted_proposals import FEW, along_axes, design, fitted_proposal

_SEED = 0  # which a run that is resumed has again
_FAR = 1.5, 3.0, 5.0, 8.0  # along each hyperparameter, in the prior's deviations: data may say what the prior hardly allows
_DRAWS_AROUND = 12
_ROUGH_DATA = 200  # that the first search looks at, of more
_MOST_CLIMBS, _CLIMBING_SWEEPS, _WORTH_A_CLIMB = 8, 5, 0.5  # nats
_FIRST_DEVIATION = 0.3  # of theta, in the prior's
_SWEEPS, _MORE_SWEEPS = 25, 8


def rough_theta(model: GPModel) -> tuple[Tensor, Tensor]:
    """Where a lower bound of the posterior is highest ``(P,)``, nearly, and deviations there ``(P, P)``, a diagonal matrix."""
    rows = torch.arange(len(model.train_x), device=model.train_x.device)[:: -(-len(model.train_x) // _ROUGH_DATA)]
    few = model.with_buffers(train_x=model.train_x[rows], train_y=model.train_y[rows])
    scale = normal_scale(model.layout)
    best, deviation = _climbed(model, scale, _best_of_a_few(few, scale))
    ends = [scale.theta(best + sign * deviation)[0] for sign in (1, -1)]
    return scale.theta(best)[0][0], (0.5 * (ends[0] - ends[1])[0]).diag()


def _bound(model: GPModel, scale: NormalScale, z: Tensor, num_sweeps: int, start: SharedSites | None = None) -> FittedSites:
    """Of the posterior on the scale of the priors, at ``z`` ``(C, P)``."""
    sites, bound = fitted_class_sites(model, scale.theta(z)[0], num_sweeps, start)
    return FittedSites(sites, bound - 0.5 * z.square().sum(-1))


def _best_of_a_few(model: GPModel, scale: NormalScale) -> Tensor:
    """``(1, P)``, of thetas along the axes and around the best of them.

    Draws from the prior are no help where it has inputs so far apart that f is white noise, which no longer depends on theta: of a
    dozen columns and more, under a prior that one would have for two or three.
    """
    unit = identity_matrix(model.layout.size, model.train_x)
    axes = torch.cat([distance * side for distance in _FAR for side in (unit, -unit)])
    best = _best_of(model, scale, torch.cat([torch.zeros_like(unit[:1]), axes]))
    around = normal_like(best.expand(_DRAWS_AROUND, -1), make_generator(_SEED, best.device))
    return _best_of(model, scale, torch.cat([best, best + 0.5 * around]))


def _best_of(model: GPModel, scale: NormalScale, z: Tensor) -> Tensor:
    """The one ``(1, P)`` of some thetas ``(C, P)`` whose bound is highest."""
    bound = torch.nan_to_num(_bound(model, scale, z, _SWEEPS).bound, nan=-torch.inf)
    return z[bound.argmax()][None]


def _climbed(model: GPModel, scale: NormalScale, best: Tensor) -> tuple[Tensor, Tensor]:
    """From ``best`` ``(1, P)`` by quadratics fitted around it, and deviations ``(P,)`` by the last of them."""
    points = design(model.layout.size, best) if model.layout.size <= FEW else along_axes(model.layout.size, best)
    highest = _bound(model, scale, best, _SWEEPS)
    for _ in range(_MOST_CLIMBS):
        around = _bound(model, scale, best + _FIRST_DEVIATION * points, _CLIMBING_SWEEPS, highest.sites).bound
        proposal = fitted_proposal(points, around[None])
        there = best + _FIRST_DEVIATION * proposal.mean
        found = _bound(model, scale, there, _MORE_SWEEPS, highest.sites)
        gain = float(found.bound) - float(highest.bound)
        if gain > 0:
            best, highest = there, found
        if gain < _WORTH_A_CLIMB:
            break
    covariance = (proposal.axes[0] / proposal.precision[0]) @ proposal.axes[0].mT
    return best, _FIRST_DEVIATION * covariance.diagonal().sqrt()
