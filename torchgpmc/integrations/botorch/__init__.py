"""BoTorch's fully Bayesian models, sampled here instead of by JAX; only the import line of a script changes."""

try:
    import botorch  # noqa: F401
except ImportError as error:
    raise ImportError("torchgpmc.integrations.botorch needs BoTorch: pip install 'torchgpmc[botorch]'; no JAX.") from error

from torchgpmc.integrations.botorch.fit import Sampling, fit_fully_bayesian_model_nuts
from torchgpmc.integrations.botorch.models import (
    FullyBayesianLinearSingleTaskGP,
    FullyBayesianSingleTaskGP,
    SaasFullyBayesianMultiTaskGP,
    SaasFullyBayesianSingleTaskGP,
)

__all__ = [
    "FullyBayesianLinearSingleTaskGP",
    "FullyBayesianSingleTaskGP",
    "SaasFullyBayesianMultiTaskGP",
    "SaasFullyBayesianSingleTaskGP",
    "Sampling",
    "fit_fully_bayesian_model_nuts",
]
