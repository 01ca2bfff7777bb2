"""The default method: what it is for each kind of model, and that sample uses it."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import fixed_kernel, gp, gp_regression, inputs, sparse_gp, targets


def wide(num_columns):
    kernel = RBFKernel(ard_num_dims=num_columns, lengthscale_prior=GammaPrior(2.0, 1.0))
    return tg.GP(inputs(6, num_columns), targets("probit", 6), kernel, tg.likelihoods.Bernoulli())


CASES = {
    "probit": (lambda: gp("probit"), tg.AMIS),
    "regression": (gp_regression, tg.AMIS),
    "sparse": (lambda: sparse_gp("probit"), tg.NUTS),
    "several latents": (lambda: gp("softmax"), tg.NUTS),
    "eight": (lambda: wide(8), tg.AMIS),
    "nine": (lambda: wide(9), tg.NUTS),
    "regression, twelve": (lambda: gp_regression(num_columns=10), tg.AMIS),
    "regression, thirteen": (lambda: gp_regression(num_columns=11), tg.NUTS),
    "fixed": (lambda: tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), tg.likelihoods.Bernoulli()), tg.EllipticalSlice),
}


@pytest.mark.parametrize("name", CASES)
def test_the_method_suits_the_model(name):
    make, expected = CASES[name]
    model = make()
    assert isinstance(tg.recommend(model), expected)
    assert tg.explain(model).startswith(expected.__name__) and len(tg.explain(model)) > 40


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_sample_uses_it_and_chains_on_request():
    weighted = tg.sample(gp("probit"), num_samples=40, seed=0, progress=False)
    assert weighted.log_weights.shape == (1, 40) and "AMIS" in weighted.info["method"]
    chains = tg.sample(gp("probit"), num_samples=5, warmup_steps=5, num_chains=2, seed=0, progress=False)
    assert chains.log_weights is None and "NUTS" in chains.info["method"]
    several = gp("poisson", 4).with_targets(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="num_chains=2"):
        tg.sample(several, num_samples=5, seed=0, progress=False)
