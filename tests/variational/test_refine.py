"""Inducing points by the free-form gradient: against finite differences, and where Gaussian noise makes the bound known."""

import itertools

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, gp, sparse_gp
from tests.speed import quick
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws
from torchgpmc.variational.bound import inducing_positions
from torchgpmc.variational.refine import AveragedBound

F64 = torch.float64
NOISE = 0.05


def draws_of(model, theta, v):
    """A posterior of one chain with these draws."""
    return Posterior(model, Draws(theta[None], v[None], None), {"lp": torch.zeros(1, len(v))}, {})


@pytest.mark.parametrize("likelihood", quick(["probit"], ["probit", "robust_max"]))
def test_the_gradient_is_that_of_differences(likelihood):
    model = sparse_gp(likelihood, num_data=10, num_inducing=3)
    generator = torch.Generator().manual_seed(0)
    theta, v = (0.5 * torch.randn(4, size, generator=generator, dtype=F64) for size in (model.layout.size, model.latent_size))
    bound = AveragedBound(model, inducing_positions(model, True), theta, v)
    bound.draws, bound.rows = torch.arange(4).split(3), torch.arange(10).split(4)  # chunks of both
    position = 0.1 * torch.randn(1, 6, generator=generator, dtype=F64)
    value, gradient = bound.value_and_grad(position)
    at = model.with_buffers(inducing_points=bound.positions.model_at(model, position[0]).inducing_points)
    joint = tg.joint_log_density(at)(torch.cat([theta, v], -1))
    prior = model.layout.log_prior(theta) - 0.5 * v.square().sum(-1) - 0.5 * v.shape[1] * torch.tensor(2 * torch.pi).log()
    torch.testing.assert_close(value[0], (joint - prior).mean(), rtol=1e-6, atol=1e-6)
    for column in range(6):
        step = torch.zeros_like(position)
        step[0, column] = 1e-5
        slope = (bound(position + step) - bound(position - step)) / 2e-5
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-4, atol=1e-5)


def wave(num_inducing):
    """Gaussian noise, hyperparameters fixed, and inducing points in one corner."""
    x = torch.linspace(0, 1, 24, dtype=F64)
    y = torch.sin(7 * x) + NOISE**0.5 * torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=F64)
    noise = tg.likelihoods.Gaussian().requires_grad_(False)
    noise.noise = NOISE
    return tg.SparseGP(x, y, fixed_kernel(0.25), noise, inducing_points=x[:num_inducing])


def known(model, count, seed=0):
    """Exact draws of v ``(S, M)``, and log C(Z): log N(y | 0, Q + noise) less the variance that Z leaves, over twice the noise."""
    at = model.at_data(model.layout.raw_values(torch.zeros(1, 0, dtype=F64)))
    a, y = at.projection[0], model.train_y
    precision = torch.eye(len(a), dtype=F64) + a @ a.mT / NOISE
    mean = torch.linalg.solve(precision, a @ y / NOISE)
    noise = torch.randn(len(a), count, generator=torch.Generator().manual_seed(seed), dtype=F64)
    v = mean + torch.linalg.solve_triangular(torch.linalg.cholesky(precision).mT, noise, upper=True).mT
    total = a.mT @ a + NOISE * torch.eye(len(y), dtype=F64)
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(y), total)
    return v.detach(), normal.log_prob(y) - at.variance.sum() / (2 * NOISE)


@pytest.mark.slow
@pytest.mark.statistical
def test_averaged_over_draws_it_is_the_gradient_of_the_free_form_bound():
    model = wave(3)
    positions, zeta = inducing_positions(model, True), torch.zeros(3, dtype=F64, requires_grad=True)
    (expected,) = torch.autograd.grad(known(positions.model_at(model, zeta), 1)[1], zeta)
    v, _ = known(model, 400)
    slopes = [AveragedBound(model, positions, v.new_zeros(1, 0), row[None]).value_and_grad(v.new_zeros(1, 3))[1] for row in v]
    assert worst_excess(torch.cat(slopes), expected) < 1
    assert worst_excess(torch.cat(slopes), 0.9 * expected) > 1


def distance(model, x):
    """Root mean squared distance of the predictive means from the full GP's."""
    v, _ = known(model, 4000)
    full = tg.GP(model.train_x, model.train_y, model.kernel, model.likelihood)
    covariance = full.prior(v.new_zeros(1, 0)).covariance[0]
    cross = model.covariance.bind(x[:, None], model.train_x)(full.layout.raw_values(v.new_zeros(1, 0)).by_module["kernel"])[0]
    expected = cross @ torch.linalg.solve(covariance + NOISE * torch.eye(len(covariance), dtype=F64), model.train_y)
    found = draws_of(model, v.new_zeros(len(v), 0), v).predict(x).latent_mean
    return float((found - expected).square().mean().sqrt())


@pytest.mark.slow
def test_bad_inducing_points_are_mended_and_the_posterior_nears_that_of_the_full_model():
    model, x = wave(6), torch.linspace(0, 1, 30, dtype=F64)
    bounds, distances = [float(known(model, 1)[1])], [distance(model, x)]
    for number in range(6):
        v, _ = known(model, 64, seed=number)
        model = tg.refine_inducing_points(draws_of(model, v.new_zeros(len(v), 0), v))
        bounds.append(float(known(model, 1)[1]))
        distances.append(distance(model, x))
    assert all(after > before for before, after in itertools.pairwise(bounds))
    assert distances[-1] < 0.5 * distances[0]


def test_what_is_returned_is_a_model_like_the_other():
    model = sparse_gp("probit", num_data=10, num_inducing=3)
    theta, v = torch.full((5, 3), 0.3, dtype=F64), torch.linspace(-1, 1, 15, dtype=F64).view(5, 3)
    before = model.inducing_points.clone()
    refined = tg.refine_inducing_points(draws_of(model, theta, v), max_iterations=3)
    with torch.inference_mode():
        again = tg.refine_inducing_points(draws_of(model, theta, v), max_iterations=3)
    assert torch.equal(refined.inducing_points, again.inducing_points) and not again.inducing_points.is_inference()
    assert torch.equal(model.inducing_points, before) and not torch.equal(refined.inducing_points, before)
    torch.testing.assert_close(refined.layout.present(refined)[0], theta[0])
    positions = torch.zeros(2, 6, dtype=F64)
    fresh = tg.SparseGP(model.train_x, model.train_y, model.kernel, model.likelihood, inducing_points=refined.inducing_points)
    torch.testing.assert_close(tg.joint_log_density(refined)(positions), tg.joint_log_density(fresh)(positions))


def test_mistakes_are_named():
    full = gp("probit")
    for given, error, match in (
        (None, TypeError, "posterior is NoneType"),
        (draws_of(full, torch.zeros(2, 3, dtype=F64), torch.zeros(2, 6, dtype=F64)), ValueError, "draws of a GP"),
    ):
        with pytest.raises(error, match=match):
            tg.refine_inducing_points(given)
    model = sparse_gp("probit")
    good = draws_of(model, torch.zeros(2, 3, dtype=F64), torch.zeros(2, 4, dtype=F64))
    for options, match in (({"num_draws": 0}, "num_draws is 0"), ({"max_iterations": 0}, "max_iterations is 0")):
        with pytest.raises(ValueError, match=match):
            tg.refine_inducing_points(good, **options)
    bad = draws_of(model, torch.full((2, 3), torch.nan, dtype=F64), torch.zeros(2, 4, dtype=F64))
    with pytest.raises(ValueError, match="not finite at some of the draws"):
        tg.refine_inducing_points(bad)
