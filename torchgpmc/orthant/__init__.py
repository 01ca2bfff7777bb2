"""Gaussian orthant and box probabilities, and draws from truncated normals: batched, in log space, differentiable."""

from torchgpmc.orthant.functions import log_probability, truncated_normal_draws, truncated_normal_samples
from torchgpmc.orthant.importance import MinimaxTilting, SeparationOfVariables, weighted_draws
from torchgpmc.orthant.problem import OrthantEstimate, Problem
from torchgpmc.orthant.sequential import Count, Sequential
from torchgpmc.orthant.split import KnownSplit
from torchgpmc.orthant.truncated import TruncatedDraws, truncated_draws

__all__ = [
    "Count",
    "KnownSplit",
    "MinimaxTilting",
    "OrthantEstimate",
    "Problem",
    "SeparationOfVariables",
    "Sequential",
    "TruncatedDraws",
    "log_probability",
    "truncated_draws",
    "truncated_normal_draws",
    "truncated_normal_samples",
    "weighted_draws",
]
