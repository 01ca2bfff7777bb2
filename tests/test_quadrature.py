import math

import numpy as np
import pytest
import scipy.integrate
import torch

from torchgpmc.numerics import quadrature


@pytest.mark.parametrize("scale", [10.0, 0.5])
def test_polynomials_are_exact(scale):
    """By either rule."""
    mean, variance = torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = quadrature.expectation_about(lambda f: f**4, mean, variance, 0.0, scale)
    expected = mean**4 + 6 * mean**2 * variance + 3 * variance**2
    assert torch.allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("variance", [0.7, 2.0, 300.0])
def test_expectation_of_a_smooth_function(variance):
    def integrand(x):
        return np.logaddexp(0, x) * math.exp(-0.5 * (x - 0.4) ** 2 / variance) / math.sqrt(2 * math.pi * variance)

    reach = 12 * variance**0.5
    expected, _ = scipy.integrate.quad(integrand, 0.4 - reach, 0.4 + reach, epsabs=1e-13, points=[0.0])
    mean, variance = torch.tensor([0.4, variance], dtype=torch.float64)
    found = quadrature.expectation_about(torch.nn.functional.softplus, mean, variance, 0.0, math.pi)
    assert float(found) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("scale", [0.03, 1.0, 3.0])
@pytest.mark.parametrize("half", quadrature._HALVES)
def test_where_the_rule_changes_both_rules_agree(scale, half):
    """The value and its derivatives, so that neither a trajectory nor another choice of chunks sees a step."""

    def at(factor):
        mean = scale * torch.linspace(-4, 4, 81, dtype=torch.float64).requires_grad_(True)
        variance = torch.full_like(mean, factor * quadrature._widest(half) * scale**2).detach().requires_grad_(True)
        nodes, _ = quadrature.rule_about(mean, variance, 0.0, scale)
        value = quadrature.expectation_about(lambda f: torch.log1p((f / scale).square()), mean, variance, 0.0, scale)
        slopes = torch.autograd.grad(value.sum(), (mean, variance))
        return nodes.shape, value.detach(), slopes[0] * scale, slopes[1] * scale**2

    below, above = at(1 - 1e-12), at(1 + 1e-11)
    assert below[0] != above[0]
    for ours, theirs in zip(below[1:], above[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-11)


def test_normal_points_have_normal_moments():
    points = quadrature.normal_points(3, torch.float64, torch.device("cpu"))
    assert torch.allclose(points.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.02)
    assert torch.allclose(points.T.cov(), torch.eye(3, dtype=torch.float64), atol=0.05)
