"""Predictions of GPRegression: exact given theta, by formulas written out with inverses."""

import copy

import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import HalfNormalPrior, NormalPrior

import torchgpmc as tg
from tests.problems import inputs, kernel
from torchgpmc.storage.draws import Draws

NOISES = 0.05 * torch.arange(1, 8, dtype=torch.float64)
LIKELIHOODS = {
    "one noise": lambda: GaussianLikelihood(noise_prior=HalfNormalPrior(1.0)),
    "one a datum": lambda: FixedNoiseGaussianLikelihood(NOISES),
}


def model_of(likelihood):
    x = inputs(7, 2)
    return tg.GPRegression(
        x, (3 * x[:, 0]).sin() + 1, kernel(2), likelihood(), mean=ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    )


def posterior_of(model, v, theta):
    return tg.Posterior(model, Draws(theta[None], v[None], None), {"lp": torch.zeros(1, len(theta))}, {})


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_they_are_the_formulas_whatever_latents_were_drawn(likelihood):
    model, generator, x = model_of(LIKELIHOODS[likelihood]), torch.Generator().manual_seed(0), inputs(3, 2, seed=5)
    theta = 0.5 * torch.randn(4, model.layout.size, generator=generator, dtype=torch.float64)
    found = posterior_of(model, torch.randn(4, 7, generator=generator, dtype=torch.float64), theta).predict(x)
    means, variances = [], []
    for row in theta:
        prior = model.prior(row[None])
        values, both = prior.values["kernel"], torch.cat([model.train_x, x])
        covariance = model.covariance.bind(both, both)(values)[0]
        noise = NOISES if likelihood == "one a datum" else torch.exp(row[-1]) + 1e-4  # gpytorch's least noise
        whole = covariance[:7, :7] + torch.eye(7) * (noise + model.jitter)
        gain = covariance[7:, :7] @ torch.linalg.inv(whole)
        constant = prior.mean[0, 0]
        means.append(constant + gain @ (model.train_y - constant))
        variances.append((covariance[7:, 7:] - gain @ covariance[:7, 7:]).diagonal())
    means, variances = torch.stack(means), torch.stack(variances)
    torch.testing.assert_close(found.latent_mean, means.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.latent_variance, (variances + means.square()).mean(0) - means.mean(0).square(), rtol=1e-5, atol=1e-6
    )


def test_data_sets_of_their_own_are_predicted_from_their_latents():
    model, x = model_of(LIKELIHOODS["one noise"]), inputs(3, 2, seed=5)
    several = model.with_targets(torch.stack([model.train_y, -model.train_y]))
    theta = torch.zeros(2, model.layout.size, dtype=torch.float64)
    prior, v = several.prior(theta), torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    posterior = tg.Posterior(several, Draws(theta[:, None], v[:, None], None), {"lp": torch.zeros(2, 1)}, {})
    expected = several.marginals(several.at(prior, x), v).mean[:, 0].mean(0)
    torch.testing.assert_close(posterior.predict(x).latent_mean, expected)


@pytest.mark.slow
def test_draws_of_latents_have_the_same_moments():
    model, x = model_of(LIKELIHOODS["one noise"]), inputs(3, 2, seed=5)
    posterior = tg.sample(model, tg.AMIS(), num_samples=4000, seed=0, progress=False)
    exact = posterior.predict(x)
    by_latents = copy.copy(posterior)
    by_latents.model = copy.deepcopy(model)
    by_latents.model.is_conjugate = False
    drawn = by_latents.predict(x)
    torch.testing.assert_close(drawn.mean, exact.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.variance, exact.variance, rtol=0.1, atol=0)
