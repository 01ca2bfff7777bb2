"""Coordinates that are white under sites of several classes: against dense matrices and autograd."""

import pytest
import torch

from tests.approximations.test_class_ep import dense, normals
from torchgpmc.models.class_coordinates import ClassMap, class_map


def made(classes, count=2, size=4):
    root = normals(count, size, size)
    factor = torch.linalg.cholesky(root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64))
    weight = 3 * normals(count, classes, size, seed=1).square() + 1e-3
    return factor, weight, normals(count, classes, size, seed=2)


def of_one(found, row):
    return ClassMap(*(part[row : row + 1] for part in found))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_w_is_standard_normal_where_v_has_the_sites_posterior(classes):
    factor, weight, shift = made(classes)
    found = class_map(factor, weight, shift)
    for row in range(2):
        prior, precision = dense(weight[row], factor[row])
        covariance = torch.linalg.inv(torch.eye(len(prior), dtype=torch.float64) + prior.T @ precision @ prior)
        mean = covariance @ prior.T @ shift[row].flatten()
        one, unit = of_one(found, row), torch.eye(len(prior), dtype=torch.float64)
        middle = one.latents(0 * unit[:1])
        root = (one.latents(unit) - middle).mT
        torch.testing.assert_close(middle[0], mean)
        torch.testing.assert_close(root @ root.mT, covariance)
        torch.testing.assert_close(one.log_volume[0], root.slogdet().logabsdet)


def test_one_theta_serves_all_rows_and_every_row_has_its_own():
    found = class_map(*made(3))
    white = normals(2, 12, seed=3)
    v = found.latents(white)
    torch.testing.assert_close(found.white(v), white)
    for row in range(2):
        torch.testing.assert_close(of_one(found, row).latents(white)[row], v[row])
        torch.testing.assert_close(of_one(found, row).white(v)[row], white[row])


def test_gradients_are_autograds():
    found, white = class_map(*made(3)), normals(2, 12, seed=3).requires_grad_(True)
    slope = normals(2, 12, seed=4)
    (expected,) = torch.autograd.grad((found.latents(white) * slope).sum(), white)
    torch.testing.assert_close(found.pulled_back(slope), expected)


def test_a_row_that_does_not_factorise_fails_alone():
    factor, weight, shift = made(3)
    factor[1, 0, 0] = torch.nan
    found = class_map(factor, weight, shift)
    torch.testing.assert_close(found.log_volume[0], class_map(*made(3)).log_volume[0])
    assert bool(found.log_volume[1].isnan())
