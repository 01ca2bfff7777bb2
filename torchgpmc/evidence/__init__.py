"""Unbiased estimators of p(y | theta): importance sampling from a Gaussian approximation, and annealing."""

from torchgpmc.evidence.annealing import AnnealedEstimator, annealed
from torchgpmc.evidence.importance_sampling import ImportanceEstimate, ImportanceEstimator, importance

__all__ = ["AnnealedEstimator", "ImportanceEstimate", "ImportanceEstimator", "annealed", "importance"]
