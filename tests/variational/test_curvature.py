"""Deviations of many hyperparameters, from probes of the joint density's curvature."""

import torch

import torchgpmc as tg
from tests.problems import gp, sparse_gp
from torchgpmc.approximations.normal_latents import GaussianLatents
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.variational import curvature


def narrow(model):
    """A q that is all but a point."""
    latents, size = model.latent_shape
    mean = torch.linspace(-1, 1, latents * size, dtype=torch.float64).view(1, latents, size)
    return GaussianLatents(mean, 1e-9 * torch.eye(size, dtype=torch.float64).expand(1, latents, -1, -1))


def hessian(model, theta, v):
    """Of minus the joint log density in theta, by differences of its gradient."""
    rows = theta + 1e-3 * torch.cat([torch.eye(len(theta)), -torch.eye(len(theta))]).double()
    gradient = JointLogDensity(model).value_and_grad(torch.cat([rows, v.expand(len(rows), -1)], -1))[1][:, : len(theta)]
    return (gradient[len(theta) :] - gradient[: len(theta)]) / 2e-3


def test_probes_err_by_no_more_than_the_rest_of_a_row(monkeypatch):
    monkeypatch.setattr(curvature, "_ERRORS", 0.0)
    start = tg.initialize(sparse_gp("softmax", num_data=40), progress=False)
    model, theta, q = start.model, start.theta, GaussianLatents(start.mean[None], 1e-9 * start.scale[None])
    exact = hessian(model, theta, q.mean.flatten(1))
    found = curvature.curvature_by_probes(model, theta, q)
    others = exact.abs().sum(-1) - exact.diagonal().abs()
    assert bool(((found - exact.diagonal()).abs() <= others + 0.01 * exact.diagonal()).all())
    assert bool((exact.diagonal() > 0).all()) and bool((others > 0).any())


def test_noise_of_probes_makes_no_hyperparameter_wider_than_its_prior():
    model = sparse_gp("softmax", num_data=40, num_columns=30)
    model = model.with_buffers(train_x=model.train_x * torch.linspace(1.0, 0.1, 30).double())  # the last say next to nothing
    theta = model.layout.present(model)[0].detach()
    found = curvature.curvature_by_probes(model, theta, narrow(model))
    leaf = theta.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model.layout.log_prior(leaf[None]).sum(), leaf, create_graph=True)
    (of_prior,) = torch.autograd.grad(-slope.sum(), leaf)  # the diagonal, parameters being independent a priori
    assert bool((found >= of_prior - 1e-3).all())


def test_a_single_hyperparameter_has_its_curvature():
    model = sparse_gp("probit", num_data=40, num_columns=1)
    model.kernel.requires_grad_(False)
    model.kernel.base_kernel.raw_lengthscale.requires_grad_(True)
    model = tg.SparseGP(model.train_x, model.train_y, model.kernel, model.likelihood, inducing_points=model.inducing_points)
    theta, q = model.layout.present(model)[0].detach(), narrow(model)
    assert len(theta) == 1
    exact = hessian(model, theta, q.mean.flatten(1))[0]
    torch.testing.assert_close(curvature.curvature_by_probes(model, theta, q), exact, rtol=0.01, atol=0)


def test_a_start_of_many_hyperparameters_has_deviations_of_each(monkeypatch):
    monkeypatch.setattr(curvature, "_MOST", 1)
    start = tg.initialize(sparse_gp("softmax", num_data=40), progress=False)
    found = curvature.curvature_by_probes(start.model, start.theta, start.latents())
    torch.testing.assert_close(start.theta_covariance, found.reciprocal().diag(), rtol=1e-6, atol=0)
    assert not bool(start.slope.any())


def test_a_density_without_slopes_has_no_curvature():
    model = gp("robust_max", num_data=8)
    theta = model.layout.present(model)[0].detach()
    assert curvature.curvature_by_probes(model, theta, narrow(model)) is None
