"""Fits at the data: what a likelihood expects under each draw, and quantiles of it."""

import numpy as np
import pytest
import torch

import torchgpmc as tg
from tests.problems import gp, sparse_gp
from tests.test_conformance import quiet_sample


@pytest.mark.parametrize("likelihood", ["probit", "softmax", "laplace"])
def test_fits_are_finite_and_of_the_response(likelihood):
    posterior = quiet_sample(gp(likelihood), tg.NUTS(max_tree_depth=2))
    draws = posterior.fitted().draws
    assert draws.shape == ((2, 6, 6, 3) if likelihood == "softmax" else (2, 6, 6))
    assert bool(torch.isfinite(draws).all())
    if likelihood == "probit":
        torch.testing.assert_close(draws, torch.special.ndtr(posterior.latents))
    if likelihood == "softmax":
        torch.testing.assert_close(draws.sum(-1), torch.ones(2, 6, 6).double())


def test_quantiles_count_weights():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 50, 3, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 4, (100,), generator=generator)
    weighted = tg.Fitted(draws, counts.double().log())
    repeated = draws.flatten(0, 1).repeat_interleave(counts, 0).numpy()
    torch.testing.assert_close(weighted.mean, torch.as_tensor(repeated.mean(0)))
    for q in (0.025, 0.5, 0.975):
        expected = np.quantile(repeated, q, axis=0, method="inverted_cdf")
        torch.testing.assert_close(weighted.quantile(q), torch.as_tensor(expected))
    with pytest.raises(ValueError, match=r"q is 1\.0\. Expected a number above 0 and below 1"):
        weighted.quantile(1.0)


def test_models_without_latents_at_the_data_say_so():
    with pytest.raises(ValueError, match=r"not a latent of SparseGP.*predict\(train_x\)"):
        quiet_sample(sparse_gp(), tg.NUTS(max_tree_depth=2)).fitted()
