"""Engines of many hyperparameters that learn the evidence, and what they may spend."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torchgpmc.approximations import EP
from torchgpmc.calls.candidate import WANTED, Candidate, Limits, uneven
from torchgpmc.calls.costs import seconds_an_estimate, seconds_of_search
from torchgpmc.calls.timing import seconds_of
from torchgpmc.importance import empty_emulator
from torchgpmc.methods import EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.runs.beginnings import AtModes

NO_PROPOSAL = "no proposal follows so many hyperparameters, but some hundred estimates teach an emulator what chains can move on."
# Thetas to learn from, at most: of 500 labels 19 lengthscales took 36 a hyperparameter until the latest were worth half of their
# number, 20 others 26, and eleven of 200 labels 20. The more there are, the more of each.
_MOST_A_HYPERPARAMETER, _LEAST_THETAS, _MANY = 48, 300, 40
_USUAL_SHARE = 0.5  # of those, were there no more of each
_ENOUGH = 0.7
# Of exact evidence no noise makes weights uneven: what does is alike at neighbouring draws. Of 500 x 11, draws worth 450 by R-hat's
# and Kish's counts were worth 75 to 400 after learning to 0.6 (480 thetas), and 380 and more of 530 after 800 thetas. One is cheap:
# the latest 64 of 832 were worth 35 and 84 draws of 960 good, those of 1392 58, and 562 of 800.
# Of 200 x 9 under Student-t noise, 48 thetas a hyperparameter: 1200 draws worth 103 in 27 CPU seconds, 128: 344 in 36.
_ENOUGH_OF_CHEAP, _MOST_OF_CHEAP = 0.9, 128
# Of 500 x 60 labels EP's evidence to this tolerance is 0.1 nats from the estimates for a sixth of their time; of 500 x 18 it is
# 0.96 off, to 0.03 0.2, for their time. By three seeds the first took 168, 120 and 144 CPU seconds by estimates, 118, 94 and 168
# learned from EP to 0.7, and to 0.8 124, 90 and 109.
_NEAR_ENOUGH, _ENOUGH_OF_EP = 0.3, 0.8
# R-hat of many short chains is noisy, of few a step's overhead is shared by few.
NUM_CHAINS = 8
_EVERY, _MOST = 160, 2400  # draws of all chains
_PATIENCE = 0.1
# Of the first of two runs: 800 draws whose worst quantity heads for too few teach another emulator instead, and join its draws. Not
# all that head for less than is wanted: of 225 x 9 some came to it, in half of the time of two runs.
_WATCHED = {"patience": 1 / 3, "heading": 0.9, "by_worst": True}
_TAUGHT = "the same once more, on an emulator that has learned from those draws, too."
_USUAL_DRAWS = 1200  # of all chains: 960 to 2080 for 400 effective ones
_GRADIENTS_A_TRAJECTORY = 14  # in time: seven, and as much beside them


def emulated(
    model: GPModel, method: EmulatedHMC, why: str, wanted: int, num_chains: int = NUM_CHAINS, *, cheap: bool = False
) -> Candidate:
    """Chains on an emulator, which learn until their weights are even; for longer of exact evidence, or ``cheap`` estimates."""
    size, cheap = model.layout.size, cheap or model.is_conjugate or model.collapses
    enough, most = (_ENOUGH_OF_CHEAP, _MOST_OF_CHEAP) if cheap else (_ENOUGH, _MOST_A_HYPERPARAMETER)
    thetas = max(_LEAST_THETAS, round(most * size * max(1.0, size / _MANY)))
    usual = max(_LEAST_THETAS, _USUAL_SHARE * most * size) + _USUAL_DRAWS * max(1.0, wanted / WANTED)
    seconds = partial(seconds_of_emulated, model, method, num_chains, usual / num_chains)
    limits = Limits(_EVERY // num_chains, _MOST // num_chains, math.inf, patience=_PATIENCE)
    return Candidate(replace(method, enough=enough), why, num_chains, math.ceil(thetas / num_chains), limits, seconds)


def emulated_twice(first: Candidate) -> list[Candidate]:
    """Chains on an emulator, and should their weights be uneven, chains on one that these draws have taught.

    What makes them uneven is an arm that learning came upon too seldom: one draw of 2400 had a fiftieth of all weight.
    """
    again = first._replace(why=_TAUGHT, goes_on=True, given=uneven)
    return [first.with_limits(**_WATCHED), again]


def taught_by_ep(first: Candidate, size: int) -> Candidate:
    """The same on an emulator of EP's evidence, where hyperparameters are so many that there is much to learn."""
    return first if size <= _MANY else with_options(first, taught_by=EP(tolerance=_NEAR_ENOUGH), enough=_ENOUGH_OF_EP)


def with_options(emulated: Candidate, **options: Any) -> Candidate:
    """The same but for some options of its :class:`EmulatedHMC`."""
    assert isinstance(emulated.method, EmulatedHMC)
    return emulated._replace(method=replace(emulated.method, **options))


def seconds_of_emulated(model: GPModel, method: EmulatedHMC, num_chains: int, steps: float) -> float:
    """Of a search for modes, and of steps, each an estimate a chain and trajectories on an emulator, which are all overhead."""
    searched = seconds_of_search(model, method.begin) if isinstance(method.begin, AtModes) else 0.0
    z = model.train_x.new_zeros(num_chains, model.layout.size)
    moved = _GRADIENTS_A_TRAJECTORY * method.num_trajectories * seconds_of(partial(empty_emulator(z[0]).value_and_grad, z))
    return searched + steps * (num_chains * seconds_an_estimate(model, method) + moved)
