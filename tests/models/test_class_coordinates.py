"""Coordinates that are white under sites of several classes: against dense matrices and autograd."""

import pytest
import torch

from tests.approximations.test_class_ep import normals
from torchgpmc.models import class_coordinates
from torchgpmc.models.class_coordinates import ClassMap, class_map
from torchgpmc.models.class_reverse import at_white, class_slopes
from torchgpmc.numerics.special import log_standard_normal


def made(classes, count=2, size=4):
    root = normals(count, size, size)
    factor = torch.linalg.cholesky(root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64))
    precision = 3 * normals(count, size, seed=1).square() + 1e-3
    shift = normals(count, classes, size, seed=2)
    return factor, precision, shift - shift.mean(1, keepdim=True)


def a_basis(size=4):
    return torch.linalg.qr(normals(size, size, seed=9)).Q


IN_ANY_BASIS = pytest.mark.parametrize("basis", [None, a_basis()], ids=["own", "turned"])


def of_one(found, row):
    return ClassMap(*(part[row : row + 1] for part in found))


def near(found, expected):
    """To what single precision gives."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def functions_of(factor, v):
    """f - m ``(C, K, N)``."""
    return v.view(len(v), -1, factor.shape[-1]) @ factor.mT


@IN_ANY_BASIS
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_w_is_standard_normal_where_v_has_the_sites_posterior(classes, basis):
    factor, precision, shift = made(classes)
    found = class_map(factor, precision, shift, basis)
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


@IN_ANY_BASIS
def test_one_theta_serves_all_rows_and_every_row_has_its_own(basis):
    factor, *others = made(3)
    found = class_map(factor, *others, basis)
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
    factor, precision, shift = made(classes)
    found, white = class_map(factor, precision, shift), normals(2, 4 * classes, seed=3)
    f = functions_of(factor, found.latents(white, factor))
    torch.testing.assert_close(found.differences(white), f - f.mean(1, keepdim=True))
    near(found.near_differences(white), f - f.mean(1, keepdim=True))


@IN_ANY_BASIS
def test_the_prior_and_gradients_are_those_of_v(basis):
    factor, precision, shift = made(3)
    found, white = class_map(factor, precision, shift, basis), normals(2, 12, seed=3).requires_grad_(True)
    slope = normals(2, 3, 4, seed=4)
    slope = slope - slope.mean(1, keepdim=True)  # of what sees differences
    v = found.latents(white, factor)
    prior = log_standard_normal(v) + found.log_volume
    differences = found.differences(white)
    torch.testing.assert_close(found.log_prior(white, differences), prior)
    (expected,) = torch.autograd.grad((prior + (functions_of(factor, v) * slope).sum((-2, -1))).sum(), white)
    near(found.gradient(white, differences, slope), expected)


def test_a_row_that_does_not_factorise_fails_alone():
    factor, precision, shift = made(3)
    factor[1, 0, 0] = torch.nan
    found = class_map(factor, precision, shift)
    torch.testing.assert_close(found.log_volume[0], class_map(*made(3)).log_volume[0])
    assert bool(found.log_volume[1].isnan())


def test_a_row_whose_root_in_a_basis_does_not_factorise_fails_alone(monkeypatch):
    factorised = class_coordinates.cholesky_in_place
    monkeypatch.setattr(
        class_coordinates, "cholesky_in_place", lambda matrix: factorised(matrix)._replace(ok=torch.tensor([True, False]))
    )
    assert class_map(*made(3), a_basis()).log_volume.isnan().tolist() == [False, True]


def under_sites(factor, precision):
    return torch.linalg.inv(torch.linalg.inv(factor @ factor.mT) + precision.diag_embed())


def test_the_root_is_the_lower_one_in_its_basis():
    factor, precision, shift = made(3)
    inner, basis = under_sites(factor, precision), a_basis()
    torch.testing.assert_close(class_map(factor, precision, shift).spread, torch.linalg.cholesky(inner))
    turned = torch.linalg.cholesky(basis.mT @ inner @ basis)
    torch.testing.assert_close(class_map(factor, precision, shift, basis).spread, basis @ turned)


def test_functions_move_least_in_the_basis_of_the_covariance_and_most_under_a_root_that_is_not_triangular():
    factor, precision, shift = made(3, size=12)
    nearby = factor + 0.1 * normals(2, 12, 12, seed=8).tril()
    basis = torch.linalg.eigh(factor[0] @ factor[0].mT).eigenvectors.flip(-1)

    def at_once(chol):
        inner = torch.eye(12, dtype=torch.float64) + chol.mT @ (precision.unsqueeze(-1) * chol)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(inner), chol.mT, upper=False).mT

    def moved(root):
        return float((root(nearby) - root(factor))[0].square().sum())

    of_data = moved(lambda chol: class_map(chol, precision, shift).spread)
    assert of_data < 0.8 * moved(at_once)
    assert moved(lambda chol: class_map(chol, precision, shift, basis).spread) < 0.8 * of_data


@pytest.mark.parametrize("classes", [2, 4])
def test_slopes_are_those_of_the_root_written_out(classes):
    factor, precision, shift = made(classes)
    white, slope = normals(2, 4 * classes, seed=3), normals(2, classes, 4, seed=4)
    slope = slope - slope.mean(1, keepdim=True)
    leaves = [part.clone().requires_grad_(True) for part in (factor @ factor.mT, precision.log(), shift)]
    covariance, log_alpha, b = leaves
    alpha, chol = log_alpha.exp(), torch.linalg.cholesky(covariance)
    spread = torch.linalg.cholesky(under_sites(chol, alpha))
    rows = white.view(2, classes, 4)
    shared = rows.mean(1, keepdim=True)
    b_apart = b - b.mean(1, keepdim=True)
    differences = (rows - shared + b_apart @ spread) @ spread.mT
    v = torch.linalg.solve_triangular(chol, differences.mT, upper=False).mT + shared
    volume = (classes - 1) * 0.5 * (torch.logdet(spread @ spread.mT) - torch.logdet(covariance))
    value = log_standard_normal(v.flatten(1)) + volume + (differences * slope).sum((-2, -1))
    expected = torch.autograd.grad(value.sum(), leaves)
    coordinates = class_map(factor, precision, shift)
    torch.testing.assert_close(coordinates.differences(white), differences)
    found = class_slopes(coordinates, [at_white(coordinates, white, differences.detach(), slope)], [1.0])
    torch.testing.assert_close(found.covariance, 0.5 * (expected[0] + expected[0].mT))
    torch.testing.assert_close(found.log_precision, expected[1])
    torch.testing.assert_close(found.shift, expected[2])
