"""Engines of many hyperparameters that learn the evidence, and what they may spend."""

from __future__ import annotations

import math

from torchgpmc.calls.candidate import Candidate, Limits, some_use
from torchgpmc.calls.chain_engines import NUM_CHAINS
from torchgpmc.calls.weighted_engines import seconds_of_estimates
from torchgpmc.methods import EmulatedHMC
from torchgpmc.models import GPModel

NO_PROPOSAL = "no proposal follows so many hyperparameters, but some hundred estimates teach an emulator what chains can move on."
# Thetas to learn from. Of 400 x 30 probit labels 14 a hyperparameter leave weights worth 0.9 of the draws, of ionosphere's 300 x 33
# 20, 30 and 47 a hyperparameter 0.2, 0.36 and 0.44: the more there are, the more of each.
_THETAS_A_HYPERPARAMETER, _LEAST_THETAS, _MANY = 24, 300, 40
_MORE = 2  # times as many, where these did not do
_EVERY, _MOST = 25, 400  # draws a chain
_USUAL_DRAWS_AN_EFFECTIVE_ONE = 1.6


def emulated(model: GPModel, method: EmulatedHMC, why: str, wanted: int) -> list[Candidate]:
    """Chains on an emulator, and once more on one that has learned more, from where the first ones went."""
    size = model.layout.size
    thetas = max(_LEAST_THETAS, round(_THETAS_A_HYPERPARAMETER * size * max(1.0, size / _MANY)))
    more = "the same, learning from twice as many thetas, the first of them around the draws before."
    second = _learning_from(_MORE * thetas, model, method, more, wanted)
    return [_learning_from(thetas, model, method, why, wanted), second._replace(given=some_use, goes_on=True)]


def _learning_from(thetas: int, model: GPModel, method: EmulatedHMC, why: str, wanted: int) -> Candidate:
    warmup_steps = math.ceil(thetas / NUM_CHAINS)
    seconds = seconds_of_estimates(model, method, thetas + _USUAL_DRAWS_AN_EFFECTIVE_ONE * wanted)
    return Candidate(method, why, NUM_CHAINS, warmup_steps, Limits(_EVERY, _MOST, math.inf), seconds)
