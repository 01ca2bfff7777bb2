import numpy as np
import pytest
import scipy.special
import torch

from torchgpmc.special import log_ndtr, log_ndtr_and_hazard, normal_hazard

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
