"""Where p(f | y, theta) has several modes: estimates of the evidence against brute force, and what they promise beside."""

import functools
import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior

import torchgpmc as tg
from tests.calibration import z_limit
from tests.speed import quick

APPROXIMATIONS = {"laplace": tg.Laplace(), "ep": tg.EP()}
NEAR = torch.linspace(0, 0.05, 6, dtype=torch.float64)
SPREAD = torch.tensor([0.1, 0.25, -0.2, -0.05, 0.3, -0.15], dtype=torch.float64)
SIGNS = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)

# Inputs, targets, squared scale of the noise.
DATA = {
    "six": (NEAR, 5 * SIGNS + SPREAD, 0.1),
    "six, wide noise": (NEAR, 5 * SIGNS + SPREAD, 1.0),
    "six, narrow noise": (NEAR, 5 * SIGNS + SPREAD, 0.02),
    "four": (NEAR[:4], (5 * SIGNS + SPREAD)[:4], 0.1),
    "two places, four modes": (
        torch.cat([NEAR[:4], NEAR[:4] + 5]),
        torch.tensor([5.0, -5.0, 5.1, -4.9, 4.0, -4.0, 4.2, -3.9], dtype=torch.float64),
        0.1,
    ),
}


def two_modes(name="six", fixed=True):
    x, y, noise = DATA[name]
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 0.3)), outputscale_prior=LogNormalPrior(2.2, 0.3)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 9.0, 1.0
    likelihood = tg.likelihoods.StudentT()
    likelihood.noise, likelihood.deg_free = noise, 4.0
    likelihood.requires_grad_(False)
    return tg.GP(x, y, kernel.requires_grad_(not fixed), likelihood, jitter=1e-4)


@functools.cache
def truth_of(name):
    return brute_force(*DATA[name], torch.ones(1).double(), torch.full((1,), 9.0).double(), 1_000_000)


def brute_force(x, y, noise, lengthscale, outputscale, count, seed=0):
    """p(y | theta) times e^shift by draws from the prior, written out: its mean, that mean's standard error, and the shift."""
    generator = torch.Generator().manual_seed(seed)
    square = (x.unsqueeze(-1) - x).square() / lengthscale.square().view(-1, 1, 1)
    covariance = outputscale.view(-1, 1, 1) * torch.exp(-0.5 * square) + 1e-4 * torch.eye(len(x), dtype=x.dtype)
    factor = torch.linalg.cholesky(covariance)
    f = torch.randn(len(factor), count // len(factor), len(x), generator=generator, dtype=x.dtype) @ factor.mT
    constant = math.lgamma(2.5) - math.lgamma(2.0) - 0.5 * math.log(4 * math.pi * noise)
    logs = len(x) * constant - 2.5 * torch.log1p((f - y).square() / (4 * noise)).sum(-1)
    shift = logs.max()
    value = (logs - shift).exp()
    by_theta = value.mean(-1)
    error = by_theta.std() / len(by_theta) ** 0.5 if len(by_theta) > 1 else value.std() / count**0.5
    return by_theta.mean(), error, shift


@pytest.mark.statistical
@pytest.mark.parametrize("name", quick(["four"], DATA))
@pytest.mark.parametrize("approximation", quick(["laplace"], APPROXIMATIONS))
def test_estimates_see_every_mode(approximation, name):
    truth, error, shift = truth_of(name)
    estimator = tg.evidence.importance(two_modes(name), APPROXIMATIONS[approximation], num_importance=160)
    # Each estimate looks for the modes anew: a hundred of many draws cost a tenth of a thousand of few, to the same error.
    found = estimator(torch.zeros(100, 0, dtype=torch.float64), torch.Generator().manual_seed(1))
    ratio = (found.value - shift).exp() / truth
    deviation = (ratio.var() / len(ratio) + (error / truth).square()).sqrt()
    assert abs(float((ratio.mean() - 1) / deviation)) < z_limit(1, len(ratio))
    assert float(deviation) < 0.02  # one mode of two would be off by a half
    # Stated variances are the variances: means of squares, to what a heavy tail would not leave.
    assert 0.5 < float(found.variance.mean() / ratio.var()) < 2


@pytest.fixture(scope="module")
def truth_over_theta():
    normals = torch.randn(2, 2000, generator=torch.Generator().manual_seed(10)).double()
    lengthscale, outputscale = (0.3 * normals[0]).exp(), (2.2 + 0.3 * normals[1]).exp()
    return brute_force(*DATA["six"], lengthscale, outputscale, 1_000_000)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_amis_finds_the_evidence(approximation, seed, truth_over_theta):
    truth, error, shift = truth_over_theta
    method = tg.AMIS(approximation=APPROXIMATIONS[approximation], batch_sizes=(400,), begin=tg.AtModes(1))
    posterior = tg.sample(two_modes(fixed=False), method, num_samples=400, seed=seed, progress=False)
    gap = posterior.info["log_evidence"] - float(truth.log() + shift)
    assert abs(gap) < z_limit(1) * (posterior.info["log_evidence_error"] ** 2 + float(error / truth) ** 2) ** 0.5
    assert posterior.info["log_evidence_error"] < 0.1
    latents = posterior.resampled(400).latents[0, :, 0]
    assert 0.3 < float((latents > 0).double().mean()) < 0.7


@pytest.mark.slow
@pytest.mark.statistical
def test_annealing_sees_every_mode():
    truth, error, shift = truth_of("four")
    estimator = tg.evidence.annealed(two_modes("four"), num_importance=64, num_temperatures=20)
    found = estimator(torch.zeros(100, 0, dtype=torch.float64), torch.Generator().manual_seed(1))
    ratio = (found.value - shift).exp() / truth
    deviation = (ratio.var() / len(ratio) + (error / truth).square()).sqrt()
    assert abs(float((ratio.mean() - 1) / deviation)) < z_limit(1, len(ratio))
    assert float(deviation) < 0.05
