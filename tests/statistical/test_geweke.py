"""Geweke's joint-distribution test, made exact by independent replicates.

A chain starts at a draw (theta, v) from the prior with targets y | theta, v, and alternates one sampler step on (theta, v) given y
with a fresh y given (theta, v). Both leave the joint distribution as it is if the sampler is exact, so after any number of rounds
the chain is still a draw from it; with the last y, which is not drawn anew, it makes a few steps. The mean of g(end) - g(start)
over thousands of independent chains is then zero for every function g, and its t statistic has a known distribution (Geweke 2004,
with independent replicates in place of a long run).

A chain that has forgotten its start is compared with more than its start: four further draws from the joint distribution, which no
sampler touches, share the part of the expectation that the start no longer predicts. That takes two fifths off the variance
where a chain forgets its start, so that 15,000 chains of NUTS see as much as 20,000 by their starts alone.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import torchgpmc as tg
from tests.calibration import without_jacobian, worst_excess
from tests.problems import gp
from tests.statistical.kernels import (
    BIASED,
    EXACT,
    SAMPLERS,
    HalvedLogDensity,
    NoLikelihood,
    NoVolume,
    Row,
    classes_in_turn,
    gibbs,
    latents_out,
    position_of,
    regressed,
    white_at_every_theta,
)
from torchgpmc.evidence import ImportanceEstimator
from torchgpmc.models import JointLogDensity
from torchgpmc.models.bent import BentMap
from torchgpmc.models.class_coordinates import class_map
from torchgpmc.models.following import FollowingMap
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.whitening import GaussianSites, whiten_under_sites
from torchgpmc.runs import class_chains, white_moves
from torchgpmc.runs.class_trajectories import Phase
from torchgpmc.runs.integrated_latents import ThroughEstimates
from torchgpmc.runs.parameterizations import _single_site_precision, _WhiteUnderSites
from torchgpmc.samplers import hmc
from torchgpmc.samplers.fitted_proposals import FittedProposal
from torchgpmc.samplers.metropolis import accept

CHAINS, FURTHER, ROUNDS = 20_000, 4, 7
# They forget fast, or a step takes many densities.
FORGETFUL = ("nuts", "nuts, white under sites", "slice")
FEWER = dict.fromkeys(FORGETFUL, 15_000) | {"latents integrated out": 10_000}
FEW_ROUNDS = 4  # for those that forget fast: an error is by then nearly as large as it comes to be, and more chains are cheaper
PLANTED = 1500  # show most planted errors at twice the limit and more; moves of latents and stale states need them all
LAST_STEPS = 4  # with the last y, which a chain that had not seen it would need some steps to forget


def functions(model, position, targets):
    """Moments of theta and v, skewed and mixed, and of v with the data they generated."""
    size = model.layout.size
    theta, v = position[:, :size], position[:, size:]
    # Of several latents, stacked, each with all of the data.
    beside = targets.repeat(1, -(-v.shape[1] // targets.shape[1]))[:, : v.shape[1]]
    parts = [
        theta,
        theta.square(),
        v,
        v.square(),
        theta[:, :1] * v,
        theta.exp().clamp_max(20.0),
        v * beside.clamp_max(10.0),
    ]
    return torch.cat(parts, -1)


def joint_draws(model, count, generator):
    """Positions and targets from the joint distribution."""
    theta = model.layout.sample_prior(count, generator)
    v = torch.randn(count, model.latent_size, generator=generator, dtype=theta.dtype)
    position = torch.cat([theta, v], -1)
    return position, draw_targets(model, position, generator)


def excess_over_the_joint(model, start, end, generator):
    """Alarm level of functions at the ends of chains ``(C, Q)`` against those at their starts, and at further joint draws.

    end - b start - (1 - b) further has mean zero whatever b is; its variance is least at b = (r + 1/m) / (1 + 1/m), with r the
    correlation of end and start, and m the number of further draws. An estimate of b from the same chains moves the mean by
    O(1 / C), against a standard error of O(1 / sqrt C).
    """
    further = functions(model, *joint_draws(model, FURTHER * len(start), generator)).view(FURTHER, *start.shape).mean(0)
    centred = [part - part.mean(0) for part in (start, end)]
    scale = (centred[0].square().sum(0) * centred[1].square().sum(0)).sqrt().clamp_min(1e-300)
    correlation = (centred[0] * centred[1]).sum(0) / scale
    b = ((correlation + 1 / FURTHER) / (1 + 1 / FURTHER)).clamp(0, 1).round(decimals=3)  # what stays where it was cancels exactly
    return worst_excess(end - b * start - (1 - b) * further)


def draw_targets(model, position, generator):
    size = model.layout.size
    prior = model.prior(position[:, :size])
    f = model.latents(prior, position[:, size:]).clamp_max(20.0)
    return model.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.sample(f, generator))


def geweke(model, sampler_name, seed, *, density_class=JointLogDensity, stale=False, rounds=None, chains=None):
    """Alarm level of the test: above 1 is an alarm."""
    rounds = rounds or (FEW_ROUNDS if sampler_name in FORGETFUL else ROUNDS)
    generator = torch.Generator().manual_seed(seed)
    position, targets = joint_draws(model, chains or FEWER.get(sampler_name, CHAINS), generator)
    start = functions(model, position, targets)
    state = None
    for last in [False] * (rounds - 1) + [True]:
        sampler = SAMPLERS[sampler_name].make(model, density_class(model, targets), position)
        # Planted error: the log density (and gradient) cached before the targets changed is used again.
        state = state if stale and state is not None else sampler.init(position, generator)
        for _ in range(LAST_STEPS if last else 1):
            state, _ = sampler.step(state, generator)
        position = position_of(state).detach()
        # A chain that had not seen the targets would pass with some that were drawn from it: the last are those it was given.
        targets = targets if last else draw_targets(model, position, generator)
    return excess_over_the_joint(model, start, functions(model, position, targets), generator)


WHITE_PCN = "pcn, white under sites"
MODELS = {"probit": lambda: gp("probit", num_data=3), "poisson": lambda: gp("poisson", num_data=3)}
# Between two likelihoods the samplers differ in nothing; NUTS tries both, the others the one that is skewed.
CASES = [("nuts", "probit"), *((name, "poisson") for name in EXACT)]
CASES += [pytest.param(name, "probit", marks=pytest.mark.long) for name in EXACT if name != "nuts"]


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("sampler", "likelihood"), CASES)
def test_sampler_leaves_the_joint_distribution_as_it_is(sampler, likelihood):
    assert geweke(MODELS[likelihood](), sampler, seed=11) < 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", BIASED)
def test_a_biased_sampler_is_seen_to_be(sampler):
    """Noise of deviation 1 in each slope widens a normal target's variance by an eighth or more."""
    assert geweke(MODELS["probit"](), sampler, seed=22, rounds=5, chains=PLANTED) > 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_likelihoods_with_parameters(likelihood):
    assert geweke(gp(likelihood, num_data=3), "nuts", seed=12) < 1


@pytest.mark.slow
@pytest.mark.statistical
def test_sparse_model_whose_inducing_points_are_its_inputs():
    """The sparse density is a bound, not p(y | theta, v), unless Z = X makes the bound tight."""
    full = gp("probit", num_data=3, jitter=1e-10)
    model = tg.SparseGP(full.train_x, full.train_y, full.kernel, full.likelihood, inducing_points=full.train_x, jitter=1e-10)
    assert geweke(model, "nuts", seed=13) < 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["nuts", "hmc", "metropolis", "slice"])
def test_a_missing_jacobian_is_caught(sampler, monkeypatch):
    without_jacobian(monkeypatch)
    assert geweke(MODELS["poisson"](), sampler, seed=14, chains=PLANTED) > 1


# Kernels that keep the prior of v are soon as wrong as they come to be, by little: chains show it, further rounds do not.
LITTLE = {"elliptical slice", "pcn", WHITE_PCN, "gibbs like", "sweep", "interwoven", "surrogate", "regressed"}
LITTLE |= {"surrogate of given noise"}
LITTLE |= {name for name in EXACT if name.startswith(("auxiliary gradient", "local regions", "control variables"))}
DEAR_PLANTS = ("surrogate", "surrogate of given noise", "latents integrated out", WHITE_PCN)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [pytest.param(name, marks=pytest.mark.long if name in DEAR_PLANTS else ()) for name in EXACT])
def test_a_halved_log_ratio_is_caught(sampler):
    little = sampler in LITTLE
    rounds = 5 if little else {"slice": 8, "nuts": 10, "latents integrated out": 40, "nuts, white under sites": 6}.get(sampler, 20)
    chains = 2 * CHAINS if little else CHAINS if sampler == "latents integrated out" else PLANTED
    assert geweke(MODELS["poisson"](), sampler, seed=15, density_class=HalvedLogDensity, rounds=rounds, chains=chains) > 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", EXACT)
def test_a_missing_likelihood_is_caught(sampler):
    chains = None if sampler == "metropolis" else PLANTED  # whose three proposals move it little
    assert geweke(MODELS["poisson"](), sampler, seed=18, density_class=NoLikelihood, rounds=3, chains=chains) > 1


@pytest.mark.slow
def test_a_missing_volume_of_the_white_coordinates_is_caught():
    assert geweke(MODELS["poisson"](), "nuts, white under sites", seed=17, density_class=NoVolume, chains=PLANTED) > 1


def geweke_at_every_theta(monkeypatch, bent, **options):
    monkeypatch.setitem(SAMPLERS, "white", Row("hmc", partial(white_at_every_theta, bent=bent)))
    return geweke(gp("softmax", num_data=2), "white", seed=24, **options)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("bent", [False, True])
def test_three_latents_white_at_every_theta_are_exact(bent, monkeypatch):
    assert geweke_at_every_theta(monkeypatch, bent, chains=6000) < 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FollowingMap, BentMap])
def test_a_missing_volume_at_every_theta_is_caught(kind, monkeypatch):
    mapped = kind.mapped
    monkeypatch.setattr(kind, "mapped", lambda *of: mapped(*of)._replace(log_volume=of[1].new_zeros(len(of[1]))))
    assert geweke_at_every_theta(monkeypatch, kind is BentMap, chains=PLANTED) > 1


def geweke_of_classes(monkeypatch, by_trajectories=False, **options):
    monkeypatch.setitem(SAMPLERS, "classes", Row("hmc", partial(classes_in_turn, by_trajectories=by_trajectories)))
    return geweke(gp("softmax", num_data=2), "classes", seed=25, rounds=5, **options)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("by_trajectories", "chains"), [(False, 15_000), (True, 8000)])
def test_classes_in_turn_are_exact(by_trajectories, chains, monkeypatch):
    assert geweke_of_classes(monkeypatch, by_trajectories, chains=chains) < 1


def no_volume(monkeypatch):
    monkeypatch.setattr(class_chains, "class_map", lambda *of: class_map(*of)._replace(log_volume=of[0].new_zeros(len(of[0]))))


def no_volume_of_trajectories(monkeypatch):
    no_volume(monkeypatch)


def no_energy_of_theta_in_trajectories(monkeypatch):
    monkeypatch.setattr(Phase, "kinetic_energy", property(lambda self: 0.5 * self.white_momentum.square().sum(-1)))


def a_push_where_trajectories_begin(monkeypatch):
    """And none where they end."""
    followed = class_chains.trajectory

    def pushed(density, phase, *rest):
        return followed(density, phase._replace(along_momentum=phase.along_momentum + 1.0), *rest)

    monkeypatch.setattr(class_chains, "trajectory", pushed)


def no_proposal_density(monkeypatch):
    monkeypatch.setattr(FittedProposal, "log_density", lambda self, position: torch.zeros_like(position[:, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        no_volume,
        no_proposal_density,
        no_volume_of_trajectories,
        no_energy_of_theta_in_trajectories,
        a_push_where_trajectories_begin,
    ],
)
def test_what_is_left_out_of_classes_in_turn_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert geweke_of_classes(monkeypatch, "trajectories" in plant.__name__, chains=PLANTED) > 1


@pytest.mark.slow
def test_a_prior_left_out_of_white_moves_is_caught(monkeypatch):
    monkeypatch.setattr(white_moves, "log_standard_normal", lambda z: torch.zeros_like(z[:, 0]))
    assert geweke(MODELS["poisson"](), WHITE_PCN, seed=19, chains=PLANTED) > 1


@pytest.mark.slow
@pytest.mark.statistical
def test_gradients_that_leave_out_how_the_noise_changes_with_theta_are_exact(monkeypatch):
    row = Row("sweep", gibbs(tg.Surrogate(), partial(hmc, num_steps=2)))
    monkeypatch.setitem(SAMPLERS, "surrogate", row)
    assert geweke(MODELS["probit"](), "surrogate", seed=20) < 1


def white_surrogate(kind=_WhiteUnderSites):
    """With sites of no data in particular, which a Geweke test changes."""
    return kind(GaussianSites(torch.tensor([0.5, 2.0, 0.1]).double(), torch.tensor([1.0, -1.0, 0.2]).double()))


@pytest.mark.slow
@pytest.mark.statistical
def test_theta_moved_given_latents_white_under_sites_is_exact(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "surrogate", Row("sweep", gibbs(white_surrogate())))
    assert geweke(MODELS["probit"](), "surrogate", seed=23) < 1


class NoWhiteVolume(_WhiteUnderSites):
    """Planted error: the density of [theta, w] without log |dv / dw|."""

    def latents(self, model, at, held, targets):
        v, log_volume = super().latents(model, at, held, targets)
        return v, 0 * log_volume


class NoDeterminant(tg.Sufficient):
    """Planted error: the density of [theta, f] without log |dv / df|."""

    def _log_volume(self, model, at):
        return 0 * at.mean[:, 0]


class NoNoise(tg.Surrogate):
    """Planted error: the density of [theta, eta] without the density of g, which is held."""

    def latents(self, model, at, held, targets):
        v = super().latents(model, at, held, targets)[0]
        sites = GaussianSites(*[_single_site_precision(model, at, targets)] * 2)
        return v, whiten_under_sites(at.projection.mT, at.mean, sites, v)[1]


class LatentsStayBehind(tg.Sufficient):
    """Planted error: theta is moved given f, and v is left where it was."""

    def latents(self, model, at, held, targets):
        return super().latents(model, at, held + 0.2, targets)


@pytest.mark.slow
@pytest.mark.parametrize("parameterization", [NoDeterminant(), NoNoise(), LatentsStayBehind(), white_surrogate(NoWhiteVolume)])
def test_errors_in_parameterizations_are_caught(parameterization, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "planted", Row("sweep", gibbs(parameterization)))
    assert geweke(MODELS["probit"](), "planted", seed=21, rounds=10) > 1


class _Afterwards(NamedTuple):
    density: Any
    v: torch.Tensor

    def draw(self, theta, generator):
        moved = self.density.draw(theta, generator)[1]
        return self.density.joint(torch.cat([theta, self.v], -1)), moved


class FollowAfterwards(tg.Regressed):
    """Planted error: theta is accepted with the latents where they were, which follow it only then."""

    def given(self, joint, theta, at, v, generator):
        density, excess = super().given(joint, theta, at, v, generator)
        return _Afterwards(density, v), excess


@pytest.mark.slow
def test_latents_that_follow_theta_unasked_are_caught(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "planted", Row("sweep", partial(regressed, parameterization=FollowAfterwards)))
    assert geweke(MODELS["probit"](), "planted", seed=25, chains=6000) > 1


class AllFresh(NamedTuple):
    """Planted error: an estimate that should hold the latents which other blocks have moved does not."""

    estimator: ImportanceEstimator

    def __getattr__(self, name):
        return getattr(self.estimator, name)

    def given(self, theta, v, generator):
        return self.estimator.draw(theta, generator)._replace(whitened=v)


@pytest.mark.slow
def test_estimates_that_do_not_hold_the_latents_are_caught(monkeypatch):
    planted = partial(latents_out, part=lambda estimator: ThroughEstimates(AllFresh(estimator)))
    monkeypatch.setitem(SAMPLERS, "planted", Row("sweep", planted))
    assert geweke(MODELS["poisson"](), "planted", seed=23, rounds=10, chains=3000) > 1


@pytest.mark.long
@pytest.mark.statistical
def test_latents_integrated_out_where_estimates_are_from_mixtures():
    assert geweke(gp("student_t", num_data=3), "latents integrated out", seed=24, rounds=3, chains=3000) < 1


@pytest.mark.slow
def test_auxiliary_gradients_accepted_by_the_likelihood_alone_are_caught(monkeypatch):
    """Planted error: the ratio of the proposals is left out."""
    module = sys.modules["torchgpmc.samplers.auxiliary_gradient"]  # the package's name is the function's
    monkeypatch.setattr(module, "accept", lambda move, *ends: accept(move._replace(correction=None), *ends))
    assert geweke(MODELS["poisson"](), "auxiliary gradient", seed=19, rounds=10) > 1


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_a_halved_log_ratio_is_caught_where_likelihoods_have_parameters(likelihood):
    assert geweke(gp(likelihood, num_data=3), "nuts", seed=12, density_class=HalvedLogDensity, rounds=10, chains=PLANTED) > 1


@pytest.mark.slow
def test_inducing_points_that_are_not_the_inputs_are_caught():
    """The sparse density's own plant: away from Z = X it is a bound."""
    full = gp("probit", num_data=3, jitter=1e-10)
    apart = full.train_x[:1] + 0.5
    model = tg.SparseGP(full.train_x, full.train_y, full.kernel, full.likelihood, inducing_points=apart, jitter=1e-10)
    assert geweke(model, "nuts", seed=13, rounds=10, chains=PLANTED) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "rounds"), [("metropolis", 20), ("hmc", 20), ("nuts", 4), ("elliptical slice", 4)])
def test_a_stale_log_likelihood_is_caught(sampler, rounds):
    # The last two go wrong at once, and then build ever deeper trees and ever narrower brackets.
    assert geweke(MODELS["poisson"](), sampler, seed=16, stale=True, rounds=rounds) > 1
