"""Which candidates are estimated: probabilities that add up, and a sample that has them."""

import math

import pytest
import scipy.optimize
import torch
from torch.testing import assert_close

from tests.calibration import z_limit
from torchgpmc.importance import included, inclusion_probabilities
from torchgpmc.numerics.random import make_generator


def log_weights(size, spread, seed=0):
    return spread * torch.randn(size, dtype=torch.float64, generator=make_generator(seed))


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 20.0])
@pytest.mark.parametrize(("size", "count"), [(80, 10), (16, 2), (9, 8), (7, 7)])
def test_probabilities_are_weights_over_one_constant_within_bounds(size, count, spread):
    given = log_weights(size, spread)
    found, least = inclusion_probabilities(given, count), 0.1 * count / size
    weights = (given - given.max()).clamp_min(-50).exp()

    def excess(log_constant):
        return float((weights / math.exp(log_constant)).clamp(least, 1).sum()) - count

    constant = scipy.optimize.brentq(excess, -51, 10, xtol=1e-13) if count < size else -51.0
    assert_close(found, (weights / math.exp(constant)).clamp(least, 1), rtol=1e-6, atol=1e-9)
    assert_close(found.sum(), torch.tensor(float(count), dtype=torch.float64), rtol=1e-9, atol=0.0)


def test_what_is_held_for_impossible_is_included_now_and_then():
    given = torch.tensor([0.0] * 20 + [-torch.inf] * 20 + [-1000.0] * 20, dtype=torch.float64)
    found = inclusion_probabilities(given, 10)
    assert_close(found[20:], torch.full((40,), 1 / 60, dtype=torch.float64))
    assert bool((found[:20] > 0.4).all())


def test_what_is_unknown_counts_as_the_mean():
    given = torch.tensor([0.0, math.log(3.0), torch.nan, math.log(2.0)], dtype=torch.float64)
    found = inclusion_probabilities(given, 2)
    assert_close(found[2], found[3])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_where_nothing_is_known_all_are_as_probable(value):
    assert_close(inclusion_probabilities(torch.full((8,), value, dtype=torch.float64), 2), torch.full((8,), 0.25).double())


def test_each_candidate_comes_as_often_as_it_should_and_as_many_as_are_wanted():
    probabilities, size, runs = inclusion_probabilities(log_weights(40, 2.0), 7), 40, 4000
    generator, counts = make_generator(1), torch.zeros(40, dtype=torch.float64)
    for _ in range(runs):
        rows = included(probabilities, 7, generator)
        assert len(rows) == len(rows.unique()) == 7
        counts[rows] += 1
    error = (probabilities * (1 - probabilities) / runs).sqrt()
    sure = error < 1e-9
    assert torch.equal(counts[sure], runs * probabilities[sure].round()) and bool(sure.any())
    assert float(((counts / runs - probabilities) / error)[~sure].abs().max()) < z_limit(size)


def test_what_is_certain_is_included_whatever_the_number_that_decides():
    probabilities = torch.tensor([1.0, 0.3, 1.0, 0.7, 1.0], dtype=torch.float64)
    for seed in range(50):
        rows = included(probabilities, 4, make_generator(seed)).tolist()
        assert {0, 2, 4} < set(rows) and len(rows) == 4
