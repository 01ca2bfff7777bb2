"""The exact evidence's written-out gradient against autograd and against scipy; a row that fails, fails alone."""

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior, LogNormalPrior, NormalPrior

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.density import AutogradDensity

PRIOR = {"lengthscale_prior": LogNormalPrior(0.0, 1.0)}
KERNELS = {
    "rbf": lambda: RBFKernel(**PRIOR),
    "rbf, a lengthscale a column": lambda: ScaleKernel(RBFKernel(ard_num_dims=2, **PRIOR), outputscale_prior=HalfNormalPrior(1.0)),
    "matern 1/2": lambda: ScaleKernel(MaternKernel(0.5, ard_num_dims=2, **PRIOR), outputscale_prior=GammaPrior(2.0, 1.0)),
    "matern 3/2": lambda: ScaleKernel(MaternKernel(1.5, **PRIOR), outputscale_prior=GammaPrior(2.0, 1.0)),
    "matern 5/2": lambda: MaternKernel(2.5, ard_num_dims=2, **PRIOR),
    "rational quadratic": lambda: rational_quadratic(),
    "by autograd": lambda: PeriodicKernel(period_length_prior=GammaPrior(2.0, 1.0), **PRIOR),
}


def rational_quadratic():
    kernel = RQKernel(**PRIOR)
    kernel.register_prior("alpha_prior", GammaPrior(2.0, 1.0), lambda module: module.alpha)
    return kernel


def model_of(kernel, mean=None, x=None, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(7, 2, generator=generator, dtype=torch.float64) if x is None else x
    y = x.sum(-1).sin() + 0.1 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return tg.GPRegression(x, y, kernel, GaussianLikelihood(noise_prior=HalfCauchyPrior(0.25)), mean=mean, **options)


def thetas(model, count=3):
    return 0.5 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_agrees_with_autograd(model, theta):
    density = ApproximateMarginal(model, Conjugate())
    for found, expected in zip(density.value_and_grad(theta), AutogradDensity.value_and_grad(density, theta), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_is_autograds(name):
    model = model_of(KERNELS[name]())
    assert_agrees_with_autograd(model, thetas(model))


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
def test_rows_that_coincide_have_finite_gradients(smoothness):
    x = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.7, 0.4], [0.7, 0.4 + 1e-9]], dtype=torch.float64)
    model = model_of(MaternKernel(smoothness, ard_num_dims=2, **PRIOR), x=x)
    density, theta = ApproximateMarginal(model, Conjugate()), thetas(model)
    found = density.value_and_grad(theta)[1]
    steps = 1e-5 * torch.eye(theta.shape[1], dtype=torch.float64)
    # Not autograd: the root of a distance that is zero but for rounding has no derivative to speak of.
    differences = torch.stack([(density(theta + step) - density(theta - step)) / 2e-5 for step in steps], -1)
    torch.testing.assert_close(found, differences, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mean",
    [
        gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0)),
        gpytorch.means.ConstantMean().requires_grad_(False),
        gpytorch.means.LinearMean(2).requires_grad_(False),
    ],
    ids=["constant", "fixed", "by autograd"],
)
def test_means_have_their_part(mean):
    model = model_of(KERNELS["matern 5/2"](), mean)
    assert_agrees_with_autograd(model, thetas(model))


def test_one_data_set_a_chain():
    model = model_of(KERNELS["matern 3/2"]())
    several = model.with_targets(torch.stack([model.train_y, -model.train_y, 2 * model.train_y]))
    assert_agrees_with_autograd(several, thetas(several))


def test_the_value_is_scipys():
    model = model_of(RBFKernel(**PRIOR), jitter=1e-4)
    theta = thetas(model)
    found = ApproximateMarginal(model, Conjugate()).value_and_grad(theta)[0]
    x, y = model.train_x.numpy(), model.train_y.numpy()
    square = ((x[:, None] - x[None]) ** 2).sum(-1)
    for row, (log_lengthscale, log_noise) in zip(found, theta.numpy(), strict=True):
        lengthscale, variance = np.exp(log_lengthscale), np.exp(log_noise) + 1e-4  # gpytorch's bound of the noise is 1e-4
        covariance = np.exp(-0.5 * square / lengthscale**2) + (1e-4 + variance) * np.eye(len(y))
        expected = scipy.stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)
        expected += scipy.stats.norm(0, 1).logpdf(log_lengthscale)
        mass = scipy.stats.halfcauchy(scale=0.25).sf(1e-4)
        expected += scipy.stats.halfcauchy(scale=0.25).logpdf(variance) - np.log(mass) + log_noise
        assert abs(float(row) - expected) < 1e-8


def test_a_row_that_does_not_factorise_fails_alone():
    model = model_of(KERNELS["rbf, a lengthscale a column"](), jitter=0.0)
    theta = thetas(model)
    theta[1, model.layout.names.index("kernel.outputscale")] = 800.0  # overflows
    value, gradient = ApproximateMarginal(model, Conjugate()).value_and_grad(theta)
    assert value[1] == -torch.inf and bool((gradient[1] == 0).all())
    alone = ApproximateMarginal(model, Conjugate()).value_and_grad(theta[[0, 2]])
    torch.testing.assert_close(value[[0, 2]], alone[0])
    torch.testing.assert_close(gradient[[0, 2]], alone[1])
