"""Up to three variables: closed forms, independent integrals, the far tails, derivatives; and how honest error bars are."""

import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch

from tests.orthant.simple import closed_form
from tests.problems import generator
from tests.speed import quick
from torchgpmc.orthant import Quadrature, log_probability


def covariances(size, count, ridge=0.05, seed=0):
    a = torch.randn(count, size, size, generator=generator(seed), dtype=torch.float64)
    return a @ a.mT + ridge * torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("size", quick([1, 2], [1, 2, 3]))
def test_orthants_have_their_closed_forms_and_error_bars_that_cover(size):
    """The default is nearer than it states at every problem, where sampling was five times as far at one in forty."""
    covariance = covariances(size, 15)
    found = log_probability(covariance, lower=0.0, num_points=1024)
    truth = torch.tensor([math.log(closed_form(each)) for each in covariance], dtype=torch.float64)
    assert bool((found.variance.sqrt() < 1e-8).all())
    assert float(((found.value - truth).abs() / found.variance.sqrt()).max()) < 1


@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize("sign", [1, -1])
def test_correlations_near_one(eps, sign):
    covariance = torch.tensor([[1.0, sign * (1 - eps)], [sign * (1 - eps), 1.0]], dtype=torch.float64)
    assert float(log_probability(covariance, lower=0.0).value) == pytest.approx(math.log(closed_form(covariance)), abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["box", "tail"])
def test_the_order_of_three_variables_does_not_matter(kind):
    """Each order is another pair of nested integrals."""
    covariance = covariances(3, 3, seed=1)
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    uniform = torch.rand(3, 3, generator=generator(2), dtype=torch.float64)
    lower = sd * (5 + 30 * uniform) if kind == "tail" else sd * (uniform - 0.5)
    upper = torch.full_like(lower, torch.inf) if kind == "tail" else lower + sd * 10 ** (-2 * uniform)
    values = [
        log_probability(covariance[:, p][:, :, p], lower=lower[:, p], upper=upper[:, p]).value
        for p in map(list, itertools.permutations(range(3)))
    ]
    assert kind == "box" or float(values[0].min()) < -745  # beyond what probabilities themselves could hold
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=0, atol=1e-8)


def test_boxes_equal_a_dense_sum():
    """Over x_1 by the trapezoidal rule, x_2 given x_1 in closed form."""
    rho, lower, upper = -0.7, np.array([-0.3, 0.2]), np.array([1.1, 2.5])
    x = np.linspace(lower[0], upper[0], 200_001)
    sd = math.sqrt(1 - rho**2)
    inner = scipy.stats.norm.cdf((upper[1] - rho * x) / sd) - scipy.stats.norm.cdf((lower[1] - rho * x) / sd)
    truth = math.log(scipy.integrate.trapezoid(scipy.stats.norm.pdf(x) * inner, x))
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    found = log_probability(covariance, lower=torch.as_tensor(lower), upper=torch.as_tensor(upper))
    assert float(found.value) == pytest.approx(truth, abs=1e-9)


def test_the_far_tail_keeps_its_digits():
    """P(x > 40, y > 40), about exp(-1070), by a dense sum in logarithms."""
    rho, limit = 0.5, 40.0
    x = np.linspace(limit, limit + 8, 800_001)
    log_values = scipy.stats.norm.logpdf(x) + scipy.special.log_ndtr((rho * x - limit) / math.sqrt(1 - rho**2))
    log_values[[0, -1]] -= math.log(2)  # the trapezoidal rule's ends
    truth = scipy.special.logsumexp(log_values) + math.log(x[1] - x[0])
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    assert float(log_probability(covariance, lower=limit).value) == pytest.approx(truth, abs=1e-7)


@pytest.mark.parametrize("size", quick([1, 2], [1, 2, 3]))
def test_derivatives(size):
    factor = torch.linalg.cholesky(covariances(size, 2, seed=3))
    lower = torch.tensor([-0.5, 0.3, -torch.inf]).double()[:size].expand(2, size).clone()
    upper = torch.tensor([1.5, torch.inf, 0.4]).double()[:size].expand(2, size).clone()
    mean = torch.linspace(-0.2, 0.3, size).double()
    leaves = [part.requires_grad_(True) for part in (factor, lower, upper, mean)]

    def value(factor, lower, upper, mean):
        return log_probability(factor @ factor.mT, lower=lower, upper=upper, mean=mean).value

    gradients = torch.autograd.grad(value(*leaves).sum(), leaves)
    random = generator(4)
    for k, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        direction = torch.randn(leaf.shape, generator=random, dtype=torch.float64)
        direction = direction.tril() if k == 0 else torch.where(torch.isinf(leaf.detach()), 0.0, direction)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [part.detach() for part in leaves]
            moved[k] = moved[k] + step * direction
            ends.append(float(value(*moved).sum()))
        assert bool(torch.isfinite(gradient).all())
        assert float((gradient * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-6)


def test_single_precision_and_no_limits():
    covariance = covariances(3, 1)[0]
    found = log_probability(covariance.float(), lower=0.0)
    assert found.value.dtype == torch.float32
    assert float(found.value) == pytest.approx(math.log(closed_form(covariance)), abs=1e-5)
    assert float(log_probability(covariance).value) == pytest.approx(0.0, abs=1e-9)


def test_more_variables_are_refused():
    with pytest.raises(ValueError, match=r"up to 3 variables and the problem has 4.*SeparationOfVariables"):
        log_probability(torch.eye(4), method=Quadrature())


def test_a_class_in_place_of_a_method_is_named():
    with pytest.raises(TypeError, match="method is <class"):
        log_probability(torch.eye(4), method=Quadrature)
