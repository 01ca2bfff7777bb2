"""Sites to draw from, sought in single precision: near those of double, which is used where rounding would show."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior

import torchgpmc as tg
from tests.problems import gp, inputs
from torchgpmc.approximations import EP, ApproximateMarginal, ep, single_precision
from torchgpmc.approximations.gaussian_form import problem_of


def separable():
    """Labels that long lengthscales explain at any outputscale, so large that single precision holds no search."""
    x = inputs(100, 3)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(1.5, 1.0)), outputscale_prior=LogNormalPrior(2.0, 3.0))
    model = tg.GP(x, (x.sum(-1) > 0).int(), kernel, tg.likelihoods.Bernoulli())
    return model, torch.cartesian_prod(torch.arange(0.0, 20.0, 2.0), torch.tensor([1.5, 3.0])).double()


def in_double(monkeypatch):
    monkeypatch.setattr(single_precision, "_LEAST", torch.inf)


@pytest.mark.parametrize("likelihood", ["probit", "logit", "poisson", "ordinal"])
def test_sites_are_near_those_of_double_precision_and_what_they_make_is_exact(likelihood, monkeypatch):
    model = gp(likelihood, 9)
    prior = model.prior(model.layout.starting_points(6, torch.Generator().manual_seed(0)))
    found = EP(tolerance=1e-3).importance_density(model, prior)
    # Given the sites, alpha and the factor are of double precision: K alpha = m(posterior) and alpha = nu - W K alpha.
    precision, shift = found.start.chunk(2, -1)
    assert found.mean.dtype == precision.dtype == torch.float64
    centred = found.mean - prior.mean
    torch.testing.assert_close((prior.covariance @ found.alpha.unsqueeze(-1)).squeeze(-1), centred, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.alpha, shift - precision * centred, rtol=1e-10, atol=1e-12)
    in_double(monkeypatch)
    expected = EP(tolerance=1e-6).importance_density(model, prior)
    assert not torch.equal(found.mean, expected.mean)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(found.precision, expected.precision, rtol=0, atol=2e-3)


def test_where_rounding_would_show_sites_are_those_of_double(monkeypatch):
    model, theta = separable()
    prior = model.prior(theta)
    expected = EP().importance_density(model, prior)
    shows = single_precision.rounding_shows(problem_of(model, prior, None), expected.precision, single_precision.SEEN_IN_DRAWS)
    assert 0 < int(shows.sum()) < len(theta)
    found = EP().importance_density(model, prior)
    assert bool(found.converged.all())
    in_double(monkeypatch)
    expected = EP().importance_density(model, prior)
    torch.testing.assert_close(found.start[shows], expected.start[shows], rtol=1e-10, atol=1e-10)
    assert bool((found.start[~shows] != expected.start[~shows]).any(-1).all())


def test_sites_of_counts_so_large_that_rounding_shows_are_those_of_double(monkeypatch):
    """Whose precision is the count: the covariance alone would not tell."""
    x = inputs(40)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0)), outputscale_prior=LogNormalPrior(0.0, 1.0))
    model = tg.GP(x, (1e5 * (2 + x[:, 0].sin())).round(), kernel, tg.likelihoods.Poisson())
    prior = model.prior(model.layout.starting_points(4, torch.Generator().manual_seed(0)))
    found = EP().importance_density(model, prior)
    in_double(monkeypatch)
    expected = EP().importance_density(model, prior)
    assert bool(
        single_precision.rounding_shows(problem_of(model, prior, None), expected.precision, single_precision.SEEN_IN_DRAWS).all()
    )
    assert bool(expected.converged.all()) and torch.equal(found.start, expected.start)


def test_which_searches_may_be_in_single_precision():
    assert single_precision.may_be_single(gp("poisson"), 0.1)
    assert not single_precision.may_be_single(gp("probit"), 1e-6)
    assert not single_precision.may_be_single(gp("student_t"), 0.1)


def test_the_loose_evidence_is_near():
    """That of the sites before a last sweep, which are good enough to draw from after it, was off by seven nats of 200 labels."""
    model = gp("probit", 60)
    theta = model.layout.starting_points(40, torch.Generator().manual_seed(0)) + torch.tensor([3.0, 0.0, 0.0]).double()
    value = ApproximateMarginal(model, EP())(theta)
    loose = ApproximateMarginal(model, EP(), loose=True)(theta)
    assert not torch.equal(value, loose)
    torch.testing.assert_close(loose, value, rtol=0, atol=0.2)


def recorded_searches(monkeypatch):
    """Precision, thetas, and most sweeps of every search from here on."""
    searches, found_from = [], EP.found_from

    def recorded(self, part, default, start):
        found = found_from(self, part, default, start)
        searches.append((part.covariance.dtype, len(part.mean), int(found[0].num_iterations.max())))
        return found

    monkeypatch.setattr(EP, "found_from", recorded)
    return searches


def test_thetas_whose_rounding_shows_are_not_swept_in_single_precision(monkeypatch):
    """They once were, to no end: of 500 counts near 2000 40 sweeps for each theta in five."""
    model, theta = separable()
    prior = model.prior(theta)
    precision = EP().importance_density(model, prior).precision
    shows = single_precision.rounding_shows(problem_of(model, prior, None), precision, single_precision.SEEN_IN_DRAWS)
    searches = recorded_searches(monkeypatch)
    EP().importance_density(model, prior)
    (single,) = [rows for dtype, rows, _ in searches if dtype == torch.float32]
    assert single < len(theta)
    assert sum(rows for dtype, rows, _ in searches if dtype == torch.float64) >= int(shows.sum()) > 0


def test_searches_in_single_precision_that_end_nowhere_give_up_soon(monkeypatch):
    x = inputs(100)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0)), outputscale_prior=LogNormalPrior(0.0, 1.0))
    model = tg.GP(x, (2e3 * (2 + x[:, 0].sin())).round(), kernel, tg.likelihoods.Poisson())
    prior = model.prior(torch.zeros(2, 2).double())
    monkeypatch.setattr(ep, "rounding_shows", lambda problem, *_: torch.zeros(len(problem.mean), dtype=torch.bool))
    searches = recorded_searches(monkeypatch)
    assert bool(EP().importance_density(model, prior).converged.all())
    assert searches[0] == (torch.float32, 2, 10) and searches[1][0] == torch.float64
