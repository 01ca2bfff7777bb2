"""Gaussian process models whose posterior is to be sampled."""

from torchgpmc.models.conditioned import ConditionedGP
from torchgpmc.models.fitc import FITC
from torchgpmc.models.full import GP
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity, joint_log_density
from torchgpmc.models.kmeans import kmeans_inducing_points
from torchgpmc.models.latents import LatentGaussian, LatentPrior, LatentsAt
from torchgpmc.models.projected import ProjectedProcess
from torchgpmc.models.regression import GPRegression
from torchgpmc.models.remedies import checked_model
from torchgpmc.models.sparse import SparseGP

__all__ = [
    "FITC",
    "GP",
    "ConditionedGP",
    "GPModel",
    "GPRegression",
    "JointLogDensity",
    "LatentGaussian",
    "LatentPrior",
    "LatentsAt",
    "ProjectedProcess",
    "SparseGP",
    "checked_model",
    "joint_log_density",
    "kmeans_inducing_points",
]
