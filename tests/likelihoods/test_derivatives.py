"""Derivatives and tilted moments: closed forms against autograd, all of them against dense quadrature."""

import math

import pytest
import scipy.optimize
import torch

from tests.likelihoods.test_likelihoods import MEAN, SCALAR, VARIANCE, make
from tests.likelihoods.test_predictive import dense_log_integral, student_t
from tests.problems import targets
from tests.speed import quick
from torchgpmc.likelihoods import Bernoulli, Factorised, NegativeBinomial, Poisson, Softmax

F = torch.tensor([[-3.0, -0.4, 0.01, 0.6, 2.5], [1.5, -1.2, 0.3, -6.0, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize("name", SCALAR)
def test_closed_derivatives_equal_autograd(name):
    likelihood, y = make(name), targets(name, 5)
    for found, expected in zip(likelihood.derivatives(F, y), Factorised.derivatives(likelihood, F, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_curvature_of_several_latents_equals_autograds(mixed):
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(3, 5, 2 if mixed else 4, generator=generator, dtype=torch.float64)
    likelihood = Softmax(num_classes=4, num_features=2, mixing_weights=mixed).double()
    y = torch.tensor([0.0, 3.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    for found, expected in zip(likelihood.curvature(f, y), Factorised.curvature(likelihood, f, y), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", SCALAR)
def test_derivatives_equal_finite_differences(name):
    likelihood, y, step = make(name), targets(name, 5), 1e-4
    left, right = (likelihood.derivatives(F + sign * step, y) for sign in (-1, 1))
    found = likelihood.derivatives(F, y)
    for order in range(3):
        difference = (right[order] - left[order]) / (2 * step)
        torch.testing.assert_close(found[order + 1], difference, rtol=1e-4, atol=1e-5)


def dense_tilted(likelihood, mean, variance, y):
    grid = torch.linspace(-12, 12, 200_001, dtype=torch.float64).view(-1, 1, 1)
    points = mean + variance.sqrt() * grid
    density = (likelihood.pointwise_log_prob(points, y) - 0.5 * grid**2).exp() / (2 * torch.pi) ** 0.5
    normaliser = torch.trapezoid(density, grid, dim=0)
    first = torch.trapezoid(density * points, grid, dim=0) / normaliser
    second = torch.trapezoid(density * (points - first) ** 2, grid, dim=0) / normaliser
    return normaliser.log(), first, second


@pytest.mark.parametrize("name", quick(["probit", "logit", "gaussian", "poisson"], SCALAR))
def test_tilted_moments_equal_dense_quadrature(name):
    likelihood, y = make(name), targets(name, 5)
    tolerance = 1e-6 if name in ("laplace", "student_t") else 1e-7
    for found, expected in zip(
        likelihood.tilted_moments(MEAN, VARIANCE, y), dense_tilted(likelihood, MEAN, VARIANCE, y), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["probit", "gaussian"])
def test_closed_tilted_moments_equal_the_general_rule(name):
    likelihood, y = make(name), targets(name, 5)
    pairs = zip(likelihood.tilted_moments(MEAN, VARIANCE, y), Factorised.tilted_moments(likelihood, MEAN, VARIANCE, y), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_tilted_moments_see_a_likelihood_much_narrower_than_the_normal():
    y = torch.tensor([1000.0], dtype=torch.float64)
    mean, variance = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 25.0, dtype=torch.float64)
    found = Poisson().tilted_moments(mean, variance, y)
    expected = dense_tilted(Poisson(), mean, variance, y)
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("degrees", [1.1, 4.0])
def test_tilted_moments_of_student_t_see_both_humps(scale, degrees):
    """The normal's and the datum's, of any share: by 12000 panels that know where each lies."""
    likelihood, distances = student_t(scale, degrees), (0.5, 3.0, 5.0, 8.0, 15.0)
    for y in (torch.tensor(distance, dtype=torch.float64) for distance in distances):
        mean, variance = torch.zeros(1, 1).double(), torch.full((1, 1), 0.5).double()
        found = likelihood.tilted_moments(mean, variance, y)

        def log_moment(power, centre, y=y):
            def log_function(f):
                return likelihood.pointwise_log_prob(f[None], y)[0] + power * (f - centre).abs().log()

            return dense_log_integral(log_function, 0.0, 0.5, float(y), scale)

        normaliser = log_moment(0, 0.0)
        assert float(found.log_normaliser) == pytest.approx(normaliser, abs=1e-6)
        # All of the mass lies above -40.
        tilted_mean = math.exp(log_moment(1, -40.0) - normaliser) - 40.0
        assert float(found.mean) == pytest.approx(tilted_mean, abs=1e-5, rel=1e-5)
        assert float(found.variance) == pytest.approx(math.exp(log_moment(2, float(found.mean)) - normaliser), rel=1e-5)


def test_probit_derivatives_hold_far_in_the_tail():
    f = torch.tensor([[-60.0, -38.0]], dtype=torch.float64)
    found = Bernoulli().derivatives(f, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found.first, -f + 1 / -f, rtol=1e-3, atol=0)
    assert bool((found.second < 0).all()) and bool((found.second > -1.0).all())


@pytest.mark.parametrize("mixed", [False, True])
def test_the_slope_of_softmax_is_autograds(mixed):
    generator = torch.Generator().manual_seed(3)
    likelihood = Softmax(num_classes=4, num_features=2, mixing_weights=mixed).double()
    f = torch.randn(3, 5, 2 if mixed else 4, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.0, 3.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    value = likelihood.log_prob(f, y)
    (slope,) = torch.autograd.grad(value.sum(), f)
    torch.testing.assert_close(likelihood.log_prob_and_slope(f, y), (value, slope))


WIDE = {
    "logit": (Bernoulli("logit"), [0.0, 1.0]),
    "poisson": (Poisson(), [0.0, 3.0, 2000.0]),
    "negative binomial": (NegativeBinomial(), [0.0, 3.0, 2000.0]),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in WIDE), ("logit", torch.float32)])
def test_the_mode_of_a_wide_cavity_is_found_in_few_steps(name, dtype, monkeypatch):
    """Newton's steps alone go to and fro between the ends of a sigmoid, and come back from an exponential by a unit a step."""
    likelihood, targets = WIDE[name]
    mean, variance, y = (
        part.flatten()[None].to(dtype)
        for part in torch.meshgrid(
            torch.tensor([-80.0, -5.0, 0.0, 5.0, 80.0]),
            torch.tensor([0.01, 1.0, 30.0, 1000.0]),
            torch.tensor(targets),
            indexing="ij",
        )
    )
    steps, derivatives = [], type(likelihood).derivatives
    monkeypatch.setattr(type(likelihood), "derivatives", lambda self, *where: steps.append(1) or derivatives(self, *where))
    mode, scale = likelihood._tilted_mode(mean, variance, y)
    assert len(steps) <= 25
    tolerance = 1e-5 if dtype == torch.float64 else 1e-3
    for found, width, m, v, count in zip(
        *(part.flatten().double().tolist() for part in (mode, scale, mean, variance, y)), strict=True
    ):

        def slope(f, m=m, v=v, count=count):
            point, y = torch.tensor([[f]], dtype=torch.float64), torch.tensor([count], dtype=torch.float64)
            return float(derivatives(likelihood, point, y).first.detach()) - (f - m) / v

        expected = scipy.optimize.brentq(slope, -2500.0, 100.0, xtol=1e-12)
        assert found == pytest.approx(expected, abs=tolerance * width, rel=1e-12 if dtype == torch.float64 else 1e-6)
