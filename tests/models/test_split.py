"""prior(theta) holds what theta alone decides; at(prior, inputs) what f at some inputs is given v, at those inputs' cost."""

import pytest
import torch

from tests.problems import gp, inputs, sparse_gp
from torchgpmc.adapter import covariance
from torchgpmc.numerics import linalg

MODELS = {"GP": gp, "SparseGP": sparse_gp}


def positions(model, count=3):
    generator = torch.Generator().manual_seed(1)
    theta = 0.3 * torch.randn(count, model.layout.size, generator=generator, dtype=torch.float64)
    return theta, torch.randn(count, model.latent_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_the_data_in_parts_are_the_data_as_a_whole(name):
    model = MODELS[name]("probit", jitter=1e-10)  # the full GP has it on its own inputs alone
    theta, v = positions(model)
    prior = model.prior(theta)
    whole = model.marginals(model.at(prior), v)
    parts = [model.marginals(model.at(prior, x), v) for x in model.train_x.split(2)]
    for index in range(2):
        joined = torch.cat([part[index] for part in parts], -1)
        torch.testing.assert_close(joined, whole[index], rtol=1e-7, atol=1e-7)


def test_targets_in_parts_add_up_to_the_likelihood():
    model = sparse_gp("probit")
    theta, v = positions(model)
    prior = model.prior(theta)
    parts = zip(model.train_x.split(2), model.train_y.split(2), strict=True)
    total = sum(model.log_likelihood(model.at(prior, x), v, model.as_targets(y)) for x, y in parts)
    torch.testing.assert_close(total, model.log_likelihood(model.at(prior), v), rtol=1e-12, atol=1e-12)


def test_prediction_and_latents_of_a_sparse_model_never_see_the_training_inputs(monkeypatch):
    model = sparse_gp("probit", num_data=50)
    theta, v = positions(model)
    test_x = inputs(3)
    columns = []
    original = linalg.solve_lower
    monkeypatch.setattr(linalg, "solve_lower", lambda factor, right: columns.append(right.shape[-1]) or original(factor, right))
    bound = []
    closed = covariance.ClosedForm.bind
    monkeypatch.setattr(covariance.ClosedForm, "bind", lambda form, a, b: bound.append(len(b)) or closed(form, a, b))
    prior = model.prior(theta)
    model.marginals(model.at(prior, test_x), v)
    model.latents(prior, v)
    assert max(columns) == 3 and max(bound, default=0) == 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("likelihood", ["probit", "softmax"])
def test_whiten_is_the_inverse_of_latents(name, likelihood):
    model = MODELS[name](likelihood)
    theta, v = positions(model)
    prior = model.prior(theta)
    torch.testing.assert_close(model.whiten(prior, model.latents(prior, v)), v, rtol=1e-6, atol=1e-6)


def test_the_factor_with_a_gradient_has_that_of_the_factorisation():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    slopes = []
    for factor_of in (torch.linalg.cholesky, lambda k: linalg.factor_with_gradient(k, torch.linalg.cholesky(k).detach())):
        leaf = root.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad((weight * factor_of(leaf @ leaf.mT + torch.eye(4).double())).sum(), leaf)
        slopes.append(slope)
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)
