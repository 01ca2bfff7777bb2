"""Sites that follow theta: right where they were fitted, and frozen far out."""

import torch

from tests.problems import gp
from torchgpmc.approximations.class_variational import fitted_class_sites
from torchgpmc.runs.class_tuning import FollowingSites, standardised


def made(model, start=None, num_sweeps=30):
    size = model.layout.size
    centre = torch.tensor([0.3, -0.2, 0.1]).double()
    root = (0.4 * torch.eye(size) + 0.1 * torch.ones(size, size).tril(-1)).double()
    return FollowingSites.around(model, centre, root, num_sweeps, start), centre, root


def test_sites_are_those_fitted_at_the_centre_and_on_both_sides_of_it():
    model = gp("softmax", num_data=5)
    sites, centre, root = made(model)
    unit = torch.eye(3)
    along = torch.cat([torch.zeros(1, 3), unit, -unit, 2 * unit, -2 * unit]).double()
    expected = fitted_class_sites(model, centre + along @ root.mT, 30).sites
    found = sites.at(along)
    torch.testing.assert_close(found.precision, expected.precision)
    torch.testing.assert_close(found.shift, expected.shift)
    assert float((expected.precision[1:] - expected.precision[:1]).abs().max()) > 0.01


def test_slopes_are_those_of_the_sites():
    sites, _, _ = made(gp("softmax", num_data=5))
    along = torch.tensor([[0.4, -1.7, 0.0], [2.2, 0.3, -0.9]]).double().requires_grad_(True)
    weights = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    more = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).double()
    found = sites.at(along)
    (expected,) = torch.autograd.grad((found.precision.log() * weights).sum() + (found.shift * more).sum(), along)
    torch.testing.assert_close(sites.slopes(along.detach(), weights, more), expected)


def test_later_sites_begin_at_earlier_ones():
    """After few sweeps they are nearer to where many lead."""
    model = gp("softmax", num_data=5)
    far, centre, root = made(model, num_sweeps=200)
    before = far, torch.cat([centre[None], root])
    errors = [float((made(model, start, 3)[0].shift - far.shift).abs().max()) for start in (before, None)]
    assert errors[0] < 0.2 * errors[1]


def test_sites_stay_where_theta_is_further_off_than_they_follow():
    sites, centre, root = made(gp("softmax", num_data=5))
    ends = torch.tensor([[2.5, 0.0, 0.0], [7.0, 0.0, 0.0]]).double()
    found = sites.at(ends)
    torch.testing.assert_close(found.precision[0], found.precision[1])
    slopes = sites.slopes(ends, torch.ones(2, 5).double(), torch.zeros(2, 3, 5).double())
    assert float(slopes[1, 0]) == 0 and float(slopes[0].abs().min()) > 0
    theta = centre + ends @ root.mT
    torch.testing.assert_close(standardised(theta, centre, root), ends)
