"""Draws whose guide is rounded, against weights written out, draws of the guide in double precision, and a closed form."""

import math

import pytest
import scipy.stats
import torch

from tests.orthant.simple import gp_covariance
from tests.problems import generator
from torchgpmc.orthant import weighting
from torchgpmc.orthant.matching import Sites, matched_sites, order_of
from torchgpmc.orthant.problem import prepare
from torchgpmc.orthant.quick_draws import quick_draws, quick_guide
from torchgpmc.orthant.weighting import weighted_draws

NORMAL = scipy.stats.norm


def orthant(covariance, lower=0.0):
    return prepare(covariance, 0.0, lower, math.inf).problem


def gp_orthants(size=40):
    """Two problems of unlike hardness."""
    covariance = torch.stack([gp_covariance(size, seed=1) + torch.eye(size), 9 * gp_covariance(size, seed=2) + torch.eye(size)])
    return orthant(covariance, torch.linspace(-1, 1, size, dtype=torch.float64))


def uniforms(problem, count, seed=0):
    shape = (*problem.lower.shape, count)
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64).clamp_min(1e-12)


def test_weights_are_the_normal_over_what_was_drawn_from():
    """Each variable's conditional worked out from the points that came before it, in numpy, from the guide's own numbers."""
    problem = gp_orthants()
    sites = matched_sites(problem)
    guide = quick_guide(problem, sites, order_of(problem, sites))
    log_weight, x, sound = quick_draws(problem, guide, uniforms(problem, 3))
    assert bool(sound.all())
    for b in range(2):
        normal = scipy.stats.multivariate_normal(cov=problem.covariance[b].numpy())
        rows = guide.rows[b].double().tril(-1)
        for p in range(3):
            z = ((x[b, p, guide.order[b]] - guide.mean[b]) / guide.sd[b]).tolist()  # h + r
            points, log_density = torch.zeros(len(z), dtype=torch.float64), 0.0
            for i, place in enumerate(z):
                h = float(rows[i] @ points)
                residual = place - h
                points[i] = guide.slope[b, i] * h + guide.scale[b, i] * (residual - guide.push[b, i])
                limit = float(guide.limit[b, i]) - h
                log_density += NORMAL.logpdf(residual) - NORMAL.logsf(limit) - math.log(guide.sd[b, i])
            assert float(log_weight[b, p]) == pytest.approx(normal.logpdf(x[b, p].numpy()) - log_density, abs=1e-3)


def test_they_are_nearly_those_of_the_guide_in_double_precision():
    problem = gp_orthants()
    sites, points = matched_sites(problem), uniforms(problem, 64)
    quick, slow = weighted_draws(problem, points, sites), weighting._with_sites(problem, sites, points)
    torch.testing.assert_close(quick[0], slow[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(quick[1], slow[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("astray", [False, True])
def test_the_mean_weight_is_the_probability_and_weighted_draws_are_of_the_truncated_normal(astray):
    """All correlations 1/2: the probability is 1 / (N + 1), whatever the sites are; x_1 is the least of one draw in N."""
    size, count, runs = 6, 2**9, 60
    covariance = 0.5 * torch.ones(size, size, dtype=torch.float64) + 0.5 * torch.eye(size)
    problem = orthant(covariance.expand(runs, -1, -1))
    sites = matched_sites(problem)
    if astray:
        wrong = torch.rand(sites.precision.shape, generator=generator(3), dtype=torch.float64)
        sites = Sites(sites.whitened_mean + 0.5 * wrong, sites.precision * (0.2 + wrong))
    log_weight, x = weighted_draws(problem, uniforms(problem, count, seed=4), sites)
    weight = log_weight.exp().mean(-1) * (size + 1)
    least = (log_weight.exp() * (x.argmin(-1) == 0)).mean(-1) * (size + 1) * size
    for found in (weight, least):  # false alarms: 4 comparisons at 5 standard errors of 60 runs, one in 45,000
        assert abs(float(found.mean()) - 1) < 5 * float(found.std()) / runs**0.5
        assert float(found.std()) / runs**0.5 < 0.03


def test_draws_are_within_the_limits():
    problem = gp_orthants()
    _, x = weighted_draws(problem, uniforms(problem, 64))
    assert bool((x >= problem.lower.unsqueeze(1)).all())


def test_where_single_precision_does_not_do_the_others_are_as_they_were():
    """A covariance too large to round, and a limit so far out that probabilities underflow."""
    covariance = gp_covariance(8, seed=3) + torch.eye(8)
    lower = torch.zeros(3, 8, dtype=torch.float64)
    lower[2] = 60.0
    problem = orthant(torch.stack([covariance, 1e8 * covariance, covariance]), lower)
    sites, points = matched_sites(problem), uniforms(problem, 16)
    found = weighted_draws(problem, points, sites)
    expected = weighting._with_sites(problem, sites, points)
    for b in (1, 2):
        torch.testing.assert_close(found[0][b], expected[0][b])
        torch.testing.assert_close(found[1][b], expected[1][b])
    alone = orthant(covariance)
    torch.testing.assert_close(found[0][0], weighted_draws(alone, points[:1], Sites(*(part[:1] for part in sites)))[0][0])


def test_upper_limits_are_kept_too():
    problem = prepare(gp_covariance(5, seed=1) + torch.eye(5), 0.0, -1.0, torch.linspace(0, 2, 5).double()).problem
    _, x = weighted_draws(problem, uniforms(problem, 32))
    assert bool(((x >= problem.lower) & (x <= problem.upper)).all())
