"""Tuning of HMC: the search finds what it should, and what it returns is the given method with other numbers."""

import numpy as np
import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.calls.tuning import expected_improvement, maximise
from torchgpmc.samplers import MassMatrix


def test_expected_improvement_is_the_integral():
    mean, deviation = np.array([-1.0, 0.3, 2.0]), np.array([0.5, 1.0, 0.1])
    z = np.linspace(-9, 9, 20_001)
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    exact = [(np.maximum(m + s * z - 0.5, 0) * weights).sum() for m, s in zip(mean, deviation, strict=True)]
    np.testing.assert_allclose(expected_improvement(mean, deviation, 0.5), exact, rtol=1e-5)


@pytest.mark.slow
def test_the_search_finds_a_maximum_through_noise():
    noise = np.random.default_rng(1)
    best = np.array([0.3, 0.8])
    tried = []

    def objective(point):
        tried.append(point)
        return -8 * ((point - best) ** 2).sum() + 0.1 * noise.standard_normal()

    found = maximise(objective, 30, np.random.default_rng(0))
    assert len(tried) == 30 and np.abs(found - best).max() < 0.2
    assert np.abs(np.array(tried[-10:]) - best).mean() < np.abs(np.array(tried[:6]) - best).mean() / 2  # it goes where it is good


@pytest.mark.slow
def test_the_same_seed_gives_the_same_options_and_the_others_are_kept():
    model = gp("probit", num_data=4)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    options = {"max_steps": 32, "num_trials": 9, "trial_steps": 6, "warmup_steps": 30, "seed": 2}
    method = tg.HMC(num_steps=4, mass_matrix=MassMatrix.IDENTITY, thinning=3)
    tuned = tg.tune_hmc(model, method, **options)
    assert tuned == tg.tune_hmc(model, method, **options)
    assert tuned.thinning == 3 and tuned.random_length and tuned.mass_matrix is MassMatrix.IDENTITY
    assert 1 <= tuned.num_steps <= 32 and 0.3 <= tuned.target_accept_prob <= 0.98 and tuned.step_size > 0
    assert torch.equal(before[0], torch.random.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"method": tg.NUTS()}, TypeError, r"Expected torchgpmc\.HMC"),
        ({"max_steps": 0}, ValueError, "max_steps is 0"),
        ({"num_trials": 3}, ValueError, "num_trials is 3. Expected a whole number of at least 6"),
        ({"trial_steps": 0}, ValueError, "trial_steps is 0"),
        ({"num_chains": 0}, ValueError, "num_chains is 0"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_bad_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        tg.tune_hmc(gp("probit", num_data=4), **options)
