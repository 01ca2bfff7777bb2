"""Engines of weighted draws, what they may spend, and how many hyperparameters they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torchgpmc.calls.candidate import WANTED, Candidate, Limits, some_use
from torchgpmc.calls.costs import seconds_a_candidate, seconds_of_search
from torchgpmc.evidence import Evidence
from torchgpmc.methods import AMIS
from torchgpmc.models import GPModel
from torchgpmc.runs.beginnings import AtModes, AtPrior

# Importance weights collapse as hyperparameters multiply; `docs/results/theta_engines.md` has the table behind this limit.
# Laplace's estimates make it worse: with EP's, the nearest normal density's, or exact evidence, weights bear more of them.
MANY_HYPERPARAMETERS = 8
MOST_HYPERPARAMETERS = 16
# Of an estimate by EP, whose sweeps cost as much as some hundreds of draws.
MANY_DRAWS = 64
# Of proposals for more hyperparameters than a few: in a dozen dimensions most draws of a Student t with five lie too far out.
SHORT_TAILS = 30
# Where estimates are nearly exact and proposals begin with the prior, weights collapse at first: those of 70 x 4, noise by column,
# are worth 2 of 400 draws, 6 of 880, 38 of 1456, 226 of 2147, 542 of 2976.
LEARNING = 0.5
INTEGRATES_OUT = "the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up."
HARDLY = "latents drawn one datum after another hardly vary where importance samples of all at once do: weighted draws, no warm-up."
AGAIN = "the same from other random numbers: runs that agree are worth their draws together."
# Where candidates are screened. Of 200 labels that say little of eleven hyperparameters one run of 8000 candidates is worth more
# than two of 4000. Calls by ten batches took 28 CPU seconds, by twenty 36: a batch is learned from, and judged.
_MORE_WHERE_SCREENED, _BATCHES = 2, 10
# Candidates, of proposals that go well.
_USUAL_DRAWS_AN_EFFECTIVE_ONE, _MORE_A_HYPERPARAMETER = 2.0, 0.5
_DRAWS_AN_EFFECTIVE_ONE = 10  # candidates: weights worth less than a tenth of their number are not to be trusted


def weighted(model: GPModel, method: AMIS, why: str, wanted: int) -> Candidate:
    """Weighted draws of theta, for ``wanted`` effective ones."""
    most = _DRAWS_AN_EFFECTIVE_ONE * max(wanted, WANTED)
    if method.screen is not None:
        most = _MORE_WHERE_SCREENED * most // method.screen.candidates
        method = replace(method, batch_size=most // _BATCHES)
    elif wanted < WANTED:
        # Few are found sooner. They are no reason to give up sooner: engines that come later are dearer.
        method = replace(method, batch_size=max(wanted, 10 * model.layout.size))
    return Candidate(method, why, None, None, Limits(1, most, math.inf), partial(seconds_of_weighted, model, method, wanted))


def from_the_prior(
    model: GPModel, evidence: Callable[[int], Evidence], few: str, more: str, wanted: int, num_importance: int = MANY_DRAWS
) -> list[Candidate]:
    """Weighted draws without a search for modes, and again with four times as many draws an estimate."""
    turns = (num_importance, few), (4 * num_importance, more)
    first, second = (weighted(model, AMIS(evidence=evidence(draws), begin=AtPrior()), why, wanted) for draws, why in turns)
    return [first, second._replace(given=some_use)]


def seconds_of_weighted(model: GPModel, method: AMIS, wanted: int) -> float:
    """Of a search for modes, and of as many candidates as is usual."""
    searched = seconds_of_search(model, method.begin) if isinstance(method.begin, AtModes) else 0.0
    draws = min(_DRAWS_AN_EFFECTIVE_ONE, _USUAL_DRAWS_AN_EFFECTIVE_ONE + _MORE_A_HYPERPARAMETER * model.layout.size)
    return searched + draws * wanted * seconds_a_candidate(model, method)


def operations_of_estimate(model: GPModel) -> float:
    """Of K functions from nothing it takes ten factorisations and more of each."""
    return model.operations * (1 if model.num_latents == 1 else 10 * model.num_latents)
