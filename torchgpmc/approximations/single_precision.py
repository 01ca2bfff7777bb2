"""Where EP's sites may be looked for in single precision, in half the time."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.likelihoods import Bernoulli
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics import linalg

_SINGLE = torch.float32
_SEEN = 0.01  # by how much the largest eigenvalue of B may be off, which values then are at most
# The same of sites to draw from: of 500 labels at outputscales of a thousand weights were as even as by sites of double precision.
SEEN_IN_DRAWS = 0.3
_LEAST = 1e-3  # of a tolerance that single precision reaches


def may_be_single(model: GPModel, tolerance: float) -> bool:
    """Whether sites may be found so to a tolerance: those of likelihoods whose searches end at one place."""
    likelihood = as_likelihood(model.likelihood)
    return tolerance >= _LEAST and (likelihood.is_log_concave or likelihood.levels_off)


def are_labels(model: GPModel) -> bool:
    """Whether no datum tells so much that a cavity would lose its digits, nor has a density of large numbers."""
    return isinstance(as_likelihood(model.likelihood), Bernoulli)


def in_single_precision(problem: LatentProblem) -> LatentProblem:
    """All of it where data are labels, else the covariance and so the algebra alone."""
    quick = problem._replace(covariance=linalg.in_single_precision(problem.covariance))
    return quick.to(_SINGLE) if are_labels(problem.model) else quick


def rounding_shows(problem: LatentProblem, precision: Tensor, seen: float = _SEEN) -> Tensor:
    """Where B is so large that rounding it to single precision would be seen ``(C,)``; of sites of ``precision`` ``(C, N)``."""
    weight = precision.clamp_min(1 / problem.model.unit)
    return (problem.covariance.diagonal(dim1=-2, dim2=-1) * weight).sum(-1) * torch.finfo(_SINGLE).eps > seen
