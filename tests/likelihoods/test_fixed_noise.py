"""Noise that is known for every datum: the evidence and its gradient, f, and what cannot be said of test points."""

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.density import AutogradDensity
from torchgpmc.likelihoods.fixed_noise import FixedNoiseGaussian

NOISE = torch.tensor([0.01, 0.4, 0.02, 1.0, 0.05, 0.3], dtype=torch.float64)


def model_of(likelihood, kind=tg.GPRegression):
    x = torch.linspace(0, 1, 6, dtype=torch.float64)
    return kind(x, (3 * x).sin(), RBFKernel(lengthscale_prior=LogNormalPrior(-1.0, 0.5)), likelihood)


def covariance(model, theta):
    """In numpy, jitter included."""
    gap = (model.train_x - model.train_x.T).numpy()
    return np.exp(-0.5 * (gap / np.exp(float(theta))) ** 2) + model.jitter * np.eye(len(gap))


@pytest.mark.parametrize("learns_more", [False, True])
def test_the_evidence_is_the_formulas_and_its_gradient_autograds(learns_more):
    options = {"learn_additional_noise": True, "noise_prior": GammaPrior(2.0, 4.0)} if learns_more else {}
    model = model_of(FixedNoiseGaussianLikelihood(NOISE, **options))
    theta = 0.5 * torch.randn(3, model.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    density = ApproximateMarginal(model, Conjugate())
    value, gradient = density.value_and_grad(theta)
    for row, found in zip(theta, value - model.layout.log_prior(theta), strict=True):
        more = (
            float(row[1].exp()) + float(model.likelihood.second_noise_covar.raw_noise_constraint.lower_bound)
            if learns_more
            else 0.0
        )
        total = covariance(model, row[0]) + np.diag(NOISE.numpy() + more)
        np.testing.assert_allclose(found, scipy.stats.multivariate_normal(np.zeros(6), total).logpdf(model.train_y), rtol=1e-8)
    torch.testing.assert_close(gradient, AutogradDensity.value_and_grad(density, theta)[1], rtol=1e-8, atol=1e-8)


def test_latents_given_the_data_have_their_closed_form():
    model = model_of(FixedNoiseGaussianLikelihood(NOISE))
    theta = torch.tensor([[-1.0]], dtype=torch.float64)
    k = covariance(model, -1.0)
    mean = k @ np.linalg.solve(k + np.diag(NOISE.numpy()), model.train_y.numpy())
    found = Conjugate().importance_density(model, model.prior(theta))
    np.testing.assert_allclose(found.mean[0], mean, rtol=1e-8)


def test_test_points_have_a_latent_function_and_no_response():
    posterior = tg.sample(model_of(FixedNoiseGaussianLikelihood(NOISE)), tg.AMIS(), num_samples=1000, seed=0, progress=False)
    # As many test points as data, where a variance a datum would broadcast.
    prediction = posterior.predict(torch.linspace(0, 1, 6))
    assert prediction.latent_mean.shape == (6,) and bool((prediction.latent_mean - posterior.model.train_y).abs().max() < 0.5)
    for response in ("mean", "variance"):
        with pytest.raises(ValueError, match="not known"):
            getattr(prediction, response)
    with pytest.raises(ValueError, match="not known"):
        prediction.sample(3, seed=0)


def test_parts_of_the_data_have_their_own_noise():
    f, y = torch.zeros(2, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    likelihood = FixedNoiseGaussian(NOISE)
    parts = sum(likelihood.for_data(rows).log_prob(f[:, rows], y[rows]) for rows in (slice(0, 2), slice(2, 6)))
    torch.testing.assert_close(parts, likelihood.log_prob(f, y))


def test_one_variance_a_target():
    with pytest.raises(ValueError, match=r"noise has shape \(5,\) and there are 6 targets"):
        model_of(FixedNoiseGaussianLikelihood(NOISE[:5]))
