"""Where EP's sites may be looked for in single precision, in half the time."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.likelihoods import Bernoulli
from torchgpmc.models.gp_model import GPModel

_SEEN = 0.01  # by how much the largest eigenvalue of a covariance may be off, which values then are at most
_LEAST = 1e-3  # of a tolerance that single precision reaches


def may_be_single(model: GPModel, tolerance: float) -> bool:
    """Whether sites may be found so to a tolerance: those of labels, none of which tells so much that a cavity loses its digits."""
    return tolerance >= _LEAST and isinstance(as_likelihood(model.likelihood), Bernoulli)


def rounding_shows(problem: LatentProblem) -> Tensor:
    """Where the covariance is so large that rounding it to single precision would be seen ``(C,)``."""
    return problem.covariance.diagonal(dim1=-2, dim2=-1).sum(-1) * torch.finfo(torch.float32).eps > _SEEN
