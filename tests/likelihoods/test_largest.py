"""P(f_k is the largest of K normals) and robust-max, against a dense rule in numpy, and slopes against its differences."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from gpytorch.priors import UniformPrior

import torchgpmc as tg
from tests.problems import inputs, kernel
from torchgpmc.likelihoods.largest import probabilities_of_largest, probability_and_slopes, probability_of_largest
from torchgpmc.likelihoods.slopes import slopes_by_autograd

NODES, WEIGHTS = np.polynomial.legendre.leggauss(12)


def dense(mean, variance, k):
    """Twelve Gauss-Legendre nodes a panel, panels as fine as each of the normals asks for."""
    mean, deviation = np.asarray(mean), np.sqrt(np.asarray(variance))
    low, high = mean[k] - 9 * deviation[k], mean[k] + 9 * deviation[k]
    steps = [m + s * np.linspace(-9, 9, 60) for m, s in zip(mean, deviation, strict=True)]
    edges = np.unique(np.concatenate([np.linspace(low, high, 200), *steps]).clip(low, high))
    half = np.diff(edges)[:, None] / 2
    u, weights = ((edges[:-1, None] + half) + half * NODES).ravel(), (half * WEIGHTS).ravel()
    z = (u[:, None] - mean) / deviation
    below = np.delete(scipy.special.ndtr(z), k, 1).prod(1)
    return float((weights * np.exp(-0.5 * z[:, k] ** 2) * below).sum() / deviation[k] / math.sqrt(2 * math.pi))


def problems(classes, ratio, seed=0):
    """Means, and variances the first of which is ``ratio ** 2`` of the size of the others."""
    generator = torch.Generator().manual_seed(seed + classes)
    mean = 2 * torch.randn(classes, generator=generator, dtype=torch.float64)
    variance = 0.2 + torch.rand(classes, generator=generator, dtype=torch.float64)
    variance[0] *= ratio**2
    return mean, variance


@pytest.mark.parametrize("ratio", [1.0, 0.1, 10.0, 1e-3, 1e4])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_probabilities_are_right_however_wide_and_narrow_the_normals(classes, ratio):
    mean, variance = problems(classes, ratio)
    found = probabilities_of_largest(mean[None], variance[None])[0]
    expected = torch.tensor([dense(mean, variance, k) for k in range(classes)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("classes", [2, 10, 40])
@pytest.mark.parametrize("spread", [0.0, 1.0, 50.0])
def test_probabilities_under_one_variance_for_all(classes, spread):
    """What the sparse model asks for; as many nodes as the number of classes wants, without a look at the numbers."""
    mean, _ = problems(classes, 1.0)
    mean, shared = spread * mean, torch.tensor([0.7], dtype=torch.float64).expand(classes)
    found = probabilities_of_largest(mean[None], shared[None])[0]
    expected = torch.tensor([dense(mean, shared, k) for k in range(min(3, classes))], dtype=torch.float64)
    torch.testing.assert_close(found[: len(expected)], expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(found, probabilities_of_largest(mean[None], shared[None].contiguous())[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("ratio", [1.0, 10.0, 1e3])
def test_slopes_equal_differences_of_the_dense_rule(ratio):
    classes, k = 5, 1
    mean, variance = problems(classes, ratio)
    found = probability_and_slopes(mean[None], variance[None], torch.tensor([k]))
    for j in range(classes):
        for slope, at in ((found.mean, mean), (found.variance, variance)):
            step = 1e-4 * float(variance[j] ** 0.5 if at is mean else variance[j])
            old, ends = float(at[j]), []
            for sign in (1, -1):
                at[j] = old + sign * step
                ends.append(dense(mean, variance, k))
            at[j] = old
            # In units of the normal's own width; differences of the dense rule have seven digits.
            assert float(slope[0, j]) * step == pytest.approx((ends[0] - ends[1]) / 2, abs=1e-11)
    assert float(found.value) == pytest.approx(dense(mean, variance, k), abs=1e-9)


def test_slopes_under_one_variance_for_all():
    """Shared variances are worked on once: the same as those of every class's own."""
    generator = torch.Generator().manual_seed(4)
    mean, index = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64), torch.arange(5) % 4
    shared = 0.1 + torch.rand(2, 5, 1, generator=generator, dtype=torch.float64)
    found = probability_and_slopes(mean, shared.expand(-1, -1, 4), index)
    expected = probability_and_slopes(mean, shared.repeat(1, 1, 4), index)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_autograd_gives_the_same_slopes():
    mean, variance = (part[None].requires_grad_(True) for part in problems(4, 1.0))
    index = torch.tensor([2.0])
    found = probability_and_slopes(mean.detach(), variance.detach(), index)
    of_one = torch.autograd.grad(probability_of_largest(mean, variance, index).sum(), (mean, variance))
    of_all = torch.autograd.grad(probabilities_of_largest(mean, variance)[0, 2], (mean, variance))
    for slopes in (of_one, of_all):
        torch.testing.assert_close(slopes, (found.mean, found.variance), rtol=0, atol=1e-10)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-6, 0.3])
def test_expectations_of_robust_max(epsilon):
    mean, variance = problems(4, 2.0)
    likelihood = tg.likelihoods.RobustMax(num_classes=4, epsilon=epsilon)
    for k in range(4):
        p, y = dense(mean, variance, k), torch.tensor([float(k)])
        expected = p * math.log1p(-epsilon) + (1 - p) * math.log(epsilon / 3)
        assert float(likelihood.expected_log_likelihood(mean[None], variance[None], y)) == pytest.approx(expected, abs=1e-8)
        predictive = math.log(p * (1 - epsilon) + (1 - p) * epsilon / 3)
        assert float(likelihood.predictive_log_prob(mean[None], variance[None], y)) == pytest.approx(predictive, abs=1e-6)
    probabilities = likelihood.response_moments(mean[None], variance[None]).mean
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-10)
    logs = torch.stack([likelihood.predictive_log_prob(mean[None], variance[None], torch.tensor([float(k)])) for k in range(4)], -1)
    torch.testing.assert_close(probabilities.log(), logs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-2, 1e-9])
def test_robust_max_is_right_to_1e_6_over_a_grid(epsilon):
    """Of means and of normals narrow and wide together; a class that is next to never the largest has the share of the wrong."""
    random = np.random.default_rng(0)
    likelihood = tg.likelihoods.RobustMax(num_classes=3, epsilon=epsilon)
    mean = torch.tensor(random.choice([-10.0, -3.0, -0.4, 0.0, 1.0, 5.0], (12, 3)))
    variance = torch.tensor(random.choice([1e-4, 0.01, 1.0, 4.0, 25.0, 400.0], (12, 3)))
    p = torch.tensor([[dense(*row, k) for k in range(3)] for row in zip(mean, variance, strict=True)], dtype=torch.float64)
    probabilities = p * (1 - epsilon) + (1 - p) * epsilon / 2
    expectations = p * math.log1p(-epsilon) + (1 - p) * math.log(epsilon / 2)
    for k in range(3):
        label = torch.full((12,), float(k))
        found = likelihood.predictive_log_prob(mean, variance, label)
        torch.testing.assert_close(found, probabilities[:, k].log(), rtol=0, atol=1e-6)
        found = likelihood.expected_log_likelihood(mean, variance, label)
        torch.testing.assert_close(found, expectations[:, k], rtol=0, atol=1e-6)
    found = likelihood.response_moments(mean, variance).mean
    torch.testing.assert_close(found.log(), probabilities.log(), rtol=0, atol=1e-6)


def test_written_out_slopes_of_robust_max_equal_autograds():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(2, 5, 1, generator=generator, dtype=torch.float64).expand(-1, -1, 3) + 0.1
    likelihood, y = tg.likelihoods.RobustMax(num_classes=3), torch.tensor([0.0, 2.0, 1.0, 1.0, 0.0])
    found = likelihood.expected_and_slopes(mean, variance, y)
    torch.testing.assert_close(found, slopes_by_autograd(likelihood, mean, variance, y))
    sampled = tg.likelihoods.RobustMax(num_classes=3, epsilon=0.02, epsilon_prior=UniformPrior(0.0, 1.0))
    (epsilon,) = sampled.expected_and_slopes(mean, variance, y, [sampled.raw_epsilon]).parameters
    step = 1e-6
    ends = []
    for sign in (1, -1):
        sampled.raw_epsilon.data += sign * step
        ends.append(float(sampled.expected_log_likelihood(mean, variance, y).sum().detach()))
        sampled.raw_epsilon.data -= sign * step
    assert float(epsilon) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_epsilon_is_sampled_where_it_has_a_prior():
    x, y = inputs(9), torch.tensor([0.0, 1.0, 2.0] * 3)
    fixed = tg.SparseGP(x, y, kernel(), tg.likelihoods.RobustMax(num_classes=3), inducing_points=inputs(3, seed=7))
    assert "likelihood.epsilon" not in fixed.layout.names
    likelihood = tg.likelihoods.RobustMax(num_classes=3, epsilon_prior=UniformPrior(0.0, 1.0))
    model = tg.SparseGP(x, y, kernel(), likelihood, inducing_points=inputs(3, seed=7))
    posterior = tg.sample(model, tg.NUTS(max_tree_depth=3), num_samples=5, warmup_steps=5, num_chains=2, progress=False)
    epsilon = posterior.samples["likelihood.epsilon"]
    assert epsilon.shape == (2, 5, 1) and bool(((epsilon > 0) & (epsilon < 1)).all())


@pytest.mark.parametrize("options", [{"num_classes": 1}, {"num_classes": 3, "epsilon": 0.0}, {"num_classes": 3, "epsilon": 1.0}])
def test_settings_of_robust_max_are_checked(options):
    with pytest.raises(ValueError, match=r"num_classes is 1|epsilon is"):
        tg.likelihoods.RobustMax(**options)


def test_the_sparse_models_gradient_of_robust_max_equals_differences():
    x, y = inputs(9), torch.tensor([0.0, 1.0, 2.0] * 3)
    likelihood = tg.likelihoods.RobustMax(num_classes=3, epsilon=0.02, epsilon_prior=UniformPrior(0.0, 1.0))
    for made in (likelihood, tg.likelihoods.RobustMax(num_classes=3)):
        model = tg.SparseGP(x, y, kernel(), made, inducing_points=inputs(3, seed=7), data_chunk=4)
        density = tg.joint_log_density(model)
        size = model.layout.size + model.latent_size
        position = 0.5 * torch.randn(1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        value, gradient = density.value_and_grad(position)
        torch.testing.assert_close(density(position), value, rtol=0, atol=1e-6)
        step = 1e-4 * torch.eye(size, dtype=torch.float64)
        differences = (density.value_and_grad(position + step)[0] - density.value_and_grad(position - step)[0]) / 2e-4
        torch.testing.assert_close(gradient[0], differences, rtol=1e-5, atol=1e-5)
