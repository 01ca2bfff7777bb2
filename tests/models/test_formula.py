"""Log densities and gradients of GP and SparseGP against numpy formulas written from the papers."""

import copy
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import scipy.stats
import torch

import torchgpmc as tg
from tests.problems import gp, sparse_gp

NODES, WEIGHTS = np.polynomial.hermite.hermgauss(60)


def log_gamma_prior(x, prior):
    # The prior's own numbers: they are float32 roundings of what the user typed.
    return scipy.stats.gamma.logpdf(x, float(prior.concentration), scale=1 / float(prior.rate))


def unpack(model, position):
    """Constrained hyperparameters by name and the log prior of theta with its Jacobian, for theta = log(x - lower)."""
    values, start, total = {}, 0, 0.0
    for name, parameter in [
        *model.kernel.named_parameters(prefix="kernel"),
        *model.likelihood.named_parameters(prefix="likelihood"),
    ]:
        theta = position[start : start + parameter.numel()]
        start += parameter.numel()
        lower = 1e-4 if "noise" in name else 0.0
        lower = float(np.float32(lower))
        x = lower + np.exp(theta)
        values[name.split(".")[-1]] = x
        total += theta.sum()
        if "lengthscale" in name:
            total += log_gamma_prior(x, model.kernel.base_kernel.lengthscale_prior).sum()
        elif "outputscale" in name:
            total += log_gamma_prior(x, model.kernel.outputscale_prior).sum()
        else:  # half normal on the noise variance, restricted to x > lower
            scale = float(model.likelihood.noise_covar.noise_prior.scale)
            total += (scipy.stats.halfnorm.logpdf(x, scale=scale) - scipy.stats.halfnorm.logsf(lower, scale=scale)).sum()
    return values, total, position[start:]


def rbf(a, b, values):
    scaled = (a[:, None, :] - b[None, :, :]) / values["raw_lengthscale"]
    return values["raw_outputscale"] * np.exp(-0.5 * (scaled**2).sum(-1))


def log_likelihood_of_f(likelihood, f, y, values):
    if likelihood == "probit":
        return scipy.special.log_ndtr((2 * y - 1) * f)
    if likelihood == "poisson":
        return scipy.stats.poisson.logpmf(y, np.exp(f))
    return scipy.stats.norm.logpdf(y, f, np.sqrt(values["raw_noise"]))


def jitter_of(model, likelihood):
    """A millionth, of the targets' variance where they are f plus noise."""
    return 1e-6 * (model.train_y.numpy().var() if likelihood == "gaussian" else 1.0)


def full_gp(model, likelihood, position):
    """log p(theta) + log N(v; 0, I) + log p(y | f), f = chol(K + jitter I) v (paper D, eq. 1-2 whitened)."""
    values, total, v = unpack(model, position)
    x, y = model.train_x.numpy(), model.train_y.numpy()
    factor = scipy.linalg.cholesky(rbf(x, x, values) + jitter_of(model, likelihood) * np.eye(len(x)), lower=True)
    return total + scipy.stats.norm.logpdf(v).sum() + log_likelihood_of_f(likelihood, factor @ v, y, values).sum()


def sparse(model, likelihood, position):
    """log p(theta) + log N(v; 0, I) + E_{p(f | u = R v)} log p(y | f) (paper D, eq. 7), each f_n's expectation by 60 nodes."""
    values, total, v = unpack(model, position)
    x, y, z = model.train_x.numpy(), model.train_y.numpy(), model.inducing_points.numpy()
    inner = rbf(z, z, values) + jitter_of(model, likelihood) * np.eye(len(z))
    factor = scipy.linalg.cholesky(inner, lower=True)
    weights = scipy.linalg.cho_solve((factor, True), rbf(z, x, values))
    mean = weights.T @ (factor @ v)
    variance = values["raw_outputscale"] - (rbf(z, x, values) * weights).sum(0)
    points = mean + np.sqrt(2 * variance) * NODES[:, None]
    expected = (WEIGHTS[:, None] * log_likelihood_of_f(likelihood, points, y, values)).sum(0) / math.sqrt(math.pi)
    return total + scipy.stats.norm.logpdf(v).sum() + expected.sum()


CASES = {"full": (gp, full_gp), "sparse": (sparse_gp, sparse)}


@pytest.mark.parametrize("likelihood", ["probit", "poisson", "gaussian"])
@pytest.mark.parametrize("case", CASES)
def test_log_density_and_gradient_equal_the_formula(case, likelihood):
    make, formula = CASES[case]
    model = make(likelihood)
    generator = torch.Generator().manual_seed(3)
    position = 0.5 * torch.randn(4, model.layout.size + model.latent_size, generator=generator, dtype=torch.float64)
    density = tg.joint_log_density(model)
    value, gradient = density.value_and_grad(position)
    rows = position.numpy()
    expected = np.array([formula(model, likelihood, row) for row in rows])
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-8)
    np.testing.assert_allclose(density(position).numpy(), expected, rtol=1e-8)
    for row, slope in zip(rows, gradient.numpy(), strict=True):
        np.testing.assert_allclose(slope, richardson(lambda p: formula(model, likelihood, p), row), rtol=1e-8, atol=1e-8)


def richardson(function, point):
    """Central differences extrapolated to sixth order: error near 1e-10 for these functions."""
    slopes = []
    for index in range(len(point)):
        table = []
        for step in (4e-2, 2e-2, 1e-2):
            shift = np.zeros_like(point)
            shift[index] = step
            table.append((function(point + shift) - function(point - shift)) / (2 * step))
        first = [(4 * table[1] - table[0]) / 3, (4 * table[2] - table[1]) / 3]
        slopes.append((16 * first[1] - first[0]) / 15)
    return np.array(slopes)


def test_sparse_with_all_inputs_as_inducing_points_is_the_full_gp():
    """Within 1e-3 in f at jitter 1e-10; at 1e-6 the difference is larger by construction."""
    full = gp("probit", num_data=12, jitter=1e-10)
    same = tg.SparseGP(full.train_x, full.train_y, full.kernel, full.likelihood, inducing_points=full.train_x, jitter=1e-10)
    generator = torch.Generator().manual_seed(0)
    theta = 0.3 * torch.randn(3, full.layout.size, generator=generator, dtype=torch.float64)
    v = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    test_x = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    for x in (full.train_x, test_x):
        a, b = full.marginals(full.at(full.prior(theta), x), v), same.marginals(same.at(same.prior(theta), x), v)
        torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=1e-3)
        torch.testing.assert_close(a.variance, b.variance, rtol=0, atol=1e-6)
    latents = full.latents(full.prior(theta), v)
    torch.testing.assert_close(same.marginals(same.at(same.prior(theta), full.train_x), v).mean[:, 0], latents, rtol=0, atol=1e-3)


@pytest.mark.parametrize("likelihood", ["probit", "student_t", "softmax"])
@pytest.mark.parametrize("make", [gp, sparse_gp])
def test_fixed_hyperparameters_are_factorised_once(make, likelihood, monkeypatch):
    """The density of v alone equals that of [theta, v] at the same values, less its prior; nothing is factorised again."""
    free = make(likelihood)
    fixed = copy.deepcopy(free)
    for part in (fixed.kernel, fixed.mean, fixed.likelihood):
        part.requires_grad_(False)
    fixed.refresh()
    theta = free.layout.present(free).expand(3, -1)
    v = torch.randn(3, free.latent_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, gradient = tg.joint_log_density(free).value_and_grad(torch.cat([theta, v], -1))
    density = tg.joint_log_density(fixed)
    monkeypatch.setattr("torchgpmc.models.gp_model.cholesky", None)
    found, found_gradient = density.value_and_grad(v)
    torch.testing.assert_close(found, value - free.layout.log_prior(theta).detach())
    torch.testing.assert_close(found_gradient, gradient[:, free.layout.size :])
    torch.testing.assert_close(density(v), found)
