"""Unbiased estimators of p(y | theta): importance sampling, of all data at once or in turn, annealing, and orthant integrals."""

from torchgpmc.evidence.annealing import AnnealedEstimator, annealed
from torchgpmc.evidence.collapsed_estimator import CollapsedEstimator
from torchgpmc.evidence.estimators import importance
from torchgpmc.evidence.exact_estimator import ExactEstimator
from torchgpmc.evidence.importance_sampling import ImportanceEstimate, ImportanceEstimator
from torchgpmc.evidence.inducing_estimator import InducingEstimator
from torchgpmc.evidence.inducing_mixture import InducingMixture, InducingMixtureEstimator, serves_inducing_mixture
from torchgpmc.evidence.latent_estimates import LATENTS_KEPT, Evidence, LatentEstimate, LatentEstimator, latents_kept
from torchgpmc.evidence.noise_alone import NoiseAlone, NoiseAloneEstimator, is_heteroskedastic
from torchgpmc.evidence.orthants import Orthant, OrthantClassifier, OrthantEstimator, classify, exact_latents, is_probit
from torchgpmc.evidence.sequential_candidates import SequentialCandidates, SequentialCandidatesEstimator
from torchgpmc.evidence.sequential_importance import SequentialImportance, SequentialImportanceEstimator
from torchgpmc.evidence.smooth_probit import SmoothProbit, SmoothProbitEstimator

__all__ = [
    "LATENTS_KEPT",
    "AnnealedEstimator",
    "CollapsedEstimator",
    "Evidence",
    "ExactEstimator",
    "ImportanceEstimate",
    "ImportanceEstimator",
    "InducingEstimator",
    "InducingMixture",
    "InducingMixtureEstimator",
    "LatentEstimate",
    "LatentEstimator",
    "NoiseAlone",
    "NoiseAloneEstimator",
    "Orthant",
    "OrthantClassifier",
    "OrthantEstimator",
    "SequentialCandidates",
    "SequentialCandidatesEstimator",
    "SequentialImportance",
    "SequentialImportanceEstimator",
    "SmoothProbit",
    "SmoothProbitEstimator",
    "annealed",
    "classify",
    "exact_latents",
    "importance",
    "is_heteroskedastic",
    "is_probit",
    "latents_kept",
    "serves_inducing_mixture",
]
