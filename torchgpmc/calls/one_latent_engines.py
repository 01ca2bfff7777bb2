"""Engines of models with one latent a datum: labels, levels, counts, and noise with heavy tails."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import EP, Laplace
from torchgpmc.approximations.curved import is_curved
from torchgpmc.approximations.single_precision import are_labels
from torchgpmc.calls.candidate import (
    NOISE_BEFORE_BETTER,
    Candidate,
    noise_or_some_use,
    noisy,
    not_noisy_by_far,
    not_taught_in_vain,
)
from torchgpmc.calls.chain_engines import CHAINS_MAY_TAKE_LONG, around_fit, chains, given_variances
from torchgpmc.calls.emulated_engines import (
    NO_PROPOSAL,
    NUM_CHAINS,
    emulated,
    emulated_twice,
    taught_by_ep,
    with_options,
)
from torchgpmc.calls.weighted_engines import (
    AGAIN,
    HARDLY,
    INTEGRATES_OUT,
    MANY_DRAWS,
    MANY_HYPERPARAMETERS,
    MOST_HYPERPARAMETERS,
    SHORT_TAILS,
    weighted,
)
from torchgpmc.evidence import Evidence, Orthant, SequentialImportance, SmoothProbit, is_probit
from torchgpmc.methods import AMIS, NUTS, EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.models.variances_density import mixes_variances
from torchgpmc.runs.beginnings import AtModes, AtPrior
from torchgpmc.runs.screening import Screen

# Of probits of some data more draws are a third of the cost, and leave half the noise where labels are all but noise. Of fewer data
# estimates hardly vary: of 30 to 100 labels, 18 models, runs were worth the same with 64.
_MORE_DRAWS, _SOME_LABELS, _FEW_LABELS = 256, 100, 300
_DRAWS_FOR_EMULATORS = 128  # draws an estimate
# Of two tables of 500 labels 256 points took 50 and 77 ms an estimate, 128 took 36 and 68, 64 took 35 and 65; relative variances
# are 0.003 and 0.009, 0.005 and 0.017, 0.010 and 0.032.
_ORTHANT_POINTS = 128  # an estimate of weighted draws
_FEW_FOR_CHAINS = 100  # data, of which chains take seconds
# Of estimates under Student-t noise: of 150 to 300 data half of them have less than 0.013. Of 300 x 8 they had 0.2 by another data
# set, and what an emulator may learn from was for nothing.
_NOISE_BEFORE_CHAINS = 0.05
# Of probits: among estimates of 64 draws with more than the first, the median of those that an emulator learns from, one in some
# hundred is one to five nats too high and weighs as dozens. Of glass and wbc it was 0.008 to 0.02, the mean by weight of all 0.05
# to 0.09, and a half of the runs were worth too little; of australian, a tenth of its labels wrong or not, 0.004 to 0.008 and 0.02
# to 0.03, and either served; of pima, ida_breast_cancer and 200 x 10 simulated ones 0.0002 to 0.003, and 0.001 to 0.015, and
# orthants take twice as long as those. With 0.8 orthants' draws are worth as much more as they took longer to learn for.
_NOISE_BEFORE_OUTLIERS, _NOISE_OF_OUTLIERS, _ENOUGH_OF_EVEN = 0.0035, 0.016, 0.8
# Of which a search for the modes of f takes longer than chains of noise variances: of eight models of 400 and 500 data estimates
# took 36 to 144 CPU seconds and served three, chains 47 to 159 and served all; of 320 x 3 either took as long.
_MANY_DATA_FOR_MODES = 300
_LEARNED = "some hundred estimates teach an emulator what chains can move on, and their weights are even."
# Of 500 data they cost a third more than 64, and half of what those cost that draw one datum after another.
_MORE_OF_THEM = "estimates vary, and of four times as many draws by less."
_NOISE_OF_MORE = 0.25  # what ends them: by 0.1 and an unlucky draw of a first batch 500 counts of 17 columns took 203 CPU s for 108
_EVEN = "chains on an emulator, with estimates of data one after another, which hardly vary."
# Where an estimate costs as little as a step on the emulator. Elsewhere their R-hats take twice as many draws to be below 1.01.
_SHORT_CHAINS = 16
_MORE_RUNS = 3  # of 4000 draws, worth 50 to 300 each where proposals reach the posterior's lobes by turns
# Where modes are looked for: Laplace's evidence may be 100 nats too high where f is rough (450 labels, 19 of them ones: draws were
# all from there).
_BY_EP = AtModes(approximation=EP(tolerance=0.02))
_BY_TWO_MODES = replace(_BY_EP, count=2)


def of_one_latent(model: GPModel, wanted: int) -> list[Candidate]:
    """Of models whose latents are the values at the data, one a datum."""
    size = model.layout.size
    if not as_likelihood(model.likelihood).is_log_concave:
        return _of_several_modes(model, wanted)
    if mixes_variances(model):
        return _of_laplace_noise(model, wanted)
    if size <= MANY_HYPERPARAMETERS:
        found = _of_few(model, wanted)
    elif size <= MOST_HYPERPARAMETERS:
        found = _of_many(model, wanted)
    else:
        found = _of_most(model, wanted)
        if model.operations > CHAINS_MAY_TAKE_LONG:
            return found  # in white coordinates 34 of 300 labels spend all in warm-up
    return [*found, _in_white_coordinates(model) if is_curved(model) else around_fit(model)]


def _of_several_modes(model: GPModel, wanted: int) -> list[Candidate]:
    """Of likelihoods that are not log-concave, some of which have no curvature."""
    if not is_curved(model):
        return [around_fit(model)]
    if mixes_variances(model):
        return _of_mixed_variances(model, wanted)
    if model.layout.size > MANY_HYPERPARAMETERS:
        return [_in_white_coordinates(model)]
    if as_likelihood(model.likelihood).levels_off:
        return [*_of_few(model, wanted), around_fit(model)]
    # Where p(f | y, theta) may have several modes EP hardly settles, and takes each of its moments over all of them. Modes are
    # what estimates spend their time on: 64 draws cost a fifth more than 16 (300 x 5 under Student t noise).
    first = weighted(model, AMIS(num_importance=MANY_DRAWS), INTEGRATES_OUT, wanted)
    # Laplace's sites are of one mode of p(f | y, theta): in coordinates white under those, chains of 60 data with Cauchy noise
    # were worth 123 draws when their budget ended and, by another seed, 404 in 56 seconds; around a fit 424 in 35.
    return [first, around_fit(model)]


def _of_mixed_variances(model: GPModel, wanted: int) -> list[Candidate]:
    """Of Student-t noise, whose modes are quickly found."""
    chains_alone = given_variances(model)
    if model.layout.size <= MANY_HYPERPARAMETERS:
        # Of 200 x 3, six hyperparameters, 2000 draws are worth 136 by estimates of 64 and, for half the time again, 652 by 256.
        first = weighted(model, AMIS(num_importance=_MORE_DRAWS), INTEGRATES_OUT, wanted)
        # Of 200 x 7, 880 draws were worth less than 88 and 2000 are worth 600, in 26 CPU seconds; chains take 60.
        return [chains_alone, first] if len(model.train_x) > _MANY_DATA_FOR_MODES else [first, chains_alone]
    if len(model.train_x) > _MANY_DATA_FOR_MODES:
        # Estimates of four such models of 400 and 500 data varied by 0.11 to 0.26: 14 to 100 CPU seconds for nothing.
        return [chains_alone]
    quick = EmulatedHMC(
        approximation=Laplace(), num_importance=_DRAWS_FOR_EMULATORS, begin=AtModes(count=2), most_noise=_NOISE_BEFORE_CHAINS
    )
    learned = emulated(model, quick, _LEARNED, wanted, cheap=True)
    if len(model.train_x) <= _FEW_FOR_CHAINS:
        return [chains_alone, *emulated_twice(learned)]
    return [learned.with_limits(most_noise=NOISE_BEFORE_BETTER), chains_alone]


def _of_laplace_noise(model: GPModel, wanted: int) -> list[Candidate]:
    """Of noise of mixed variances that is log-concave."""
    chains_alone = given_variances(model)
    if model.layout.size <= MANY_HYPERPARAMETERS:
        *quick, better = _of_few(model, wanted)
        # Of 200 to 500 data, four to eight columns, importance estimates varied by 0.6 to 0.95 and those that draw f in turn by
        # 0.46 to 0.75, for 10 to 30 CPU seconds of little use; of 100 x 5 by 0.33 and 0.14.
        return [*quick, better._replace(given=not_noisy_by_far), chains_alone]
    learned, better = _learned(model, _LEARNED, wanted)
    if len(model.train_x) <= _FEW_FOR_CHAINS:
        return [chains_alone, learned, better]  # of 40 x 12 and 60 x 9 they took 5 and 7 CPU seconds, emulators 17 and 10 to 19
    # Of 200 x 12 to 500 x 8 estimates varied by 0.6 to 0.75, in turn by 0.28 to 0.88: of little use in 27 to 43 CPU seconds.
    return [learned, better._replace(goes_on=True, given=not_noisy_by_far), chains_alone]


def _of_few(model: GPModel, wanted: int) -> list[Candidate]:
    """Of few hyperparameters, of log-concave data."""
    # Laplace's estimates may all miss what a short lengthscale and a large outputscale make of labels, and look even; of counts of
    # zero, too: p(y | f) is flat on one side.
    first = AMIS(approximation=EP(), num_importance=MANY_DRAWS, begin=_BY_EP)
    more, better = replace(first, num_importance=_MORE_DRAWS), replace(first, evidence=_in_turn(model))
    if is_probit(model):
        draws = _MORE_DRAWS if _SOME_LABELS < len(model.train_x) <= _FEW_LABELS else MANY_DRAWS
        first, more = (AMIS(begin=_BY_EP, evidence=SmoothProbit(EP(), number)) for number in (draws, _MORE_DRAWS))
        better = replace(first, evidence=Orthant(_ORTHANT_POINTS))
    turns = [weighted(model, first, INTEGRATES_OUT, wanted).with_limits(most_noise=NOISE_BEFORE_BETTER)]
    if len(model.train_x) > _FEW_LABELS:
        again = weighted(model, more, _MORE_OF_THEM, wanted).with_limits(most_noise=_NOISE_OF_MORE)
        turns.append(again._replace(goes_on=True, given=noisy))
    return [*turns, weighted(model, better, HARDLY, wanted)._replace(goes_on=True)]


def _of_many(model: GPModel, wanted: int) -> list[Candidate]:
    """Of more hyperparameters than a few, of log-concave data. What these leave open has lobes apart from the modes."""
    num_chains = _SHORT_CHAINS if len(model.train_x) <= _FEW_LABELS else NUM_CHAINS
    learned, better = _learned(model, _LEARNED, wanted, num_chains)
    # Where labels say little an emulator follows nothing, however much it is taught (by 2900 thetas, draws of k-hat 0.8 and more):
    # weighted draws, around the modes if most of the mass is there.
    learned = learned.with_limits(learning=num_chains * (learned.warmup_steps or 0))
    extremes = AtPrior(arms=True)
    # Of probits one such draw in fifteen counts. Other estimates vary more; one far too high weighs more where few are made.
    screen = Screen() if is_probit(model) else None
    from_prior = AMIS(**_estimates(model), degrees_of_freedom=SHORT_TAILS, begin=extremes, screen=screen)
    # Without tails, 4000 draws of 500 x 14 (a tenth of the labels wrong) are worth 23: a far outputscale has a long arm.
    modes = replace(from_prior, begin=replace(_BY_EP, search_tails=True, leave_for=extremes))
    apart = "what data leave open has lobes apart from the modes: weighted draws that begin with the prior."
    # Of 270 x 13 logit labels runs from the prior were worth one to three draws each: what estimates miss, more runs do.
    runs = (apart, *[AGAIN] * _MORE_RUNS) if is_probit(model) else (apart,)
    return [
        *_by_emulators(model, learned, better),
        weighted(model, modes, INTEGRATES_OUT, wanted),
        *(weighted(model, from_prior, why, wanted) for why in runs),
    ]


def _by_emulators(model: GPModel, learned: Candidate, better: Candidate) -> list[Candidate]:
    """Chains on an emulator, by quick estimates and by ``better`` ones."""
    if not is_probit(model):
        return [*emulated_twice(learned), better._replace(goes_on=True, given=noise_or_some_use)]
    quiet = with_options(learned, most_noise=_NOISE_BEFORE_OUTLIERS).with_limits(most_noise=_NOISE_OF_OUTLIERS)
    even, again = emulated_twice(with_options(better, enough=_ENOUGH_OF_EVEN))
    return [*emulated_twice(quiet), even._replace(goes_on=True, given=not_taught_in_vain), again]


def _of_most(model: GPModel, wanted: int) -> list[Candidate]:
    """Of so many hyperparameters that no proposal follows, of log-concave data."""
    quick, better = _learned(model, NO_PROPOSAL, wanted)
    if are_labels(model):
        # Of four tables of 300 and 500 labels, 19 to 61 hyperparameters, estimates of 64 draws varied too much each time.
        first, again = emulated_twice(better._replace(why=NO_PROPOSAL))
        return [taught_by_ep(first, model.layout.size), again]
    # Of 500 x 11 levels, 17 hyperparameters, they vary by 0.003: 62 CPU seconds for 185.
    again, *others = emulated_twice(better)
    return [*emulated_twice(quick), again._replace(goes_on=True, given=noise_or_some_use), *others]


def _learned(model: GPModel, why: str, wanted: int, num_chains: int = NUM_CHAINS) -> tuple[Candidate, Candidate]:
    """Chains on an emulator by estimates of some draws, and, should these vary too much, by estimates that hardly do."""
    quick = EmulatedHMC(**_estimates(model), begin=_BY_TWO_MODES, most_noise=NOISE_BEFORE_BETTER)
    learned = emulated(model, quick, why, wanted, num_chains).with_limits(most_noise=NOISE_BEFORE_BETTER)
    return learned, emulated(model, replace(quick, evidence=_in_turn(model), most_noise=math.inf), _EVEN, wanted)


def _estimates(model: GPModel) -> dict[str, Any]:
    """Options of methods by which an estimate has 64 draws, white noise out where f is under probits."""
    return {"evidence": SmoothProbit(EP(), MANY_DRAWS)} if is_probit(model) else {"num_importance": MANY_DRAWS}


def _in_turn(model: GPModel) -> Evidence:
    """Estimates that draw f one datum after another, which hardly vary where f is rough."""
    return Orthant(MANY_DRAWS) if is_probit(model) else SequentialImportance(MANY_DRAWS)


def _in_white_coordinates(model: GPModel) -> Candidate:
    why = f"chains of {model.layout.size} hyperparameters and the latents together, in white coordinates, need no evidence."
    return chains(model, NUTS(whitening=Laplace(), max_tree_depth=8), why, 150)
