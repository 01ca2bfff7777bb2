"""Noise with a latent function of its own, against autograd and a dense rule in two dimensions."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.likelihoods.test_predictive import dense_log_integral
from torchgpmc.likelihoods import Factorised

LIKELIHOOD = tg.likelihoods.HeteroskedasticGaussian(scale=0.5)
Y = torch.tensor([0.4, -2.0, 1.0], dtype=torch.float64)
CASES = [([0.1, -0.3], [0.5, 0.4]), ([0.4, -6.0], [1e-6, 0.3]), ([-3.0, 1.0], [2.0, 4.0]), ([0.4, 2.0], [1e-8, 9.0])]


def test_curvature_is_autograds():
    f = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for found, expected in zip(LIKELIHOOD.curvature(f, Y), Factorised.curvature(LIKELIHOOD, f, Y), strict=True):
        torch.testing.assert_close(found, expected)


def test_expectations_equal_a_dense_rule():
    mean, variance = (torch.tensor(part, dtype=torch.float64) for part in CASES[0])
    grid = torch.linspace(-10, 10, 401, dtype=torch.float64)
    weights = torch.softmax(-0.5 * grid.square(), 0)
    f = mean + variance.sqrt() * torch.cartesian_prod(grid, grid)
    logs, shares = LIKELIHOOD.pointwise_log_prob(f, Y[0]), torch.outer(weights, weights).flatten()
    assert float(LIKELIHOOD.expected_log_likelihood(mean, variance, Y[0])) == pytest.approx(float(shares @ logs), abs=1e-8)
    predictive = float((shares @ logs.exp()).log())
    assert float(LIKELIHOOD.predictive_log_prob(mean[None], variance[None], Y[0])) == pytest.approx(predictive, abs=1e-6)


@pytest.mark.parametrize(("mean", "variance"), CASES)
def test_predictive_densities_are_mixtures_of_normals(mean, variance):
    """Over f_2 on a fine grid; also where the datum lies at the mean and asks for no noise at all."""
    mean, variance = torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64)
    grid = torch.linspace(-14, 14, 400_001, dtype=torch.float64)
    total = variance[0] + torch.exp(2 * (mean[1] + math.log(0.5) + variance[1].sqrt() * grid))
    for y in (*Y, mean[0]):
        logs = -0.5 * ((y - mean[0]).square() / total + (2 * math.pi * total).log()) - 0.5 * grid.square()
        expected = torch.logsumexp(logs, 0) - torch.logsumexp(-0.5 * grid.square(), 0)
        found = LIKELIHOOD.predictive_log_prob(mean[None], variance[None], y)
        assert float(found) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.slow
def test_predictive_densities_are_right_to_1e_6_over_a_grid():
    """Also where the datum is thousands of deviations away, and the noise that explains it hundreds from where f_2 is."""
    axes = [-6.0, 0.0, 3.0], [1e-8, 400.0], [1e-4, 1.0, 400.0], [0.0, 0.4, -20.0]
    centre, spread, variance, gap = (
        part.flatten() for part in torch.meshgrid(*(torch.tensor(axis).double() for axis in axes), indexing="ij")
    )
    zero = torch.zeros_like(centre)
    found = LIKELIHOOD.predictive_log_prob(torch.stack([zero, centre], -1), torch.stack([spread, variance], -1), gap)

    def log_density(f, spread, gap):
        total = spread + torch.exp(2 * (f + math.log(0.5)))
        return -0.5 * (gap**2 / total + (2 * math.pi * total).log())

    expected = [
        dense_log_integral(lambda f, row=row: log_density(f, row[1], row[3]), row[0], row[2], math.log(2 * abs(row[3]) + 1e-4), 1.0)
        for row in torch.stack([centre, spread, variance, gap], -1).tolist()
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-6)


def test_gradients_and_moments():
    mean = torch.tensor([[0.2, -0.4], [1.0, 0.3]], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.3, 0.2], [0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    for function in (LIKELIHOOD.expected_log_likelihood, LIKELIHOOD.predictive_log_prob):
        assert torch.autograd.gradcheck(lambda m, v, function=function: function(m, v, Y[:2]), (mean, variance), atol=1e-5)
    found = LIKELIHOOD.response_moments(mean.detach(), variance.detach())
    expected = Factorised.response_moments(LIKELIHOOD, mean.detach(), variance.detach())
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_the_scale_is_checked(scale):
    with pytest.raises(ValueError, match="scale is"):
        tg.likelihoods.HeteroskedasticGaussian(scale=scale)
