"""R-hat looks at latents: chains stuck in modes of f that hyperparameters and densities do not tell apart."""

import warnings

import pytest
import torch

import torchgpmc as tg
from tests.evidence.test_mixtures import SIGNS, two_modes
from tests.problems import gp
from torchgpmc.diagnostics import worst_latent


def symmetric():
    """f and -f have the same density, and so each mode the same p(theta) and lp."""
    model = two_modes("four")
    return model.with_targets(5 * SIGNS[:4])


@pytest.mark.slow
def test_chains_of_nuts_stuck_in_two_modes_of_f_warn():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = tg.sample(symmetric(), tg.NUTS(), num_samples=60, warmup_steps=60, num_chains=4, seed=1, progress=False)
    side = posterior.latents.mean(-1) > 0
    assert bool((side == side[:, :1]).all()) and 0 < int(side[:, 0].sum()) < 4  # stuck, and not all in one
    told = [str(warning.message) for warning in caught]
    assert any("R-hat of latent" in message and "mode of f" in message for message in told)


@pytest.mark.slow
def test_chains_that_mix_are_not_complained_about():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hundred draws are few
        posterior = tg.sample(gp("probit", 8), tg.NUTS(), num_samples=60, warmup_steps=60, num_chains=4, seed=0, progress=False)
    assert not any("latent" in complaint for complaint in posterior.complaints())


def test_the_worst_of_many_independent_latents_is_no_alarm():
    """And one pair of chains off by two standard deviations in one of five hundred is."""
    draws = torch.randn(4, 400, 500, generator=torch.Generator().manual_seed(0))
    assert worst_latent(draws)[1] < 1.1
    draws[:2, :, 321] += 2.0
    index, rhat = worst_latent(draws)
    assert index == 321 and rhat > 1.1
