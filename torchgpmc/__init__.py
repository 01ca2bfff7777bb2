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
    AdaptiveMH,
    EllipticalSlice,
    OrthantGPC,
    PseudoMarginal,
    PseudoMarginalSlice,
    Slice,
)
from torchgpmc.models import GP, GPRegression, SparseGP, joint_log_density, kmeans_inducing_points
from torchgpmc.posterior import Posterior
from torchgpmc.prediction import Prediction
from torchgpmc.recommend import explain, recommend
from torchgpmc.samplers import MassMatrix
from torchgpmc.storage.checkpoint import Checkpoint
from torchgpmc.variational import Start, initialize

__version__ = "0.1.0"

__all__ = [
    "AMIS",
    "EP",
    "GP",
    "HMC",
    "MAMIS",
    "NUTS",
    "AdaptiveMH",
    "Checkpoint",
    "EllipticalSlice",
    "GPRegression",
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
    "Start",
    "approximations",
    "diagnostics",
    "evidence",
    "explain",
    "fit",
    "initialize",
    "joint_log_density",
    "kmeans_inducing_points",
    "likelihoods",
    "orthant",
    "recommend",
    "sample",
    "samplers",
    "scores",
]
