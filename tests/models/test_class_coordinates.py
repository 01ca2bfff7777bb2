"""Coordinates that are white under sites of several classes: against dense matrices and autograd."""

import pytest
import torch

from tests.approximations.test_class_ep import normals
from torchgpmc.models.class_coordinates import ClassMap, class_basis, class_map, class_root
from torchgpmc.models.class_reverse import class_slopes
from torchgpmc.numerics.special import log_standard_normal


def made(classes, count=2, size=4, turned=True):
    root = normals(count, size, size)
    factor = torch.linalg.cholesky(root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64))
    precision = 3 * normals(count, size, seed=1).square() + 1e-3
    shift = normals(count, classes, size, seed=2)
    basis = class_basis(factor[:1], precision[:1]) if turned else torch.zeros(0, 0, dtype=torch.float64)
    return factor, basis, precision, shift - shift.mean(1, keepdim=True)


def of_one(found, row):
    return ClassMap(*(part[row : row + 1] for part in found))


def near(found, expected):
    """To what single precision gives."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def functions_of(factor, v):
    """f - m ``(C, K, N)``."""
    return v.view(len(v), -1, factor.shape[-1]) @ factor.mT


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_w_is_standard_normal_where_v_has_the_sites_posterior(classes, turned):
    factor, basis, precision, shift = made(classes, turned=turned)
    found = class_map(factor, basis, precision, shift)
    for row in range(2):
        apart = torch.eye(classes, dtype=torch.float64) - 1 / classes
        prior = torch.block_diag(*[factor[row]] * classes)
        sites = torch.kron(apart, precision[row].diag())
        covariance = torch.linalg.inv(torch.eye(len(prior), dtype=torch.float64) + prior.T @ sites @ prior)
        mean = covariance @ prior.T @ shift[row].flatten()
        one, unit = of_one(found, row), torch.eye(len(prior), dtype=torch.float64)
        middle = one.latents(0 * unit[:1], factor[row : row + 1])
        root = (one.latents(unit, factor[row : row + 1]) - middle).mT
        torch.testing.assert_close(middle[0], mean)
        torch.testing.assert_close(root @ root.mT, covariance)
        torch.testing.assert_close(one.log_volume[0], root.slogdet().logabsdet)


@pytest.mark.parametrize("turned", [True, False])
def test_one_theta_serves_all_rows_and_every_row_has_its_own(turned):
    factor, *others = made(3, turned=turned)
    found = class_map(factor, *others)
    white = normals(2, 12, seed=3)
    v, differences = found.latents(white, factor), found.differences(white)
    torch.testing.assert_close(found.white(v, factor), white)
    for row in range(2):
        one, its_factor = of_one(found, row), factor[row : row + 1]
        torch.testing.assert_close(one.latents(white, its_factor)[row], v[row])
        torch.testing.assert_close(one.white(v, its_factor)[row], white[row])
        of_one_factor = one.differences(white)
        torch.testing.assert_close(of_one_factor[row], differences[row])
        near(one.near_differences(white)[row], differences[row])
        torch.testing.assert_close(one.log_prior(white, of_one_factor)[row], found.log_prior(white, differences)[row])
        near(one.gradient(white, of_one_factor, differences)[row], found.gradient(white, differences, differences)[row])


@pytest.mark.parametrize("classes", [2, 4])
def test_differences_are_those_of_the_functions(classes):
    factor, basis, precision, shift = made(classes)
    found, white = class_map(factor, basis, precision, shift), normals(2, 4 * classes, seed=3)
    f = functions_of(factor, found.latents(white, factor))
    torch.testing.assert_close(found.differences(white), f - f.mean(1, keepdim=True))
    near(found.near_differences(white), f - f.mean(1, keepdim=True))


def test_the_prior_and_gradients_are_those_of_v():
    factor, basis, precision, shift = made(3)
    found, white = class_map(factor, basis, precision, shift), normals(2, 12, seed=3).requires_grad_(True)
    slope = normals(2, 3, 4, seed=4)
    slope = slope - slope.mean(1, keepdim=True)  # of what sees differences
    v = found.latents(white, factor)
    prior = log_standard_normal(v) + found.log_volume
    differences = found.differences(white)
    torch.testing.assert_close(found.log_prior(white, differences), prior)
    (expected,) = torch.autograd.grad((prior + (functions_of(factor, v) * slope).sum((-2, -1))).sum(), white)
    near(found.gradient(white, differences, slope), expected)


def test_a_row_that_does_not_factorise_fails_alone():
    factor, basis, precision, shift = made(3)
    factor[1, 0, 0] = torch.nan
    found = class_map(factor, basis, precision, shift)
    torch.testing.assert_close(found.log_volume[0], class_map(*made(3)).log_volume[0])
    assert bool(found.log_volume[1].isnan())


def plain_root(covariance, basis):
    """The root written out, with a graph."""
    return basis @ torch.linalg.cholesky(basis.mT @ covariance @ basis) @ basis.mT


def under_sites(factor, precision):
    return torch.linalg.inv(torch.linalg.inv(factor @ factor.mT) + precision.diag_embed())


def test_the_basis_makes_the_root_symmetric_where_it_is_taken():
    factor, basis, precision, shift = made(3)
    spread = class_map(factor, basis, precision, shift).spread
    covariance = under_sites(factor, precision)
    torch.testing.assert_close(spread, plain_root(covariance, basis))
    values, axes = torch.linalg.eigh(covariance)
    symmetric = axes @ (values.sqrt().unsqueeze(-1) * axes.mT)
    torch.testing.assert_close(spread[0], symmetric[0], rtol=1e-5, atol=1e-5)
    assert float((spread[1] - symmetric[1]).abs().max()) > 0.01  # at another theta nearly


def test_functions_move_less_than_under_the_order_of_the_data():
    factor, basis, precision, shift = made(3, size=12)
    nearby = factor + 0.1 * normals(2, 12, 12, seed=8).tril()

    def moved(axes):
        before, after = (class_map(one, axes, precision, shift).spread for one in (factor, nearby))
        return float((after - before)[0].square().sum())

    assert moved(basis) < 0.8 * min(moved(torch.eye(12, dtype=torch.float64)), moved(basis[:0, :0]))


def test_the_basis_of_equal_variances_is_not_that_of_rounding():
    """A smooth kernel's smallest variances are all the jitter's."""
    x = torch.linspace(0, 1, 30, dtype=torch.float64)
    covariance = torch.exp(-2 * (x[:, None] - x).square()) + 1e-6 * torch.eye(30, dtype=torch.float64)
    factor, precision = torch.linalg.cholesky(covariance)[None], torch.ones(1, 30, dtype=torch.float64)
    noise = 1e-15 * normals(1, 30, 30, seed=3).tril()
    found, expected = (class_basis(factor + more, precision) for more in (noise, 0 * noise))
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-3, atol=1e-3)


def test_signs_of_the_basis_make_no_difference():
    factor, basis, precision, shift = made(3)
    turned = basis * torch.tensor([1.0, -1.0, -1.0, 1.0]).double()
    torch.testing.assert_close(
        class_map(factor, turned, precision, shift).spread, class_map(factor, basis, precision, shift).spread
    )


def test_a_covariance_without_a_root_fails_alone():
    """Where K is singular I + L' A L is not, but S is."""
    factor, basis, precision, shift = made(3)
    factor[1] = 0
    found = class_map(factor, basis, precision, shift)
    torch.testing.assert_close(found.log_volume[0], class_map(*made(3)).log_volume[0])
    assert bool(found.log_volume[1].isnan())


@pytest.mark.parametrize("classes", [2, 4])
def test_slopes_are_those_of_the_root_written_out(classes):
    factor, basis, precision, shift = made(classes)
    white, slope = normals(2, 4 * classes, seed=3), normals(2, classes, 4, seed=4)
    slope = slope - slope.mean(1, keepdim=True)
    leaves = [part.clone().requires_grad_(True) for part in (factor @ factor.mT, precision.log(), shift)]
    covariance, log_alpha, b = leaves
    alpha, chol = log_alpha.exp(), torch.linalg.cholesky(covariance)
    spread = plain_root(under_sites(chol, alpha), basis)
    rows = white.view(2, classes, 4)
    shared = rows.mean(1, keepdim=True)
    b_apart = b - b.mean(1, keepdim=True)
    differences = (rows - shared + b_apart @ spread) @ spread.mT
    v = torch.linalg.solve_triangular(chol, differences.mT, upper=False).mT + shared
    volume = (classes - 1) * 0.5 * (torch.logdet(spread @ spread.mT) - torch.logdet(covariance))
    value = log_standard_normal(v.flatten(1)) + volume + (differences * slope).sum((-2, -1))
    expected = torch.autograd.grad(value.sum(), leaves)
    root = class_root(factor, basis, precision)
    coordinates = root.coordinates(precision, shift)
    torch.testing.assert_close(coordinates.differences(white), differences)
    found = class_slopes(root, basis, coordinates, shift, white, differences.detach(), slope)
    torch.testing.assert_close(found.covariance, 0.5 * (expected[0] + expected[0].mT))
    torch.testing.assert_close(found.log_precision, expected[1])
    torch.testing.assert_close(found.shift, expected[2])
