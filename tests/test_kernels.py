"""The kernel and the prior that gpytorch has not, against formulas written here, and inside models."""

import copy
import pickle

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from torchgpmc.adapter.covariance import BatchMode, OneByOne, covariance_function
from torchgpmc.adapter.functional import perturbed_values
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.density import AutogradDensity


def single(number):
    """As gpytorch keeps the numbers of priors."""
    return float(np.float32(number))


def data(count=7, columns=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, columns, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)


def model_of(x, y, **options):
    prior = tg.priors.ShiftedGammaPrior(0.9, 10.0, 1e-4)
    likelihood = GaussianLikelihood(noise_prior=prior, noise_constraint=GreaterThan(1e-4))
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    return tg.GPRegression(x, y, tg.kernels.SAAS(x.shape[1], **options), likelihood, mean=mean, jitter=0.0)


def theta_of(model, count=3):
    return 0.5 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def covariance(x, scale, tausq, relevance):
    """Eriksson & Jankowiak (2021), in numpy."""
    gap = x[:, None, :] - x[None, :, :]
    r = np.sqrt((tausq * relevance * gap**2).sum(-1))
    return scale * (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)


def log_density(theta, x, y):
    """log p(theta, y) up to nothing: priors, Jacobians of the logarithms, and the normal density of y."""
    mean, excess = theta[-2], np.exp(theta[-1])
    scale, tausq, relevance = np.exp(theta[0]), np.exp(theta[1]), np.exp(theta[2:-2])
    total = scipy.stats.gamma.logpdf(scale, 2.0, scale=1 / single(0.15)) + scipy.stats.halfcauchy.logpdf(tausq, scale=single(0.1))
    total += scipy.stats.halfcauchy.logpdf(relevance).sum() + scipy.stats.norm.logpdf(mean)
    total += scipy.stats.gamma.logpdf(excess, single(0.9), scale=0.1) + theta[:-2].sum() + theta[-1]
    noisy = covariance(x, scale, tausq, relevance) + (1e-4 + excess) * np.eye(len(x))
    return total + scipy.stats.multivariate_normal.logpdf(y, np.full(len(x), mean), noisy)


def test_the_kernel_is_its_formula():
    x, _ = data()
    kernel = tg.kernels.SAAS(3).double()
    kernel.outputscale, kernel.tausq, kernel.relevance = 1.7, 0.3, torch.tensor([[0.1, 2.0, 40.0]])
    expected = covariance(x.numpy(), 1.7, 0.3, np.array([0.1, 2.0, 40.0]))
    np.testing.assert_allclose(kernel(x).to_dense().detach(), expected, rtol=1e-6)
    np.testing.assert_allclose(kernel(x, x[:2]).to_dense().detach(), expected[:, :2], rtol=1e-6)
    np.testing.assert_allclose(kernel(x, diag=True).detach(), np.full(len(x), 1.7), rtol=1e-6)
    np.testing.assert_allclose(kernel.lengthscale.detach(), (0.3 * np.array([[0.1, 2.0, 40.0]])) ** -0.5, rtol=1e-6)


@pytest.mark.parametrize(("columns", "active"), [(3, None), (1, None), (2, (0, 2))])
def test_the_closed_form_is_gpytorchs_answer(columns, active):
    x, _ = data(columns=3 if active else columns)
    kernel = tg.kernels.SAAS(columns, active_dims=active).double()
    closed, values = covariance_function(kernel, x), perturbed_values(kernel, 4)
    assert not isinstance(closed, BatchMode | OneByOne)
    for other in (BatchMode(kernel), OneByOne(kernel)):
        for inputs in (x, x[:2]):
            torch.testing.assert_close(closed.bind(x, inputs)(values), other.bind(x, inputs)(values), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(closed.diagonal(values, x), other.diagonal(values, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_density_is_the_formulas_and_its_gradient_autograds(columns):
    x, y = data(columns=columns)
    model = model_of(x, y)
    theta = theta_of(model)
    density = ApproximateMarginal(model, Conjugate())
    expected = [log_density(row.numpy(), x.numpy(), y.numpy()) for row in theta]
    np.testing.assert_allclose(density(theta), expected, rtol=1e-10)
    for found, by_autograd in zip(density.value_and_grad(theta), AutogradDensity.value_and_grad(density, theta), strict=True):
        torch.testing.assert_close(found, by_autograd, rtol=1e-8, atol=1e-8)


def test_priors_draw_and_models_copy_and_pickle():
    model = model_of(*data())
    draws = model.layout.constrain(model.layout.sample_prior(4000, torch.Generator().manual_seed(0)))
    for name, expected in {
        "kernel.outputscale": scipy.stats.gamma(2.0, scale=1 / 0.15),
        "kernel.tausq": scipy.stats.halfcauchy(scale=0.1),
        "kernel.relevance": scipy.stats.halfcauchy(),
        "likelihood.noise_covar.noise": scipy.stats.gamma(0.9, loc=1e-4, scale=0.1),
    }.items():
        assert scipy.stats.kstest(draws[name].flatten().numpy(), expected.cdf).pvalue > 1e-4, name
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        theta = theta_of(model)
        torch.testing.assert_close(ApproximateMarginal(twin, Conjugate())(theta), ApproximateMarginal(model, Conjugate())(theta))


def test_the_shifted_gamma_prior_ends_at_its_shift():
    prior, points = tg.priors.ShiftedGammaPrior(0.9, 10.0, 1e-4), torch.tensor([0.0, 1e-4, 0.01, 0.3], dtype=torch.float64)
    expected = scipy.stats.gamma(0.9, loc=1e-4, scale=0.1)
    np.testing.assert_allclose(prior.log_prob(points)[2:], expected.logpdf(points[2:]), rtol=1e-6)
    assert prior.log_prob(points)[:2].tolist() == [-np.inf] * 2
    np.testing.assert_allclose(prior.cdf(points), expected.cdf(points), atol=1e-6)
    np.testing.assert_allclose(float(prior.mean), expected.mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="shift is 0"):
        tg.priors.ShiftedGammaPrior(0.9, 10.0, 0)
    with pytest.raises(ValueError, match="num_dims is"):
        tg.kernels.SAAS(2.0)


# --- White ------------------------------------------------------------------------------------------------------------


def with_nugget(**options):
    return RBFKernel(lengthscale_prior=GammaPrior(2.0, 3.0)) + tg.kernels.White(0.3, **options)


def test_a_nugget_is_variance_that_no_inducing_point_takes_away():
    x, _ = data(9)
    z = x[:3] + 0.01
    y, likelihood = (x[:, 0] > 0.5).double(), tg.likelihoods.Bernoulli()
    model, plain = (tg.SparseGP(x, y, k, likelihood, inducing_points=z) for k in (with_nugget(), with_nugget().kernels[0]))
    theta = theta_of(plain)
    at, at_plain = (m.at_data(m.layout.raw_values(theta)) for m in (model, plain))
    inner = at_plain.prior.covariance + 0.3 * torch.eye(3)
    torch.testing.assert_close(at.prior.covariance, inner)
    outer = plain.cross(at_plain.prior, x).covariance
    explained = (outer * torch.linalg.solve(inner, outer)).sum(1)
    torch.testing.assert_close(at.variance, 1.3 - explained)
    assert float(at.variance.min().detach()) > 0.3


def test_a_nuggets_variance_may_be_sampled():
    x, y = data()
    model = tg.GP(x, (y > 0).double(), with_nugget(variance_prior=GammaPrior(2.0, 9.0)), tg.likelihoods.Bernoulli())
    assert model.layout.names == ["kernel.kernels.0.lengthscale", "kernel.kernels.1.variance"]
    prior = model.prior(torch.tensor([[0.0, 0.0]]).double())
    torch.testing.assert_close(prior.covariance[0].diagonal(), torch.full((len(x),), 2.0 + model.jitter).double())
    with pytest.raises(ValueError, match="variance is 0"):
        tg.kernels.White(0.0)
