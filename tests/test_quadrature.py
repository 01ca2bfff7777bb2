import math

import numpy as np
import pytest
import scipy.integrate
import torch

from torchgpmc.numerics import quadrature, smooth_rules


@pytest.mark.parametrize("scale", [10.0, 0.5])
def test_polynomials_are_exact(scale):
    """By either rule."""
    mean, variance = torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = smooth_rules.expectation_about(lambda f: f**4, mean, variance, 0.0, scale)
    expected = mean**4 + 6 * mean**2 * variance + 3 * variance**2
    assert torch.allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("variance", [0.7, 2.0, 300.0])
def test_expectation_of_a_smooth_function(variance):
    def integrand(x):
        return np.logaddexp(0, x) * math.exp(-0.5 * (x - 0.4) ** 2 / variance) / math.sqrt(2 * math.pi * variance)

    reach = 12 * variance**0.5
    expected, _ = scipy.integrate.quad(integrand, 0.4 - reach, 0.4 + reach, epsabs=1e-13, points=[0.0])
    mean, variance = torch.tensor([0.4, variance], dtype=torch.float64)
    found = smooth_rules.expectation_about(torch.nn.functional.softplus, mean, variance, 0.0, math.pi)
    assert float(found) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("scale", [0.03, 1.0, 3.0])
@pytest.mark.parametrize("half", smooth_rules._HALVES)
def test_where_the_rule_changes_both_rules_agree(scale, half):
    """The value and its derivatives, so that neither a trajectory nor another choice of chunks sees a step."""

    def at(factor):
        mean = scale * torch.linspace(-4, 4, 81, dtype=torch.float64).requires_grad_(True)
        variance = torch.full_like(mean, factor * smooth_rules._widest(half) * scale**2).detach().requires_grad_(True)
        nodes, _ = smooth_rules.rule_about(mean, variance, 0.0, scale)
        value = smooth_rules.expectation_about(lambda f: torch.log1p((f / scale).square()), mean, variance, 0.0, scale)
        slopes = torch.autograd.grad(value.sum(), (mean, variance))
        return nodes.shape, value.detach(), slopes[0] * scale, slopes[1] * scale**2

    below, above = at(1 - 1e-12), at(1 + 1e-11)
    assert below[0] != above[0]
    for ours, theirs in zip(below[1:], above[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-11)


def test_normals_of_different_widths_get_rules_of_their_own():
    """And what all of them get by one rule."""
    generator = torch.Generator().manual_seed(0)
    variance = (2 * torch.randn(smooth_rules._MANY // 4, generator=generator, dtype=torch.float64)).exp().expand(4, -1)
    mean = torch.randn(variance.shape, generator=generator, dtype=torch.float64)
    seen = []

    def alike(variance, mean):
        seen.append(len(smooth_rules.rule_about(mean, variance, 0.0, math.pi)[0]))
        return smooth_rules.expectation_about(torch.nn.functional.softplus, mean, variance, 0.0, math.pi), mean

    found, same = smooth_rules.in_groups(alike, variance, math.pi, mean)
    assert len(seen) == len(smooth_rules._LEVELS) + 1 and seen[0] < seen[1] < seen[2] < seen[3]
    torch.testing.assert_close(found, alike(variance, mean)[0], rtol=0, atol=1e-10)
    assert torch.equal(same, mean)
    narrow, few = variance.clamp_max(0.1), variance[:1]
    for whole in (narrow, few):  # one rule serves all
        seen.clear()
        smooth_rules.in_groups(alike, whole, math.pi, mean[: len(whole)])
        assert len(seen) == 1


def test_normal_points_have_normal_moments():
    points = quadrature.normal_points(3, torch.float64, torch.device("cpu"))
    assert torch.allclose(points.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.02)
    assert torch.allclose(points.T.cov(), torch.eye(3, dtype=torch.float64), atol=0.05)
