"""The GP whose latent function is known at some inputs: its prior by the textbook, its gradients, its predictions, its errors."""

import pytest
import torch
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior

import torchgpmc as tg
from tests.models.test_reverse import assert_equal, both
from tests.problems import conditioned_gp, gp, inputs
from tests.test_conformance import quiet_sample


def test_the_prior_is_the_conditional_of_the_joint_prior():
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    model = conditioned_gp(mean=mean, jitter=1e-4)
    plain = gp(mean=mean, jitter=0.0)
    theta = torch.tensor([[0.1, -0.4, 0.3, 0.7], [-0.5, 0.2, -0.2, -1.0]], dtype=torch.float64)
    new = inputs(3, seed=3)
    prior = model.prior(theta)
    cross = model.cross(prior, new)
    data, known = model.train_x, model.known_inputs
    everything = torch.cat([data, new, known])
    values = plain.layout.raw_values(theta).by_module
    for row in range(2):
        covariance = plain.covariance.bind(everything, everything)(values["kernel"])[row]
        constant = values["mean"]["raw_constant"][row]
        inner = covariance[9:, 9:] + 1e-4 * torch.eye(2)
        gain = torch.linalg.solve(inner, covariance[9:, :9]).mT
        expected = constant + gain @ (model.known_values - constant)
        rest = covariance[:9, :9] - gain @ covariance[9:, :9]
        torch.testing.assert_close(torch.cat([prior.mean[row], cross.mean[row]]), expected)
        torch.testing.assert_close(prior.covariance[row], rest[:6, :6] + 1e-4 * torch.eye(6))
        torch.testing.assert_close(cross.covariance[row], rest[:6, 6:])
        torch.testing.assert_close(cross.variance[row], rest[6:, 6:].diagonal())


def test_gradients_are_those_of_differences():
    density = tg.joint_log_density(conditioned_gp())
    position = 0.3 * torch.randn(1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, gradient = density.value_and_grad(position)
    steps = 1e-5 * torch.eye(9, dtype=torch.float64)
    difference = (density(position + steps) - density(position - steps)) / 2e-5
    torch.testing.assert_close(gradient[0], difference, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_predictions_pass_through_what_is_known():
    model = conditioned_gp()
    prediction = quiet_sample(model, tg.NUTS(max_tree_depth=3)).predict(model.known_inputs)
    torch.testing.assert_close(prediction.latent_mean, model.known_values, atol=0.02, rtol=0)
    assert bool((prediction.latent_variance < 1e-3).all())


def test_an_input_without_a_value_is_refused():
    with pytest.raises(ValueError, match=r"known_values has shape \(2,\) and known_inputs \(3, 2\).*\(3,\)"):
        conditioned_gp(known_inputs=inputs(3))
    with pytest.raises(ValueError, match="known_inputs has 1 columns but the model's train_x has 2"):
        conditioned_gp(known_inputs=torch.rand(2))
    with pytest.raises(ValueError, match="known_values has 1 NaN"):
        conditioned_gp(known_values=torch.tensor([0.0, torch.nan]))


@pytest.mark.parametrize("name", ["probit", "softmax"])
def test_the_gradient_by_parts_is_autograds(name):
    model = conditioned_gp(name, mean=ConstantMean(constant_prior=NormalPrior(0.0, 1.0)), jitter=1e-4)
    assert_equal(*both(model), rtol=1e-9, atol=1e-9)
