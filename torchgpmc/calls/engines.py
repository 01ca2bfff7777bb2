"""Which engines this project's own measurements favour for a model, in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import EP, ApproximateMarginal, ClassEP, Conjugate, Laplace
from torchgpmc.approximations.class_ep import sees_differences
from torchgpmc.approximations.curved import is_curved
from torchgpmc.approximations.gaussian_form import has_inducing_normal
from torchgpmc.approximations.held_sites import can_hold_sites
from torchgpmc.calls.candidate import Candidate, Limits, anything, no_start, some_use, too_much_noise
from torchgpmc.calls.timing import seconds_of_chains, seconds_of_evaluations
from torchgpmc.density import SharedDensity
from torchgpmc.evidence import (
    Evidence,
    InducingMixture,
    NoiseAlone,
    Orthant,
    SmoothProbit,
    is_heteroskedastic,
    is_probit,
    serves_inducing_mixture,
)
from torchgpmc.likelihoods import Softmax
from torchgpmc.methods import AMIS, HMC, NUTS, AuxiliaryGradient, ClassGibbs, EllipticalSlice, Gibbs, Method, Slice
from torchgpmc.models import GPModel, checked_model
from torchgpmc.models.class_coordinates import class_map
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.random import make_generator
from torchgpmc.runs.beginnings import AtModes, AtPrior
from torchgpmc.runs.chain_targets import estimator_for, suited_approximation
from torchgpmc.runs.parameterizations import Interwoven
from torchgpmc.runs.run import MethodOptions
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.variational import Start, initialize

WANTED = 400  # effective draws (Vehtari et al. 2021, section 4)
# Importance weights collapse as hyperparameters multiply; `docs/results/theta_engines.md` has the table behind this limit.
# Laplace's estimates make it worse: with EP's, the nearest normal density's, or exact evidence, weights bear more of them.
MANY_HYPERPARAMETERS = 8
MOST_HYPERPARAMETERS = 16
MOST_WITH_EXACT_EVIDENCE = 40
_USUAL_DRAWS_AN_EFFECTIVE_ONE = 3
_FEW_HYPERPARAMETERS, _FIRST_BATCH = 3, 100  # that draws from the prior find as well as a search for modes
_FEW_FUNCTIONS = 3  # of which a search for modes costs little: iris and thyroid_type take 20 and 39 s with it, 22 and 74 without
# Of so few functions estimates take longer than sweeps from here on (wine, 152 x 13: 20.7 s and 8.4; 250 x 18: 221 and 26). Of
# fewer data they are quick, and serve labels that are noise, of which chains are slow.
_FEW_CLASS_DATA = 150
_DRAWS_AN_EFFECTIVE_ONE = 10  # weights worth less than a tenth of their number are not to be trusted
# An estimate's; those of inducing values around their nearest normal density vary by some hundredths, and cost little else.
_FEW_DRAWS = 4
# Where those vary too much, at a hundred inducing points and more.
_SOME_DRAWS = 32
# Of an estimate by EP, whose sweeps cost as much as some hundreds of them.
_MANY_DRAWS = 64
# Of probits of so many data, of which more draws are a third of the cost and leave half the noise where labels are all but noise.
_MORE_DRAWS, _FEW_LABELS = 256, 300
# Where 64 do not do; of 150 labels that are noise, 256 did for two seeds of four.
_MOST_DRAWS = 1024
# Data whose expectations 64 draws an estimate take by quadrature (Student t, 1000 x 1: no answer in 116 seconds).
_FEW_INTEGRALS = 400
_MOST_INDUCING = 200  # numbers in v, of which estimates factorise a matrix
# Of proposals for more hyperparameters than a few: in a dozen dimensions most draws of a Student t with five lie too far out.
_SHORT_TAILS = 30
# Where estimates are nearly exact and proposals begin with the prior, weights collapse at first: those of 70 x 4, noise by column,
# are worth 2 of 400 draws, 6 of 880, 38 of 1456, 226 of 2147, 542 of 2976.
_LEARNING = 0.5
_MORE = "where f is nearly noise, many draws an estimate make up for what a normal density is too narrow for."
_HARDLY = "orthant integrals hardly vary where importance samples of the latents do: weighted draws, no warm-up."
_MORE_RUNS = 3  # of 4000 draws, worth 50 to 300 each where proposals reach the posterior's lobes by turns
# What chains may cost, in seconds of two idle cores of 2020s make; counted in evaluations, so that seeds reproduce.
_BUDGET = 100.0
_AFTER_WEIGHTS = 0.5  # of that, where weighted draws have spent some: chains that go well need a fifth
_SECONDS_A_BATCH, _OPERATIONS_A_SECOND = 3e-3, 2e9
# Of one function of inducing values: N = 1000, M = 100, by chains that ran beside other work.
_SPARSE_OPERATIONS_A_SECOND = 1e10
_SEVERAL_OPERATIONS_A_SECOND = 4e9  # of several: N = 2000, M = 30, three classes
# The exact evidence's gradient is products and one factorisation of large matrices; what is beside them costs as much as elsewhere.
_EXACT_OPERATIONS_A_SECOND = 2e10
_OPERATIONS_OF_SITES_A_SECOND = 6e9  # EP's gradients from held sites in single precision, with the weights of draws
# Where modes are looked for: Laplace's evidence may be 100 nats too high where f is rough (450 labels, 19 of them ones: draws were
# all from there).
_BY_EP = AtModes(approximation=EP(tolerance=0.02))
# Leapfrog steps on the scale of the priors, where a step near 0.27 is accepted four times in five.
_LEAST_STEPS, _MOST_STEPS, _SHORT_WARM_UP = 4, 7, 80
# Chains of which R-hat and effective sizes are content at about the same time: each halves to some fifty effective draws.
_CHAINS = 4
_MANY_CHAINS = 16  # of sweeps by slices, whose draws hang together: of ten labels 400 of each are worth 490
_BY_SLICES = Gibbs(hyper=Slice(), latent=EllipticalSlice(), parameterization=Interwoven(), latent_steps=10)
CHAINS_MAY_TAKE_LONG = 1.3e7  # a gradient, of which chains take fifteen times as many
_TIMED_OPERATIONS, _MOST_TIMED_THETAS = 3e8, 100  # of a batch of estimates; small ones are all overhead


def recommend(model: GPModel) -> Method:
    """The method to begin with; print ``explain(model)`` for the reason.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 10)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())
        >>> type(tg.recommend(model)).__name__
        'AMIS'
    """
    return next(engine.method for engine in candidates(model) if not engine.only_begins)


def candidates(model: GPModel, wanted: int = WANTED) -> list[Candidate]:
    """The engines to try for ``wanted`` effective draws, best first, by what the model can do."""
    size = checked_model(model).layout.size
    if size == 0:
        why = "every hyperparameter is fixed, and one factorisation serves all draws of the latents."
        return [_chains(model, AuxiliaryGradient() if model.is_smooth else EllipticalSlice(), why, 200)]
    if not model.is_smooth:
        why = "the likelihood is a step in f, which has no slopes to follow; a SparseGP would be sampled much faster."
        return [_chains(model, _BY_SLICES, why, 150, _MANY_CHAINS)]
    if model.is_conjugate or model.collapses:
        return _through_exact_evidence(model, wanted)
    one_latent = model.factorises and model.num_latents == 1
    few = "the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up."
    if not (model.has_latents_at_data and one_latent):
        return _of_other_latents(model, one_latent, few, wanted)
    if not (as_likelihood(model.likelihood).is_log_concave or is_curved(model)):
        return _together(model, one_latent)[:1]
    found = _through_estimates(model, few, wanted)
    if as_likelihood(model.likelihood).is_log_concave and size > MOST_HYPERPARAMETERS and can_hold_sites(model):
        found = [_on_normal_scale(model)]
        if model.operations > CHAINS_MAY_TAKE_LONG:
            return found  # in white coordinates 34 of 300 labels spend all in warm-up
    if found and not as_likelihood(model.likelihood).is_log_concave:
        # Laplace's sites are of one mode of p(f | y, theta): in coordinates white under those, chains of 60 data with Cauchy noise
        # were worth 123 draws when their budget ended and, by another seed, 404 in 56 seconds; around a fit 424 in 35.
        return [*found, _together(model, one_latent)[0]]
    white = f"chains of {size} hyperparameters and the latents together, in white coordinates, need no evidence."
    found.append(_chains(model, NUTS(whitening=Laplace(), max_tree_depth=8), white, 150))
    return found


def _through_exact_evidence(model: GPModel, wanted: int) -> list[Candidate]:
    """Of regressions, and of inducing values with Gaussian noise."""
    size = model.layout.size
    exact = "the evidence is exact and the hyperparameters are few: weighted draws, no warm-up."
    if size <= MANY_HYPERPARAMETERS:
        none = "should weights not do, chains of the hyperparameters need none."
        careful = NUTS(max_tree_depth=8, target_accept_prob=0.9)
        return [_weighted(model, AMIS(), exact, wanted), _of_exact_evidence(model, careful, none, 150)]
    # From nothing, warm-up of 32 hyperparameters took all that chains may; from weighted draws worth ten it is short.
    many = f"{size} hyperparameters may be more than importance weights survive, but chains can begin at such draws."
    chains = _of_exact_evidence(model, NUTS(max_tree_depth=8), many, 60)._replace(goes_on=True)
    if size > MOST_WITH_EXACT_EVIDENCE:
        few = "weighted draws for chains to begin at, seldom even enough for more."
        first = _weighted(model, AMIS(degrees_of_freedom=_SHORT_TAILS), few, wanted).with_limits(patience=_LEARNING)
        return [first._replace(only_begins=True), chains]
    # Weights of more look even where they miss an arm, a hundredth of the mass along one lengthscale.
    far = "the evidence is exact: weighted draws, no warm-up, some from far along each hyperparameter that has mass there."
    again = "the same from other random numbers: runs that agree are worth their draws together."
    method = AMIS(degrees_of_freedom=_SHORT_TAILS, begin=AtModes(search_tails=True))
    return [*(_weighted(model, method, why, wanted) for why in (far, again)), chains]


def _of_exact_evidence(model: GPModel, method: NUTS, why: str, warmup_steps: int) -> Candidate:
    """Chains of theta alone."""
    if model.collapses:
        alone = NUTS(marginal=Conjugate(), from_mode=True, max_tree_depth=8, target_accept_prob=0.9)
        # The curvature at the mode is the mass matrix, so that warm-up has a step size to find and no more.
        chains = _chains(model, alone, why, 50)
    else:
        chains = _chains(model, method, why, warmup_steps)
    return chains.with_limits(budget=_budget(model, _CHAINS, _EXACT_OPERATIONS_A_SECOND))


def _of_other_latents(model: GPModel, one_latent: bool, few: str, wanted: int) -> list[Candidate]:
    """Of several latents a datum, and of inducing values."""
    size = model.layout.size
    together = _together(model, one_latent)
    if is_heteroskedastic(model) and size <= MANY_HYPERPARAMETERS:
        return [*_through_noise(model, wanted), *together]
    if model.has_latents_at_data and model.factorises and sees_differences(model) and size <= MANY_HYPERPARAMETERS:
        is_small = size <= _FEW_HYPERPARAMETERS and (model.num_latents > _FEW_FUNCTIONS or len(model.train_x) > _FEW_CLASS_DATA)
        first = [_in_turn(model, wanted)] if is_small else []
        return [*first, *_through_classes(model, few, wanted), *together]
    if not has_inducing_normal(model):
        served = size <= MANY_HYPERPARAMETERS and _suits_inducing_mixture(model)
        after = [engine.with_limits(budget=_AFTER_WEIGHTS * engine.limits.budget) for engine in together]
        return [*_through_inducing_values(model, wanted), *after] if served else together
    if size > MOST_HYPERPARAMETERS:
        return together
    more = "many draws an estimate make up for what a normal density of inducing values misses."
    turns = (_FEW_DRAWS, few), (_SOME_DRAWS, more)
    return [*(_weighted(model, AMIS(num_importance=draws), why, wanted) for draws, why in turns), *together]


def _through_estimates(model: GPModel, few: str, wanted: int) -> list[Candidate]:
    """Of models whose latents are the values at the data, one a datum."""
    size = model.layout.size
    if not as_likelihood(model.likelihood).is_log_concave:
        # Where p(f | y, theta) may have several modes EP hardly settles, and takes each of its moments over all of them. Modes are
        # what estimates spend their time on: 64 draws cost a fifth more than 16 (300 x 5 under Student t noise).
        return [_weighted(model, AMIS(num_importance=_MANY_DRAWS), few, wanted)] if size <= MANY_HYPERPARAMETERS else []
    if size > MOST_HYPERPARAMETERS:
        return []
    if size > MANY_HYPERPARAMETERS:
        return _of_many(model, few, wanted)
    if not is_probit(model):
        # Laplace's estimates miss the same of other labels, and of counts of zero: p(y | f) is flat on one side.
        turns = (_MANY_DRAWS, few), (_MOST_DRAWS, _MORE)
        first = AMIS(approximation=EP(), begin=_BY_EP)
        return [_weighted(model, replace(first, num_importance=draws), why, wanted) for draws, why in turns]
    # Laplace's estimates may all miss what a short lengthscale and a large outputscale make of labels, and look even.
    draws = _MORE_DRAWS if len(model.train_x) <= _FEW_LABELS else _MANY_DRAWS
    first = AMIS(begin=_BY_EP, evidence=SmoothProbit(EP(), draws))
    orthants = _weighted(model, replace(first, evidence=Orthant()), _HARDLY, wanted)
    return [_weighted(model, first, few, wanted).with_limits(better_follow=True), orthants._replace(goes_on=True)]


def _of_many(model: GPModel, few: str, wanted: int) -> list[Candidate]:
    """Of more hyperparameters than a few, of log-concave data. What these leave open has lobes apart from the modes."""
    extremes = AtPrior(arms=True)
    first = AMIS(approximation=EP(), num_importance=_MANY_DRAWS, degrees_of_freedom=_SHORT_TAILS, begin=extremes)
    if is_probit(model):
        first = AMIS(evidence=SmoothProbit(EP(), _MANY_DRAWS), degrees_of_freedom=_SHORT_TAILS, begin=extremes)
    # Without tails, 4000 draws of 500 x 14 (a tenth of the labels wrong) are worth 23: a far outputscale has a long arm.
    modes = replace(first, begin=replace(_BY_EP, search_tails=True, leave_for=extremes))
    better, hardly = replace(modes, num_importance=_MOST_DRAWS), _MORE
    if is_probit(model):
        better, hardly = replace(modes, evidence=Orthant(_MANY_DRAWS)), _HARDLY
    found = [
        _weighted(model, modes, few, wanted).with_limits(better_follow=True),
        _weighted(model, better, hardly, wanted)._replace(given=too_much_noise, goes_on=True),
    ]
    apart = "what data leave open has lobes apart from the modes: weighted draws that begin with the prior."
    again = "the same from other random numbers: runs that agree are worth their draws together."
    # Of 270 x 13 logit labels runs from the prior were worth one to three draws each: what estimates miss, more runs do.
    runs = (apart, *[again] * _MORE_RUNS) if is_probit(model) else (apart,)
    return [*found, *(_weighted(model, first, why, wanted) for why in runs)]


def _through_classes(model: GPModel, few: str, wanted: int) -> list[Candidate]:
    """Of several classes, whose functions share a covariance.

    Laplace's estimates of labels that are noise miss a part: at an outputscale of 100 all of them by 18 nats of 40 labels.
    """
    first = AMIS(approximation=ClassEP(), num_importance=_MANY_DRAWS)
    if model.layout.size <= _FEW_HYPERPARAMETERS and model.num_latents > _FEW_FUNCTIONS:
        # A gradient of Laplace's evidence, of one K N x K N matrix, takes as long as ten estimates (six classes, 183 data: 0.94 s).
        # Estimates start from those of the first batch, which do not: so that is small.
        first = replace(first, begin=AtPrior(), batch_size=_FIRST_BATCH)
    turns = (first, few), (replace(first, num_importance=_MOST_DRAWS), _MORE)
    return [_weighted(model, method, why, wanted) for method, why in turns]


def _through_noise(model: GPModel, wanted: int) -> list[Candidate]:
    """Of noise with a latent size. The joint mode, which Laplace's searches for theta rest on, is where noise goes to nothing."""
    few = "the mean function integrates out by hand, the noise's well, and the hyperparameters are few: weighted draws, no warm-up."
    more = "many draws an estimate make up for what a normal density of log deviations is too narrow for."
    return [engine.with_limits(patience=_LEARNING) for engine in _from_the_prior(model, NoiseAlone, few, more, wanted)]


def _suits_inducing_mixture(model: GPModel) -> bool:
    """Expectations that are integrals take longer than chains: Softmax's, and of many data those of Student t and Beta."""
    if not serves_inducing_mixture(model) or model.latent_size > _MOST_INDUCING or isinstance(model.likelihood, Softmax):
        return False
    are_integrals = model.takes_expectations and model.num_latents == 1
    return not are_integrals or len(model.train_x) <= _FEW_INTEGRALS


def _through_inducing_values(model: GPModel, wanted: int) -> list[Candidate]:
    """Of several functions, of likelihoods that are not log-concave, and of f that is a function of inducing values."""
    few = "the inducing values integrate out well and the hyperparameters are few: weighted draws, no warm-up."
    more = "many draws an estimate make up for what normal densities of inducing values miss."
    return _from_the_prior(model, InducingMixture, few, more, wanted)


def _from_the_prior(model: GPModel, evidence: Callable[[int], Evidence], few: str, more: str, wanted: int) -> list[Candidate]:
    """Weighted draws without a search for modes, and again with four times as many draws an estimate."""
    turns = (_MANY_DRAWS, few), (4 * _MANY_DRAWS, more)
    first, second = (_weighted(model, AMIS(evidence=evidence(draws), begin=AtPrior()), why, wanted) for draws, why in turns)
    return [first, second._replace(given=some_use)]


def _together(model: GPModel, one_latent: bool) -> list[Candidate]:
    """Of models whose latents cannot be integrated out one site a datum."""
    why = "hyperparameters and latents are sampled together, as the latents cannot be integrated out one site a datum."
    white = NUTS(whitening=Laplace(), max_tree_depth=8) if one_latent else NUTS(max_tree_depth=8, target_accept_prob=0.9)
    # Of one function its coordinates are others than those around the fit.
    found = [_chains(model, white, why, 200)._replace(given=some_use if model.factorises and not one_latent else anything)]
    if model.factorises:
        around = "chains begin around a variational fit, in coordinates white under it."
        fit = partial(initialize, model, optimize_inducing_points=False, progress=False)
        found.insert(0, _chains(model, NUTS(max_tree_depth=8, target_accept_prob=0.9), around, 100, start=fit))
    if not model.has_latents_at_data:
        budget = _budget(model, _CHAINS, _SPARSE_OPERATIONS_A_SECOND if one_latent else _SEVERAL_OPERATIONS_A_SECOND)
        found = [engine.with_limits(budget=budget) for engine in found]
    return found


def _chains(
    model: GPModel,
    method: MethodOptions,
    why: str,
    warmup_steps: int,
    num_chains: int = _CHAINS,
    start: Callable[..., Start | None] = no_start,
) -> Candidate:
    density = SharedDensity(JointLogDensity(model), model.operations, model.train_x.device)

    def rehearse() -> Callable[[], Any]:
        theta = model.layout.starting_points(num_chains, make_generator(0, model.train_x.device))
        position = torch.cat([theta, theta.new_zeros(num_chains, model.latent_size)], -1)
        return partial(density.value_and_grad, position)

    if isinstance(method, NUTS) and (method.whitening is not None or start is not no_start):
        seconds = partial(seconds_of_chains, model, method, num_chains, warmup_steps, start)
    else:
        seconds = partial(seconds_of_evaluations, rehearse, 15.0 * (warmup_steps + 150))
    budget = _budget(model, num_chains, _OPERATIONS_A_SECOND)
    return Candidate(method, why, num_chains, warmup_steps, Limits(50, 4000, budget), seconds, start)


def _on_normal_scale(model: GPModel) -> Candidate:
    """Of log-concave data with more hyperparameters than weights of proposals survive, most of which are as the prior has them.

    Trajectories of a quarter of the prior's period give nearly independent draws, of which weights leave 0.85.
    """
    why = "EP's evidence is nearly exact, and most hyperparameters are as the prior has them: weighted chains."
    weights = SmoothProbit(EP(), _MANY_DRAWS) if is_probit(model) else _MANY_DRAWS
    on_theta: Any = {"marginal": EP(), "importance_weights": weights, "normal_scale": True}
    method = HMC(num_steps=_MOST_STEPS, least_steps=_LEAST_STEPS, mass_matrix=MassMatrix.IDENTITY, **on_theta)
    rough = ApproximateMarginal(model, EP(), loose=True)

    def rehearse() -> Callable[[], Any]:
        # From nothing, to be drawn from, takes about as long as a gradient from held sites.
        return partial(rough, model.layout.starting_points(_CHAINS, make_generator(0, model.train_x.device)))

    # Weights of draws take as long as a third of their gradients.
    typical = 0.5 * (_LEAST_STEPS + _MOST_STEPS) * (_SHORT_WARM_UP + 4 / 3 * WANTED)
    budget = _budget(model, _CHAINS, _OPERATIONS_OF_SITES_A_SECOND)
    seconds = partial(seconds_of_evaluations, rehearse, typical)
    return Candidate(method, why, _CHAINS, _SHORT_WARM_UP, Limits(50, 1000, budget), seconds)


def _in_turn(model: GPModel, wanted: int) -> Candidate:
    """Of many classes, whose latents' density is so far from normal that estimates of few draws vary too much.

    Of 183 labels of six classes, at an outputscale of 13, estimates of 64 draws have a variance of 0.6; a sweep takes half as long.
    """
    why = "theta and the latents of many classes in turn, in coordinates in which they are nearly independent: no estimates."

    def rehearse() -> Callable[[], Any]:
        theta = model.layout.starting_points(_CHAINS, make_generator(0, model.train_x.device))
        shift = model.train_x.new_zeros(_CHAINS, *model.latent_shape)
        precision = torch.full_like(shift[:, 0], 1 / model.num_latents)
        return lambda: class_map(model.prior(theta).factor, precision, shift)

    # A sweep takes as long as three to five, the search for where to begin as long as all warm-up.
    seconds = partial(seconds_of_evaluations, rehearse, 4 * (2 * _SHORT_WARM_UP + 1.25 * wanted))
    # Of few functions estimates come next, which labels that are noise are better served by.
    most = 800 if model.num_latents <= _FEW_FUNCTIONS else 1600
    return Candidate(ClassGibbs(), why, _CHAINS, _SHORT_WARM_UP, Limits(50, most, math.inf), seconds)


def _budget(model: GPModel, num_chains: int, operations_a_second: float) -> float:
    return _BUDGET / (_SECONDS_A_BATCH / num_chains + model.operations / operations_a_second)


def operations_of_estimate(model: GPModel) -> float:
    """Of K functions from nothing it takes ten factorisations and more of each."""
    return model.operations * (1 if model.num_latents == 1 else 10 * model.num_latents)


def _weighted(model: GPModel, method: AMIS, why: str, wanted: int) -> Candidate:
    thetas = max(2, min(_MOST_TIMED_THETAS, int(_TIMED_OPERATIONS / operations_of_estimate(model))))

    def rehearse() -> Callable[[], Any]:
        generator = make_generator(0, model.train_x.device)
        approximation = suited_approximation(model, method.approximation)
        estimator = estimator_for(model, approximation, method.num_importance, None, method.evidence)
        return partial(estimator.draw, model.layout.starting_points(thetas, generator), generator)

    if wanted < WANTED:
        # Few are found sooner. They are no reason to give up sooner: engines that come later are dearer.
        method = replace(method, batch_size=max(wanted, 10 * model.layout.size))
    most = _DRAWS_AN_EFFECTIVE_ONE * max(wanted, WANTED)
    seconds = partial(seconds_of_evaluations, rehearse, _USUAL_DRAWS_AN_EFFECTIVE_ONE * wanted / thetas)
    return Candidate(method, why, None, None, Limits(1, most, math.inf), seconds)
