"""Likelihoods: ours, with closed forms and no floors; any gpytorch likelihood with a factorised ``forward`` works too."""

from torchgpmc.likelihoods.bernoulli import Bernoulli
from torchgpmc.likelihoods.beta import Beta
from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.likelihoods.heteroskedastic import HeteroskedasticGaussian
from torchgpmc.likelihoods.laplace_noise import LaplaceNoise
from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.likelihoods.negative_binomial import NegativeBinomial
from torchgpmc.likelihoods.ordinal import Ordinal
from torchgpmc.likelihoods.poisson import Poisson
from torchgpmc.likelihoods.responses import Activation, Linear, Repression, Response
from torchgpmc.likelihoods.robust_max import RobustMax
from torchgpmc.likelihoods.softmax import Softmax
from torchgpmc.likelihoods.student_t import StudentT
from torchgpmc.likelihoods.transcription import Transcription

__all__ = [
    "Activation",
    "Bernoulli",
    "Beta",
    "Factorised",
    "Gaussian",
    "HeteroskedasticGaussian",
    "LaplaceNoise",
    "Linear",
    "LogLikelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Repression",
    "Response",
    "RobustMax",
    "Softmax",
    "StudentT",
    "Transcription",
]
