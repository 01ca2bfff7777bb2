"""Coordinates around a Gaussian fit by polynomials: against the posteriors they stand for, Jacobians, autograd."""

import pytest
import torch

from tests.models.test_following import CASES, MODELS, LinearData
from tests.models.test_whitening import random_positions
from torchgpmc.density import AutogradDensity
from torchgpmc.models import JointLogDensity
from torchgpmc.models.affine import AffineJointLogDensity
from torchgpmc.models.bent import bent_map


def around(name, together, deviation=0.2):
    """Data, and the map around the posterior at one theta."""
    model = MODELS[name]()
    data, theta = LinearData(model, together), random_positions(model, 1)[0, : model.layout.size]
    return data, bent_map(data.fit(theta), torch.full_like(theta, deviation))


def matrix_at(coordinates, theta, size):
    """Where w is zero at one theta, and dv / dw."""
    corners = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
    v = coordinates.latents(theta.expand(len(corners), -1), corners)
    return v[0], (v[1:] - v[0]).mT


@pytest.mark.parametrize(("name", "together"), CASES)
def test_means_are_right_a_deviation_away(name, together):
    data, coordinates = around(name, together)
    size = len(coordinates.origin)
    unit = 0.2 * torch.eye(size).double()
    for step in [torch.zeros(size).double(), *unit, *-unit, unit[:2].sum(0)]:
        theta = coordinates.origin + step
        found, _ = matrix_at(coordinates, theta, data.model.latent_size)
        torch.testing.assert_close(found, data.posterior(theta)[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "together"), CASES)
def test_what_is_left_of_covariances_shrinks_with_the_square_of_the_distance(name, together):
    left = []
    for deviation in (0.08, 0.04):
        data, coordinates = around(name, together, deviation)
        theta = coordinates.origin + deviation * torch.ones_like(coordinates.origin)
        matrix = matrix_at(coordinates, theta, data.model.latent_size)[1]
        of_w = torch.linalg.inv(matrix) @ data.posterior(theta)[1] @ torch.linalg.inv(matrix).mT
        left.append(float((of_w - torch.eye(len(of_w))).norm()))
    assert left[1] < 0.01 * len(of_w) ** 0.5  # of that of I, which white coordinates of one theta alone are not nearly
    assert left[1] < 0.35 * left[0]  # a quarter, but for cubes


@pytest.mark.parametrize("distance", [0.1, 5.0])  # in theta, whose deviation is taken to be a fifth
@pytest.mark.parametrize(("name", "together"), CASES)
def test_the_density_is_that_of_theta_and_v_times_the_volume_and_its_gradient_autograds(name, together, distance):
    data, coordinates = around(name, together)
    model, size = data.model, data.model.layout.size
    position = random_positions(model)
    position[:, :size] = coordinates.origin + distance * torch.tensor([-0.4, 0.3, 0.2])[: len(position), None]
    theta, w = position.tensor_split([size], -1)
    joint = JointLogDensity(model)
    density = AffineJointLogDensity(joint, coordinates)
    v, log_volume = density.whitened(position)
    for row in range(len(position)):
        centre, matrix = matrix_at(coordinates, theta[row], model.latent_size)
        torch.testing.assert_close(v[row], centre + matrix @ w[row])
        torch.testing.assert_close(log_volume[row], matrix.slogdet().logabsdet)

    def value(at):
        whitened = coordinates.whitened(*at.tensor_split([size], -1))
        return joint(torch.cat([at[:, :size], whitened[0]], -1)) + whitened[1]

    for found, expected in zip(density.value_and_grad(position), AutogradDensity(value).value_and_grad(position), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(density(position), value(position))
    torch.testing.assert_close(coordinates.white(theta, v), w, rtol=1e-6, atol=1e-6)


def test_far_off_nothing_runs_away():
    data, coordinates = around("sparse, three latents", True)
    far, further = (coordinates.origin + distance * torch.ones_like(coordinates.origin) for distance in (20.0, 40.0))
    size = data.model.latent_size
    matrices = [matrix_at(coordinates, theta, size)[1] for theta in (far, further)]
    torch.testing.assert_close(*matrices)
    line = [matrix_at(coordinates._replace(slope=0 * coordinates.slope), theta, size)[0] for theta in (far, further)]
    torch.testing.assert_close(*line)


def test_in_other_numbers_the_map_touches_itself():
    data, coordinates = around("sparse, three latents", True)
    size = len(coordinates.origin)
    jacobian = torch.eye(size).double() + 0.3 * torch.randn(size, size, generator=torch.Generator().manual_seed(1)).double()
    origin = torch.arange(size).double()
    moved, step = coordinates.moved(origin, jacobian), 0.1 * torch.arange(1, size + 1).double()
    w = torch.randn(1, data.model.latent_size, generator=torch.Generator().manual_seed(2)).double()
    found = moved.whitened(origin + step[None], w)
    expected = coordinates.whitened(coordinates.origin + (jacobian @ step)[None], w)
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other)


def test_a_covariance_without_a_root_nearby_leaves_no_map(monkeypatch):
    data = LinearData(MODELS["sparse"](), True)
    following = data.fit(torch.zeros(data.model.layout.size).double())
    normal_at = type(following).normal_at
    monkeypatch.setattr(type(following), "normal_at", lambda self, theta: (*normal_at(self, theta)[:2], theta[:, 0] < 0.1))
    assert bent_map(following, torch.full_like(following.origin, 0.2)) is None
