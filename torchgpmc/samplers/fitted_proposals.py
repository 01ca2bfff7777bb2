"""Proposals from a quadratic that is fitted to a log density's values at some fixed points: for few dimensions, and dear densities.

A kernel may propose from any density that does not depend on where it is, if it weighs what it proposes (Metropolis, "independence
sampling", Tierney 1994). Values at points that stay cost little where what is dear about a point is worked out once.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.random import normal_like

_REACH = 1.3  # of the points, in deviations
_LEAST_WEIGHT, _SHARPNESS = 0.02, 0.5  # of a point in the fit; of the density as weights
_LEAST_CURVATURE, _MOST_CURVATURE = 0.7, 25.0  # of the quadratic, in inverse variances of all that is moved
_FARTHEST = 3.0  # its mean
_FREEDOM = 8  # of the proposals' Student t density


def design(dimension: int, like: Tensor) -> Tensor:
    """Points ``(J, dimension)`` that a quadratic is fitted to: the centre, two a coordinate and four a pair of them.

    Example:
        >>> design(1, torch.zeros(())).flatten(), len(design(3, torch.zeros(())))
        (tensor([ 0.0000,  1.3000, -1.3000]), 19)
    """
    unit = torch.eye(dimension, dtype=like.dtype, device=like.device)
    points = [like.new_zeros(dimension)]
    points += [sign * row for row in unit for sign in (1, -1)]
    pairs = itertools.combinations(range(dimension), 2)
    points += [one * unit[i] + other * unit[j] for i, j in pairs for one in (1, -1) for other in (1, -1)]
    return _REACH * torch.stack(points)


class FittedProposal(NamedTuple):
    """Student t densities, one a chain."""

    mean: Tensor  # (C, P)
    axes: Tensor  # (C, P, P), orthonormal, in columns
    precision: Tensor  # (C, P), along these

    def draw(self, generator: torch.Generator) -> Tensor:
        """A position of each chain ``(C, P)``."""
        normal = normal_like(self.mean, generator)
        chi = normal_like(self.mean.new_empty(len(self.mean), _FREEDOM), generator).square().mean(-1, keepdim=True)
        return self.mean + (self.axes @ (normal * (self.precision * chi).rsqrt()).unsqueeze(-1)).squeeze(-1)

    def log_density(self, position: Tensor) -> Tensor:
        """Up to a constant that all chains share ``(C,)``."""
        along = (self.axes.mT @ (position - self.mean).unsqueeze(-1)).squeeze(-1)
        square = (self.precision * along.square()).sum(-1)
        return 0.5 * self.precision.log().sum(-1) - 0.5 * (_FREEDOM + position.shape[-1]) * torch.log1p(square / _FREEDOM)


def fitted_proposal(points: Tensor, log_density: Tensor) -> FittedProposal:
    """The proposal of values ``(C, J)`` at the points of :func:`design` ``(J, P)``; -inf where a value is not known.

    Curvatures are kept where proposals are not far wider or narrower than the whole target, in whose deviations points are.

    Example:
        >>> import torch
        >>> points = design(2, torch.zeros(()).double())
        >>> found = fitted_proposal(points, -2 * (points - 0.5).square().sum(-1)[None])  # N(0.5, 1 / 4) in each coordinate
        >>> found.mean.mul(100).round(), found.precision.mul(100).round()
        (tensor([[50., 50.]], dtype=torch.float64), tensor([[400., 400.]], dtype=torch.float64))
    """
    size = points.shape[-1]
    highest = log_density.amax(-1, keepdim=True)
    lower = torch.nan_to_num(log_density - highest, nan=-torch.inf, neginf=-torch.inf)
    known = torch.isfinite(lower)
    weight = torch.where(known, (_SHARPNESS * lower).exp().clamp_min(_LEAST_WEIGHT), 0.0)
    pairs = list(itertools.combinations_with_replacement(range(size), 2))
    squares = torch.stack([points[:, i] * points[:, j] * (0.5 if i == j else 1.0) for i, j in pairs], -1)
    terms = torch.cat([torch.ones_like(points[:, :1]), points, squares], -1)
    left = terms.mT @ (weight.unsqueeze(-1) * terms) + 1e-9 * torch.eye(terms.shape[-1], dtype=points.dtype, device=points.device)
    right = terms.mT @ (weight * torch.where(known, lower, 0.0)).unsqueeze(-1)
    found = torch.linalg.solve(left, right).squeeze(-1)
    curvature = points.new_zeros(len(found), size, size)
    for number, (i, j) in enumerate(pairs):
        curvature[:, i, j] = curvature[:, j, i] = -found[:, 1 + size + number]
    precision, axes = torch.linalg.eigh(curvature)
    precision = precision.clamp(_LEAST_CURVATURE, _MOST_CURVATURE)
    slope = (axes.mT @ found[:, 1 : 1 + size].unsqueeze(-1)).squeeze(-1)
    mean = (axes @ (slope / precision).unsqueeze(-1)).squeeze(-1)
    length = mean.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return FittedProposal(mean * (_FARTHEST / length).clamp_max(1.0), axes, precision)
