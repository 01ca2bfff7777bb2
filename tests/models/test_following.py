"""Coordinates that are white under a Gaussian fit at every theta: against inverses, autograd, and the density of [theta, v]."""

import pytest
import torch

from tests.models.test_whitening import constant_mean, random_positions
from tests.problems import gp, sparse_gp
from torchgpmc.density import AutogradDensity
from torchgpmc.models import JointLogDensity
from torchgpmc.models.affine import AffineJointLogDensity
from torchgpmc.models.following import following_map

MODELS = {
    "full": lambda: gp("student_t", mean=constant_mean(), jitter=1e-4),
    "full, three latents": lambda: gp("softmax", jitter=1e-4),
    "sparse": lambda: sparse_gp("probit", mean=constant_mean(), jitter=1e-4),
    "sparse, three latents": lambda: sparse_gp("softmax", mean=constant_mean(), jitter=1e-4),
}
CASES = [(name, together) for name in MODELS for together in (True, False) if together or "three" in name]


class LinearData:
    """y = H u + noise, u the function values of all latents: a Gaussian likelihood, whose posterior is known at every theta."""

    def __init__(self, model, together):
        generator = torch.Generator().manual_seed(3)
        latents, size = model.latent_shape
        rows = torch.randn(latents, 4, latents, size, generator=generator, dtype=torch.float64)
        if not together:
            rows = rows * torch.eye(latents)[:, None, :, None]
        self.model, self.together = model, together
        self.map = 2 * rows.view(4 * latents, -1)
        self.y = 3 * torch.randn(len(self.map), generator=generator, dtype=torch.float64)

    def posterior(self, theta):
        """Mean and covariance of v given y at one theta."""
        with torch.no_grad():
            prior = self.model.prior(theta[None])
        latents = self.model.num_latents
        seen = self.map @ torch.block_diag(*[prior.factor[0]] * latents)
        covariance = torch.linalg.inv(torch.eye(seen.shape[1]) + seen.mT @ seen)
        return covariance @ seen.mT @ (self.y - self.map @ prior.mean[0].repeat(latents)), covariance

    def fit(self, theta, slope=None):
        """The map of a fit that is the posterior at theta."""
        mean, covariance = self.posterior(theta)
        blocks = 1 if self.together else self.model.num_latents
        size = len(mean) // blocks
        parts = [covariance[k * size : (k + 1) * size, k * size : (k + 1) * size] for k in range(blocks)]
        return following_map(self.model, theta, mean.view(blocks, -1), torch.linalg.cholesky(torch.stack(parts)), slope)


@pytest.mark.parametrize(("name", "together"), CASES)
def test_under_a_gaussian_likelihood_w_is_standard_normal_at_every_theta(name, together):
    model = MODELS[name]()
    data, position = LinearData(model, together), random_positions(model, 4)
    theta = position[:, : model.layout.size]
    coordinates = data.fit(theta[0])
    corners = torch.cat([torch.zeros(1, model.latent_size), torch.eye(model.latent_size)]).double()
    for row in theta:
        v, log_volume = coordinates.whitened(row.expand(len(corners), -1), corners)
        mean, covariance = data.posterior(row)
        matrix = (v[1:] - v[0]).mT
        torch.testing.assert_close(v[0], mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(matrix @ matrix.mT, covariance, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(log_volume[0], matrix.slogdet().logabsdet)


def random_slope(model):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(model.latent_size, model.layout.size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("name", "together"), CASES)
def test_the_gradient_is_autograds_and_the_density_that_of_theta_and_v(name, together):
    model = MODELS[name]()
    position = random_positions(model)
    size = model.layout.size
    coordinates = LinearData(model, together).fit(position[0, :size] + 0.3, random_slope(model))
    density = AffineJointLogDensity(JointLogDensity(model), coordinates)
    for found, expected in zip(density.value_and_grad(position), AutogradDensity(density).value_and_grad(position), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    v, log_volume = density.whitened(position)
    torch.testing.assert_close(density(position), JointLogDensity(model)(torch.cat([position[:, :size], v], -1)) + log_volume)
    torch.testing.assert_close(coordinates.mapped(position[:, :size], position[:, size:]).v, v)


def test_the_mean_has_the_slope_of_the_fit():
    model = MODELS["sparse, three latents"]()
    theta, slope = random_positions(model)[0, : model.layout.size], random_slope(model)
    nowhere = torch.zeros(1, model.latent_size, dtype=torch.float64)

    def slope_of(coordinates):
        return torch.autograd.functional.jacobian(lambda at: coordinates.latents(at[None], nowhere)[0], theta)

    data = LinearData(model, True)
    torch.testing.assert_close(slope_of(data.fit(theta, slope)), slope, rtol=0, atol=1e-4)
    moved = [data.posterior(theta + step)[0] for step in (1e-4 * torch.eye(len(theta)).double()[0] * sign for sign in (1, -1))]
    torch.testing.assert_close(slope_of(data.fit(theta))[:, 0], (moved[0] - moved[1]) / 2e-4, rtol=1e-4, atol=1e-5)


def test_a_row_that_does_not_factorise_fails_alone():
    model = gp("softmax", num_data=30, jitter=0.0)
    position = random_positions(model, 2)
    position[0, : model.layout.size], position[1, : model.layout.size] = -3.0, 9.0
    theta, unit = position[0, : model.layout.size], torch.eye(30, dtype=torch.float64)
    fit = following_map(model, theta, 0 * unit[:3], 0.5 * unit.expand(3, -1, -1))
    density = AffineJointLogDensity(JointLogDensity(model), fit)
    value, gradient = density.value_and_grad(position)
    assert bool(torch.isfinite(value[0])) and float(value[1]) == -torch.inf and float(gradient[1].abs().max()) == 0.0
    torch.testing.assert_close(density(position), value)
