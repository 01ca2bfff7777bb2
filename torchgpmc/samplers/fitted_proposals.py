"""Proposals from a quadratic that is fitted to a log density's values at some fixed points: for few dimensions, and dear densities.

A kernel may propose from any density that does not depend on where it is, if it weighs what it proposes (Metropolis, "independence
sampling", Tierney 1994). Values at points that stay cost little where what is dear about a point is worked out once.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.random import normal_like


class _Choices(NamedTuple):
    """Chosen by trial; draws are exact whatever they are. Lengths are in deviations of the whole target."""

    reach: float = 1.3  # how far the points lie along each coordinate
    sharpness: float = 0.5  # a point's weight in the fit is the density to this power, so that the quadratic is right at the top
    least_weight: float = 0.02  # and at least this, so that far points keep the quadratic from rising there
    least_curvature: float = 0.7  # inverse variance of a proposal: no wider than the target, and defined where the fit bends up
    most_curvature: float = 25.0  # nor narrower than a fifth of it, since it would seldom propose what lies further out
    farthest: float = 3.0  # the proposal's mean: the fit knows nothing of what lies beyond
    turned: float = 0.7  # correlation, but for its sign, of a proposal on the other side of the mean
    degrees_of_freedom: int = 8  # of the proposals' Student t density, whose tails no density that is nearly normal exceeds


_CHOICES = _Choices()
FEW = 3  # dimensions, in which points on planes are few, too


def along_axes(dimension: int, like: Tensor) -> Tensor:
    """Points ``(1 + 2 dimension, dimension)`` that a quadratic without mixed terms is fitted to: the centre, two a coordinate.

    Example:
        >>> along_axes(2, torch.zeros(())).shape
        torch.Size([5, 2])
    """
    unit = torch.eye(dimension, dtype=like.dtype, device=like.device)
    return _CHOICES.reach * torch.cat([torch.zeros_like(unit[:1]), torch.stack([unit, -unit], 1).flatten(0, 1)])


def design(dimension: int, like: Tensor) -> Tensor:
    """Points ``(J, dimension)`` that a quadratic is fitted to: the centre, two a coordinate and four a pair of them.

    Example:
        >>> design(1, torch.zeros(())).flatten(), len(design(3, torch.zeros(())))
        (tensor([ 0.0000,  1.3000, -1.3000]), 19)
    """
    axes = along_axes(dimension, like)
    unit = axes[1::2]
    pairs = itertools.combinations(range(dimension), 2)
    planes = [one * unit[i] + other * unit[j] for i, j in pairs for one in (1, -1) for other in (1, -1)]
    return torch.cat([axes, torch.stack(planes)]) if planes else axes


class FittedProposal(NamedTuple):
    """Student t densities, one a chain."""

    mean: Tensor  # (C, P)
    axes: Tensor  # (C, P, P), orthonormal, in columns
    precision: Tensor  # (C, P), along these

    def draw(self, generator: torch.Generator) -> Tensor:
        """A position of each chain ``(C, P)``."""
        freedom = _CHOICES.degrees_of_freedom
        normal = normal_like(self.mean, generator)
        chi = normal_like(self.mean.new_empty(len(self.mean), freedom), generator).square().mean(-1, keepdim=True)
        return self._at(normal * chi.rsqrt())

    def opposite(self, position: Tensor, generator: torch.Generator) -> Tensor:
        """One on the other side of the mean from ``position`` ``(C, P)``, which leaves the density as it is, and is reversible.

        Student's t is a normal density whose scale is random. Given a scale that goes with ``position`` it is overrelaxed (Adler
        1981): the deviation turns round, and a share of it is drawn anew.
        """
        scaled = self._along(position) * self.precision.sqrt()
        freedom = _CHOICES.degrees_of_freedom
        squares = normal_like(self.mean.new_empty(len(self.mean), freedom + position.shape[-1]), generator).square()
        chi = squares.sum(-1, keepdim=True) / (freedom + scaled.square().sum(-1, keepdim=True))
        kept = _CHOICES.turned
        return self._at(math.sqrt(1 - kept**2) * normal_like(scaled, generator) * chi.rsqrt() - kept * scaled)

    def _along(self, position: Tensor) -> Tensor:
        """Away from the mean, along the axes ``(C, P)``."""
        return (self.axes.mT @ (position - self.mean).unsqueeze(-1)).squeeze(-1)

    def _at(self, scaled: Tensor) -> Tensor:
        """The position ``(C, P)`` so many deviations away along the axes."""
        return self.mean + (self.axes @ (scaled * self.precision.rsqrt()).unsqueeze(-1)).squeeze(-1)

    def log_density(self, position: Tensor) -> Tensor:
        """Up to a constant that all chains share ``(C,)``."""
        square = (self.precision * self._along(position).square()).sum(-1)
        freedom = _CHOICES.degrees_of_freedom
        return 0.5 * self.precision.log().sum(-1) - 0.5 * (freedom + position.shape[-1]) * torch.log1p(square / freedom)


def fitted_proposal(points: Tensor, log_density: Tensor) -> FittedProposal:
    """The proposal of values ``(C, J)`` at the points ``(J, P)`` of :func:`design`, or of :func:`along_axes`, whose quadratics have
    no mixed terms; -inf where a value is not known.

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
    weight = torch.where(known, (_CHOICES.sharpness * lower).exp().clamp_min(_CHOICES.least_weight), 0.0)
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
    precision = precision.clamp(_CHOICES.least_curvature, _CHOICES.most_curvature)
    slope = (axes.mT @ found[:, 1 : 1 + size].unsqueeze(-1)).squeeze(-1)
    mean = (axes @ (slope / precision).unsqueeze(-1)).squeeze(-1)
    length = mean.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return FittedProposal(mean * (_CHOICES.farthest / length).clamp_max(1.0), axes, precision)
