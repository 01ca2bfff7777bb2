"""Fits at the data: what a likelihood expects under each draw, and quantiles of it."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import gp, inputs, sparse_gp
from tests.test_conformance import quiet_sample
from torchgpmc.models.latents import likelihood_parameters


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


@pytest.mark.parametrize(("likelihood", "replicates"), [("softmax", 1), ("transcription", 1), ("transcription", 2)])
def test_a_projected_process_fits_by_its_values_at_the_data(likelihood, replicates):
    """Inducing points that are the data, in another order: the full GP's fit at the same f."""
    if likelihood == "softmax":
        full, x = gp(likelihood), inputs(6)
        kernel, module, y = full.kernel, full.likelihood, full.train_y
    else:
        x = torch.linspace(0, 12, 13, dtype=torch.float64)
        response, kernel = tg.likelihoods.Activation(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        module = tg.likelihoods.Transcription(x, x[::4], num_genes=2, num_replicates=replicates, response=response)
        y = torch.rand(replicates, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
        full = tg.GP(x, y, kernel, module)
    model = tg.ProjectedProcess(x, y, kernel, module, inducing_points=x.flip(0), jitter=1e-8)
    posterior = quiet_sample(model, tg.NUTS(max_tree_depth=2))
    draws = posterior.fitted().draws
    theta, f = posterior.theta.flatten(0, 1), posterior.latents.flatten(0, 1).flip(1)
    values = likelihood_parameters(full.layout.raw_values(theta).by_module["likelihood"])
    expected = full.likelihood_function(values, lambda likelihood: likelihood.expected_response(f))
    torch.testing.assert_close(draws.flatten(0, 1), expected.detach(), rtol=1e-4, atol=1e-5)


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
    with pytest.raises(ValueError, match=r"the latents of SparseGP leave open.*predict\(train_x\)"):
        quiet_sample(sparse_gp(), tg.NUTS(max_tree_depth=2)).fitted()
