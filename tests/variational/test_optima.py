"""Fits with several optima: which are found and kept, how chains are dealt out over them, and what R-hat then tells."""

import dataclasses
import math
import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import LogNormalPrior
from tqdm.auto import tqdm

import torchgpmc as tg
from tests.problems import sparse_gp
from torchgpmc.models.affine import AffineMap
from torchgpmc.models.bent import BentMap
from torchgpmc.models.following import FollowingMap
from torchgpmc.runs.run import Settings
from torchgpmc.trees import take
from torchgpmc.variational import optima, searches
from torchgpmc.variational import start as start_module
from torchgpmc.variational.bound import HeldSites, inducing_positions

STILL = {"optimize_inducing_points": False, "progress": False}
SEARCHES = {**STILL, "num_starts": 8}  # all in one of two equal lobes once in 128 times


def two_lobes(deviation=0.4, median=10.0, num_data=200):
    """Labels of a wave along a column that stands twice: either copy may have the short lengthscale, the other as the prior has it.

    Both at once cost the prior twice, so that two equal lobes stand apart, the further the narrower the prior.
    """
    x = torch.linspace(0, 3, num_data, dtype=torch.float64)
    y = (torch.sin(3 * x + 0.3) > 0).double()
    x = torch.stack([x, x], -1)
    kernel = RBFKernel(ard_num_dims=2, lengthscale_prior=LogNormalPrior(math.log(median), deviation))
    kernel.lengthscale = torch.tensor([[1.0, 2.0]])  # from equal ones a search ends on the ridge between the lobes
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:: num_data // 10])


@pytest.fixture(scope="module")
def start():
    return tg.initialize(two_lobes(), **SEARCHES)


def is_first(theta):
    """Whether the first copy has the short lengthscale."""
    return theta[..., 0] < theta[..., 1]


def test_both_lobes_are_found_with_equal_masses(start):
    assert len(start.optima) == 2
    torch.testing.assert_close(start.theta, start.others[0].theta.flip(0), rtol=0, atol=0.02)
    assert abs(start.log_mass - start.others[0].log_mass) < 0.05
    assert start.shares() == pytest.approx([0.5, 0.5], abs=0.02)
    assert [start.chains_at(chains) for chains in (2, 3, 4, 6)] == [[1, 1], start.chains_at(3), [2, 2], [3, 3]]
    assert sorted(start.chains_at(1)) == [0, 1] and sorted(start.chains_at(3)) == [1, 2]
    assert "2 optima, others at " in repr(start) and "with shares of 0.5 and 0.5" in repr(start)


def test_from_one_beginning_there_is_one(start):
    alone = tg.initialize(two_lobes(), num_starts=1, **STILL)
    assert alone.others == () and alone.chains_began(4) is None and "optima" not in repr(alone)
    assert alone.chains_at(4) == [4]


@pytest.mark.slow
def test_masses_are_the_integral_over_theta(start):
    """By brute force on a grid around one lobe, for a lobe that is nearly normal."""
    near = start.theta + 6 * start.theta_covariance.diagonal().sqrt() * torch.linspace(-1, 1, 31).unsqueeze(-1).double()
    grid = torch.cartesian_prod(*near.unbind(-1))
    value, _ = searches.values_at(start.model, grid)
    cell = float((near[1] - near[0]).prod())
    found = float(torch.logsumexp(value[is_first(grid) == is_first(start.theta)], 0)) + math.log(cell)
    assert abs(found - (start.log_mass + math.log(2 * math.pi))) < 0.3


@pytest.mark.parametrize("shares", [(0.9, 0.08, 0.02), (0.98, 0.016, 0.004), (0.3, 0.7, 0.0)])
def test_chains_are_dealt_out_by_mass_and_at_least_one_where_it_matters(start, shares, monkeypatch):
    three = dataclasses.replace(start, others=(start.others[0], start.others[0]))
    monkeypatch.setattr(start_module.Start, "shares", lambda self: list(shares))
    expected = {
        (0.9, 0.08, 0.02): ([1, 0, 0], [2, 1, 1], "3 optima of the fit (chains 0 to 1 at number 1, chain 2 at number 2, "),
        (0.98, 0.016, 0.004): ([1, 0, 0], [3, 1, 0], "2 optima of the fit (chains 0 to 2 at number 1, chain 3 at number 2)"),
        (0.3, 0.7, 0.0): ([0, 1, 0], [1, 3, 0], "2 optima of the fit (chain 0 at number 1, chains 1 to 3 at number 2)"),
    }[shares]
    assert (three.chains_at(1), three.chains_at(4)) == expected[:2]
    assert three.chains_began(4).startswith(expected[2])


@pytest.mark.parametrize("worth_following", [0.0, math.inf])
def test_each_chain_begins_around_its_own_optimum_in_the_coordinates_of_the_best(start, worth_following, monkeypatch):
    monkeypatch.setattr(start_module, "_WORTH_FOLLOWING", worth_following)
    run = tg.NUTS().prepare(start.model, Settings(20, 20, 400, None, start))
    position, covariance = run.target.start(torch.Generator().manual_seed(0))
    theta, w = position.tensor_split([2], -1)
    assert (is_first(theta[:200]) == is_first(start.theta)).double().mean() > 0.9
    assert abs(float(is_first(theta[:200]).double().mean() - is_first(theta[200:]).double().mean())) > 0.8
    torch.testing.assert_close(covariance[:2, :2], start.theta_covariance)
    other = start.others[0]
    v = start.white_coordinates().latents(theta[200:], w[200:])
    own = other.white_coordinates().white(theta[200:], v)
    assert float(own.square().mean()) == pytest.approx(1.0, abs=0.15)  # white under its own fit
    assert bool(torch.isfinite(run.target.density(position)).all())


def test_with_one_optimum_chains_begin_where_they_did(start, monkeypatch):
    alone = dataclasses.replace(start, others=())
    run = tg.NUTS().prepare(start.model, Settings(20, 20, 4, None, alone))
    whole = tg.NUTS().prepare(start.model, Settings(20, 20, 2, None, alone))
    both = tg.NUTS().prepare(start.model, Settings(20, 20, 4, None, start))
    drawn = [one.target.start(torch.Generator().manual_seed(0))[0] for one in (run, whole, both)]
    assert bool((is_first(drawn[0][:, :2]) == is_first(start.theta)).all()) and run.target.begun is None
    torch.testing.assert_close(drawn[1], drawn[2][:2])


@pytest.mark.parametrize("kind", [AffineMap, BentMap, FollowingMap])
def test_white_undoes_latents(start, kind, monkeypatch, generator):
    monkeypatch.setattr(start_module, "_WORTH_FOLLOWING", math.inf if kind is FollowingMap else 0.0)
    monkeypatch.setattr(start_module, "_MOST_BENT", math.inf if kind is BentMap else 0)
    coordinates = start.white_coordinates()
    assert isinstance(coordinates, kind)
    theta = start.theta + torch.randn(5, 2, generator=generator, dtype=torch.float64)
    w = torch.randn(5, start.mean.numel(), generator=generator, dtype=torch.float64)
    torch.testing.assert_close(coordinates.white(theta, coordinates.latents(theta, w)), w, rtol=1e-6, atol=1e-6)


def sampled(start, **options):
    run = {"num_samples": 60, "warmup_steps": 60, "num_chains": 4, "seed": 0, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tg.sample(start.model, tg.NUTS(max_tree_depth=6), start=start, **run)


def worst_rhat(posterior):
    return max(row.rhat for row in posterior.summary().rows)


@pytest.mark.slow
def test_rhat_tells_of_lobes_that_chains_do_not_leave(start):
    """Begun at one optimum all draws are of one lobe, half of the posterior, and nothing says so."""
    alone, both = sampled(dataclasses.replace(start, others=())), sampled(start)
    assert bool((is_first(alone.theta) == is_first(start.theta)).all()) and worst_rhat(alone) < 1.1
    assert worst_rhat(both) > 1.5
    began = "2 optima of the fit (chains 0 to 1 at number 1, chains 2 to 3 at number 2)"
    assert both.info["begun"] == began and "begun" not in alone.info
    assert f"the chains began at {began} and have not met" in both.verdict()
    assert is_first(both.theta).double().mean() == 0.5


@pytest.mark.slow
def test_rhat_is_content_where_chains_meet():
    near = tg.initialize(two_lobes(0.2, 4.0, 120), **SEARCHES)
    assert near.chains_at(4) == [2, 2]
    posterior = sampled(near, num_samples=400)
    assert worst_rhat(posterior) < 1.1 and "have not met" not in posterior.verdict()
    assert is_first(posterior.theta).double().mean(1).tolist() == pytest.approx([0.5] * 4, abs=0.25)


@pytest.mark.slow
def test_sweeps_begin_there_too(start):
    run = tg.Gibbs().prepare(start.model, Settings(5, 5, 4, None, start))
    theta = run.target.start(torch.Generator().manual_seed(0))[0][:, :2]
    assert is_first(theta).tolist() in ([True, True, False, False], [False, False, True, True])
    assert run.target.begun is not None


def test_runs_resume_and_see_the_other_optima(start, tmp_path):
    settings = {"num_samples": 4, "warmup_steps": 4, "checkpoint": tmp_path / "run"}
    first = sampled(start, **settings)
    assert torch.equal(sampled(start, **settings).theta, first.theta)
    longer = sampled(start, **{**settings, "num_samples": 6})
    assert torch.equal(longer.theta, sampled(start, num_samples=6, warmup_steps=4).theta)
    first.save(tmp_path / "draws")
    assert tg.Posterior.load(tmp_path / "draws", start.model).info["begun"] == first.info["begun"]
    alone, nudged = (dataclasses.replace(start, others=others) for others in ((), (dataclasses.replace(start, elbo=0.0),)))
    assert len({one.digest() for one in (start, alone, nudged)}) == 3
    for changed in (alone, nudged):
        with pytest.raises(ValueError, match="start was"):
            sampled(changed, **settings)


def test_another_models_optima_are_refused(start):
    with pytest.raises(ValueError, match="belongs to another model"):
        sampled(dataclasses.replace(start, others=(tg.initialize(sparse_gp(), num_starts=1, **STILL),)))


def test_where_all_searches_meet_nothing_changes(monkeypatch):
    seen = []
    carry = optima._carried_on
    monkeypatch.setattr(optima, "_carried_on", lambda *given: seen.append(carry(*given)) or seen[-1])
    model = sparse_gp("probit", num_data=40)
    found = tg.initialize(model, **STILL)
    assert seen == [optima.Elsewhere([], False)] and found.others == ()
    monkeypatch.setattr(optima, "_MOST", 0)
    assert tg.initialize(model, **STILL).digest() == found.digest()


def test_more_searches_begin_where_not_all_meet(monkeypatch):
    begun = []
    carry = optima._carried_on
    monkeypatch.setattr(optima, "_carried_on", lambda *given: begun.append(len(given[2])) or carry(*given))
    monkeypatch.setattr(optima, "_meets", lambda theta, fit: False)
    tg.initialize(two_lobes(), **STILL)
    assert begun == [2, 2]
    begun.clear()
    tg.initialize(two_lobes(), num_starts=3, **STILL)  # as many as were asked for
    assert begun == [2]


def test_a_search_that_ends_higher_becomes_the_fit(start):
    """Of an asymmetric prior: the lower lobe first, then the higher."""
    model = two_lobes()
    uneven = LogNormalPrior(torch.tensor([math.log(4.0), math.log(3.0)]).double(), 0.25)
    model.kernel.register_prior("lengthscale_prior", uneven, "lengthscale")
    model = tg.SparseGP(model.train_x, model.train_y, model.kernel, model.likelihood, inducing_points=model.inducing_points)
    bar = tqdm(disable=True)
    ends = [
        searches.search(model, inducing_positions(model, False), theta, None, 200, bar)
        for theta in (torch.tensor([-1.0, 3.0]).double(), torch.tensor([3.0, -1.0]).double())
    ]
    low, high = sorted(ends, key=lambda end: end.value)
    assert high.value > low.value + 0.5
    found = optima.with_others(optima.fitted_at(model, low), [high], (), False, 200, bar)
    torch.testing.assert_close(found.fit.theta, high.position, rtol=0, atol=1e-2)
    torch.testing.assert_close(found.fit.others[0].theta, low.position, rtol=0, atol=1e-2)
    assert found.fit.chains_at(4) == [4, 0]  # a thousandth of the posterior is no place for a chain
    kept = optima.with_others(optima.fitted_at(model, low), [high], (), True, 200, bar)
    torch.testing.assert_close(kept.fit.theta, low.position, rtol=0, atol=1e-2)
    assert kept.fit.chains_at(4) == [0, 4]


@pytest.mark.slow
def test_other_optima_are_those_under_the_inducing_points_that_moved():
    found = tg.initialize(two_lobes(), progress=False, num_starts=8)
    for other in found.others:
        assert torch.equal(other.model.inducing_points, found.model.inducing_points)
        again = searches.search(found.model, inducing_positions(found.model, False), other.theta, None, 50, tqdm(disable=True))
        assert abs(again.value - other.height) < 0.1
    sampled(found, num_samples=4, warmup_steps=4)


# --- searches side by side --------------------------------------------------------------------------------------------


def test_each_of_several_positions_has_sites_of_its_own(start):
    theta = torch.stack([optimum.theta for optimum in start.optima]) + 0.1
    _, sites = searches.values_at(start.model, theta)
    still = inducing_positions(start.model, False)
    held = HeldSites(start.model, still, sites)
    value, gradient = held.value_and_grad(theta)
    for row in (0, 1):
        one = HeldSites(start.model, still, take(sites, [row])).value_and_grad(theta[[row]])
        chosen = held.select(torch.tensor([row])).value_and_grad(theta[[row]])
        for own, picked, batch in zip(one, chosen, (value, gradient), strict=True):
            torch.testing.assert_close(own, batch[[row]])
            torch.testing.assert_close(picked, batch[[row]])
