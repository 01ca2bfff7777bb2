"""Independent ways to the quantities of Gaussian approximations: dense quadrature, and the first correct Newton iteration."""

import numpy as np
import torch

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.models.latents import likelihood_values


def evidence_by_quadrature(model, theta, num_points=61, width=7.0):
    """log p(y | theta), posterior mean and covariance of f for N <= 3, by the trapezoid rule in the whitened latents."""
    prior = model.prior(theta)
    size = model.latent_size
    axis = torch.linspace(-width, width, num_points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * size).view(-1, size)
    values = []
    for row in range(len(theta)):
        only = {name: value[row : row + 1] for name, value in likelihood_values(prior).items()}
        whole = prior.mean[row] + grid.view(-1, *model.latent_shape) @ prior.factor[row].T
        log_terms = pointwise(model, only, model._at_boundary(whole)).sum(-1)
        f = whole.flatten(1)
        log_terms = log_terms - 0.5 * (grid**2).sum(-1) - 0.5 * size * np.log(2 * np.pi) + size * torch.log(axis[1] - axis[0])
        log_evidence = torch.logsumexp(log_terms, 0)
        weights = (log_terms - log_evidence).exp()
        mean = weights @ f
        values.append((log_evidence, mean, (weights[:, None] * (f - mean)).T @ (f - mean)))
    return tuple(torch.stack(parts).detach() for parts in zip(*values, strict=True))


def pointwise(model, values, f):
    return model.likelihood_function(values, lambda likelihood: likelihood.pointwise_log_prob(f, model.train_y))


def plain_laplace(model, theta):
    """One theta after another, K^-1 and all: mode, curvature and log evidence of Laplace's approximation."""
    found = []
    for row in theta:
        with torch.no_grad():
            prior = model.prior(row[None])
        covariance, mean = prior.covariance[0], prior.mean[0]
        inverse = torch.linalg.inv(covariance)
        only = likelihood_values(prior)
        f = mean.clone()
        for _ in range(100):
            slopes = model.likelihood_function(only, lambda likelihood, f=f: likelihood.derivatives(f[None], model.train_y))
            first, second = slopes.first[0].detach(), slopes.second[0].detach()
            f = f + torch.linalg.solve(inverse - torch.diag(second), first - inverse @ (f - mean))
        value = as_value(model, only, f) - 0.5 * (f - mean) @ inverse @ (f - mean)
        log_evidence = value - 0.5 * torch.linalg.slogdet(torch.eye(len(f)).to(f) - covariance * second).logabsdet
        found.append((f, log_evidence))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def as_value(model, values, f):
    return model.likelihood_function(values, lambda module: as_likelihood(module).log_prob(f[None], model.train_y))[0].detach()


def gaussian_evidence(model, theta):
    """log N(y | m, K + noise I), by scipy."""
    import scipy.stats

    prior = model.prior(theta)
    noise = prior.values["likelihood"]["noise_covar.raw_noise"]
    return torch.tensor(
        [
            scipy.stats.multivariate_normal.logpdf(
                model.train_y.numpy(),
                prior.mean[row].numpy(),
                (prior.covariance[row] + noise[row] * torch.eye(len(model.train_y))).numpy(),
            )
            for row in range(len(theta))
        ],
        dtype=torch.float64,
    )
