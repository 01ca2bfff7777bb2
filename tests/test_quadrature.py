import math

import pytest
import scipy.integrate
import torch

from torchgpmc import quadrature


def test_polynomials_are_exact():
    mean, variance = torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = quadrature.expectation(lambda f: f**4, mean, variance)
    expected = mean**4 + 6 * mean**2 * variance + 3 * variance**2
    assert torch.allclose(found, expected, rtol=1e-12)


def test_log_expectation_does_not_underflow():
    mean, variance = torch.tensor([-800.0], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)
    found = quadrature.log_expectation(lambda f: f, mean, variance)
    assert float(found) == pytest.approx(-800.0 + 0.05, rel=1e-12)


def test_expectation_of_a_smooth_function():
    def integrand(x):
        return math.log1p(math.exp(x)) * math.exp(-0.5 * (x - 0.4) ** 2 / 0.7) / math.sqrt(2 * math.pi * 0.7)

    expected, _ = scipy.integrate.quad(integrand, -12, 12, epsabs=1e-13)
    found = quadrature.expectation(
        torch.nn.functional.softplus, torch.tensor(0.4, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    )
    assert float(found) == pytest.approx(expected, rel=1e-7)


def test_normal_points_have_normal_moments():
    points = quadrature.normal_points(3, torch.float64, torch.device("cpu"))
    assert torch.allclose(points.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.02)
    assert torch.allclose(points.T.cov(), torch.eye(3, dtype=torch.float64), atol=0.05)
