"""Monte Carlo inference for Gaussian process models, native to PyTorch."""

from torchgpmc import approximations, diagnostics, evidence, likelihoods, orthant, samplers, scores
from torchgpmc.approximations import EP, Laplace
from torchgpmc.checks import SamplingWarning
from torchgpmc.fitting import fit
from torchgpmc.loop import sample
from torchgpmc.methods import (
    AMIS,
    HMC,
    MAMIS,
    NUTS,
    PCN,
    AdaptiveMH,
    AuxiliaryGradient,
    EllipticalSlice,
    Gibbs,
    OrthantGPC,
    PseudoMarginal,
    PseudoMarginalSlice,
    Slice,
)
from torchgpmc.models import GP, GPRegression, SparseGP, joint_log_density, kmeans_inducing_points
from torchgpmc.posterior import Posterior
from torchgpmc.prediction import Prediction
from torchgpmc.recommend import explain, recommend
from torchgpmc.runs.parameterizations import Ancillary, Interwoven, Sufficient, Surrogate
from torchgpmc.samplers import MassMatrix
from torchgpmc.storage.checkpoint import Checkpoint

__version__ = "0.1.0"

__all__ = [
    "AMIS",
    "EP",
    "GP",
    "HMC",
    "MAMIS",
    "NUTS",
    "PCN",
    "AdaptiveMH",
    "Ancillary",
    "AuxiliaryGradient",
    "Checkpoint",
    "EllipticalSlice",
    "GPRegression",
    "Gibbs",
    "Interwoven",
    "Laplace",
    "MassMatrix",
    "OrthantGPC",
    "Posterior",
    "Prediction",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "SamplingWarning",
    "Slice",
    "SparseGP",
    "Sufficient",
    "Surrogate",
    "approximations",
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
    "samplers",
    "scores",
]
