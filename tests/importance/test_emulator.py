"""The Gaussian process that tells a log density from its values at some points."""

import gpytorch
import pytest
import scipy.optimize
import torch

from torchgpmc.importance import empty_emulator, emulated
from torchgpmc.importance import emulator as emulator_module
from torchgpmc.importance.emulator import Bends


def bumpy(z):
    """Like a log posterior of lengthscales: flat on either side of a step, under a standard normal prior."""
    return -0.5 * z.square().sum(-1) + 20 * torch.tanh(z[:, 0] - 0.5) - 5 * torch.tanh(z[:, 0] * z[:, 1])


def points(count, dimension, seed=0):
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gradient_is_the_slope_of_the_value():
    z = points(120, 3)
    emulator = emulated(z, bumpy(z))
    at = points(7, 3, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(emulator(at).sum(), at)
    value, gradient = emulator.value_and_grad(at.detach())
    torch.testing.assert_close(value, emulator(at.detach()))
    torch.testing.assert_close(gradient, slope)


def test_the_mean_is_that_of_a_gaussian_process_in_bent_coordinates():
    z, at = points(60, 2), points(9, 2, seed=1)
    emulator = emulated(z, bumpy(z))
    bends = emulator.bends

    def bent(position):  # dx/dz is 1 over the lengthscale where the coordinate is not bent
        return torch.tanh(bends.log_slope.exp() * (position - bends.bend)) / bends.log_slope.exp()

    covariance = gpytorch.kernels.RBFKernel(ard_num_dims=2).double()
    covariance.lengthscale = bends.log_lengthscale.exp()
    signal, noise = (2 * bends.log_signal).exp(), (2 * bends.log_noise).exp()
    linear = gpytorch.kernels.LinearKernel(ard_num_dims=2).double()
    linear.variance = (2 * bends.log_linear - 2 * bends.log_lengthscale).exp()

    def between(one, other):
        return signal * covariance(one, other).to_dense() + linear(one, other).to_dense()

    with torch.no_grad():
        known = between(bent(z), bent(z)) + (noise + 1e-6 * signal) * torch.eye(60, dtype=torch.float64)
        values = bumpy(z) + 0.5 * z.square().sum(-1)
        across = between(bent(at), bent(z))
        expected = values.mean() + across @ torch.linalg.solve(known, values - values.mean()) - 0.5 * at.square().sum(-1)
    torch.testing.assert_close(emulator(at), expected, rtol=1e-6, atol=1e-6)


def test_more_points_tell_more():
    at = points(200, 4, seed=1)
    errors = []
    for count in (40, 160, 640):
        z = points(count, 4)
        errors.append(float((emulated(z, bumpy(z))(at) - bumpy(at)).square().mean().sqrt()))
    assert errors[0] > 2 * errors[1] and errors[1] > 2 * errors[2] and errors[2] < 0.5


def test_a_sum_of_bends_is_learned_from_few_points_of_many_dimensions(monkeypatch):
    """By the linear part: without it the error is several times as large."""
    weight = torch.linspace(-2, 2, 30, dtype=torch.float64)

    def steps(z):
        return torch.tanh(0.5 * z) @ weight - 0.5 * z.square().sum(-1)

    z, at = points(90, 30), points(200, 30, seed=1)

    def error():
        return float((emulated(z, steps(z))(at) - steps(at)).square().mean().sqrt())

    with_it = error()
    monkeypatch.setattr(emulator_module, "_LINEAR", -6.0)
    monkeypatch.setattr(emulator_module, "_BOUNDS", (*emulator_module._BOUNDS[:-1], (-6.0, -6.0)))
    assert error() > 2 * with_it


def test_noise_is_averaged_and_not_followed():
    z, at = points(400, 2), points(200, 2, seed=1)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    emulator = emulated(z, bumpy(z) + noise)
    error = float((emulator(at) - bumpy(at)).square().mean().sqrt())
    assert 0.7 < float(emulator.bends.log_noise.exp()) < 1.4 and error < 0.6


def test_a_search_that_has_been_misled_begins_again_where_it_ended(monkeypatch):
    """As from a loss of 1e10 along a line: a search ends at a slope of hundreds of nats and says that it has converged."""
    z, searches = points(100, 2), []

    def misled(loss, numbers, options, **others):
        searches.append(options["maxiter"])
        options = options | {"maxiter": min(3, options["maxiter"])}
        return scipy.optimize.minimize(loss, numbers, options=options, **others)

    whole = emulated(z, bumpy(z))
    monkeypatch.setattr(emulator_module, "minimize", misled)
    at = points(200, 2, seed=1)
    errors = [float((emulator(at) - bumpy(at)).square().mean().sqrt()) for emulator in (whole, emulated(z, bumpy(z)))]
    assert errors[1] < 2 * errors[0] and searches[:3] == [50, 47, 44] and searches[-1] > 0


def test_a_fit_goes_on_from_the_one_before():
    z = points(200, 3)
    first = emulated(z[:100], bumpy(z[:100]))
    again = emulated(z, bumpy(z), first.bends)
    at = points(200, 3, seed=1)
    error = (again(at) - bumpy(at)).abs().median()
    assert float(error) < float((first(at) - bumpy(at)).abs().median())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_points_and_equal_ones_are_no_trouble(count):
    z = points(1, 3).expand(count, 3)
    emulator = emulated(z, torch.full((count,), -3.0, dtype=torch.float64))
    value, gradient = emulator.value_and_grad(points(4, 3, seed=1))
    assert bool(torch.isfinite(value).all()) and bool(torch.isfinite(gradient).all())


def test_of_no_points_it_is_the_prior():
    z = points(5, 3)
    value, gradient = empty_emulator(z[0]).value_and_grad(z)
    torch.testing.assert_close(value, -0.5 * z.square().sum(-1))
    torch.testing.assert_close(gradient, -z)


def test_every_hyperparameter_has_bounds():
    bends = empty_emulator(torch.zeros(4)).bends
    assert len(bends.bounds()) == sum(part.numel() for part in bends) and isinstance(bends, Bends)


def test_the_gradient_in_its_own_hyperparameters_is_that_of_differences():
    z = points(40, 3)
    values = bumpy(z) - bumpy(z).mean()
    moved = 0.1 * points(1, 10, seed=2)[0]
    like = empty_emulator(z[0]).bends
    sizes = [part.numel() for part in like]
    flat = torch.cat([part.flatten() for part in like]) + moved

    def found(numbers):
        bends = Bends(*(part.view_as(other) for part, other in zip(numbers.split(sizes), like, strict=True)))
        return emulator_module._negative_log_posterior(bends, z, values)

    steps = 1e-5 * torch.eye(len(flat), dtype=torch.float64)
    differences = torch.tensor([(found(flat + step)[0] - found(flat - step)[0]) / 2e-5 for step in steps], dtype=torch.float64)
    torch.testing.assert_close(found(flat)[1], differences, rtol=1e-5, atol=1e-4)
