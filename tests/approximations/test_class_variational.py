"""Sites of several classes by a lower bound of p(y | theta)."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from tests.approximations.reference import evidence_by_quadrature
from tests.approximations.test_class_ep import normals, softmax
from torchgpmc.approximations import class_variational
from torchgpmc.approximations.class_sites import differences
from torchgpmc.approximations.class_variational import SharedSites, fitted_class_sites
from torchgpmc.numerics.matched_points import matched_points


def test_the_bound_is_below_the_evidence_and_near():
    model = softmax(1)
    theta = 0.6 * normals(3, model.layout.size)
    evidence = evidence_by_quadrature(model, theta)[0]
    bound = fitted_class_sites(model, theta, 40).bound
    assert bool((bound < evidence).all()) and bool((bound > evidence - 0.1).all())


def test_sweeps_raise_the_bound_and_come_to_rest():
    model = softmax(7, num_classes=4)
    theta = 0.6 * normals(2, model.layout.size)
    bounds = torch.stack([fitted_class_sites(model, theta, sweeps).bound for sweeps in (1, 3, 10, 40)])
    assert bool((bounds[:3].diff(dim=0) > 1e-3).all())
    torch.testing.assert_close(bounds[2], bounds[3], rtol=0, atol=1e-3)
    found = fitted_class_sites(model, theta, 40).sites
    assert float(found.shift.sum(1).abs().max()) < 1e-14  # to double precision, or the density of [theta, w] would be another
    again = fitted_class_sites(model, theta, 1, found).sites
    torch.testing.assert_close(again, found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 4])
def test_the_bound_is_that_of_the_density_which_sites_make(classes):
    """By dense matrices of all differences, at sites that are far from the best."""
    model = softmax(5, num_classes=classes)
    theta = 0.6 * normals(1, model.layout.size)
    prior = model.prior(theta)
    precision, shift = 0.2 + normals(1, 5, seed=1).square(), normals(1, classes, 5, seed=2)
    sites = SharedSites(precision, shift - shift.mean(1, keepdim=True))
    basis = differences(classes, theta)
    unit = torch.eye(classes - 1, dtype=torch.float64)
    before = torch.kron(unit, prior.covariance[0])
    after = torch.linalg.inv(torch.linalg.inv(before) + torch.kron(unit, precision[0].diag()))
    mean = after @ (basis @ sites.shift[0]).flatten()
    divergence = kl_divergence(MultivariateNormal(mean, after), MultivariateNormal(0 * mean, before))
    points = matched_points(classes - 1, 8, theta)
    deviation = after.diagonal()[:5].sqrt()  # the same of every difference
    f = (mean.view(-1, 5) + points.unsqueeze(-1) * deviation).mT @ basis
    expected = model.likelihood.log_prob(prior.mean[0, :, None] + f, model.train_y).mean()
    found = fitted_class_sites(model, theta, 1, sites).bound[0]
    torch.testing.assert_close(found, expected - divergence, rtol=1e-6, atol=0.0)  # in single precision


def test_other_sites_have_a_lower_bound():
    model = softmax(7, num_classes=4)
    theta = 0.6 * normals(1, model.layout.size)
    best = fitted_class_sites(model, theta, 40)
    for factor, step in ((0.8, 0.0), (1.25, 0.0), (1.0, 0.05), (1.0, -0.05)):
        shift = best.sites.shift + step * normals(*best.sites.shift.shape, seed=3)
        other = SharedSites(factor * best.sites.precision, shift - shift.mean(1, keepdim=True))
        assert float(fitted_class_sites(model, theta, 1, other).bound) < float(best.bound)


def test_sweeps_do_not_run_away_under_a_wide_prior():
    """Steps by the mean curvature of a datum's differences, where two classes contend for it, end tens of nats below."""
    model = softmax(30, num_classes=8)
    theta = torch.tensor([[6.0, *[0.0] * (model.layout.size - 1)]]).double()
    bounds = torch.stack([fitted_class_sites(model, theta, sweeps).bound for sweeps in (5, 10, 20, 40, 80)])
    assert bool((bounds.diff(dim=0) > -1e-3).all()), bounds


@pytest.mark.parametrize("begun", [False, True])
def test_where_single_precision_leads_nowhere_double_does(begun, monkeypatch):
    model = softmax(7)
    theta = 0.6 * normals(3, model.layout.size)
    start = fitted_class_sites(model, theta, 2).sites if begun else None
    near = fitted_class_sites(model, theta, 5, start)
    honest, second = class_variational.in_single_precision, torch.tensor([1])
    monkeypatch.setattr(class_variational, "in_single_precision", lambda matrix: honest(matrix).index_fill(0, second, torch.nan))
    found = fitted_class_sites(model, theta, 5, start)
    assert found.bound.dtype == torch.float64 and bool(found.bound[1] != near.bound[1])
    torch.testing.assert_close(found, near, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.bound[[0, 2]], near.bound[[0, 2]])  # the others see nothing of it


def test_thetas_do_not_see_one_another():
    model = softmax(7)
    theta = 0.6 * normals(3, model.layout.size)
    together, alone = fitted_class_sites(model, theta, 5), fitted_class_sites(model, theta[1:2], 5)
    torch.testing.assert_close(together.sites.shift[1:2], alone.sites.shift)
    torch.testing.assert_close(together.bound[1:2], alone.bound)
