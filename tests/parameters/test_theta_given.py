"""Theta as users have it, wherever it is given: numbers of any precision, or a plain sentence."""

import numpy as np
import pytest
import torch

import torchgpmc as tg
from tests.problems import generator, gp, inputs
from torchgpmc.approximations import EP, ApproximateMarginal, Laplace

X = inputs(6)
MODEL = gp("probit")
SIZE = MODEL.layout.size
CALLS = {
    "prior": lambda theta: MODEL.prior(theta).factor,
    "laplace": lambda theta: tg.approximations.laplace(MODEL, theta).log_evidence,
    "EP": lambda theta: tg.approximations.expectation_propagation(MODEL, theta).log_evidence,
    "predict": lambda theta: tg.approximations.predict(MODEL, theta, EP(), X).probs,
    "marginal": lambda theta: ApproximateMarginal(MODEL, Laplace())(theta),
    "marginal's gradient": lambda theta: ApproximateMarginal(MODEL, Laplace()).value_and_grad(theta)[1],
    "importance": lambda theta: tg.evidence.importance(MODEL)(theta, generator()).value,
    "importance, with latents": lambda theta: tg.evidence.importance(MODEL).draw(theta, generator()).value,
    "annealed": lambda theta: tg.evidence.annealed(MODEL)(theta, generator()).value,
    "SmoothProbit": lambda theta: tg.evidence.SmoothProbit(EP(), 8).estimator(MODEL).draw(theta, generator()).value,
    "Orthant": lambda theta: tg.evidence.Orthant().estimator(MODEL).draw(theta, generator()).value,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_numbers_of_any_precision_and_kind_are_the_same_theta(call):
    theta = torch.zeros(2, SIZE, dtype=torch.float64)
    expected = call(theta)
    assert expected.dtype == torch.float64
    for other in (theta.float(), theta.numpy(), theta.numpy().astype(np.float32), theta.tolist(), theta.int()):
        assert torch.equal(call(other), expected)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("shape", [(SIZE,), (2, SIZE + 1), (2, 1), (1, 2, SIZE)])
def test_another_shape_is_named(call, shape):
    with pytest.raises(ValueError, match=rf"theta has shape .* Expected \(C, {SIZE}\).*kernel\.outputscale"):
        call(torch.zeros(shape, dtype=torch.float64))


def test_text_is_no_theta():
    with pytest.raises(TypeError, match=r"theta is .* Expected numbers"):
        MODEL.prior([["a", "b", "c"]])
