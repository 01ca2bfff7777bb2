"""E log sum exp of normals by its rules, against a plain one: the greatest sum with a Gumbel variable, on dense grids."""

import math

import pytest
import torch

from torchgpmc.likelihoods import greatest_sum, gumbel_parts, log_sum_exp
from torchgpmc.likelihoods.decided import decided_log_sum_exp
from torchgpmc.likelihoods.greatest_sum import greatest_of_sums
from torchgpmc.likelihoods.log_sum_exp import log_sum_exp_and_slopes, log_sum_exp_slopes_and_products
from torchgpmc.likelihoods.slopes import coupling_by_differences, coupling_function
from torchgpmc.likelihoods.softmax import Softmax

EULER = 0.5772156649015329
WIDTHS = (1e-3, 0.03, 0.079, 0.081, 0.159, 0.161, 0.5, 1.27, 1.29, 2.55, 2.6)


def by_grids(mean, variance, last=45.0, step=0.15, spacing=0.05):
    """E max (f + g) is ``last``, less the integral below of the product of distribution functions; slopes are autograd's."""
    leaves = mean.clone().requires_grad_(True), variance.clone().requires_grad_(True)
    u = last - step * torch.arange(int((2 * last + 35) / step), dtype=torch.float64)
    z = torch.arange(-9.0, 9.01, spacing, dtype=torch.float64)
    weights = torch.softmax(-0.5 * z.square(), 0)
    values = []
    for centre, spread in zip(*leaves, strict=True):
        below = 1.0
        for m, v in zip(centre, spread, strict=True):
            rates = (m + v.sqrt() * z - u.unsqueeze(-1)).clamp_max(6.5).exp()
            below = below * (torch.exp(-rates) @ weights)
        values.append(last - step * (below.sum() - 0.5 * below[0]) - EULER)
    value = torch.stack(values)
    return value.detach(), *torch.autograd.grad(value.sum(), leaves)


def normals(size, widths, seed, distance=3.0):
    generator = torch.Generator().manual_seed(seed)
    mean = distance * torch.randn(len(widths), size, generator=generator, dtype=torch.float64)
    part = torch.rand(len(widths), size, generator=generator, dtype=torch.float64)
    part[:, 0] = 1.0  # the widest of each
    return mean, (torch.tensor(widths, dtype=torch.float64).unsqueeze(-1) * part).square()


@pytest.mark.parametrize("size", [2, 5, 12])
def test_sums_over_lattices_have_the_value_and_slopes_of_dense_grids(size):
    """Of all widths together, which share lattices, from normals that are points to wide ones."""
    mean, variance = normals(size, WIDTHS, seed=size)
    for found, expected in zip(greatest_of_sums(mean, variance), by_grids(mean, variance), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("width", [5.0, 12.0, 40.0])
def test_wide_normals(width):
    """Of which the Gumbel variable is smoothed by a part of their own width."""
    mean, variance = normals(3, [width, 1.1 * width, 1.2 * width], seed=2, distance=width)
    by_grid = by_grids(mean, variance, 12 * width + 30, width / 8, 0.1 / width)
    for found, expected in zip(greatest_of_sums(mean, variance), by_grid, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_device_that_is_not_asked_for_widths_has_the_same(monkeypatch):
    mean, variance = normals(4, WIDTHS, seed=7)
    expected = greatest_of_sums(mean, variance, products=True)
    monkeypatch.setattr(greatest_sum, "parts_of", gumbel_parts._all_at_once)
    for found, part in zip(greatest_of_sums(mean, variance, products=True), expected, strict=True):
        torch.testing.assert_close(found, part, rtol=0, atol=1e-9)


def test_points():
    """Normals of no width."""
    mean = normals(6, WIDTHS, seed=1)[0]
    value, softmax, slope = greatest_of_sums(mean, torch.zeros_like(mean))
    torch.testing.assert_close(value, torch.logsumexp(mean, -1), rtol=0, atol=1e-10)
    torch.testing.assert_close(softmax, torch.softmax(mean, -1), rtol=0, atol=1e-10)
    torch.testing.assert_close(2 * slope, torch.softmax(mean, -1) * (1 - torch.softmax(mean, -1)), rtol=0, atol=1e-9)


def test_normals_of_many_widths_in_a_datum():
    mean, variance = torch.linspace(-2, 2, len(WIDTHS)).double()[None], torch.tensor(WIDTHS).double().square()[None]
    for found, expected in zip(greatest_of_sums(mean, variance), by_grids(mean, variance), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_slopes_are_those_of_the_sum_itself():
    """To rounding, by differences, so that searches end: of narrow normals that are corrected for, and wide ones."""
    mean, variance = normals(4, [0.05, 0.3, 1.5], seed=0)
    _, mean_slope, variance_slope = greatest_of_sums(mean, variance)
    for column in range(4):
        for part, slope, step in (mean, mean_slope, 1e-4), (variance, variance_slope, 1e-6):
            ends = []
            for sign in 1, -1:
                before = part[:, column].clone()
                part[:, column] += sign * step
                ends.append(greatest_of_sums(mean, variance)[0])
                part[:, column] = before
            torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope[:, column], rtol=0, atol=2e-7)


@pytest.mark.parametrize("size", [2, 7])
def test_the_series_errs_by_no_more_than_its_bound(size):
    """Bounds from 1e-13 to one: not too small, and small enough to be of use."""
    gaps = torch.linspace(0.5, 14.0, 30, dtype=torch.float64).unsqueeze(-1)
    mean, variance = normals(size, [0.4] * 30, seed=3, distance=0.5)
    mean[:, 1:] -= gaps
    value, softmax, slope, bound = decided_log_sum_exp(mean, variance)
    errors = [
        (found - expected).abs().view(30, -1).amax(-1)
        for found, expected in zip((value, softmax, slope), by_grids(mean, variance), strict=True)
    ]
    assert bool((torch.stack(errors) <= bound + 1e-12).all())
    assert float(bound.max()) > 1e-2 and float(bound.min()) < 1e-14
    assert bool((bound < 1e-11)[gaps.squeeze(-1) > 8].all())


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("width", [0.05, 0.5, 2.0])
def test_products_are_the_slopes_of_the_mean_slopes(size, width):
    """By central differences, of data decided and not, by products of nodes and by lattices; two together are the coupling."""
    mean, variance = normals(size, [width] * 40, seed=size, distance=6.0)
    *found, products = log_sum_exp_slopes_and_products(mean, variance)
    for part, other in zip(found, log_sum_exp_and_slopes(mean, variance), strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(products.sum(-1), found[1], rtol=0, atol=2e-8)
    torch.testing.assert_close(products, products.mT, rtol=0, atol=1e-12)
    likelihood, y = Softmax(num_classes=size), torch.arange(40) % size
    slopes, coupling = likelihood.expected_and_coupling(mean, variance, y)
    expected, by_differences = coupling_by_differences(likelihood.expected_and_slopes, mean, variance, y, central=True)
    torch.testing.assert_close(coupling, by_differences, rtol=0, atol=1e-6)
    torch.testing.assert_close(slopes.mean, expected.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes.variance, expected.variance, rtol=0, atol=1e-12)
    assert float(coupling.abs().max()) > 0.1
    decided = decided_log_sum_exp(mean, variance)[3] <= 1e-10
    assert bool(decided.any()) == (width < 2) and not bool(decided.all())


def test_a_subclass_with_a_density_of_its_own_has_its_own_coupling():
    class Sharper(Softmax):
        def expected_log_likelihood(self, mean, variance, targets):
            return super().expected_log_likelihood(2 * mean, 4 * variance, targets)

    mean, variance = normals(3, [0.5, 1.0], seed=0, distance=1.0)
    y = torch.zeros(2)
    found = coupling_function(Sharper(num_classes=3), central=True)(mean, variance, y)[1]
    expected = 4 * Softmax(num_classes=3).expected_and_coupling(2 * mean, 4 * variance, y)[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_nothing_is_decided_where_functions_are_alike_or_wide():
    mean = torch.tensor([[0.0, 0.0, 0.0], [0.0, -20.0, -20.0], [0.0, -1000.0, -1000.0]]).double()
    variance = torch.tensor([0.01, 4.0, 2500.0]).double().unsqueeze(-1).expand(3, 3)
    assert not bool((decided_log_sum_exp(mean, variance)[3] < 1e-6).any())


def test_data_decided_and_not_have_what_they_have_alone(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    mean = 8 * torch.randn(300, 6, generator=generator, dtype=torch.float64)
    variance = torch.rand(300, 6, generator=generator, dtype=torch.float64)
    decided = int((decided_log_sum_exp(mean, variance)[3] <= 1e-11).sum())
    assert 50 < decided < 250
    found = log_sum_exp_and_slopes(mean, variance)
    monkeypatch.setattr(log_sum_exp, "_DECIDED", -1.0)
    for part, other in zip(found, log_sum_exp_and_slopes(mean, variance), strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=1e-10)


def test_means_as_far_apart_as_numbers_go():
    rows = [[1e300, 0.0, -1e300], [0.0, -1e300, 1.0], [0.5, 0.0, -1e12], [0.0, 0.0, -math.inf]]
    mean = torch.tensor(rows, dtype=torch.float64)
    value, softmax, slope = log_sum_exp_and_slopes(mean, torch.ones_like(mean))
    alone = log_sum_exp_and_slopes(torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]]).double(), torch.ones(3, 2).double())
    assert float(value[0]) == 1e300 and float(softmax[0, 0]) == 1.0 and float(softmax[0, 1:].max()) < 1e-100
    torch.testing.assert_close(value[1:], alone[0], rtol=0, atol=1e-9)
    for part, other in (softmax, alone[1]), (slope, alone[2]):
        torch.testing.assert_close(part[1:].sum(-1), other.sum(-1), rtol=0, atol=1e-9)


def test_one_function_alone():
    mean, variance = torch.tensor([[3.0]]).double(), torch.tensor([[2.0]]).double()
    value, softmax, slope = log_sum_exp_and_slopes(mean, variance)
    assert float(value[0]) == pytest.approx(3.0, abs=1e-9)
    assert float(softmax[0, 0]) == pytest.approx(1.0, abs=1e-9) and math.isclose(float(slope[0, 0]), 0.0, abs_tol=1e-9)


def test_mixing_weights_have_a_coupling_by_differences_on_both_sides():
    """Which cancel in sums over data, where differences on one side do not."""
    mean, variance = normals(2, [0.3] * 20, seed=5, distance=1.0)
    likelihood, y = Softmax(num_features=2, num_classes=3).double().requires_grad_(False), torch.arange(20) % 3
    arguments = likelihood.expected_and_slopes, mean, variance, y
    one_sided, central = (coupling_by_differences(*arguments, central=both)[1] for both in (False, True))
    found = coupling_function(likelihood)(mean, variance, y)[1]
    torch.testing.assert_close(found, central, rtol=0, atol=1e-12)
    assert float((one_sided - central).abs().max()) > 1e-8
