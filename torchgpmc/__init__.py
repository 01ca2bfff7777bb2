"""Monte Carlo inference for Gaussian process models, native to PyTorch."""

from torchgpmc import approximations, diagnostics, evidence, likelihoods, orthant, samplers, scores
from torchgpmc.approximations import EP, Laplace
from torchgpmc.checks import SamplingWarning
from torchgpmc.density_sampling import sample_density
from torchgpmc.fitting import fit
from torchgpmc.loop import sample
from torchgpmc.methods import (
    AMIS,
    HMC,
    MAMIS,
    NUTS,
    AdaptiveMH,
    ChEES,
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
from torchgpmc.tuning import tune_hmc

__version__ = "0.1.0"

__all__ = [
    "AMIS",
    "EP",
    "GP",
    "HMC",
    "MAMIS",
    "NUTS",
    "AdaptiveMH",
    "ChEES",
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
    "sample_density",
    "samplers",
    "scores",
    "tune_hmc",
]
