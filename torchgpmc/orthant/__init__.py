"""Gaussian orthant and box probabilities, and draws from truncated normals: batched, in log space, differentiable."""

from torchgpmc.orthant.low_dimensional import Quadrature
from torchgpmc.orthant.probability import log_probability, truncated_normal_draws, truncated_normal_samples
from torchgpmc.orthant.problem import OrthantEstimate
from torchgpmc.orthant.sequential import Count, Sequential
from torchgpmc.orthant.split import KnownSplit
from torchgpmc.orthant.truncated import TruncatedDraws
from torchgpmc.orthant.weighting import MinimaxTilting, SeparationOfVariables

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
