"""The exact evidence of regressions, and draws of v from its normal posterior, against dense algebra."""

import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood

import torchgpmc as tg
from tests.problems import gp_regression, inputs, kernel, targets
from torchgpmc.evidence import ExactEstimator
from torchgpmc.models.latents import likelihood_values
from torchgpmc.runs.chain_targets import estimator_for


def a_noise_a_datum():
    noise = torch.linspace(0.05, 0.5, 6, dtype=torch.float64)
    return tg.GPRegression(inputs(6, 2), targets("gaussian", 6), kernel(2), FixedNoiseGaussianLikelihood(noise=noise))


def a_latent_gp():
    """Not integrated out but where a method does so."""
    return tg.GP(inputs(6, 2), targets("gaussian", 6), kernel(2), gp_regression().likelihood)


def estimator_of(model):
    return ExactEstimator(model, model.targets)


def thetas(model, count):
    return 0.5 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("make", [gp_regression, a_noise_a_datum, a_latent_gp])
def test_draws_have_the_posteriors_mean_and_covariance(make):
    """Draws are affine in the normal numbers, so that these two are all there is to know."""
    model = make()
    size, theta = model.latent_size, thetas(model, 1)
    prior = model.prior(theta)
    noise = model.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.noise).expand(1, size)[0]
    factor = prior.factor[0]
    precision = torch.eye(size, dtype=torch.float64) + factor.mT @ (factor / noise[:, None])
    mean = torch.linalg.solve(precision, factor.mT @ ((model.targets.values - prior.mean[0]) / noise))
    normals = torch.cat([torch.zeros(1, 2 * size), torch.eye(2 * size)]).double()
    found = estimator_of(model).evaluate(theta.expand(len(normals), -1), normals)
    torch.testing.assert_close(found.whitened[0], mean, rtol=1e-8, atol=1e-9)
    root = found.whitened[1:] - mean
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(precision), rtol=1e-8, atol=1e-9)
    total = torch.distributions.MultivariateNormal(prior.mean[0], prior.covariance[0] + noise.diag())
    torch.testing.assert_close(found.value, total.log_prob(model.targets.values).expand(len(normals)))
    at = model.at(model.prior(theta.expand(len(normals), -1)))
    torch.testing.assert_close(found.log_likelihood, model.log_likelihood(at, found.whitened))


def test_further_draws_are_from_numbers_of_their_own():
    model = gp_regression()
    theta, generator = thetas(model, 3), torch.Generator().manual_seed(0)
    normals = torch.randn(3, 2, 2 * model.latent_size, generator=generator, dtype=torch.float64)
    together = estimator_of(model).evaluate(theta, normals.flatten(1))
    first, second = (estimator_of(model).evaluate(theta, part) for part in normals.unbind(1))
    torch.testing.assert_close(together.whitened, first.whitened)
    torch.testing.assert_close(together.further_whitened[:, 0], second.whitened)
    torch.testing.assert_close(together.log_likelihood, first.log_likelihood)


def test_a_failed_factorisation_is_its_own_thetas():
    model = gp_regression(jitter=0.0)
    theta, normals = thetas(model, 3), torch.zeros(3, 2 * model.latent_size, dtype=torch.float64)
    fine = estimator_of(model).evaluate(theta, normals)
    theta[1, :3] = torch.tensor([0.0, 25.0, 25.0])  # logarithms of outputscale and lengthscales at which K is all ones
    found = estimator_of(model).evaluate(theta, normals)
    assert found.value[1] == -torch.inf
    torch.testing.assert_close(found.value[[0, 2]], fine.value[[0, 2]])


@pytest.mark.parametrize("noise", [1e-4, 1e-40])
def test_next_to_no_noise_is_taken_as_long_as_it_has_digits(noise):
    likelihood = GaussianLikelihood(noise_constraint=Positive()).requires_grad_(False)
    likelihood.noise = noise
    model = tg.GPRegression(inputs(6, 2), targets("gaussian", 6), kernel(2), likelihood)
    found = estimator_of(model).evaluate(thetas(model, 1), torch.ones(1, 2 * model.latent_size, dtype=torch.float64))
    assert bool(torch.isfinite(found.value)) == (noise > 1e-10)


def test_a_data_set_a_chain():
    model = gp_regression()
    several = torch.stack([targets("gaussian", 6, seed) for seed in range(3)])
    theta, normals = thetas(model, 3), torch.zeros(3, 2 * model.latent_size, dtype=torch.float64)
    of_all = model.with_targets(several)
    whole = estimator_of(of_all).evaluate(theta, normals)
    picked = estimator_of(of_all).select(torch.tensor([2])).evaluate(theta[2:], normals[2:])
    for row in range(3):
        alone = estimator_of(model.with_targets(several[row])).evaluate(theta[row : row + 1], normals[row : row + 1])
        torch.testing.assert_close((whole.value[row], whole.whitened[row]), (alone.value[0], alone.whitened[0]))
    torch.testing.assert_close(picked.value, whole.value[2:])


def test_an_estimate_given_latents_holds_them():
    model = gp_regression()
    theta, v = thetas(model, 2), torch.linspace(-1, 1, 2 * model.latent_size, dtype=torch.float64).view(2, -1)
    found = estimator_of(model).given(theta, v, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.whitened, v)
    torch.testing.assert_close(found.log_likelihood, model.log_likelihood(model.at(model.prior(theta)), v))


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize("make", [gp_regression, a_latent_gp])
def test_it_serves_every_method_on_theta_of_a_model_with_gaussian_noise(make):
    model = make()
    assert isinstance(estimator_for(model, tg.approximations.Conjugate(), 16, None, None), ExactEstimator)
    posterior = tg.sample(model, tg.AMIS(), num_samples=40, seed=0, progress=False)
    assert not posterior.stats["log_evidence_variance"].any()
    position = torch.cat([posterior.theta, posterior.whitened], -1).flatten(0, 1)
    torch.testing.assert_close(tg.joint_log_density(model)(position), posterior.stats["lp"].flatten())
