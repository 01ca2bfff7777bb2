"""Whether draws are to be trusted: effective sizes, R-hat, k-hat, and complaints in plain words."""

from torchgpmc.diagnostics.noisy_evidence import MAX_ESTIMATE_VARIANCE, estimate_noise
from torchgpmc.diagnostics.verdicts import (
    ENOUGH_ESS,
    MAX_FAILED_SHARE,
    MAX_HEAT,
    MAX_LATENT_RHAT,
    MAX_NOISE_OF_RUNS,
    MAX_RHAT,
    MAX_RUN_ERRORS,
    MIN_EFFICIENCY,
    MIN_ESS_PER_CHAIN,
    complaints,
    complaints_about_choice,
    complaints_about_divergences,
    complaints_about_latents,
    complaints_about_runs,
    least_effective,
    verdict,
    worst_latent,
)

__all__ = [
    "ENOUGH_ESS",
    "MAX_ESTIMATE_VARIANCE",
    "MAX_FAILED_SHARE",
    "MAX_HEAT",
    "MAX_LATENT_RHAT",
    "MAX_NOISE_OF_RUNS",
    "MAX_RHAT",
    "MAX_RUN_ERRORS",
    "MIN_EFFICIENCY",
    "MIN_ESS_PER_CHAIN",
    "complaints",
    "complaints_about_choice",
    "complaints_about_divergences",
    "complaints_about_latents",
    "complaints_about_runs",
    "estimate_noise",
    "least_effective",
    "verdict",
    "worst_latent",
]
