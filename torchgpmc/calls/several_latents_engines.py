"""Engines of models with several latents a datum that integrate out: classes, and noise with a latent size."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torchgpmc.approximations import ClassEP
from torchgpmc.calls.candidate import NOISE_BEFORE_BETTER, Candidate, Limits, noise_or_some_use
from torchgpmc.calls.chain_engines import NUM_CHAINS, SHORT_WARM_UP, together
from torchgpmc.calls.class_costs import seconds_of_class_sweeps
from torchgpmc.calls.emulated_engines import emulated, emulated_twice
from torchgpmc.calls.weighted_engines import (
    HARDLY,
    INTEGRATES_OUT,
    LEARNING,
    MANY_DRAWS,
    from_the_prior,
    weighted,
)
from torchgpmc.evidence import NoiseAlone, SequentialCandidates
from torchgpmc.methods import AMIS, ClassGibbs, EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.runs.beginnings import AtModes, AtPrior
from torchgpmc.samplers.fitted_proposals import FEW

# Of which weighted draws follow: iris with five hyperparameters takes 16 CPU seconds by these, 40 to 80 by an emulator.
_MOST_HYPERPARAMETERS = 5
_FEW_HYPERPARAMETERS, _FIRST_BATCH = 3, 100  # that draws from the prior find as well as a search for modes
_SOME_FUNCTIONS = 5  # of which EP's estimates are good for something: three to five classes of tables took 64 to 174 s by them
_LONGER_WARM_UP, _MOST_TRAJECTORIES = 100, 1200  # a chain: of lobes that it hardly leaves it would not have left by more
_MOST_BEFORE_ESTIMATES = 800  # a chain, where estimates come next, which labels that are noise are better served by
_FEW_FUNCTIONS = 3  # of which a search for modes costs little: iris and thyroid_type take 20 and 39 s with it, 22 and 74 without
# Of so few functions estimates take longer than sweeps from here on (wine, 152 x 13: 20.7 s and 8.4; 250 x 18: 221 and 26). Of
# fewer data they are quick, and serve labels that are noise, of which chains are slow.
_FEW_CLASS_DATA = 150
# Of each of four chains: for 400 effective three, six and ten classes took 250 to 350 sweeps, seven 500 and 650; those of six and
# seven, in a basis, are dearer than the sweep that is timed. Trajectories of six classes and ten hyperparameters took 650.
_SWEEPS_AN_EFFECTIVE_DRAW, _TRAJECTORIES_AN_EFFECTIVE_DRAW = 1.0, 1.6
_JUDGED_FROM = 0.25  # of sweeps: of labels that are noise, 200 x 3, 800 sweeps of four chains were worth 80
_MORE_DRAWS = 256  # an estimate
_DRAWS_OF_NOISE = 16  # an estimate: of 500 data relative variances are 0.03 to 0.11, those of 64 0.01, in 85 ms and 210
# Of 250 x 2 by 0.33: 4000 draws were worth 293 in 103 CPU seconds, and 800 of them are as good to begin at.
_MOST_NOISE = 0.25
_LEARNED = "some hundred estimates teach an emulator what chains of hyperparameters alone can move on."
_EVEN = "chains on an emulator, with estimates of data one after another, which hardly vary."


def of_classes(model: GPModel, wanted: int) -> list[Candidate]:
    """Of several classes, whose functions share a covariance."""
    if model.layout.size > _MOST_HYPERPARAMETERS:
        learned = [] if model.num_latents > _SOME_FUNCTIONS else _learned(model, wanted)
        moved = [_by_trajectories(model, wanted)]
        # Of 150 x 6 and 200 x 8, four classes, trajectories take 25 to 35 CPU seconds, emulators took 205, and 244 to no answer.
        return [*(moved + learned if model.num_latents > _FEW_FUNCTIONS else learned + moved), *together(model)]
    is_large = model.num_latents > _FEW_FUNCTIONS or len(model.train_x) > _FEW_CLASS_DATA
    sweeps = _in_turn if model.layout.size <= FEW else partial(_by_trajectories, most=_MOST_BEFORE_ESTIMATES)
    return [*([sweeps(model, wanted)] if is_large else []), *_through_estimates(model, wanted), *together(model)]


def _learned(model: GPModel, wanted: int) -> list[Candidate]:
    """Of more hyperparameters than weighted draws follow.

    Of 200 x 7, three classes, eight hyperparameters: 1040 draws in 64 CPU seconds were worth 547, where weighted draws were not
    done in 120; chains take as long. 256 draws an estimate take a third longer than 64, those in turn thrice as long.
    """
    quick = EmulatedHMC(approximation=ClassEP(), num_importance=_MORE_DRAWS, begin=AtModes(count=2), most_noise=NOISE_BEFORE_BETTER)
    first = emulated(model, quick, _LEARNED, wanted).with_limits(most_noise=NOISE_BEFORE_BETTER)
    better = emulated(model, replace(quick, evidence=SequentialCandidates(), most_noise=math.inf), _EVEN, wanted)
    return [*emulated_twice(first), better._replace(goes_on=True, given=noise_or_some_use)]


def _by_trajectories(model: GPModel, wanted: int, most: int = _MOST_TRAJECTORIES) -> Candidate:
    """Of more functions, whose EP takes long and often does not converge, so that estimates vary by their whole log.

    Of 183 x 9, six classes, ten hyperparameters, estimates' logs vary by 1 and take 0.2 seconds.
    """
    why = "theta and the latents of several classes by trajectories, in coordinates that are white at every theta: no estimates."
    seconds = partial(seconds_of_class_sweeps, model, NUM_CHAINS, _LONGER_WARM_UP + _TRAJECTORIES_AN_EFFECTIVE_DRAW * wanted)
    in_turn = _in_turn(model, wanted).with_limits(most=most)
    return in_turn._replace(why=why, warmup_steps=_LONGER_WARM_UP, seconds=seconds)


def of_noise(model: GPModel, wanted: int) -> list[Candidate]:
    """Of noise with a latent size. The joint mode, which Laplace's searches for theta rest on, is where noise goes to nothing."""
    few = "the mean function integrates out by hand, the noise's well, and the hyperparameters are few: weighted draws, no warm-up."
    more = "many draws an estimate make up for what a normal density of log deviations is too narrow for."
    first, second = from_the_prior(model, NoiseAlone, few, more, wanted, _DRAWS_OF_NOISE)
    first, second = first.with_limits(patience=LEARNING, most_noise=_MOST_NOISE), second.with_limits(patience=LEARNING)
    return [first, second._replace(goes_on=True, given=noise_or_some_use), *together(model)]


def _through_estimates(model: GPModel, wanted: int) -> list[Candidate]:
    """Laplace's of labels that are noise miss a part: at an outputscale of 100 all of them by 18 nats of 40 labels."""
    first = AMIS(approximation=ClassEP(), num_importance=MANY_DRAWS)
    if model.layout.size <= _FEW_HYPERPARAMETERS and model.num_latents > _FEW_FUNCTIONS:
        # A gradient of Laplace's evidence, of one K N x K N matrix, takes as long as ten estimates (six classes, 183 data: 0.94 s).
        # Estimates start from those of the first batch, which do not: so that is small.
        first = replace(first, begin=AtPrior(), batch_size=_FIRST_BATCH)
    better = replace(first, evidence=SequentialCandidates())
    after = weighted(model, better, HARDLY, wanted)._replace(goes_on=True)
    return [weighted(model, first, INTEGRATES_OUT, wanted).with_limits(most_noise=NOISE_BEFORE_BETTER), after]


def _in_turn(model: GPModel, wanted: int) -> Candidate:
    """Of many classes, whose latents' density is so far from normal that estimates of few draws vary too much.

    Of 183 labels of six classes, at an outputscale of 13, estimates of 64 draws have a variance of 0.6; a sweep takes half as long.
    """
    why = "theta and the latents of many classes in turn, in coordinates in which they are nearly independent: no estimates."

    seconds = partial(seconds_of_class_sweeps, model, NUM_CHAINS, SHORT_WARM_UP + _SWEEPS_AN_EFFECTIVE_DRAW * wanted)
    most = _MOST_BEFORE_ESTIMATES if model.num_latents <= _FEW_FUNCTIONS else 1600
    limits = Limits(50, most, math.inf, chains_judged_from=_JUDGED_FROM)
    return Candidate(ClassGibbs(), why, NUM_CHAINS, SHORT_WARM_UP, limits, seconds)
