"""Fits of several latent functions, of a likelihood that is not log-concave: curvature between the functions, and held sites."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import inputs, sparse_gp
from torchgpmc.approximations import nearest_normal as search
from torchgpmc.approximations import normal_latents
from torchgpmc.approximations.nearest_normal import nearest_normal, precisions_of, sites_of
from torchgpmc.approximations.normal_latents import GaussianLatents, expected_log_likelihood, joint_scale, lower_bound, under_sites
from torchgpmc.models.latents import likelihood_values
from torchgpmc.numerics.matched_points import matched_points
from torchgpmc.variational import curvature, searches
from torchgpmc.variational.bound import HeldSites, VariationalMarginal, inducing_positions

QUIET = {"progress": False}


def three_classes(count, points):
    """Overlapping clouds in the plane: a tenth of the labels are on the wrong side, at seven nats each."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 3
    centres = torch.tensor([[-1.2, -0.6], [1.2, -0.6], [0.0, 1.2]], dtype=torch.float64)
    x = centres[label] + 0.7 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0))
    return tg.SparseGP(x, label, kernel, tg.likelihoods.RobustMax(num_classes=3), inducing_points=x[:points])


def at_zero(model):
    with torch.no_grad():
        return model.at_data(model.layout.raw_values(torch.zeros(1, model.layout.size, dtype=torch.float64)))


def test_with_the_curvature_between_functions_steps_arrive_and_without_they_do_not(monkeypatch):
    model = three_classes(90, 8)
    at = at_zero(model)
    together = nearest_normal(model, at, model.targets, max_iterations=60, tolerance=1e-8)
    monkeypatch.setattr(normal_latents, "_MOST_COUPLED", 0)
    apart, longer = (nearest_normal(model, at, model.targets, max_iterations=steps, tolerance=1e-8) for steps in (60, 120))
    assert bool(together.converged) and not bool(apart.converged)
    assert float(together.log_evidence) > float(apart.log_evidence) + 0.1
    assert float(together.log_evidence) > float(longer.log_evidence) - 1e-3


@pytest.mark.parametrize("name", ["softmax", "robust max"])
def test_curvature_between_functions_is_that_of_the_expectation(name):
    """By second differences of values in both means at once."""
    model = sparse_gp("softmax", num_data=7) if name == "softmax" else three_classes(7, 3)
    at = at_zero(model)
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.randn(2, 1, 3, 7, generator=generator, dtype=torch.float64)
    variance = variance.exp()

    def expected(moved):
        return expected_log_likelihood(model, at, moved, variance, model.targets)

    problem = search._Problem(model, at, likelihood_values(at.prior), model.targets)
    found = problem.slopes_and_coupling(mean, variance)[1]
    for pair, (j, k) in enumerate(((0, 1), (0, 2), (1, 2))):
        total = torch.zeros(1, 7, dtype=torch.float64)
        for first, second in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            step = torch.zeros(3, 1, dtype=torch.float64)
            step[j], step[k] = 1e-2 * first, 1e-2 * second
            total += first * second * expected(mean + step)
        torch.testing.assert_close(found[:, pair], -total / 4e-4, rtol=0.01, atol=2e-3)


def test_a_bound_at_held_sites_touches_the_best_one_from_below():
    model = three_classes(30, 4)
    positions = inducing_positions(model, True)
    position = torch.zeros(1, 1 + positions.moving_size, dtype=torch.float64)
    best = VariationalMarginal(model, positions)
    value, gradient = best.value_and_grad(position)
    held = HeldSites(model, positions, best.sites)
    held_value, held_gradient = held.value_and_grad(position)
    torch.testing.assert_close(held_value, value)
    torch.testing.assert_close(held_gradient, gradient, rtol=1e-3, atol=1e-3)
    away = position + 0.1 * torch.randn(position.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gap = float(best.value_and_grad(away)[0] - held.value_and_grad(away)[0])
    assert 1e-6 < gap < 0.25 * abs(float((gradient * (away - position)).sum()))


@pytest.mark.slow
def test_a_fit_by_robust_max_converges_where_a_plain_ascent_of_the_same_bound_ends():
    """The rival: Adam on theta and all numbers of q, 300 steps at the fit's inducing points."""
    model = three_classes(45, 5)
    start = tg.initialize(model, **QUIET)
    assert start.converged
    theta = model.layout.present(model).detach().clone().requires_grad_(True)
    mean = torch.zeros(1, 3, 5, dtype=torch.float64, requires_grad=True)
    root = torch.eye(5, dtype=torch.float64).repeat(1, 3, 1, 1).requires_grad_(True)
    rival = torch.optim.Adam([theta, mean, root], lr=0.1)
    for _ in range(300):
        hyperparameters, log_prior = start.model.layout.raw_values_and_log_prior(theta)
        at = start.model.at_data(hyperparameters)
        q = GaussianLatents(mean, root.tril(-1) + torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).abs()))
        loss = -(lower_bound(start.model, at, q, model.targets) + log_prior).sum()
        rival.zero_grad()
        loss.backward()
        rival.step()
    ours = start.elbo + float(start.model.layout.log_prior(start.theta[None]).detach())
    assert ours > -float(loss.detach()) - 0.05


def test_chains_move_in_what_functions_share_as_in_the_prior():
    """Robust max sees differences alone: q, a product over functions, has their sum as narrow as each of them."""
    start = tg.initialize(three_classes(30, 4), optimize_inducing_points=False, **QUIET)
    covariance = torch.linalg.inv(torch.eye(12) + start.white_coordinates().precision[0])
    shared = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    torch.testing.assert_close(covariance @ shared, shared, rtol=0, atol=0.01)
    assert float((start.scale @ start.scale.mT).diagonal(dim1=-2, dim2=-1).min()) < 0.5
    # Within one function, the others where they are, it is as narrow as q.
    precision = torch.linalg.inv(covariance)
    for k, scale in enumerate(start.scale):
        own = torch.linalg.inv(precision[4 * k : 4 * k + 4, 4 * k : 4 * k + 4])
        torch.testing.assert_close(own, scale @ scale.mT, rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_the_sites_of_the_best_q_are_those_that_make_it_and_a_fit_goes_on_from_them():
    model = three_classes(24, 3)
    start = tg.initialize(model, optimize_inducing_points=False, **QUIET)
    model = start.model
    with torch.no_grad():
        at = model.at_data(model.layout.raw_values(start.theta[None]))
        q, ok = under_sites(at, sites_of(model, at, start.latents()))
    assert bool(ok.all())
    torch.testing.assert_close(q.mean[0], start.mean, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(q.scale[0], start.scale, rtol=1e-3, atol=2e-3)
    again = tg.initialize(model, start=start, optimize_inducing_points=False, max_iterations=1, **QUIET)
    assert again.converged and again.elbo == pytest.approx(start.elbo, abs=0.05)


def test_the_joint_scale_by_chunks_has_all_data(monkeypatch):
    model = sparse_gp("softmax", num_data=60)
    start = tg.initialize(model, **QUIET)
    monkeypatch.setattr(curvature, "_PAIR_ELEMENTS", 6 * model.latent_shape[1] * 25)
    found = curvature.joint_scale_by_chunks(start.model, start.theta, start.latents())
    at = start.model.at_data(start.model.layout.raw_values(start.theta[None]))
    at_once = joint_scale(at, precisions_of(start.model, at, start.latents()))[0].detach()
    torch.testing.assert_close(found, at_once, rtol=1e-9, atol=1e-9)


def test_what_functions_share_is_as_wide_as_in_the_prior():
    """Their precisions and couplings cancel over the data, by central differences, as far as quadrature goes."""
    model = three_classes(90, 8)
    start = tg.initialize(model, **QUIET)
    found = curvature.joint_scale_by_chunks(start.model, start.theta, start.latents())
    alike = torch.eye(8, dtype=torch.float64).repeat(3, 1) / 3**0.5
    torch.testing.assert_close(alike.mT @ found @ found.mT @ alike, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-5)
    at = start.model.at_data(start.model.layout.raw_values(start.theta[None]))
    left = [
        float(sites.times(torch.ones_like(sites.shift)).abs().max() / sites.precision.abs().max())
        for sites in (precisions_of(start.model, at, start.latents()), sites_of(start.model, at, start.latents()))
    ]
    assert left[0] < 1e-5 < left[1]


def test_slopes_of_a_bound_at_held_sites_are_those_of_differences():
    """Away from the best sites, where the bound does not rest in q: that no factorisation was followed must not show."""
    model = three_classes(30, 4)
    positions = inducing_positions(model, True)
    position = torch.zeros(1, 1 + positions.moving_size, dtype=torch.float64)
    best = VariationalMarginal(model, positions)
    best.value_and_grad(position)
    assert float(best.sites.coupling.abs().max()) > 0.1
    held = HeldSites(model, positions, best.sites)
    away = position + 0.3 * torch.randn(position.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient = held.value_and_grad(away)[1][0]
    for column in range(position.shape[1]):
        step = torch.zeros_like(position)
        step[0, column] = 1e-5
        slope = float(held.value_and_grad(away + step)[0] - held.value_and_grad(away - step)[0]) / 2e-5
        assert float(gradient[column]) == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_short_searches_of_many_classes_see_fewer_data(monkeypatch):
    x, generator = inputs(60, 2), torch.Generator().manual_seed(0)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0))
    monkeypatch.setattr(searches, "_PRODUCTS", 300)
    monkeypatch.setattr(searches, "_LEAST_DATA", 20)
    for num_classes, seen in ((3, 50), (4, 30), (6, 20)):
        likelihood = tg.likelihoods.Softmax(num_classes=num_classes)
        model = tg.SparseGP(x, torch.arange(60) % num_classes, kernel, likelihood, inducing_points=x[:5])
        assert len(searches._some_data(model, generator).train_x) == seen


@pytest.mark.filterwarnings("ignore:the variational fit did not converge")
def test_a_fit_by_minibatches_knows_how_functions_hang_together():
    start = tg.initialize(three_classes(90, 8), batch_size=30, max_iterations=5, **QUIET)
    assert start.joint_scale.shape == (24, 24)
    one = tg.initialize(sparse_gp("probit", num_data=40), batch_size=10, max_iterations=2, **QUIET)
    assert one.joint_scale is None


def test_first_bounds_of_many_classes_are_those_of_densities_found_roughly(monkeypatch):
    """No integral tells how functions hang together; what is lost is little beside what thetas differ by, and never negative."""
    x = inputs(40, 2)
    likelihood = tg.likelihoods.Softmax(num_classes=4)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0))
    model = tg.SparseGP(x, torch.arange(40) % 4, kernel, likelihood, inducing_points=x[::5])
    theta = torch.tensor([[-1.0], [0.0], [1.0]]).double()
    best = VariationalMarginal(model).evaluate(theta)[0].detach()

    def asked(*arguments, **options):
        raise AssertionError("an integral was taken")

    monkeypatch.setattr(search._Problem, "slopes_and_coupling", asked)
    value, sites = searches.values_at(model, theta)
    lost = best - value
    assert bool((lost > 0).all()) and float(lost.max()) < 0.1 < float(best.max() - best.min())
    with pytest.raises(AssertionError, match="integral"):
        searches.values_at(model, theta, sites)


def test_a_fit_of_more_classes_than_it_takes_pairs_of_points():
    """Ten classes were an error of the algebra: eight pairs of points span eight dimensions."""
    x = inputs(30, 2)
    kernel, likelihood = RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), tg.likelihoods.Softmax(num_classes=10)
    model = tg.SparseGP(x, torch.arange(30) % 10, kernel, likelihood, inducing_points=x[::6])
    start = tg.initialize(model, optimize_inducing_points=False, num_starts=1, **QUIET)
    assert start.converged and start.elbo < -30
    points = matched_points(10, 4, start.theta)
    torch.testing.assert_close(points.mT @ points / len(points), torch.eye(10).double())


def test_classes_by_the_dozen():
    x, likelihood = inputs(50, 2), tg.likelihoods.Softmax(num_classes=40)
    model = tg.GP(x, torch.arange(50) % 40, RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), likelihood)
    found = tg.approximations.ClassEP().importance_density(model, model.prior(torch.zeros(1, 1).double()))
    assert bool(torch.isfinite(found.mean).all()) and bool(found.is_sound().all())
