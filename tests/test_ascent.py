"""Searches for a maximum where gradients are found to a tolerance, and how often they look."""

import pytest
import torch

from torchgpmc.numerics.ascent import ascend


class Parabola:
    """-|x - 1|^2 / 2, with a gradient that is nowhere less than ``least``; counts positions."""

    def __init__(self, least=0.0):
        self.least = least
        self.looked_at = []

    def value_and_grad(self, position):
        self.looked_at += [tuple(row) for row in position.tolist()]
        gap = 1 - position
        return -0.5 * gap.square().sum(-1), gap + self.least * torch.where(gap < 0, -1.0, 1.0)


def search(density, **options):
    return ascend(density, torch.tensor([-2.0, 3.0]).double(), bound=10.0, max_iterations=200, **options)


def test_no_position_is_looked_at_twice():
    density = Parabola()
    found = search(density)
    torch.testing.assert_close(found.position, torch.ones(2).double())
    assert len(density.looked_at) == len(set(density.looked_at))


@pytest.mark.parametrize("least", [0.02, 0.05])
def test_a_search_ends_where_values_tell_nothing_more(least):
    # Where no gradient is less than ``slope`` scipy's line search tries twenty points, and twenty again.
    endless, density = Parabola(least), Parabola(least)
    search(endless, slope=0.01)
    found = search(density, slope=0.01, gain=1e-3)
    assert found.converged
    assert len(density.looked_at) <= 10 < 20 < len(endless.looked_at)
    value, _ = density.value_and_grad(found.position[None])
    assert found.log_density == float(value) > -3e-3


def test_a_search_from_the_maximum_ends_there():
    density = Parabola()
    found = ascend(density, torch.ones(2).double(), bound=10.0, max_iterations=200, gain=1e-3)
    assert found.position.tolist() == [1.0, 1.0]
    assert len(density.looked_at) == 1
