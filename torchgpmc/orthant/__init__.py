"""Gaussian orthant and box probabilities, and draws from truncated normals: batched, in log space, differentiable."""

from torchgpmc.orthant.functions import log_probability, truncated_normal_draws, truncated_normal_samples
from torchgpmc.orthant.importance import MinimaxTilting, SeparationOfVariables
from torchgpmc.orthant.problem import OrthantEstimate
from torchgpmc.orthant.quadrature import Quadrature
from torchgpmc.orthant.sequential import Count, Sequential
from torchgpmc.orthant.split import KnownSplit
from torchgpmc.orthant.truncated import TruncatedDraws

__all__ = [
    "Count",
    "KnownSplit",
    "MinimaxTilting",
    "OrthantEstimate",
    "Quadrature",
    "SeparationOfVariables",
    "Sequential",
    "TruncatedDraws",
    "log_probability",
    "truncated_normal_draws",
    "truncated_normal_samples",
]
