"""Monte Carlo inference for Gaussian process models, native to PyTorch."""

from torchgpmc import (
    approximations,
    diagnostics,
    distributed,
    evidence,
    kernels,
    likelihoods,
    orthant,
    plots,
    priors,
    samplers,
    scores,
)
from torchgpmc.approximations import EP, Laplace
from torchgpmc.calls.density_sampling import sample_density
from torchgpmc.calls.engines import recommend
from torchgpmc.calls.fitting import fit
from torchgpmc.calls.forecast import explain
from torchgpmc.calls.pooling import pool
from torchgpmc.calls.sampling import sample
from torchgpmc.calls.tuning import tune_hmc
from torchgpmc.checks import SamplingWarning
from torchgpmc.fitted import Fitted
from torchgpmc.integrations.gpytorch_models import from_gpytorch
from torchgpmc.integrations.scikit_learn import GPClassifier, GPRegressor
from torchgpmc.methods import (
    AMIS,
    HMC,
    MAMIS,
    NUTS,
    PCN,
    AdaptiveMH,
    AuxiliaryGradient,
    ChEES,
    ClassGibbs,
    ControlVariables,
    EllipticalSlice,
    EmulatedHMC,
    Gibbs,
    GibbsLike,
    LocalRegions,
    OrthantGPC,
    PseudoMarginal,
    PseudoMarginalSlice,
    Slice,
    StochasticGradientHMC,
)
from torchgpmc.models import (
    FITC,
    GP,
    ConditionedGP,
    GPRegression,
    ProjectedProcess,
    SparseGP,
    joint_log_density,
    kmeans_inducing_points,
)
from torchgpmc.point_process import bin_events
from torchgpmc.posterior import Posterior
from torchgpmc.prediction import Prediction
from torchgpmc.runs.beginnings import AtModes, AtPrior
from torchgpmc.runs.parameterizations import Ancillary, Interwoven, Sufficient, Surrogate
from torchgpmc.runs.regressed import Regressed
from torchgpmc.runs.screening import Screen
from torchgpmc.samplers import MassMatrix
from torchgpmc.storage.checkpoint import Checkpoint
from torchgpmc.variational import Start, initialize, refine_inducing_points
from torchgpmc.versions import show_versions

__version__ = "0.1.0"

__all__ = [
    "AMIS",
    "EP",
    "FITC",
    "GP",
    "HMC",
    "MAMIS",
    "NUTS",
    "PCN",
    "AdaptiveMH",
    "Ancillary",
    "AtModes",
    "AtPrior",
    "AuxiliaryGradient",
    "ChEES",
    "Checkpoint",
    "ClassGibbs",
    "ConditionedGP",
    "ControlVariables",
    "EllipticalSlice",
    "EmulatedHMC",
    "Fitted",
    "GPClassifier",
    "GPRegression",
    "GPRegressor",
    "Gibbs",
    "GibbsLike",
    "Interwoven",
    "Laplace",
    "LocalRegions",
    "MassMatrix",
    "OrthantGPC",
    "Posterior",
    "Prediction",
    "ProjectedProcess",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "Regressed",
    "SamplingWarning",
    "Screen",
    "Slice",
    "SparseGP",
    "Start",
    "StochasticGradientHMC",
    "Sufficient",
    "Surrogate",
    "approximations",
    "bin_events",
    "diagnostics",
    "distributed",
    "evidence",
    "explain",
    "fit",
    "from_gpytorch",
    "initialize",
    "joint_log_density",
    "kernels",
    "kmeans_inducing_points",
    "likelihoods",
    "orthant",
    "plots",
    "pool",
    "priors",
    "recommend",
    "refine_inducing_points",
    "sample",
    "sample_density",
    "samplers",
    "scores",
    "show_versions",
    "tune_hmc",
]
