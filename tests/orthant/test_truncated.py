"""Draws from truncated normals: exact against quadrature, against elliptical slice sampling, and within their limits."""

import math

import numpy as np
import pytest
import torch

import torchgpmc.orthant.truncated as truncated
from tests.calibration import worst_excess
from tests.orthant.simple import gp_covariance
from torchgpmc.orthant import truncated_normal_draws, truncated_normal_samples
from torchgpmc.samplers import elliptical_slice

COVARIANCE = torch.tensor([[1.0, 0.7], [0.7, 2.0]], dtype=torch.float64)
MEAN = torch.tensor([0.3, -0.2], dtype=torch.float64)
LOWER, UPPER = torch.tensor([0.5, -math.inf], dtype=torch.float64), torch.tensor([math.inf, 0.1], dtype=torch.float64)


def functions(x):
    return torch.cat([x, x.square(), (x[:, :1] * x[:, 1:]), x.exp().clamp_max(50)], -1)


def expected_by_quadrature():
    axes = [np.linspace(0.5, 9, 1701), np.linspace(-12, 0.1, 2421)]
    grid = torch.as_tensor(np.stack(np.meshgrid(*axes, indexing="ij"), -1)).reshape(-1, 2)
    ends = [np.ones(len(axis)) for axis in axes]
    for end in ends:
        end[[0, -1]] = 0.5
    weight = torch.distributions.MultivariateNormal(MEAN, COVARIANCE).log_prob(grid).exp()
    weight = weight * torch.as_tensor(np.outer(*ends).ravel())
    return (functions(grid) * weight.unsqueeze(-1)).sum(0) / weight.sum()


def draws(seed, num_samples=100_000):
    return truncated_normal_samples(
        COVARIANCE, mean=MEAN, lower=LOWER, upper=UPPER, num_samples=num_samples, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.slow
@pytest.mark.statistical
def test_moments_equal_quadrature():
    assert worst_excess(functions(draws(0)), expected_by_quadrature()) < 1


def test_a_bound_that_is_too_low_is_caught(monkeypatch):
    found = truncated.minimax_tilt

    def lowered(separated):
        tilt = found(separated)
        return tilt._replace(log_bound=tilt.log_bound - 0.5)

    monkeypatch.setattr(truncated, "minimax_tilt", lowered)
    with pytest.raises(RuntimeError, match="a log weight exceeds its bound"):
        draws(0)


@pytest.mark.slow
def test_accepting_everything_is_caught(monkeypatch):
    found = truncated.draw

    def even(proposal, uniforms):
        log_weight, points = found(proposal, uniforms)
        return torch.full_like(log_weight, -1e9), points

    monkeypatch.setattr(truncated, "draw", even)
    monkeypatch.setattr(truncated, "LEAST_ACCEPTANCE", -1.0)
    tilt_of = truncated.minimax_tilt
    # Plain GHK: its weights are far from even.
    even_tilt = {"shift": torch.zeros(1, 2, dtype=torch.float64), "log_bound": torch.tensor([-1e9])}
    monkeypatch.setattr(truncated, "minimax_tilt", lambda s: tilt_of(s)._replace(**even_tilt))
    assert worst_excess(functions(draws(0)), expected_by_quadrature()) > 1


@pytest.mark.statistical
@pytest.mark.slow
def test_draws_agree_with_elliptical_slice_sampling():
    assert excess_over_elliptical_slice(0.0) < 1


@pytest.mark.slow
def test_another_limit_does_not_agree_with_elliptical_slice_sampling():
    assert excess_over_elliptical_slice(-0.4) > 1


def excess_over_elliptical_slice(limit):
    """Thousands of independent slice chains, each long enough to forget where it began."""
    size, chains = 6, 4000
    covariance = gp_covariance(size, seed=2)
    factor = torch.linalg.cholesky(covariance)
    exact = truncated_normal_draws(covariance, lower=0.0, num_samples=2 * chains, generator=torch.Generator().manual_seed(1))
    assert bool(exact.exact) and bool((exact.samples >= 0).all()) and 0.1 < float(exact.acceptance_rate) <= 1

    def inside(v):
        return torch.where((v @ factor.mT >= limit).all(-1), 0.0, -torch.inf).to(v)

    sampler, generator = elliptical_slice(inside), torch.Generator().manual_seed(2)
    start = torch.linalg.solve_triangular(factor, exact.samples[:chains].T, upper=False).T
    state = sampler.init(start, generator)
    for _ in range(60):
        state, _ = sampler.step(state, generator)
    other = state.position @ factor.mT
    both = [torch.cat([x, x.square(), x[:, :1] * x[:, 1:]], -1) for x in (exact.samples[chains:], other)]
    return worst_excess(both[0] - both[1])


def test_batches_mirrored_limits_and_determinism():
    batch = torch.stack([COVARIANCE, 3 * COVARIANCE])
    first, second = (truncated_normal_draws(batch, upper=-1.0, num_samples=7) for _ in range(2))
    assert first.samples.shape == (2, 7, 2) and bool((first.samples <= -1).all())
    assert torch.equal(first.samples, second.samples) and bool(first.exact.all())
    assert bool((first.log_weight == 0).all()) and first.acceptance_rate.shape == (2,)


def test_far_from_the_mean_acceptance_stays_high():
    found = truncated_normal_draws(COVARIANCE, lower=30.0, num_samples=100)
    assert float(found.acceptance_rate) > 0.5 and bool((found.samples >= 30).all())
