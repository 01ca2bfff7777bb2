"""Estimates of p(y | theta) are unbiased: their mean over many repeats against dense quadrature."""

import functools

import pytest
import torch

import torchgpmc as tg
from tests.approximations.reference import evidence_by_quadrature
from tests.calibration import worst_excess
from tests.problems import gp, sparse_gp
from torchgpmc.approximations import Variational
from torchgpmc.evidence.gaussian_draws import GaussianDraws
from torchgpmc.evidence.inducing_estimator import InducingDraws

REPEATS = 25_000


def whitened_quadrature(model, theta):
    """log p(y | theta) for two to six latents: a product rule in the whitened ones, trapezoidal for two, else Gauss-Hermite."""
    import numpy as np

    from torchgpmc.models.latents import likelihood_values

    size = model.latent_size
    if size == 2:  # Gauss-Hermite sums of rates that grow like exp(f) are off by 0.0014 with sixty nodes
        nodes = np.linspace(-9, 9, 201)
        weights = np.exp(-0.5 * nodes**2)
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss({5: 17, 6: 11}[size])
    axes = (torch.as_tensor(nodes), torch.as_tensor(np.log(weights / weights.sum())))
    grid, log_weights = (torch.cartesian_prod(*[axis] * size) for axis in axes)
    log_weights = log_weights.sum(-1)
    prior = model.prior(theta)
    if not model.has_latents_at_data:
        at = model.at(prior)
        f, variance = at.mean + grid @ at.projection[0], at.variance.expand(len(grid), -1)
        logs = model.likelihood.expected_log_likelihood(f, variance, model.train_y)
    else:
        f = model._at_boundary(prior.mean[0] + grid.view(-1, *model.latent_shape) @ prior.factor[0].T)
        logs = model.likelihood_function(
            likelihood_values(prior), lambda likelihood: likelihood.pointwise_log_prob(f, model.train_y)
        )
    return torch.logsumexp(logs.sum(-1) + log_weights, 0)


ESTIMATORS = {
    "laplace, 1": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=1),
    "laplace, 4, antithetic": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=4, antithetic=True),
    "laplace, 4": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=4, antithetic=False),
    "ep, 1": lambda model: tg.evidence.importance(model, tg.EP(), num_importance=1),
    "ep, 2, antithetic": lambda model: tg.evidence.importance(model, tg.EP(), num_importance=2, antithetic=True),
    "ep, 2": lambda model: tg.evidence.importance(model, tg.EP(), num_importance=2, antithetic=False),
    "loose laplace": lambda model: tg.evidence.importance(model, tg.Laplace(max_iterations=1), num_importance=2),
    "annealed": lambda model: tg.evidence.annealed(model, tg.Laplace(), num_importance=1, num_temperatures=4),
    "data in turn, 2": lambda model: tg.evidence.SequentialImportance(num_points=2).estimator(model).draw,
    "rough, white noise out": lambda model: tg.evidence.SmoothProbit(num_importance=1).estimator(model).draw,
    "softmax, 1": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=1),
    "softmax, 4, antithetic": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=4),
    "inducing values, 1": lambda model: tg.evidence.importance(model, num_importance=1),
    "inducing values, poisson, 4, antithetic": lambda model: tg.evidence.importance(model, num_importance=4),
    "inducing values, loose": lambda model: tg.evidence.importance(model, Variational(max_iterations=1), num_importance=2),
    "softmax, annealed": lambda model: tg.evidence.annealed(model, tg.Laplace(), num_importance=1, num_temperatures=4),
}


# What is in the names of estimators of other models and settings than the rest.
PROBLEMS = ("inducing values, poisson", "inducing values", "softmax", "rough")


def problem_of(name):
    return next((part for part in PROBLEMS if part in name), "probit")


@functools.cache
def truth_of(name):
    """The log evidence of a problem, whose grid of a million points takes longer than the estimates."""
    return whitened_quadrature(*problem(name))


def problem(name="probit"):
    if "inducing" in name:
        model = sparse_gp("poisson" if "poisson" in name else "probit", num_inducing=2)
        return model, torch.tensor([[0.7, -0.5, -1.5]], dtype=torch.float64)
    model = gp("softmax", num_data=2) if "softmax" in name else gp("probit", num_data=5)
    theta = torch.tensor([[0.7, -2.0, -1.5] if "rough" in name else [-0.7, -0.5, 1.5]], dtype=torch.float64)
    return model, theta


def ratios(name, seed=3):
    """Estimates over the evidence ``(repeats, 1)``."""
    model, theta = problem(name)
    estimator, generator = ESTIMATORS[name](model), torch.Generator().manual_seed(seed)
    batch = theta.expand(5000, -1)
    values = torch.cat([estimator(batch, generator).value for _ in range(REPEATS // 5000)])
    return (values - truth_of(problem_of(name))).exp().unsqueeze(-1)


def test_the_quadratures_agree():
    model = gp("probit", num_data=3)
    theta = torch.zeros(1, 3, dtype=torch.float64)
    estimate = tg.evidence.importance(model, tg.EP(), num_importance=20_000)(theta, torch.Generator().manual_seed(0))
    truth = evidence_by_quadrature(model, theta)[0]
    assert abs(float(estimate.value - truth)) < 5 * float(estimate.variance.sqrt())


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_are_unbiased(name):
    found = ratios(name)
    assert worst_excess(found, 1.0) < 1
    # The test has power: a bias of a hundredth is twenty errors and more, where the limit is below five.
    assert float(found.std() / len(found) ** 0.5) < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laplace, 4, antithetic", "softmax, 4, antithetic"])
@pytest.mark.parametrize("error", ["no determinant", "twin without its own weight"])
def test_a_wrong_weight_is_caught(error, name, monkeypatch):
    original = GaussianDraws.weigh

    def weigh(self, antithetic):
        log_weight, log_likelihood = original(self, antithetic)
        if error == "no determinant":
            return log_weight + 0.02, log_likelihood
        half = log_weight.shape[-1] // 2
        linear = (self.delta @ self.found.alpha.unsqueeze(-1)).squeeze(-1)
        return torch.cat([log_weight[:, :half], log_weight[:, half:] - 2 * linear], -1), log_likelihood

    monkeypatch.setattr(GaussianDraws, "weigh", weigh)
    assert worst_excess(ratios(name), 1.0) > 1


@pytest.mark.slow
def test_a_twin_of_inducing_values_with_the_weight_of_the_first_is_caught(monkeypatch):
    original = InducingDraws.weigh

    def weigh(self, antithetic):
        log_weight, log_likelihood = original(self, antithetic)
        first, twin = (0.5 * v.square().sum(-1) for v in self.whitened(True).chunk(2, 1))
        return log_weight + torch.cat([torch.zeros_like(first), twin - first], -1), log_likelihood

    monkeypatch.setattr(InducingDraws, "weigh", weigh)
    assert worst_excess(ratios("inducing values, poisson, 4, antithetic"), 1.0) > 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("antithetic", [False, True])
def test_the_stated_variance_is_the_variance(antithetic):
    model, theta = problem()
    estimator = tg.evidence.importance(model, tg.Laplace(), num_importance=32, antithetic=antithetic)
    found = estimator(theta.expand(4000, -1), torch.Generator().manual_seed(1))
    relative = (found.value - truth_of("probit")).exp()
    square = (relative - 1).square()
    assert worst_excess((square - found.variance).unsqueeze(-1)) < 1
    assert worst_excess((square - 0.8 * found.variance).unsqueeze(-1)) > 1  # a fifth less would be seen
