"""Estimates of the joint density from some of the data: their mean, and where they are exact."""

import gpytorch
import pytest
import torch

import torchgpmc as tg
from tests.problems import fixed_kernel, inputs, kernel, projected_process, sparse_gp, targets
from torchgpmc.models import JointLogDensity
from torchgpmc.models.control_variates import EstimatedJointLogDensity, fixed_point

N = 8


def with_likelihood(likelihood, name):
    x = inputs(N)
    return tg.SparseGP(x, targets(name, N), kernel(), likelihood, inducing_points=x[:3], data_chunk=3)


def known_noise():
    variances = torch.linspace(0.1, 2.0, N).double()
    return with_likelihood(gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise=variances), "gaussian")


def fixed_hyperparameters():
    return tg.SparseGP(inputs(N), targets("probit", N), fixed_kernel(), tg.likelihoods.Bernoulli(), inducing_points=inputs(N)[:3])


MODELS = {
    "a sampled noise": lambda: sparse_gp("gaussian", num_data=N),
    "three latents": lambda: sparse_gp("robust_max", num_data=N),
    "an exposure a datum": lambda: with_likelihood(tg.likelihoods.Poisson(exposure=torch.linspace(0.5, 2.0, N)), "poisson"),
    "a noise a datum": known_noise,
    "a likelihood of gpytorch's": lambda: with_likelihood(gpytorch.likelihoods.BernoulliLikelihood(), "probit"),
    "fixed hyperparameters": fixed_hyperparameters,
    "projected": lambda: projected_process("probit", num_data=N),
}


def positions(model, seed, chains=3):
    size = model.layout.size + model.latent_size
    return 0.5 * torch.randn(chains, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_all_minibatches_is_the_density_and_its_gradient(name):
    model = MODELS[name]()
    there, position = fixed_point(model, positions(model, 1, 1)), positions(model, 2)
    batches = torch.arange(N).roll(3).split(2)
    found = [EstimatedJointLogDensity(model, there, rows).value_and_grad(position) for rows in batches]
    values, gradients = (torch.stack(part) for part in zip(*found, strict=True))
    expected = JointLogDensity(model).value_and_grad(position)
    torch.testing.assert_close(values.mean(0), expected[0])
    torch.testing.assert_close(gradients.mean(0), expected[1])
    assert float(gradients.std(0).max()) > 1e-3  # each is an estimate


def test_errors_vanish_with_the_distance_to_the_fixed_point():
    model = MODELS["a sampled noise"]()
    there = fixed_point(model, positions(model, 1, 1))
    estimate, whole = EstimatedJointLogDensity(model, there, torch.tensor([1, 6])), JointLogDensity(model)
    position = there.position + torch.tensor([0.0, 1e-4, 1e-3, 1e-2])[:, None] * positions(model, 2, 1)
    errors = (estimate.value_and_grad(position)[1] - whole.value_and_grad(position)[1]).norm(dim=-1)
    assert float(errors[0]) < 1e-10
    torch.testing.assert_close(errors[2:] / errors[1:3], torch.full((2,), 10.0).double(), rtol=0.1, atol=0)


def test_a_row_that_fails_says_so_alone():
    model = tg.SparseGP(
        inputs(30), targets("probit", 30), kernel(), tg.likelihoods.Bernoulli(), inducing_points=inputs(20), jitter=0.0
    )
    there, position = fixed_point(model, torch.full((1, 23), -1.0).double()), torch.full((2, 23), -1.0).double()
    position[1, :3] = 9.0  # long lengthscales: K(Z, Z) of rank one
    value, gradient = EstimatedJointLogDensity(model, there, torch.arange(4)).value_and_grad(position)
    assert bool(torch.isfinite(value[0])) and bool(torch.isinf(value[1])) and bool((gradient[1] == 0).all())
