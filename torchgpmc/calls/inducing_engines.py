"""Engines of models whose latents are inducing values that do not integrate out exactly."""

from __future__ import annotations

from torchgpmc.approximations.gaussian_form import has_inducing_normal
from torchgpmc.calls.candidate import Candidate
from torchgpmc.calls.chain_engines import together
from torchgpmc.calls.emulated_engines import NO_PROPOSAL, emulated, emulated_twice
from torchgpmc.calls.weighted_engines import INTEGRATES_OUT, MANY_HYPERPARAMETERS, MOST_HYPERPARAMETERS, from_the_prior, weighted
from torchgpmc.evidence import InducingMixture, serves_inducing_mixture
from torchgpmc.likelihoods import RobustMax
from torchgpmc.methods import AMIS, EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.runs.beginnings import AtModes

# An estimate's; those of inducing values around their nearest normal density vary by some hundredths, and cost little else.
_FEW_DRAWS = 4
# Data whose expectations 64 draws an estimate take by quadrature (Student t, 1000 x 1: no answer in 116 seconds).
_FEW_INTEGRALS = 400
# Three classes by robust max, which chains hardly move in: of 60 data weighted draws are trusted after 33 CPU seconds, of 120 and
# 250 they were given up after 168 and 64, and of 1000 had no answer in 480.
_FEW_OF_ROBUST_MAX = 100
_MOST_INDUCING = 200  # numbers in v, of which estimates factorise a matrix
_AFTER_NOISE = 2.0  # of what chains may cost: those of 1788 x 18 had 66 draws each when it was spent
_AFTER_WEIGHTS = 0.5  # of what chains may cost, where weighted draws have spent some: chains that go well need a fifth


def of_inducing_values(model: GPModel, wanted: int) -> list[Candidate]:
    """Of one function and a log-concave likelihood around their nearest normal density, else around several."""
    size = model.layout.size
    if has_inducing_normal(model) and size > MOST_HYPERPARAMETERS:
        method = EmulatedHMC(num_importance=_FEW_DRAWS, begin=AtModes(count=1))
        return [*emulated_twice(emulated(model, method, NO_PROPOSAL, wanted)), *together(model)]
    if has_inducing_normal(model):
        # Estimates that vary too much have heavy tails, and with eight times as many draws, too: of 1788 x 18, M = 100, one of 2147
        # had a tenth of all weight. Chains are as quick there.
        first = weighted(model, AMIS(num_importance=_FEW_DRAWS), INTEGRATES_OUT, wanted)
        return [first, *together(model, _AFTER_NOISE)]
    if not has_inducing_normal(model) and size <= MANY_HYPERPARAMETERS and _suits_mixture(model):
        few = "the inducing values integrate out well and the hyperparameters are few: weighted draws, no warm-up."
        more = "many draws an estimate make up for what normal densities of inducing values miss."
        return [*from_the_prior(model, InducingMixture, few, more, wanted), *together(model, _AFTER_WEIGHTS)]
    return together(model)


def _suits_mixture(model: GPModel) -> bool:
    """Whether modes are found, and expectations are no integrals, which take longer than chains do.

    Under heteroskedastic noise, 2000 x 2, 60 inducing points, a fifth of the modes were not found: 390 of 428 CPU
    seconds went for nothing, where chains take 35; of 60 data a seventh.
    """
    if not serves_inducing_mixture(model) or model.latent_size > _MOST_INDUCING:
        return False
    if model.num_latents > 1:
        return isinstance(model.likelihood, RobustMax) and len(model.train_x) <= _FEW_OF_ROBUST_MAX
    return not model.takes_expectations or len(model.train_x) <= _FEW_INTEGRALS
