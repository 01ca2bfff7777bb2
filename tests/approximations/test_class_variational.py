"""Sites of several classes by a lower bound of p(y | theta)."""

import torch

from tests.approximations.reference import evidence_by_quadrature
from tests.approximations.test_class_ep import normals, softmax
from torchgpmc.approximations.class_sites import ClassSites
from torchgpmc.approximations.class_variational import fitted_class_sites


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
    torch.testing.assert_close(
        bounds[2], bounds[3], rtol=0, atol=1e-3
    )  # at rest it is not quite highest, of d being bound to a form
    found = fitted_class_sites(model, theta, 40).sites
    again = fitted_class_sites(model, theta, 1, found).sites
    torch.testing.assert_close(again, found, rtol=1e-6, atol=1e-6)


def test_other_sites_have_a_lower_bound():
    model = softmax(7, num_classes=4)
    theta = 0.6 * normals(1, model.layout.size)
    best = fitted_class_sites(model, theta, 40)
    for factor, step in ((0.5, 0.0), (2.0, 0.0), (1.0, 0.2), (1.0, -0.2)):
        shift = best.sites.shift + step * normals(*best.sites.shift.shape, seed=3)
        other = ClassSites(factor * best.sites.weight, shift - shift.mean(1, keepdim=True))
        assert float(fitted_class_sites(model, theta, 1, other).bound) < float(best.bound)


def test_thetas_do_not_see_one_another():
    model = softmax(7)
    theta = 0.6 * normals(3, model.layout.size)
    together, alone = fitted_class_sites(model, theta, 5), fitted_class_sites(model, theta[1:2], 5)
    torch.testing.assert_close(together.sites.shift[1:2], alone.sites.shift)
    torch.testing.assert_close(together.bound[1:2], alone.bound)
