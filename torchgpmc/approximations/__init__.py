"""Gaussian approximations of p(f | y, theta): Laplace and expectation propagation, for a whole batch of thetas at once."""

from torchgpmc.approximations.class_ep import ClassApproximation, ClassEP
from torchgpmc.approximations.collapsed_marginal import CollapsedMarginal, marginal_of
from torchgpmc.approximations.conjugate import Conjugate
from torchgpmc.approximations.ep import EP
from torchgpmc.approximations.functions import expectation_propagation, laplace, negative_log_evidence, predict
from torchgpmc.approximations.gaussian_form import Approximation, GaussianApproximation, covariance_factor
from torchgpmc.approximations.laplace_mode import Laplace
from torchgpmc.approximations.marginal import ApproximateMarginal
from torchgpmc.approximations.nearest_normal import Variational

__all__ = [
    "EP",
    "ApproximateMarginal",
    "Approximation",
    "ClassApproximation",
    "ClassEP",
    "CollapsedMarginal",
    "Conjugate",
    "GaussianApproximation",
    "Laplace",
    "Variational",
    "covariance_factor",
    "expectation_propagation",
    "laplace",
    "marginal_of",
    "negative_log_evidence",
    "predict",
]
