"""The search for mass that a mode's curvature does not tell of, and importance sampling that begins with what it finds."""

import math
from functools import cache

import pytest
import torch

from torchgpmc.density import AutogradDensity
from torchgpmc.diagnostics.weights import pareto_khat
from torchgpmc.importance import (
    Adaptation,
    Mode,
    adapt,
    add_draws,
    draw_from,
    find_modes,
    from_modes,
    log_weights,
    search_tails,
    start,
    with_defence,
)
from torchgpmc.importance.tail_search import TetheredDensity
from torchgpmc.numerics.joint_ascent import ascend_together

F64 = torch.float64
D, WIDTH, MASS = 10, 0.3, 0.1
FAR, LENGTH = 6 * WIDTH, 0.4  # where the arm's middle is along the first coordinate, and its deviation there
UNIT = torch.eye(D, dtype=F64)
PLAN = Adaptation(False, False, 2.0 * D, 0.2, 0.3)


def _core(x):
    return -0.5 * (x / WIDTH).square().sum(-1) - D * math.log(WIDTH)


def _arm(x):
    """Six deviations of the core away in the first coordinate; two others follow that along a bent path."""
    length = (x[:, 0] - FAR) / LENGTH
    path = torch.stack([0.4 * (x[:, 0] - 0.6), -0.5 * (x[:, 0] - 0.6).square()], -1)
    rest = torch.cat([x[:, 1:3] - path, x[:, 3:]], -1) / WIDTH
    return -0.5 * (length.square() + rest.square().sum(-1)) - (D - 1) * math.log(WIDTH) - math.log(LENGTH)


def _with_an_arm(x):
    """0.9 of the mass in the core, 0.1 in the arm; the integral is (2 pi)^(D / 2)."""
    return torch.logaddexp(math.log(1 - MASS) + _core(x), math.log(MASS) + _arm(x))


@cache
def core_mode():
    return find_modes(AutogradDensity(_with_an_arm), torch.zeros(1, D, dtype=F64))[0]


@cache
def tails():
    return search_tails(AutogradDensity(_with_an_arm), core_mode())


def drawn(places, seed):
    """What AMIS draws whose first components are the mode, some places in the tails, and the prior, N(0, I), twice."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.cat([torch.zeros(1), torch.full((len(places),), 0.7 / max(1, len(places)))]).to(F64)
    share[0] = 1 - share.sum()
    places = [core_mode(), *places]
    proposal = from_modes(torch.stack([p.position for p in places]), torch.stack([p.covariance for p in places]), share.log(), 30.0)
    for _ in range(2):
        proposal = with_defence(proposal, 0 * UNIT[0], UNIT, PLAN.defensive_share)
    state = start(proposal)
    for count in (400, 600, 900):
        x = draw_from(state.current, count, generator)
        state = adapt(add_draws(state, x, _with_an_arm(x)), PLAN)
    return state


def mean_along(state):
    """Of the first coordinate: 0.1 of the arm's."""
    return float(torch.softmax(log_weights(state), 0) @ state.position[:, 0])


@pytest.mark.parametrize("seed", range(3))
def test_without_the_search_weights_look_even_and_miss_the_arm(seed):
    """What the search is for; did this find the arm, the next test would prove nothing."""
    state = drawn([], seed)
    weight = torch.softmax(log_weights(state), 0)
    assert mean_along(state) < 0.4 * MASS * FAR
    assert pareto_khat(log_weights(state)) < 0.7 and 1 / float(weight.square().sum()) > 0.3 * len(weight)


@pytest.mark.parametrize("seed", range(5))
def test_with_the_search_the_mean_is_the_closed_form(seed):
    """Within four standard errors, which the adaptation biases: one false alarm in 10^8, if excesses are normal.

    Over 80 seeds the mean is 0.168 for 0.18, by 0.84 (deviation 0.49) of the stated errors too low: mixture weights of proposals
    that learn are only consistent. With four times the draws it is 0.176, and 0.179 and 0.180 where nothing is learned.
    """
    state = drawn(tails(), seed)
    relative = (log_weights(state) - torch.logsumexp(log_weights(state), 0)).exp()
    error = float((relative * (state.position[:, 0] - mean_along(state))).norm())
    assert error < 0.1 * MASS * FAR
    assert abs(mean_along(state) - MASS * FAR) < 4 * error


def test_what_is_found_lies_along_the_arm_with_the_density_there():
    position = torch.stack([place.position for place in tails()])
    assert bool((_arm(position) > _core(position) + 5).all())
    # The bent path, but for the slope of the core's own tail.
    torch.testing.assert_close(position[:, 1], 0.4 * (position[:, 0] - 0.6), atol=0.05, rtol=0)
    torch.testing.assert_close(position[:, 3:], torch.zeros(len(position), D - 3, dtype=F64), atol=0.01, rtol=0)
    torch.testing.assert_close(torch.stack([place.log_density for place in tails()]), _with_an_arm(position))
    assert float(position[:, 0].min()) < FAR + LENGTH  # where most of its mass is


def test_a_normal_density_holds_no_more_than_its_curvature_says():
    precision = torch.linalg.inv(0.1 * UNIT + 0.05)
    normal = AutogradDensity(lambda x: -0.5 * ((x @ precision) * x).sum(-1))
    assert search_tails(normal, Mode(0 * UNIT[0], torch.zeros((), dtype=F64), 0.1 * UNIT + 0.05)) == []


def test_a_density_of_heavy_tails_is_found_along_each_coordinate_both_ways():
    """Student t with three degrees of freedom, a coordinate: four deviations out, 4.5 nats above the normal with its curvature."""
    heavy = AutogradDensity(lambda x: -2 * torch.log1p((x / 0.2).square() / 3).sum(-1))
    mode = Mode(torch.zeros(3, dtype=F64), torch.zeros((), dtype=F64), 0.03 * torch.eye(3, dtype=F64))
    found = torch.stack([place.position for place in search_tails(heavy, mode)])
    for index in range(3):
        assert float(found[:, index].max()) > 0.5 and float(found[:, index].min()) < -0.5


def test_no_tether_lies_beyond_the_bound():
    heavy = AutogradDensity(lambda x: -0.5 * torch.log1p(x.square()).sum(-1))
    mode = Mode(torch.zeros(2, dtype=F64), torch.zeros((), dtype=F64), torch.eye(2, dtype=F64))
    assert search_tails(heavy, mode, bound=3.9) == []
    assert search_tails(heavy, mode, bound=4.0)


def test_a_tethered_density_has_the_gradient_of_autograd():
    coordinate = torch.tensor([1, 0, 2])
    centre, deviation = torch.tensor([[1.0, -2.0, 0.5], [0.5, 2.0, 1.0]], dtype=F64)
    tethered = TetheredDensity(AutogradDensity(lambda x: -(x**4).sum(-1)), coordinate, centre, deviation)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=F64)

    def written_out(x):
        return -(x**4).sum(-1) - 0.5 * ((x[torch.arange(3), coordinate] - centre) / deviation).square()

    value, gradient = tethered.value_and_grad(x)
    expected, slope = AutogradDensity(written_out).value_and_grad(x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, slope)
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(tethered.select(rows)(x[rows]), expected[rows])


def test_joint_searches_end_at_maxima_and_leave_impossible_starts_alone():
    """Rosenbrock's valley, from a curvature that is wrong; beyond five the density is zero."""

    def valley(x):
        value = -10 * (x[:, 1] - x[:, 0].square()).square() - (1 - x[:, 0]).square()
        return torch.where(x.abs().amax(-1) > 5, -math.inf, value)

    begun = torch.tensor([[-1.0, 1.0], [2.0, 0.0], [6.0, 0.0]], dtype=F64)
    found = ascend_together(AutogradDensity(valley), begun, torch.eye(2, dtype=F64).expand(3, 2, 2), rise=1e-10, max_iterations=200)
    torch.testing.assert_close(found.position[:2], torch.ones(2, 2, dtype=F64), atol=1e-3, rtol=0)
    assert found.position[2].tolist() == [6.0, 0.0] and found.log_density[2] == -math.inf
    assert found.num_gradients < 200
