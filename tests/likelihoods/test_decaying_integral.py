"""Integrals against a decaying exponential: for any decay, against an adaptive solver, closed forms and Simpson's rule."""

import numpy as np
import pytest
import scipy.integrate
import torch

from torchgpmc.likelihoods.decaying_integral import DecayingIntegral

SPACING = 0.1
SCALED = [0.01, 0.1, 0.5, 1.0, 1.9999, 2.0, 2.0001, 3.0, 5.0, 20.0]  # D h, on both sides of where the formulas change
ROWS = [0, 1, 2, 3, 7, 8, 24]


def integral_of(values, scaled, rows=ROWS, spacing=SPACING):
    return DecayingIntegral(spacing, values.shape[-1], rows)(values, torch.as_tensor(scaled, dtype=torch.float64) / spacing)


def smooth(t):
    return 0.4 + 0.3 * np.sin(1.1 * t)


def test_smooth_functions_agree_with_an_adaptive_solver_at_any_decay():
    grid = SPACING * np.arange(25)
    found = integral_of(torch.as_tensor(smooth(grid)).unsqueeze(0), SCALED)
    for scaled, row in zip(SCALED, found[:, 0], strict=True):
        decay = scaled / SPACING
        exact = scipy.integrate.solve_ivp(
            lambda t, y, decay=decay: smooth(t) - decay * y,
            (0, grid[-1]),
            [0.0],
            "LSODA",
            t_eval=grid[ROWS],
            rtol=1e-10,
            atol=1e-13,
        ).y[0]
        # Where g is interpolated it errs by h^3 / (9 sqrt 3) times the third derivative, 0.4: 2.6e-5 of 0.4 at the most.
        assert np.abs(row.numpy() - exact).max() < 2.6e-5 / decay


def test_parabolas_are_integrated_exactly():
    t = SPACING * torch.arange(25, dtype=torch.float64)
    decay = torch.tensor(SCALED, dtype=torch.float64).unsqueeze(-1) / SPACING
    found = integral_of((1 - 2 * t + 3 * t.square()).unsqueeze(0), SCALED).squeeze(-2)

    def solution(t):  # y' = 1 - 2 t + 3 t^2 - D y
        second = 3 / decay
        first = (-2 - 2 * second) / decay
        return second * t.square() + first * t + (1 - first) / decay

    exact = solution(t[ROWS]) - solution(torch.zeros(1)) * (-decay * t[ROWS]).exp()
    # At D h = 0.01 the closed form cancels six digits.
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("scaled", [0.0, 1e-12])
def test_without_decay_it_is_simpsons_rule(scaled):
    values = torch.rand(1, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [0, *range(2, 25)]
    simpson = [scipy.integrate.simpson(values[0, : row + 1].numpy(), dx=SPACING) for row in rows]
    torch.testing.assert_close(integral_of(values, scaled, rows)[0], torch.tensor(simpson, dtype=torch.float64))


def test_simpsons_rule_with_the_exponential_in_it_is_caught():
    """The planted error: the rule of the paper, 6 % at D h = 2 and constant g."""
    grid = SPACING * np.arange(25)
    simpson = scipy.integrate.simpson(np.exp(-20.0 * (grid[-1] - grid)), dx=SPACING)
    exact = (1 - np.exp(-20.0 * grid[-1])) / 20.0
    assert simpson / exact == pytest.approx(1.06, abs=0.01)
    assert float(integral_of(torch.ones(1, 25).double(), 2.0)[0, -1]) == pytest.approx(exact, rel=1e-12)


def test_gradients_are_those_of_finite_differences():
    values = torch.rand(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    scaled = torch.tensor([1e-5, *SCALED[:4], *SCALED[7:]], dtype=torch.float64, requires_grad=True)
    integral = DecayingIntegral(1.0, 9, [1, 2, 5, 8])
    assert torch.autograd.gradcheck(integral, (values, scaled))
    nothing = torch.tensor([0.0, 1e-8], dtype=torch.float64, requires_grad=True)  # differences would look at D < 0
    at_zero, near_zero = torch.autograd.grad(integral(values, nothing).sum(), nothing)[0]
    torch.testing.assert_close(at_zero, near_zero, rtol=1e-6, atol=0.0)


def test_extreme_decays_neither_overflow_nor_lose_the_gradient():
    values = torch.rand(1, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = torch.tensor([1e-300, 1e-8, 1e3, 1e8, 1e30], dtype=torch.float64, requires_grad=True)
    found = integral_of(values, scaled)
    (slope,) = torch.autograd.grad(found.sum(), scaled)
    assert bool(torch.isfinite(found).all()) and bool(torch.isfinite(slope).all())
    torch.testing.assert_close(found[3, 0, 1:] * 1e8 / SPACING, values[0, ROWS[1:]], rtol=1e-7, atol=1e-7)  # g(t) / D


def test_single_precision_keeps_its_digits():
    values = torch.rand(1, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = torch.tensor([1e-6, 1e-3, *SCALED], dtype=torch.float64)

    def value_and_slope(dtype):
        decay = (scaled / SPACING).to(dtype).requires_grad_(True)
        value = DecayingIntegral(SPACING, 25, ROWS).to(dtype)(values.to(dtype), decay)
        return value.detach().double(), torch.autograd.grad(value.sum(), decay)[0].double()

    for single, double in zip(value_and_slope(torch.float32), value_and_slope(torch.float64), strict=True):
        torch.testing.assert_close(single, double, rtol=5e-6, atol=1e-7)


def test_values_after_the_end_do_not_matter():
    values = torch.rand(1, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    for row in range(2, 25):
        (slope,) = torch.autograd.grad(integral_of(values, 0.7, [row]).sum(), values)
        assert not bool(slope[0, row + 1 :].any()) and bool(slope[0, row] != 0)
