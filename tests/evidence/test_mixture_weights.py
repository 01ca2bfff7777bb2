"""Weights of draws from a mixture over modes, by dense normal densities."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.evidence.test_importance import dense_precision, thetas
from tests.problems import gp
from tests.speed import quick
from torchgpmc.evidence.mixtures import MixtureEstimator
from torchgpmc.models.latents import likelihood_values

NORMAL = torch.distributions.MultivariateNormal


def dense_log_weights(model, theta, estimator, f):
    """log p(y, f | theta) - log sum_j share_j N(f; mean_j, (K^-1 + W_j)^-1), for f ``(C, draws, V)``."""
    prior = model.prior(theta)
    _, densities, share, _ = estimator.components(prior, None)
    values = {name: value.unsqueeze(-1) for name, value in likelihood_values(prior).items()}
    likelihood = model.likelihood_function(values, lambda part: part.pointwise_log_prob(f, model.train_y)).sum(-1)
    logs = []
    for part, log_share in zip(densities, share.log().unbind(-1), strict=True):
        covariance = torch.linalg.inv(torch.linalg.inv(prior.covariance) + dense_precision(part))
        covariance = 0.5 * (covariance + covariance.mT)
        normal = NORMAL(part.mean.unsqueeze(1), covariance.unsqueeze(1), validate_args=False)
        logs.append(log_share.unsqueeze(-1) + normal.log_prob(f))
    log_prior = NORMAL(prior.mean.unsqueeze(1), prior.covariance.unsqueeze(1), validate_args=False).log_prob(f)
    return likelihood + log_prior - torch.logsumexp(torch.stack(logs), 0)


@pytest.mark.parametrize("antithetic", quick([True], [True, False]))
@pytest.mark.parametrize(
    ("name", "approximation"),
    quick(
        [("student_t", tg.Laplace()), ("student_t", tg.EP())],
        [("student_t", tg.Laplace()), ("student_t", tg.EP()), ("beta", tg.Laplace())],
    ),
)
def test_weights_equal_dense_densities(name, approximation, antithetic):
    model = gp(name, 6, jitter=1e-4)
    theta = thetas(model)
    estimator = tg.evidence.importance(model, approximation, num_importance=8, antithetic=antithetic)
    assert isinstance(estimator, MixtureEstimator)
    auxiliary = torch.randn(3, estimator.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimate, log_weight = estimator._evaluate(theta, auxiliary, None)
    prior = model.prior(theta)
    v = estimator._draws(prior, auxiliary, None).whitened(antithetic)
    f = prior.mean.unsqueeze(1) + v @ prior.factor.mT
    torch.testing.assert_close(log_weight, dense_log_weights(model, theta, estimator, f), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(estimate.value, torch.logsumexp(log_weight, -1) - math.log(8))
    chosen = (v - estimate.whitened.unsqueeze(1)).abs().amax(-1).argmin(-1)
    torch.testing.assert_close(v[torch.arange(3), chosen], estimate.whitened)
    assert bool((estimator.components(prior, None)[2].sum(-1) - 1).abs().max() < 1e-12)
