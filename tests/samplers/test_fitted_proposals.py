"""Proposals from a quadratic through a density's values."""

import pytest
import torch
from torch.distributions import StudentT

from tests.calibration import z_limit
from torchgpmc.samplers.fitted_proposals import FittedProposal, design, fitted_proposal


def precision_and_mean(size):
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.mT + 1.5 * torch.eye(size), torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_normal_density_is_proposed_as_it_is(size):
    precision, mean = precision_and_mean(size)
    points = design(size, mean)
    away = points - mean
    found = fitted_proposal(points, -0.5 * ((away @ precision) * away).sum(-1)[None] + 40.0)
    torch.testing.assert_close(found.mean[0], mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((found.axes * found.precision.unsqueeze(-2) @ found.axes.mT)[0], precision, rtol=1e-6, atol=1e-6)


def test_what_is_not_known_is_left_out_and_what_is_not_concave_kept_as_wide_as_the_target():
    points = design(2, torch.zeros(()).double())
    values = -points.square().sum(-1)[None].repeat(3, 1)
    values[1, 4] = -torch.inf
    values[2] *= -1
    found = fitted_proposal(points, values)
    torch.testing.assert_close(found.precision[1], found.precision[0], rtol=1e-6, atol=1e-6)
    assert bool(torch.isfinite(found.mean).all()) and float(found.precision[2].max()) == 0.7


def test_all_unknown_is_a_proposal_all_the_same():
    points = design(2, torch.zeros(()).double())
    found = fitted_proposal(points, torch.full((1, len(points)), -torch.inf).double())
    assert bool(torch.isfinite(found.draw(torch.Generator().manual_seed(0))).all())


def test_densities_are_student_ts():
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]]).double().expand(3, 2, 2)
    found = FittedProposal(
        torch.tensor([[1.0, 2.0]]).double().expand(3, 2), turn, torch.tensor([[4.0, 0.25]]).double().expand(3, 2)
    )
    ends = torch.tensor([[1.0, 2.0], [1.6, 2.8], [0.2, 2.6]]).double()  # the mean, and one along each axis
    value = found.log_density(ends)
    expected = -5 * torch.log1p(torch.tensor([0.0, 4.0, 0.25]).double() / 8)
    torch.testing.assert_close(value - value[0], expected)


@pytest.mark.statistical
def test_draws_have_the_density_and_those_on_the_other_side_leave_it(generator):
    count = 400_000
    one = torch.ones(count, 1).double()
    found = FittedProposal(one, one.unsqueeze(-1), 4 * one)
    drawn = found.draw(generator)
    opposite = found.opposite(drawn, generator)
    theirs = StudentT(8.0, 1.0, 0.5)
    levels = torch.linspace(-0.5, 2.5, 7)
    # The distribution function by sums of torch's density.
    grid = torch.linspace(-40, 40, 160_001).double()
    below = torch.cumsum(theirs.log_prob(grid).exp() * 0.0005, 0)[((levels + 40) / 0.0005).round().long()]
    for ends in (drawn, opposite):
        z = ((ends < levels).double().mean(0) - below) / (below * (1 - below) / count).sqrt()
        assert float(z.abs().max()) < z_limit(2 * len(z))
    assert float(torch.corrcoef(torch.cat([drawn, opposite], -1).mT)[0, 1]) < -0.6
