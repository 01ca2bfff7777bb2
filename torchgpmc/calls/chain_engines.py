"""Engines of chains of hyperparameters and latents together, and what chains may spend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchgpmc.adapter.closed_form import BoundClosedForm
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import Laplace
from torchgpmc.calls.candidate import Candidate, Limits, anything, no_start, some_use
from torchgpmc.calls.timing import seconds_of_chains, seconds_of_evaluations
from torchgpmc.methods import HMC, NUTS
from torchgpmc.models import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.rough import with_rough_gradients
from torchgpmc.models.variances_density import VariancesLogDensity, rough_variances
from torchgpmc.numerics.random import make_generator
from torchgpmc.runs.chain_targets import shared
from torchgpmc.runs.noise_update import draws_variances
from torchgpmc.runs.run import MethodOptions
from torchgpmc.types import LogDensity
from torchgpmc.variational import Start, initialize

# Of which R-hat and effective sizes are content at about the same time: each halves to some fifty effective draws.
NUM_CHAINS = 4
_FEW_DATA, _MORE_CHAINS = 100, 16  # of which a gradient takes hardly longer than of four
_GRADIENTS_A_TREE, _USUAL_TREES = 15.0, 150  # of trees, and a chain
_TREE_WARM_UP = 200
SHORT_WARM_UP = 80  # of chains that begin near where they are to be, with little to tune
CHAINS_MAY_TAKE_LONG = 1.3e7  # operations a gradient, of which chains take fifteen times as many
# What chains may cost, in seconds of two idle cores of 2020s make; counted in evaluations, so that seeds reproduce.
_BUDGET = 100.0
_SECONDS_A_BATCH, _OPERATIONS_A_SECOND = 3e-3, 2e9
# Given inducing values of one function, N = 1000, M = 100, and of three, N = 2000, M = 30, by chains that ran beside other work.
_SPARSE_OPERATIONS_A_SECOND, _SEVERAL_OPERATIONS_A_SECOND = 1e10, 4e9
_EVIDENCE_OPERATIONS_A_SECOND = 1.2e10  # of the exact evidence's gradient, where the kernel's is written out
_ROUGH_OPERATIONS_A_SECOND = 1.6e10  # of that gradient in single precision, and what a trajectory takes beside it
_GIVEN_OPERATIONS_A_SECOND = 9e9  # the same of theta alone, by steps that are few beside what variances take
_BY_AUTOGRAD = 1 / 3  # of either speed
_WHERE_NOTHING_FOLLOWS = 2.0  # times the usual, of chains
# The same of theta alone: what came to be trusted had spent some three fifths of twice the usual (500 x 3, 500 x 30) or two thirds
# (500 x 7, next to no noise) at most, and 500 x 10, a lengthscale with two lobes, was not after all of it, 200 CPU seconds.
_MORE_THAN_USUAL = 1.5
# Of variances, too, trees of fifteen steps, from draws of the prior on, took 13,000 to 18,000 gradients to warm up (200 x 9,
# 400 x 10 and 500 x 7); from a mode they take 3000 to 6000, and trajectories of these lengths 2000 to 3000.
_WITH_VARIANCES = HMC(noise_variances=True, from_mode=True, num_steps=40, least_steps=3, trajectory_length=3.1)
# Of more data two to five steps of theta alone, given variances that are drawn anew, take half the time and had 1.1 to three times
# the effective draws a second (twelve models of 300 to 500 rows); of four of a hundred and less two had fewer.
_GIVEN_VARIANCES = HMC(
    noise_variances=True,
    given_variances=True,
    from_mode=True,
    num_steps=20,
    least_steps=2,
    trajectory_length=2.0,
    target_accept_prob=0.65,
    rough_trajectories=True,
)
# Of 40 x 12, accepted at 0.8, 14 of 5600 transitions diverged and 7 evaluations failed: a thousand draws' worth, never trusted.
_OF_FEW_DATA = 0.9
_GRADIENTS_WITH_VARIANCES = 4000.0  # a chain: of 200 x 9 to 500 x 7 1900 to 4400
_GRADIENTS_GIVEN_VARIANCES = 2500.0  # that take as long as all else does
# Of 1980 data, seven classes, M = 100, what chains may cost was spent in warm-up, after a fit of minutes: no draws. A call has said
# by then how long it will take.
_INTEGRALS_TAKE_LONGER = 10.0
# Of those, 702 coordinates, trees grew to 62 steps: 400 draws worth 103 in 866 CPU seconds. Trajectories of a length that is known
# without a fit, by few points, had 1200 worth 360 in 268: long ones draw what latents hold, short ones what is quadratic in them.
# Lengths to three quarters of half a period, and of three steps at least, are on either side of a quarter period, where what is
# linear in white coordinates is new. From four steps to 2.8 steps of 0.5 had theta change sides at each draw and keep its distance.
_TRAJECTORY_LENGTH = 2.3
_TRAJECTORIES = HMC(num_steps=20, least_steps=3, trajectory_length=_TRAJECTORY_LENGTH)
# Given inducing values trees have fifteen steps where these have four or five, for as much. Of 5000 data, M = 100, NUTS had spent
# its budget in warm-up (Student t noise, Beta, two classes of 3000).
_DEAR_TAKE_LONGER, _DEAR_OF_SEVERAL = 2.5, 6.0  # a gradient of two functions took a third of what is counted
# Coordinates are white already, and of trajectories that take an exact test each, half a second, 25 are worth a look.
_TRAJECTORY_WARM_UP, _TRAJECTORIES_A_LOOK = 60, 25
# Of three classes by robust max, 1000 x 3, M = 40, steps were 0.085 and 240 draws worth 8: nothing was said within 12 CPU minutes.
_TRAJECTORIES_JUDGED_FROM = 0.25
# Where no other engine follows: of 500 x 4 with Laplace noise, R-hat was 1.07 and the size 32 after 50 draws a chain and a quarter
# of the budget. They had 408 when they ended.
_LAST_JUDGED_FROM = 0.5
# Steps of 0.42 of 92 coordinates, 0.23 of 302, 0.15 of 702 and 0.13 of 1002.
_STEP_TIMES_ROOT_OF_LATENTS = 4.0
_USUAL_TRAJECTORIES = 300
_A_TEST_IN_ROUGH_GRADIENTS, _FIT_IN_CHAINS = 4.0, 1 / 3  # how long they take


def budget_of_chains(model: GPModel, num_chains: int = NUM_CHAINS, operations_a_second: float = _OPERATIONS_A_SECOND) -> float:
    """Evaluations that take as long as chains may."""
    return _BUDGET / (_SECONDS_A_BATCH / num_chains + model.operations / operations_a_second)


def together(model: GPModel, share: float = 1.0) -> list[Candidate]:
    """Of models whose latents cannot be integrated out one site a datum; of a ``SparseGP`` chains may cost a share of the usual."""
    one_latent = model.factorises and model.num_latents == 1
    why = "hyperparameters and latents are sampled together, as the latents cannot be integrated out one site a datum."
    white = NUTS(whitening=Laplace(), max_tree_depth=8) if one_latent else NUTS(max_tree_depth=8, target_accept_prob=0.9)
    found = [chains(model, white, why, _TREE_WARM_UP)]
    if model.factorises:
        # Of one function white coordinates are others than those around the fit; of several chains only begin further off.
        found = [around_fit(model), found[0]._replace(given=anything if one_latent else some_use)]
    if model.has_latents_at_data:
        return found
    speed = _SPARSE_OPERATIONS_A_SECOND if one_latent else _SEVERAL_OPERATIONS_A_SECOND
    usual = budget_of_chains(model, operations_a_second=speed)
    found = [engine.with_limits(budget=share * usual) for engine in found]
    if not model.factorises:
        return found
    # Trees that would not end their warm-up are not begun.
    may_end = usual > _GRADIENTS_A_TREE * NUM_CHAINS * _TREE_WARM_UP
    if _takes_long_integrals(model):
        found[0] = found[0].with_limits(budget=_INTEGRALS_TAKE_LONGER * usual)
    elif not may_end:
        found[0] = found[0].with_limits(budget=(_DEAR_TAKE_LONGER if one_latent else _DEAR_OF_SEVERAL) * usual)
    return found if may_end else found[:1]


def _takes_long_integrals(model: GPModel) -> bool:
    """Whether a gradient of [theta, v] is expectations that take longer than all algebra does."""
    return model.takes_expectations and model.factorises and as_likelihood(model.likelihood).expectation_operations > 0


def around_fit(model: GPModel) -> Candidate:
    """Of likelihoods that are products over data."""
    why = "chains begin around a variational fit, in coordinates white under it."
    fit = partial(initialize, model, optimize_inducing_points=False, rough_expectations=True, progress=False)
    if model.has_latents_at_data:
        return chains(model, NUTS(max_tree_depth=8, target_accept_prob=0.9), why, 100, start=fit)
    method, followed, usual = _TRAJECTORIES, JointLogDensity(model), _gradients_of_trajectories(model)
    if _takes_long_integrals(model):
        method, followed = replace(method, rough_trajectories=True), JointLogDensity(with_rough_gradients(model))
        usual = _gradients_of_trajectories(model, _A_TEST_IN_ROUGH_GRADIENTS)
    found = chains(model, method, why, _TRAJECTORY_WARM_UP, start=fit, usual_gradients=usual, followed=followed)
    return found.with_limits(every=_TRAJECTORIES_A_LOOK, chains_judged_from=_TRAJECTORIES_JUDGED_FROM)


def _gradients_of_trajectories(model: GPModel, a_test: float = 0.0) -> float:
    """That usually take as long as trajectories, their exact tests, where gradients are not, and the fit do."""
    longest = min(_TRAJECTORIES.num_steps, _TRAJECTORY_LENGTH * model.latent_size**0.5 / _STEP_TIMES_ROOT_OF_LATENTS)
    a_transition = (_TRAJECTORIES.least_steps + max(_TRAJECTORIES.least_steps, longest)) / 2 + a_test
    return (1 + _FIT_IN_CHAINS) * (_TRAJECTORY_WARM_UP + _USUAL_TRAJECTORIES) * a_transition


def given_variances(model: GPModel) -> Candidate:
    """Of noise that is normal given a variance for each datum."""
    why = "given a noise variance for each datum, sampled in the latents' place, these integrate out exactly."
    is_small = len(model.train_x) <= _FEW_DATA
    num_chains = _MORE_CHAINS if is_small else NUM_CHAINS
    density = VariancesLogDensity(model)
    followed: LogDensity = density if is_small else rough_variances(density)
    method, usual, share = _WITH_VARIANCES, _GRADIENTS_WITH_VARIANCES, _WHERE_NOTHING_FOLLOWS
    if is_small:
        method, speed = replace(method, target_accept_prob=_OF_FEW_DATA), _EVIDENCE_OPERATIONS_A_SECOND
    elif draws_variances(model) and model.layout.size:
        method, usual = _GIVEN_VARIANCES, _GRADIENTS_GIVEN_VARIANCES
        speed, share = _GIVEN_OPERATIONS_A_SECOND, _MORE_THAN_USUAL
    else:
        method, speed = replace(method, rough_trajectories=True), _ROUGH_OPERATIONS_A_SECOND
    found = chains(model, method, why, _TRAJECTORY_WARM_UP, num_chains, usual_gradients=usual, followed=followed)
    is_written_out = isinstance(model.bindings.among_latents, BoundClosedForm)
    budget = share * budget_of_chains(model, num_chains, speed * (1.0 if is_written_out else _BY_AUTOGRAD))
    return found.with_limits(every=_TRAJECTORIES_A_LOOK, chains_judged_from=_LAST_JUDGED_FROM, budget=budget)


def chains(
    model: GPModel,
    method: MethodOptions,
    why: str,
    warmup_steps: int,
    num_chains: int = NUM_CHAINS,
    start: Callable[..., Start | None] = no_start,
    usual_gradients: float | None = None,
    followed: LogDensity | None = None,
) -> Candidate:
    """Of a method on [theta, v], or on v alone, which usually takes so many gradients a chain, or fifteen for each of 150 draws.

    Its trajectories take the gradients of ``followed``, if that is another density: one exact test each adds little to their time.
    """
    density = shared(JointLogDensity(model) if followed is None else followed, model)

    def rehearse() -> Callable[[], Any]:
        theta = model.layout.starting_points(num_chains, make_generator(0, model.train_x.device))
        position = torch.cat([theta, theta.new_zeros(num_chains, model.latent_size)], -1)
        return partial(density.value_and_grad, position)

    limits = Limits(50, 4000, budget_of_chains(model, num_chains))
    seconds = partial(seconds_of_evaluations, rehearse, usual_gradients or _GRADIENTS_A_TREE * (warmup_steps + _USUAL_TREES))
    found = Candidate(method, why, num_chains, warmup_steps, limits, seconds, start)
    if not (isinstance(method, NUTS) and (method.whitening is not None or start is not no_start)):
        return found
    # Six models' chains, watched, took twice what gradients at draws of the prior say, fifteen a transition.
    roughly = partial(seconds_of_evaluations, rehearse, 30.0 * (warmup_steps + 200))
    watched = partial(seconds_of_chains, model, method, num_chains, warmup_steps, start)
    return found._replace(seconds=watched, roughly=roughly)
