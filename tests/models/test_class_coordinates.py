"""Coordinates that are white under sites of several classes: against dense matrices and autograd."""

import pytest
import torch

from tests.approximations.test_class_ep import normals
from torchgpmc.models.class_coordinates import ClassMap, class_map
from torchgpmc.numerics.special import log_standard_normal


def made(classes, count=2, size=4):
    root = normals(count, size, size)
    factor = torch.linalg.cholesky(root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64))
    precision = 3 * normals(count, size, seed=1).square() + 1e-3
    shift = normals(count, classes, size, seed=2)
    return factor, precision, shift - shift.mean(1, keepdim=True)


def of_one(found, row):
    return ClassMap(*(part[row : row + 1] for part in found))


def near(found, expected):
    """To what single precision gives."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def functions_of(factor, v):
    """f - m ``(C, K, N)``."""
    return v.view(len(v), -1, factor.shape[-1]) @ factor.mT


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_w_is_standard_normal_where_v_has_the_sites_posterior(classes):
    factor, precision, shift = made(classes)
    found = class_map(factor, precision, shift)
    for row in range(2):
        apart = torch.eye(classes, dtype=torch.float64) - 1 / classes
        prior = torch.block_diag(*[factor[row]] * classes)
        sites = torch.kron(apart, precision[row].diag())
        covariance = torch.linalg.inv(torch.eye(len(prior), dtype=torch.float64) + prior.T @ sites @ prior)
        mean = covariance @ prior.T @ shift[row].flatten()
        one, unit = of_one(found, row), torch.eye(len(prior), dtype=torch.float64)
        middle = one.latents(0 * unit[:1])
        root = (one.latents(unit) - middle).mT
        torch.testing.assert_close(middle[0], mean)
        torch.testing.assert_close(root @ root.mT, covariance)
        torch.testing.assert_close(one.log_volume[0], root.slogdet().logabsdet)


def test_one_theta_serves_all_rows_and_every_row_has_its_own():
    factor, *sites = made(3)
    found = class_map(factor, *sites)
    white = normals(2, 12, seed=3)
    v, differences = found.latents(white), found.differences(white, factor)
    torch.testing.assert_close(found.white(v), white)
    for row in range(2):
        one = of_one(found, row)
        torch.testing.assert_close(one.latents(white)[row], v[row])
        torch.testing.assert_close(one.white(v)[row], white[row])
        of_one_factor = one.differences(white, factor[row : row + 1])
        torch.testing.assert_close(of_one_factor[row], differences[row])
        near(one.near_differences(white)[row], differences[row])
        torch.testing.assert_close(one.log_prior(white, of_one_factor)[row], found.log_prior(white, differences)[row])
        near(one.gradient(white, of_one_factor, differences)[row], found.gradient(white, differences, differences)[row])


@pytest.mark.parametrize("classes", [2, 4])
def test_differences_are_those_of_the_functions(classes):
    factor, precision, shift = made(classes)
    found, white = class_map(factor, precision, shift), normals(2, 4 * classes, seed=3)
    f = functions_of(factor, found.latents(white))
    torch.testing.assert_close(found.differences(white, factor), f - f.mean(1, keepdim=True))
    near(found.near_differences(white), f - f.mean(1, keepdim=True))


def test_the_prior_and_gradients_are_those_of_v():
    factor, precision, shift = made(3)
    found, white = class_map(factor, precision, shift), normals(2, 12, seed=3).requires_grad_(True)
    slope = normals(2, 3, 4, seed=4)
    slope = slope - slope.mean(1, keepdim=True)  # of what sees differences
    v = found.latents(white)
    prior = log_standard_normal(v) + found.log_volume
    differences = found.differences(white, factor)
    torch.testing.assert_close(found.log_prior(white, differences), prior)
    (expected,) = torch.autograd.grad((prior + (functions_of(factor, v) * slope).sum((-2, -1))).sum(), white)
    near(found.gradient(white, differences, slope), expected)


def test_a_row_that_does_not_factorise_fails_alone():
    factor, precision, shift = made(3)
    factor[1, 0, 0] = torch.nan
    found = class_map(factor, precision, shift)
    torch.testing.assert_close(found.log_volume[0], class_map(*made(3)).log_volume[0])
    assert bool(found.log_volume[1].isnan())
