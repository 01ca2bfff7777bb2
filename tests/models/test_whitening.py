"""Coordinates that are white under sites: against plain formulas, a closed form, and the density of [theta, v]."""

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.priors import NormalPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, Halved, fixed_kernel, gp, inputs, kernel, sparse_gp, targets
from torchgpmc.density import AutogradDensity
from torchgpmc.models import JointLogDensity
from torchgpmc.models.whitening import GaussianSites


def random_sites(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return GaussianSites(
        3 * torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype),
    )


def random_positions(model, chains=3):
    generator = torch.Generator().manual_seed(2)
    size = model.layout.size + model.latent_size
    return 0.5 * torch.randn(chains, size, generator=generator, dtype=torch.float64).to(model.train_x)


def constant_mean():
    return gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))


MODELS = {
    "probit": lambda: gp("probit", jitter=1e-4),
    "sampled mean and parameters": lambda: gp("student_t", mean=constant_mean(), jitter=1e-4),
    "poisson": lambda: gp("poisson", jitter=1e-4),
}


def assert_gradients_agree(density, position, **tolerance):
    found, expected = density.value_and_grad(position), AutogradDensity.value_and_grad(density, position)
    assert bool(torch.isfinite(found[0]).all()) and not found[1].requires_grad
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(density(position), found[0], **tolerance)


@pytest.mark.parametrize("shape", [(6,), (3, 6)], ids=["common", "one set a chain"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_by_parts_is_autograds(name, shape):
    model = MODELS[name]()
    many = model.train_y if shape == (6,) else model.train_y.expand(3, -1)
    density = JointLogDensity(model, many, sites=random_sites(*shape))
    assert_gradients_agree(density, random_positions(model), rtol=1e-9, atol=1e-9)
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(density.select(rows)(random_positions(model)[rows]), density(random_positions(model))[rows])


def test_float32():
    model = gp("probit", jitter=1e-3, dtype=torch.float32)
    sites = random_sites(6, dtype=torch.float32)
    assert_gradients_agree(JointLogDensity(model, sites=sites), random_positions(model), rtol=2e-3, atol=2e-3)


def map_of(density, theta):
    """v at w = 0 and the matrix dv/dw, v being affine in w."""
    size = density.model.latent_size
    corners = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
    v, log_volume = density.whitened(torch.cat([theta.expand(size + 1, -1), corners], -1))
    return v[0], (v[1:] - v[0]).mT, log_volume


@pytest.mark.parametrize("name", [*MODELS, "sparse"])
def test_white_coordinates_are_those_of_the_posterior_given_the_sites(name):
    """dv/dw is a root of the covariance, the centre is the mean, both by plain inverses; the density is that of [theta, v]."""
    model = sparse_gp("probit", jitter=1e-4) if name == "sparse" else MODELS[name]()
    sites = random_sites(len(model.train_x))
    density, position = JointLogDensity(model, sites=sites), random_positions(model)
    size = model.layout.size
    for row in position:
        centre, matrix, log_volume = map_of(density, row[:size])
        at = model.at(model.prior(row[None, :size]))
        factor = at.projection.mT[0].detach().numpy()
        precision, shift = (part.numpy() for part in sites)
        covariance = np.linalg.inv(np.eye(factor.shape[1]) + factor.T @ np.diag(precision) @ factor)
        mean = covariance @ factor.T @ (shift - precision * at.mean[0].detach().numpy())
        np.testing.assert_allclose(matrix @ matrix.mT, covariance, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(centre, mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(log_volume[0], matrix.slogdet().logabsdet)
        v = density.whitened(row[None])[0]
        plain = JointLogDensity(model)(torch.cat([row[None, :size], v], -1))
        torch.testing.assert_close(density(row[None]), plain + log_volume[:1])
    assert_gradients_agree(density, position, rtol=1e-9, atol=1e-9)


def test_with_the_likelihoods_own_sites_latents_are_white_and_the_rest_is_the_evidence():
    """Gaussian noise of fixed size: the density of [theta, w] is p(theta) p(y | theta) N(w | 0, I), whatever w."""
    x, y = inputs(6), targets("gaussian", 6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3
    noise = likelihood.double().noise.item()
    model = tg.GP(x, y, kernel(2), likelihood.requires_grad_(False), jitter=1e-6)
    position = random_positions(model, chains=5)
    theta, white = position.split([model.layout.size, 6], -1)
    found = JointLogDensity(model, sites=GaussianSites(torch.full((6,), 1 / noise).double(), y / noise))(position)
    covariance = model.prior(theta).covariance.detach().numpy() + noise * np.eye(6)
    evidence = [scipy.stats.multivariate_normal(np.zeros(6), matrix).logpdf(y.numpy()) for matrix in covariance]
    expected = model.layout.log_prior(theta) + torch.tensor(evidence) + torch.distributions.Normal(0, 1).log_prob(white).sum(-1)
    torch.testing.assert_close(found.detach(), expected.detach())


def test_empty_sites_change_nothing():
    model = gp("probit", jitter=1e-4)
    position, nothing = random_positions(model), GaussianSites(torch.zeros(6).double(), torch.zeros(6).double())
    density = JointLogDensity(model, sites=nothing)
    for found, expected in zip(density.value_and_grad(position), JointLogDensity(model).value_and_grad(position), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(density.whitened(position)[0], position[:, model.layout.size :])


def test_fixed_hyperparameters():
    model = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"]())
    density, position = JointLogDensity(model, sites=random_sites(6)), random_positions(model)
    assert_gradients_agree(density, position)
    v, log_volume = density.whitened(position)
    torch.testing.assert_close(density(position), JointLogDensity(model)(v) + log_volume)


@pytest.mark.parametrize("broken", ["prior", "sites"])
def test_a_row_that_does_not_factorise_fails_alone(broken):
    """With an enormous lengthscale all rows of K are the same; with an enormous outputscale and sites P overflows."""
    model = gp("probit", num_data=30, jitter=0.0 if broken == "prior" else 1e-6)
    position = torch.full((2, model.layout.size + 30), -3.0, dtype=torch.float64)
    position[1, : model.layout.size] = 9.0 if broken == "prior" else 0.0
    sites = random_sites(2, 30)
    if broken == "sites":
        sites.precision[1] = 1e308
    density = JointLogDensity(model, model.train_y.expand(2, -1), sites=sites)
    value, gradient = density.value_and_grad(position)
    assert bool(torch.isfinite(value[0])) and float(value[1]) == -torch.inf
    assert float(density(position)[1]) == -torch.inf
    assert bool(torch.isfinite(gradient).all()) and float(gradient[1].abs().max()) == 0.0


def test_a_model_that_overrides_its_density_keeps_it():
    plain = gp(jitter=1e-4)
    model = Halved(plain.train_x, plain.train_y, kernel(2), tg.likelihoods.Bernoulli(), jitter=1e-4)
    sites, position = random_sites(6), random_positions(model)
    assert_gradients_agree(JointLogDensity(model, sites=sites), position, rtol=1e-9, atol=1e-9)
    difference = JointLogDensity(model, sites=sites)(position) - JointLogDensity(plain, sites=sites)(position)
    assert float(difference.abs().max()) > 0.1
