"""Coordinates that are white under a Gaussian q(v): the density of [theta, v] times a constant, whatever the map."""

import pytest
import torch

from tests.problems import LIKELIHOODS, fixed_kernel, gp, inputs, sparse_gp, targets
from torchgpmc.models import GP, JointLogDensity
from torchgpmc.models.affine import AffineJointLogDensity, AffineMap


def random_map(model):
    generator = torch.Generator().manual_seed(1)
    (latents, size), theta_size = model.latent_shape, model.layout.size

    def normal(*shape):
        return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    scale = normal(latents, size, size).tril(-1) + torch.diag_embed(normal(latents, size).exp())
    return AffineMap(normal(theta_size), normal(latents, size), normal(latents * size, theta_size), scale)


def random_positions(model, chains=3):
    size = model.layout.size + model.latent_size
    return 0.5 * torch.randn(chains, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


MODELS = {
    "full": lambda: gp("probit", jitter=1e-4),
    "full, three latents": lambda: gp("softmax", jitter=1e-4),
    "sparse": lambda: sparse_gp("student_t", jitter=1e-4),
    "sparse, three latents": lambda: sparse_gp("softmax", jitter=1e-4),
    "fixed hyperparameters": lambda: GP(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"]()),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_density_is_that_of_theta_and_v_times_the_volume(name):
    model = MODELS[name]()
    coordinates, position = random_map(model), random_positions(model)
    density = AffineJointLogDensity(JointLogDensity(model), coordinates)
    size = model.layout.size
    theta, white = position[:, :size], position[:, size:]
    v, log_volume = density.whitened(position)

    for row in range(len(position)):
        for k in range(model.num_latents):
            columns = slice(k * model.latent_shape[1], (k + 1) * model.latent_shape[1])
            shift = coordinates.slope[columns] @ (theta[row] - coordinates.origin)
            expected = coordinates.centre[k] + shift + coordinates.scale[k] @ white[row, columns]
            torch.testing.assert_close(v[row, columns], expected)
    jacobian = torch.autograd.functional.jacobian(lambda w: coordinates.latents(theta[:1], w[None])[0], white[0])
    torch.testing.assert_close(log_volume[0], jacobian.slogdet().logabsdet)
    torch.testing.assert_close(density(position), JointLogDensity(model)(torch.cat([theta, v], -1)) + log_volume)

    value, gradient = density.value_and_grad(position)
    torch.testing.assert_close(value, density(position))
    for column in (0, size, size + model.latent_size - 1):
        step = torch.zeros_like(position)
        step[:, column] = 1e-5
        slope = (density(position + step) - density(position - step)) / 2e-5
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-4, atol=1e-5)


def test_a_row_that_fails_and_data_sets_of_several_chains():
    model = gp("probit", num_data=30, jitter=0.0)
    many = model.with_targets(torch.stack([model.train_y, 1 - model.train_y]))
    density = AffineJointLogDensity(JointLogDensity(many), random_map(model))
    position = random_positions(model, 2)
    position[0, : model.layout.size], position[1, : model.layout.size] = -3.0, 9.0
    value, gradient = density.value_and_grad(position)
    assert bool(torch.isfinite(value[0])) and float(value[1]) == -torch.inf and float(gradient[1].abs().max()) == 0.0
    torch.testing.assert_close(density.select(torch.tensor([0]))(position[:1]), value[:1])
