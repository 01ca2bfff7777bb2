"""Likelihoods: ours, with closed forms and no floors; any gpytorch likelihood with a factorised ``forward`` works too."""

from torchgpmc.likelihoods.base import Factorised, LogLikelihood
from torchgpmc.likelihoods.bernoulli import Bernoulli
from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.likelihoods.poisson import Poisson
from torchgpmc.likelihoods.softmax import Softmax
from torchgpmc.likelihoods.student_t import StudentT
from torchgpmc.likelihoods.transcription import Activation, Linear, Repression, Response, Transcription

__all__ = [
    "Activation",
    "Bernoulli",
    "Factorised",
    "Gaussian",
    "Linear",
    "LogLikelihood",
    "Poisson",
    "Repression",
    "Response",
    "Softmax",
    "StudentT",
    "Transcription",
]
