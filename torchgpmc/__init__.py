"""Monte Carlo inference for Gaussian process models, native to PyTorch."""

from torchgpmc import approximations, diagnostics, evidence, likelihoods, orthant, samplers, scores
from torchgpmc.approximations import EP, Laplace
from torchgpmc.checks import SamplingWarning
from torchgpmc.density_sampling import sample_density
from torchgpmc.fitted import Fitted
from torchgpmc.fitting import fit
from torchgpmc.integrations.scikit_learn import GPClassifier, GPRegressor
from torchgpmc.loop import sample
from torchgpmc.methods import (
    AMIS,
    HMC,
    MAMIS,
    NUTS,
    PCN,
    AdaptiveMH,
    AuxiliaryGradient,
    ChEES,
    EllipticalSlice,
    OrthantGPC,
    PseudoMarginal,
    PseudoMarginalSlice,
    Slice,
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
from torchgpmc.recommend import explain, recommend
from torchgpmc.samplers import MassMatrix
from torchgpmc.storage.checkpoint import Checkpoint
from torchgpmc.tuning import tune_hmc
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
    "AuxiliaryGradient",
    "ChEES",
    "Checkpoint",
    "ConditionedGP",
    "EllipticalSlice",
    "Fitted",
    "GPClassifier",
    "GPRegression",
    "GPRegressor",
    "Laplace",
    "MassMatrix",
    "OrthantGPC",
    "Posterior",
    "Prediction",
    "ProjectedProcess",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "SamplingWarning",
    "Slice",
    "SparseGP",
    "approximations",
    "bin_events",
    "diagnostics",
    "evidence",
    "explain",
    "fit",
    "joint_log_density",
    "kmeans_inducing_points",
    "likelihoods",
    "orthant",
    "recommend",
    "sample",
    "sample_density",
    "samplers",
    "scores",
    "show_versions",
    "tune_hmc",
]
