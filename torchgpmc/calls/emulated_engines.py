"""Engines of many hyperparameters that learn the evidence, and what they may spend."""

from __future__ import annotations

import math
from dataclasses import replace

from torchgpmc.calls.candidate import Candidate, Limits
from torchgpmc.calls.weighted_engines import seconds_of_estimates
from torchgpmc.methods import EmulatedHMC
from torchgpmc.models import GPModel

NO_PROPOSAL = "no proposal follows so many hyperparameters, but some hundred estimates teach an emulator what chains can move on."
# Thetas to learn from, at most: of 500 labels 19 lengthscales took 36 a hyperparameter until the latest were worth half of their
# number, 20 others 26, and eleven of 200 labels 20. The more there are, the more of each.
_MOST_A_HYPERPARAMETER, _LEAST_THETAS, _MANY = 48, 300, 40
_USUAL_SHARE = 0.5  # of those
_ENOUGH = 0.6
# Of exact evidence no noise makes weights uneven: what does is alike at neighbouring draws. Of 500 x 11, draws worth 450 by R-hat's
# and Kish's counts were worth 75 to 400 after learning to 0.6 (480 thetas), and 380 and more of 530 after 800 thetas.
_ENOUGH_OF_EXACT, _MOST_OF_EXACT = 0.9, 64
# R-hat of many short chains is noisy, of few a step's overhead is shared by few.
NUM_CHAINS = 8
_EVERY, _MOST = 160, 2400  # draws of all chains
_PATIENCE = 0.1
_USUAL_DRAWS_AN_EFFECTIVE_ONE = 1.8


def emulated(model: GPModel, method: EmulatedHMC, why: str, wanted: int, num_chains: int = NUM_CHAINS) -> Candidate:
    """Chains on an emulator, which learn until their weights are even."""
    size, is_exact = model.layout.size, model.is_conjugate or model.collapses
    enough, most = (_ENOUGH_OF_EXACT, _MOST_OF_EXACT) if is_exact else (_ENOUGH, _MOST_A_HYPERPARAMETER)
    thetas = max(_LEAST_THETAS, round(most * size * max(1.0, size / _MANY)))
    seconds = seconds_of_estimates(model, method, _USUAL_SHARE * thetas + _USUAL_DRAWS_AN_EFFECTIVE_ONE * wanted)
    limits = Limits(_EVERY // num_chains, _MOST // num_chains, math.inf, patience=_PATIENCE)
    return Candidate(replace(method, enough=enough), why, num_chains, math.ceil(thetas / num_chains), limits, seconds)
