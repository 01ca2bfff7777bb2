"""E log p(y | f) under wide and narrow normals, which the sparse model integrates, against dense rules."""

import math

import numpy as np
import pytest
import torch

import torchgpmc as tg
from tests.likelihoods.test_predictive import CASES, MEANS, NAMES, SOFTMAX, VARIANCES
from tests.problems import LIKELIHOODS, fixed_kernel, inputs, targets
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.sparse_laplace import inducing_laplace
from torchgpmc.likelihoods.greatest_sum import greatest_of_sums
from torchgpmc.likelihoods.log_sum_exp import expected_log_sum_exp, log_sum_exp_and_slopes
from torchgpmc.likelihoods.narrow_normals import are_narrow, narrow_log_sum_exp
from torchgpmc.likelihoods.softmax import log_probabilities_of_normals
from torchgpmc.numerics.quadrature import gauss_hermite, product_rule


def dense_expectation(function, mean, variance, centre, scale):
    """Ten Gauss-Legendre nodes on each of some 4000 panels over mean +- 12 deviations: even ones, and others about the kink."""
    deviation = math.sqrt(variance)
    low, high = mean - 12 * deviation, mean + 12 * deviation
    about = np.clip(centre + scale * np.sinh(np.linspace(-16, 16, 3001)), low, high)
    edges = np.unique(np.concatenate([np.linspace(low, high, 1001), about]))
    nodes, weights = np.polynomial.legendre.leggauss(10)
    widths = np.diff(edges)[:, None]
    points, weights = edges[:-1, None] + widths * (nodes + 1) / 2, widths * weights / 2
    weights = weights * np.exp(-0.5 * (points - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)
    return float((function(torch.as_tensor(points.ravel())) * torch.as_tensor(weights.ravel())).sum())


@pytest.mark.parametrize("name", [case for case in NAMES if case.values != ("noise",)])
def test_expected_log_likelihood_is_right_to_1e_6(name):
    module, targets, narrow = CASES[name]
    likelihood = as_likelihood(module)
    means, variances = MEANS, VARIANCES[:5] if name.startswith("poisson") else VARIANCES
    for y in targets:
        target = torch.tensor(y, dtype=torch.float64)
        for variance in variances.tolist():  # rules are chosen by the largest of a call
            with torch.no_grad():
                found = likelihood.expected_log_likelihood(means[None], torch.full_like(means[None], variance), target)[0]
            expected = [
                dense_expectation(lambda f, t=target: likelihood.pointwise_log_prob(f[None], t)[0], mean, variance, *narrow(y))
                for mean in means.tolist()
            ]
            torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("link", ["probit", "logit"])
@pytest.mark.parametrize("variance", [1.0, 9.0, 100.0])
def test_gradients_of_wide_expectations(link, variance):
    likelihood, y = tg.likelihoods.Bernoulli(link), torch.ones(6, dtype=torch.float64)
    mean = MEANS[None].clone().requires_grad_(True)
    variances = torch.full_like(mean, variance).detach().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m, v: likelihood.expected_log_likelihood(m, v, y), (mean, variances), atol=1e-6)


@pytest.mark.parametrize("link", ["probit", "logit"])
@pytest.mark.parametrize("size", [1.0, 60.0])  # within reach of the quick form, and not
def test_expectations_without_slopes_are_those_with(link, size):
    likelihood, generator = tg.likelihoods.Bernoulli(link), torch.Generator().manual_seed(0)
    mean = size * torch.randn(5, 300, generator=generator, dtype=torch.float64)
    variance = torch.rand(5, 300, generator=generator, dtype=torch.float64)
    y = (torch.rand(300, generator=generator) < 0.5).double()
    alone = likelihood.expected_log_likelihood(mean, variance, y)
    with_slopes = likelihood.expected_log_likelihood(mean.requires_grad_(True), variance, y)
    assert with_slopes.requires_grad and not alone.requires_grad
    torch.testing.assert_close(alone, with_slopes.detach(), rtol=1e-13, atol=1e-15)


def dense_log_sum_exp(mean, variance):
    grids = [torch.arange(-10, 10, min(0.4, 0.4 / v**0.5), dtype=torch.float64) for v in variance.tolist()]
    mesh = torch.cartesian_prod(*grids)
    weights = torch.softmax(-0.5 * mesh.square().sum(-1), 0)
    return weights @ torch.logsumexp(mean + variance.sqrt() * mesh, -1)


@pytest.mark.parametrize(("mean", "variance"), SOFTMAX)
def test_expected_log_softmax_is_right_to_1e_8(mean, variance):
    mean, variance = torch.tensor(mean).double(), torch.tensor(variance).double()
    likelihood = tg.likelihoods.Softmax(num_classes=len(mean), mixing_weights=False)
    y = torch.arange(len(mean)).double()
    rows = mean.expand(len(y), -1), variance.expand(len(y), -1)
    found = likelihood.expected_log_likelihood(*rows, y)
    torch.testing.assert_close(found, mean - dense_log_sum_exp(mean, variance), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("mean", "variance"), SOFTMAX)
def test_gradients_of_expected_log_sum_exp(mean, variance):
    """Written out; against autograd's of the dense rule."""
    leaves = torch.tensor(mean).double().requires_grad_(True), torch.tensor(variance).double().requires_grad_(True)
    found = torch.autograd.grad(expected_log_sum_exp(*leaves), leaves)
    for slope, expected in zip(found, torch.autograd.grad(dense_log_sum_exp(*leaves), leaves), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["probit", "laplace"])
def test_curvature_at_the_mode_of_the_sparse_model_is_the_expected_one(name):
    """Of wide latents, and of a kink, which has curvature in expectation alone."""
    likelihood, _, narrow = CASES[name]
    x, y = inputs(8), (torch.arange(8) % 2).double()
    model = tg.SparseGP(x, y, fixed_kernel(0.2, 16.0), likelihood, inducing_points=inputs(3, seed=7))
    at = model.at(model.prior(torch.zeros(1, 0, dtype=torch.float64)))
    assert float(at.variance.max()) > 4
    found = inducing_laplace(model, at, model.targets)
    assert bool(found.converged.all())
    projection, precision = at.projection[0], found.precision[0]
    inner = torch.eye(3).double() + (projection * precision) @ projection.mT
    v = torch.linalg.solve(inner, projection @ (found.shift - precision * at.mean)[0])
    f = (at.mean[0] + v @ projection).tolist()
    for label, mean, variance, value in zip(y, f, at.variance[0].tolist(), precision.tolist(), strict=True):
        if name == "probit":
            expected = dense_expectation(
                lambda point, y=label: likelihood.derivatives(point[None], y).second[0], mean, variance, *narrow(label)
            )
        else:  # -|y - f| / 0.1 turns by -20 at y
            expected = -20 * math.exp(-0.5 * (float(label) - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)
        # The sites were made within Newton's tolerance of this mode, not at it.
        assert value == pytest.approx(-expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a predictive density")
def test_enormous_variances_of_softmax_end_and_are_about_right():
    """A lattice over them would fill the memory; beside such latents softmax is the largest's indicator."""
    mean, variance = torch.zeros(4, 3).double(), torch.full((4, 3), 1e8).double().requires_grad_(True)
    value = expected_log_sum_exp(mean, variance)
    largest = 1.5 / math.sqrt(math.pi) * 1e4  # E max of three standard normals, times the deviation
    torch.testing.assert_close(value.detach(), torch.full((4,), largest).double(), rtol=0, atol=0.06 * 1e4)
    assert bool(torch.isfinite(torch.autograd.grad(value.sum(), variance)[0]).all())
    probabilities = log_probabilities_of_normals(mean, variance.detach()).exp()
    torch.testing.assert_close(probabilities, torch.full((4, 3), 1 / 3).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize(("classes", "nodes"), [(2, 60), (3, 36), (4, 14)])
@pytest.mark.parametrize("widest", [0.008, 0.04, 0.09, 0.2, 0.3, 0.4, 0.5, 0.63])
def test_products_of_few_nodes_for_narrow_normals(classes, nodes, widest):
    """Each rule where it errs most, against a product with an axis a function; the lattices to their own errors."""
    if not are_narrow(classes, widest):
        pytest.skip("sums over a lattice take less time")
    random = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(60, classes, generator=random, dtype=torch.float64) * torch.linspace(0, 1, 60)[:, None]
    deviation = widest * torch.rand(60, classes, generator=random, dtype=torch.float64)
    deviation[::2], deviation[1, 0] = widest, 0.0
    node, weight = gauss_hermite(nodes, torch.float64, mean.device)
    f = mean.unsqueeze(1) + deviation.unsqueeze(1) * torch.cartesian_prod(*[node] * classes)
    weights, softmax = torch.cartesian_prod(*[weight] * classes).prod(-1), torch.softmax(f, -1)
    expected = torch.logsumexp(f, -1) @ weights, softmax.mT @ weights, (softmax * (1 - softmax)).mT @ weights / 2
    found = narrow_log_sum_exp(mean, deviation.square(), widest)
    by_lattice = greatest_of_sums(mean, deviation.square())
    for ours, lattice, dense in zip(found, by_lattice, expected, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=5e-10)
        torch.testing.assert_close(ours, lattice, rtol=0, atol=2e-8)


def test_softmax_of_normals_of_all_widths_together():
    """Rules differ with the width: each datum has the value and slopes that it has alone, from 2 nodes to the widest lattice."""
    deviation = torch.tensor([1e-3, 2.9e-3, 3.1e-3, 0.016, 0.018, 0.05, 0.07, 0.21, 0.3, 0.8, 2.0, 5.0, 20.0]).double()
    mean = torch.randn(len(deviation), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    variance = deviation.square().unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.25])
    y, likelihood = torch.arange(len(deviation)) % 3, tg.likelihoods.Softmax(num_classes=3)
    together = likelihood.expected_and_slopes(mean, variance, y)
    alone = [likelihood.expected_and_slopes(*(part[row : row + 1] for part in (mean, variance, y))) for row in range(len(y))]
    torch.testing.assert_close(together.value, torch.stack([part.value for part in alone]).sum(), rtol=0, atol=2e-8)
    torch.testing.assert_close(together.mean, torch.cat([part.mean for part in alone]), rtol=0, atol=2e-9)
    torch.testing.assert_close(together.variance, torch.cat([part.variance for part in alone]), rtol=0, atol=5e-9)
    narrow = deviation < 0.1  # the rules of few nodes against a product of twenty nodes
    at, weights = product_rule(2, torch.float64, torch.device("cpu"))
    pairs = mean[narrow, :2] + variance[narrow, :2].sqrt() * at.unsqueeze(1)
    expected = (weights.unsqueeze(-1) * torch.logsumexp(pairs, -1)).sum(0)
    torch.testing.assert_close(expected_log_sum_exp(mean[narrow, :2], variance[narrow, :2]), expected, rtol=0, atol=1e-8)


def test_a_normal_that_is_none_has_no_say_in_the_others():
    mean, variance = torch.zeros(3, 2).double(), torch.tensor([[1.0, 4.0], [0.01, 9.0], [0.0, 0.0]]).double()
    expected = [part.clone() for part in log_sum_exp_and_slopes(mean, variance)]
    mean[1, 0] = torch.nan
    for part, other in zip(log_sum_exp_and_slopes(mean, variance), expected, strict=True):
        assert bool(torch.isnan(part[1]).all())
        torch.testing.assert_close(part[[0, 2]], other[[0, 2]], rtol=0, atol=2e-9)


@pytest.mark.parametrize("name", ["probit", "logit", "student_t", "ordinal"])
def test_slopes_of_narrow_normals_survive_wide_ones_beside_them(name):
    """A chain's slopes were off by up to 5e-4 where another chain's normal was wide: nodes came as differences of large numbers."""
    likelihood = LIKELIHOODS[name]().double().requires_grad_(False)
    variance = torch.tensor([[1e-14, 1e-12, 1e-8, 1e-4, 1.0, 1e4]]).double()
    mean, y = torch.full_like(variance, 0.3), targets(name, 1).double().expand(variance.shape[1])
    together = likelihood.expected_and_slopes(mean, variance, y)
    for column in range(variance.shape[1]):
        part = slice(column, column + 1)
        alone = likelihood.expected_and_slopes(mean[:, part], variance[:, part], y[part])
        torch.testing.assert_close(together.mean[:, part], alone.mean, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(together.variance[:, part], alone.variance, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("link", ["probit", "logit"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_quick_expectations_are_the_plain_ones(link, dtype):
    """Beside a datum far in the tail all data take the plain form, alone the quick one."""
    mean = torch.tensor([[-3.0, -0.5, 0.0, 2.0, 5.0, -2000.0]], dtype=dtype)
    variance = torch.tensor([[0.01, 1.0, 3.0, 0.5, 4.0, 2.0]], dtype=dtype)
    likelihood, y = tg.likelihoods.Bernoulli(link), torch.tensor([1, 1, 0, 1, 1, 1], dtype=dtype)
    plain = likelihood.expected_and_slopes(mean, variance, y)
    quick = likelihood.expected_and_slopes(mean[:, :-1], variance[:, :-1], y[:-1])
    tolerance = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(quick.mean, plain.mean[:, :-1], **tolerance)
    torch.testing.assert_close(quick.variance, plain.variance[:, :-1], **tolerance)
    values = [
        likelihood.expected_log_likelihood(m, s, y[: m.shape[1]])[0, :5]
        for m, s in ((mean, variance), (mean[:, :-1], variance[:, :-1]))
    ]
    torch.testing.assert_close(values[1], values[0], **tolerance)
