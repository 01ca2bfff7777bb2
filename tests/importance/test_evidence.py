"""The log evidence of adaptive importance sampling over hundreds of small regressions, against the mean over a fine net."""

import math

import numpy as np
import pytest
import torch

from tests.calibration import worst_excess
from torchgpmc.importance import (
    Adaptation,
    adapt,
    add_draws,
    draw_from,
    from_modes,
    log_evidence,
    log_weights,
    own_log_weights,
    start,
    with_defence,
)
from torchgpmc.random import make_generator, sobol_points

N, D, NOISE, NUM_DATA_SETS = 8, 4, 0.1, 300
BATCHES = [20] * 20  # small ones, which learn from few draws, make the most of what goes wrong
ZERO, UNIT = torch.zeros(1, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
PLANS = {"amis": Adaptation(False, False, 2.0 * D, 0.1), "mamis": Adaptation(True, False, 2.0 * D, 0.1)}
WEIGHTS = {"own": own_log_weights, "mixture": log_weights}


def log_likelihood(gaps, y, z):
    """Of a squared exponential kernel with lengthscales exp(2 z), whose prior is LogNormal(0, 2); ``gaps`` is (N, N, D)."""
    covariance = torch.exp(-0.5 * (gaps.flatten(0, 1) @ torch.exp(-4 * z).mT).mT).view(-1, N, N)
    factor = torch.linalg.cholesky(covariance + NOISE * torch.eye(N, dtype=torch.float64))
    white = torch.linalg.solve_triangular(factor, y.expand(len(z), N).unsqueeze(-1), upper=False).squeeze(-1)
    log_determinant = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - log_determinant - 0.5 * N * math.log(2 * math.pi)


def one_data_set(seed, plan):
    """Errors of the log evidence and those stated, by either kind of weights."""
    generator = make_generator(seed)
    x, y = torch.rand(N, D, generator=generator).double(), torch.randn(N, generator=generator).double()
    gaps = (x.unsqueeze(0) - x.unsqueeze(1)).square()
    net = torch.special.ndtri(next(sobol_points(4096, D, 1, 1, generator)).T)
    truth = torch.logsumexp(log_likelihood(gaps, y, net), 0) - math.log(len(net))
    state = start(with_defence(from_modes(ZERO, UNIT[None], ZERO[:, 0], 5.0), ZERO[0], UNIT, plan.defensive_share))
    for count in BATCHES:
        z = draw_from(state.current, count, generator)
        log_prior = -0.5 * (z.square().sum(-1) + D * math.log(2 * math.pi))
        state = adapt(add_draws(state, z, log_likelihood(gaps, y, z) + log_prior), plan)
    found = [log_evidence(weights(state)) for weights in WEIGHTS.values()]
    return [(float(value - truth), float(error)) for value, error in found]


@pytest.fixture(scope="module", params=PLANS)
def errors(request):
    """Actual and stated errors of all data sets, by the weights they come from ``(2, NUM_DATA_SETS)``."""
    found = np.array([one_data_set(seed, PLANS[request.param]) for seed in range(NUM_DATA_SETS)])  # (data sets, weights, 2)
    return {name: found[:, index].T for index, name in enumerate(WEIGHTS)}


@pytest.mark.slow
@pytest.mark.statistical
def test_the_evidence_is_unbiased_while_proposals_adapt(errors):
    actual, _ = errors["own"]
    assert worst_excess(np.exp(actual)[:, None], 1.0) < 1


@pytest.mark.slow
def test_the_bias_of_mixture_weights_is_caught(errors):
    actual, _ = errors["mixture"]
    assert worst_excess(np.exp(actual)[:, None], 1.0) > 1


@pytest.mark.slow
@pytest.mark.statistical
def test_stated_errors_cover_and_are_no_wider_than_they_need(errors):
    actual, stated = errors["own"]
    assert (np.abs(actual / stated) > 3).mean() <= 0.01
    assert 1.0 < math.sqrt((stated**2).mean() / (actual**2).mean()) < 2.0
