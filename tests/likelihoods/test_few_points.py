"""Expectations over few points: means of log sum exp over them, near the integrals where normals are narrow."""

import pytest
import torch

from torchgpmc.likelihoods import Bernoulli, Softmax
from torchgpmc.likelihoods.few_points import log_sum_exp_by_points, rough_slopes_and_products
from torchgpmc.likelihoods.log_sum_exp import expected_log_sum_exp, log_sum_exp_slopes_and_products
from torchgpmc.likelihoods.slopes import coupling_function, slopes_function
from torchgpmc.numerics.matched_points import matched_points


def normals(num_classes, deviation=1.0, count=(3, 20)):
    generator = torch.Generator().manual_seed(num_classes)
    mean = 2 * torch.randn(*count, num_classes, generator=generator, dtype=torch.float64)
    return mean, (deviation * (0.5 + torch.rand(mean.shape, generator=generator, dtype=torch.float64))) ** 2


@pytest.mark.parametrize("num_classes", [2, 7, 12])
def test_value_and_slopes_are_those_of_a_mean_over_points(num_classes):
    mean, variance = (part.requires_grad_() for part in normals(num_classes))
    points = matched_points(num_classes, 8, mean)
    expected = torch.stack([torch.logsumexp(mean + variance.sqrt() * point, -1) for point in points]).mean(0)
    slopes = torch.autograd.grad(expected.sum(), (mean, variance))
    for found, known in zip(log_sum_exp_by_points(mean.detach(), variance.detach()), (expected, *slopes), strict=True):
        torch.testing.assert_close(found, known.detach())
    targets = torch.arange(20) % num_classes
    likelihood = Softmax(num_classes=max(4, num_classes)).by_few_points()
    value = likelihood.expected_log_likelihood(mean, variance, targets)
    torch.testing.assert_close(value, mean[..., range(20), targets] - expected)
    for found, slope in zip(torch.autograd.grad(value.sum(), (mean, variance)), slopes, strict=True):
        of_targets = torch.nn.functional.one_hot(targets, num_classes) if slope is slopes[0] else 0
        torch.testing.assert_close(found, of_targets - slope)


@pytest.mark.parametrize("num_classes", [4, 10])
def test_what_is_left_shrinks_with_the_square_of_the_variance(num_classes):
    mean, variance = normals(num_classes, 0.5)
    left = []
    for shrink in (1.0, 0.25):
        exact = log_sum_exp_slopes_and_products(mean, shrink * variance)
        rough = (*log_sum_exp_by_points(mean, shrink * variance), rough_slopes_and_products(mean, shrink * variance)[3])
        left.append([float((one - other).abs().mean()) for one, other in zip(exact, rough, strict=True)])
    # Values by the fourth power of the deviation, slopes by its square, which is the first that points that match two moments miss.
    assert left[1][0] < left[0][0] / 12 and left[0][0] < 0.01
    assert all(after < before / 3 for after, before in zip(left[1], left[0], strict=True))


def test_precisions_of_rough_slopes_are_never_negative():
    _, _, of_variance, products = rough_slopes_and_products(*normals(6, 3.0))
    precision = torch.diag_embed(2 * of_variance) - products + torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert float(torch.linalg.eigvalsh(precision).min()) > -1e-12
    torch.testing.assert_close(precision.sum(-1), torch.zeros_like(of_variance))  # a shift of all changes nothing


def test_which_likelihoods_have_few_points():
    likelihood = Softmax(num_classes=4)
    rough = likelihood.by_few_points()
    assert rough is not likelihood and rough.by_few_points() is rough and rough.num_classes == 4
    assert slopes_function(rough) == rough.expected_and_slopes and coupling_function(rough) == rough.expected_and_coupling
    mean, variance = normals(4, 0.1)
    targets = torch.arange(20) % 4
    torch.testing.assert_close(*(each.predictive_log_prob(mean, variance, targets) for each in (likelihood, rough)))

    class Tempered(Softmax):
        def _log_probabilities(self, f):
            return super()._log_probabilities(0.5 * f)

    assert Softmax(num_classes=3).by_few_points().num_classes == 3
    for same in (Softmax(num_classes=2), Softmax(2, 5), Bernoulli(), Tempered(num_classes=4)):
        assert same.by_few_points() is same


def test_a_normal_that_is_none_fails_alone():
    mean, variance = normals(5)
    mean[0, 3, 1] = torch.nan
    found = expected_log_sum_exp(mean, variance), *log_sum_exp_by_points(mean, variance)
    for part in found:
        bad = torch.isnan(part).view(3, 20, -1).any(-1)
        assert bool(bad[0, 3]) and int(bad.sum()) == 1
