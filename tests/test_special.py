import numpy as np
import pytest
import scipy.special
import torch

from torchgpmc.numerics.special import (
    interval_quantile,
    log_ndtr,
    log_ndtr_and_hazard,
    log_ndtr_interval,
    ndtr,
    ndtri_exp,
    normal_hazard,
)

POINTS = torch.cat(
    [torch.linspace(-60, 40, 401, dtype=torch.float64), torch.tensor([-1e4, -1e3, -37.0, -37.01, -40.0, 0.0], dtype=torch.float64)]
)


def test_log_ndtr_equals_scipy():
    np.testing.assert_allclose(log_ndtr(POINTS).numpy(), scipy.special.log_ndtr(POINTS.numpy()), rtol=1e-13, atol=3e-16)


def test_log_ndtr_is_not_floored():
    assert float(log_ndtr(torch.tensor(-40.0, dtype=torch.float64))) == pytest.approx(-804.6084420137538, rel=1e-14)


def test_float32_is_accurate_to_its_rounding():
    value = log_ndtr(POINTS.float())
    np.testing.assert_allclose(value.numpy(), scipy.special.log_ndtr(POINTS.numpy()), rtol=2e-6, atol=2e-7)


def test_hazard_equals_its_definition_in_the_tail():
    # phi / Phi by the scaled complementary error function, which neither overflows nor cancels.
    x = POINTS[POINTS < 5]
    expected = np.sqrt(2 / np.pi) / scipy.special.erfcx(-x.numpy() / np.sqrt(2))
    np.testing.assert_allclose(normal_hazard(x).numpy(), expected, rtol=2e-12)


def test_gradients_are_those_of_the_function():
    x = torch.tensor([-45.0, -38.0, -20.0, -3.0, 0.1, 6.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_ndtr, (x,))
    moderate = torch.tensor([-20.0, -3.0, 0.1, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(log_ndtr, (moderate,))


def test_hazard_has_no_jump_where_the_series_takes_over():
    below, above = (float(normal_hazard(torch.tensor(-40.0 + s, dtype=torch.float64))) for s in (-1e-9, 1e-9))
    assert below == pytest.approx(above, rel=1e-9)


@pytest.mark.parametrize("points", [POINTS, POINTS[POINTS > -30]], ids=["with tail", "without"])
def test_both_together_equal_each_alone(points):
    value, hazard = log_ndtr_and_hazard(points)
    torch.testing.assert_close(value, log_ndtr(points), rtol=1e-14, atol=3e-16)
    torch.testing.assert_close(hazard, normal_hazard(points), rtol=1e-12, atol=0)


def test_ndtr_keeps_its_digits_in_the_tail():
    x = POINTS[(POINTS > -37) & (POINTS < 9)]
    np.testing.assert_allclose(ndtr(x).numpy(), scipy.special.ndtr(x.numpy()), rtol=1e-12)


def test_quantiles_of_log_probabilities_equal_scipy():
    y = torch.cat([-torch.logspace(-12, 5, 300, dtype=torch.float64), torch.tensor([-649.0, -651.0, -torch.inf, 0.0])])
    np.testing.assert_allclose(ndtri_exp(y).numpy(), scipy.special.ndtri_exp(y.numpy()), rtol=1e-11, atol=1e-12)


INTERVALS = torch.tensor(
    [
        [-1.0, 1.0],
        [40.0, 41.0],
        [-41.0, -40.0],
        [-torch.inf, 3.0],
        [2.0, torch.inf],
        [-9.0, 30.0],
        [1.0, 1.001],
        [100.0, torch.inf],
        [-torch.inf, -38.0],
        [-37.2, -36.9],  # on either side of where erfc has all its digits
        [36.9, 37.2],
        [-37.4, -37.1],
    ],
    dtype=torch.float64,
)


def test_intervals_equal_scipys_truncated_normal():
    lower, upper = INTERVALS.T
    # By the survival function above zero, where scipy's difference of distribution functions would cancel.
    a, b = lower.numpy(), upper.numpy()
    high, low = np.where(a > 0, scipy.special.log_ndtr(-a), scipy.special.log_ndtr(b)), np.where(a > 0, -b, a)
    expected = high + np.log1p(-np.exp(scipy.special.log_ndtr(low) - high))
    np.testing.assert_allclose(log_ndtr_interval(lower, upper).numpy(), expected, rtol=1e-11, atol=1e-16)
    for level in (0.01, 0.2, 0.5, 0.999):  # much nearer to an end, x itself has too few digits
        x = interval_quantile(torch.full_like(lower, level), lower, upper)
        assert bool(((x >= lower) & (x <= upper)).all())
        share = (log_ndtr_interval(lower, x) - log_ndtr_interval(lower, upper)).exp()
        np.testing.assert_allclose(share.numpy(), level, rtol=1e-6)


def test_gradients_of_intervals():
    finite = INTERVALS[torch.isfinite(INTERVALS).all(1)]
    lower, upper = (end.clone().requires_grad_(True) for end in finite.T)
    assert torch.autograd.gradcheck(log_ndtr_interval, (lower, upper), rtol=1e-4)
    level = torch.linspace(0.1, 0.9, len(lower), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: interval_quantile(level, a, b), (lower, upper), rtol=1e-4)
    lower, upper = (end.clone().requires_grad_(True) for end in INTERVALS.T)
    value = log_ndtr_interval(lower, upper).sum() + interval_quantile(torch.full_like(lower, 0.3), lower, upper).sum()
    assert all(bool(torch.isfinite(part).all()) for part in torch.autograd.grad(value, (lower, upper)))


def test_a_nan_elsewhere_does_not_cost_the_tail_its_value():
    x = torch.tensor([torch.nan, -60.0], dtype=torch.float64)
    for value in (log_ndtr(x), log_ndtr_and_hazard(x)[0]):
        assert float(value[1]) == pytest.approx(float(scipy.special.log_ndtr(-60.0)), rel=1e-14)
