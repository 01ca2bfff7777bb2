"""The best q(v) at fixed hyperparameters: closed forms for Gaussian noise, stationarity, and the bound by Monte Carlo."""

import gpytorch
import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import gp, sparse_gp
from torchgpmc.approximations.nearest_normal import nearest_normal
from torchgpmc.approximations.normal_latents import GaussianLatents, LatentSites, lower_bound, no_sites
from torchgpmc.models.latents import likelihood_values
from torchgpmc.numerics.linalg import normal_from_natural
from torchgpmc.trees import concatenate


def at_three_thetas(model):
    theta = torch.linspace(-0.8, 0.8, 3, dtype=torch.float64)[:, None].expand(3, model.layout.size)
    at = model.at_data(model.layout.raw_values(theta))
    return at, nearest_normal(model, at, model.targets)


def constant_mean():
    return gpytorch.means.ConstantMean(constant_prior=gpytorch.priors.NormalPrior(0.0, 1.0))


def test_with_gaussian_noise_q_is_the_exact_posterior_and_the_bound_is_titsias():
    """Titsias 2009: log N(y | m, Q + noise) - tr(K - Q) / (2 noise), Q = Kxz Kzz^-1 Kzx; q(u) by the plain formulas."""
    model = sparse_gp("gaussian", num_data=20, num_inducing=5, mean=constant_mean(), jitter=1e-4)
    at, found = at_three_thetas(model)
    assert bool(found.converged.all())
    for row in range(3):
        noise = float(likelihood_values(at.prior)["noise_covar.raw_noise"][row])
        cross = model.cross(at.prior, model.train_x)
        inner, outer = at.prior.covariance[row].detach(), cross.covariance[row].detach()
        reduced = outer.mT @ torch.linalg.solve(inner, outer)
        mean = cross.mean[row].detach()
        covariance = reduced + noise * torch.eye(20).double()
        normal = torch.distributions.MultivariateNormal(mean, covariance)
        trace = float((cross.variance[row].detach() - reduced.diagonal()).sum())
        torch.testing.assert_close(
            found.log_evidence[row], normal.log_prob(model.train_y) - 0.5 * trace / noise, rtol=1e-9, atol=1e-9
        )

        sigma = torch.linalg.inv(inner + outer @ outer.mT / noise)
        exact_mean = at.prior.mean[row].detach() + inner @ sigma @ outer @ (model.train_y - mean) / noise
        factor = at.prior.factor[row]
        torch.testing.assert_close(at.prior.mean[row].detach() + factor @ found.latents.mean[row, 0], exact_mean)
        root = factor @ found.latents.scale[row, 0]
        torch.testing.assert_close(root @ root.mT, inner @ sigma @ inner, rtol=1e-6, atol=1e-8)


def test_with_gaussian_noise_the_full_models_bound_is_the_evidence():
    model = gp("gaussian", num_data=8)
    at, found = at_three_thetas(model)
    noise = likelihood_values(at.prior)["noise_covar.raw_noise"]
    covariance = at.prior.covariance + noise[:, :, None] * torch.eye(8).double()
    expected = torch.distributions.MultivariateNormal(torch.zeros(8).double(), covariance).log_prob(model.train_y)
    torch.testing.assert_close(found.log_evidence, expected.detach())


@pytest.mark.parametrize("make", [gp, sparse_gp], ids=["full", "sparse"])
@pytest.mark.parametrize("name", ["probit", "poisson", "student_t", "softmax"])
def test_the_bound_is_stationary_in_mean_and_scale(name, make):
    model = make(name, num_data=10)
    at, found = at_three_thetas(model)
    assert bool(found.converged.all()) and bool((found.latents.scale.triu(1) == 0).all())
    mean, scale = (part.clone().requires_grad_(True) for part in found.latents)
    q = GaussianLatents(mean, scale.tril())
    with torch.enable_grad():
        value = lower_bound(model, at, q, model.targets)
    torch.testing.assert_close(value.detach(), found.log_evidence)
    mean_slope, scale_slope = torch.autograd.grad(value.sum(), (mean, scale))
    # In deviations of q: what a unit of them would gain.
    white = scale.detach().mT
    assert float((white @ mean_slope.unsqueeze(-1)).abs().max()) < 2e-4
    assert float((white @ scale_slope).tril().abs().max()) < 2e-4


def test_sites_may_have_negative_precision_where_the_likelihood_is_not_log_concave():
    _, found = at_three_thetas(sparse_gp("student_t", num_data=40))
    assert float(found.sites.precision.min()) < -0.1 and bool(found.converged.all())


def test_a_search_goes_on_from_sites_that_help_and_starts_anew_from_others():
    model = sparse_gp("student_t", num_data=40)
    at, found = at_three_thetas(model)
    none, good = no_sites(at, 1), LatentSites.from_stacked(found.start, 1)
    bad = good._replace(shift=good.shift + 1e4)
    again, other = (nearest_normal(model, at, model.targets, [none, sites], max_iterations=1) for sites in (good, bad))
    assert bool(again.converged.all()) and not bool(other.converged.any())
    assert bool((again.log_evidence >= found.log_evidence - 1e-9).all())
    torch.testing.assert_close(other.log_evidence, nearest_normal(model, at, model.targets, max_iterations=1).log_evidence)


@pytest.mark.statistical
def test_the_bound_is_what_monte_carlo_says():
    model = sparse_gp("softmax", num_data=6, num_inducing=3)
    at, found = at_three_thetas(model)
    generator, count = torch.Generator().manual_seed(0), 40_000
    mean, scale = found.latents.mean[1], found.latents.scale[1]
    noise = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    v = mean + (scale @ noise.unsqueeze(-1)).squeeze(-1)
    f_mean = at.mean[1] + v @ at.projection[1].detach()
    spread = at.variance[1].detach().sqrt() * torch.randn(count, 3, 6, generator=generator, dtype=torch.float64)
    log_likelihood = model.likelihood.log_prob((f_mean + spread).mT, model.train_y).detach()
    log_prior = -0.5 * v.square().sum((1, 2))
    log_q = -0.5 * noise.square().sum((1, 2)) - scale.diagonal(dim1=-2, dim2=-1).log().sum()
    replicates = (log_likelihood + log_prior - log_q).view(-1, 1)
    assert worst_excess(replicates, found.log_evidence[1]) < 1
    assert worst_excess(replicates, found.log_evidence[1] + 0.1) > 1


def test_natural_parameters_give_mean_and_lower_root():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    precision, linear = root @ root.mT + torch.eye(4).double(), root[..., 0]
    mean, scale, ok = normal_from_natural(precision, linear)
    assert bool(ok.all()) and bool((scale.triu(1) == 0).all())
    torch.testing.assert_close(scale @ scale.mT, torch.linalg.inv(precision))
    torch.testing.assert_close(mean, torch.linalg.solve(precision, linear))


def test_one_theta_that_fails_leaves_the_others_alone():
    model = gp("probit", num_data=30, jitter=0.0)
    theta = torch.tensor([[0.0, -1.0, -1.0], [0.0, 9.0, 9.0]], dtype=torch.float64)
    found = nearest_normal(model, model.at_data(model.layout.raw_values(theta)), model.targets)
    alone = nearest_normal(model, model.at_data(model.layout.raw_values(theta[:1])), model.targets)
    torch.testing.assert_close(found.log_evidence[:1], alone.log_evidence)
    assert float(found.log_evidence[1]) == -torch.inf and found.converged.tolist() == [True, False]


@pytest.mark.parametrize("name", ["probit", "softmax"])
def test_a_theta_never_sees_its_neighbours(name):
    model = sparse_gp(name)
    theta = torch.tensor([[0.7, -0.5, -1.5], [-0.7, 0.5, 0.5], [2.5, -2.0, -2.0]], dtype=torch.float64)

    def found(rows):
        return nearest_normal(model, model.at(model.prior(rows)), model.targets, tolerance=0.1)

    together, alone = found(theta), [found(row[None]) for row in theta]
    assert len(set(together.num_iterations.tolist())) > 1
    torch.testing.assert_close(together, concatenate(alone), rtol=1e-9, atol=1e-9)


def test_float32():
    model = sparse_gp("probit", num_data=20, jitter=1e-3, dtype=torch.float32)
    theta = torch.zeros(1, model.layout.size)
    found = nearest_normal(model, model.at_data(model.layout.raw_values(theta)), model.targets)
    double = tg.SparseGP(
        model.train_x.double(), model.train_y, model.kernel, model.likelihood, inducing_points=model.inducing_points, jitter=1e-3
    )
    expected = nearest_normal(double, double.at_data(double.layout.raw_values(theta.double())), double.targets)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.log_evidence.double(), expected.log_evidence, rtol=1e-4, atol=1e-3)
