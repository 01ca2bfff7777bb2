import math

import pytest
import torch

from torchgpmc.parameters.bijections import Interval

INTERVALS = [Interval(-math.inf, math.inf), Interval(1e-4, math.inf), Interval(-math.inf, 2.0), Interval(-1.0, 3.0)]
POINTS = torch.linspace(-5, 5, 21, dtype=torch.float64)


@pytest.mark.parametrize("interval", INTERVALS)
def test_round_trip_and_inside(interval):
    value = interval.constrain(POINTS)
    assert bool(interval.contains(value).all())
    assert torch.allclose(interval.unconstrain(value), POINTS, atol=1e-9)


@pytest.mark.parametrize("interval", INTERVALS)
def test_log_jacobian_is_the_derivative(interval):
    points = POINTS.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(interval.constrain(points).sum(), points)
    assert torch.allclose(interval.log_jacobian(POINTS), slope.abs().log(), atol=1e-9)


@pytest.mark.parametrize("interval", INTERVALS)
def test_slopes_are_autograds(interval):
    points = POINTS.clone().requires_grad_(True)
    value = interval.constrain(points)
    found = interval.derivative(POINTS, value.detach()), interval.jacobian_slope(POINTS)
    for ours, function in zip(found, (interval.constrain, interval.log_jacobian), strict=True):
        (expected,) = torch.autograd.grad((function(points) + 0 * points).sum(), points)
        torch.testing.assert_close(torch.as_tensor(ours).expand_as(expected), expected, check_dtype=False)


def test_intersection():
    assert Interval(0.0, 5.0).intersect(Interval(1.0, math.inf)) == Interval(1.0, 5.0)
