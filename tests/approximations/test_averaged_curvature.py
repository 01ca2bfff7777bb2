"""Curvature averaged over marginals, against derivatives of expectations; and how much less estimates around it vary."""

from dataclasses import dataclass

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import torchgpmc as tg
from tests.problems import gp
from tests.speed import quick
from torchgpmc.approximations.averaged_curvature import with_average_curvature
from torchgpmc.approximations.gaussian_form import problem_of, without_graph
from torchgpmc.approximations.site_algebra import marginal_variances
from torchgpmc.evidence.importance_sampling import ImportanceEstimator


@dataclass(frozen=True)
class Averaged(tg.approximations.Approximation):
    def importance_density(self, model, prior, targets=None, start=None):
        mode = tg.Laplace().importance_density(model, prior, targets, start)
        return with_average_curvature(without_graph(problem_of(model, prior, targets)), mode)


def at_mode(model, thetas=3):
    theta = 0.3 * torch.randn(thetas, model.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        prior = model.prior(theta)
        return theta, without_graph(problem_of(model, prior, None)), tg.Laplace().importance_density(model, prior)


@pytest.mark.parametrize("name", quick(["student_t"], ["student_t", "probit", "poisson"]))
def test_sites_are_slopes_of_the_expected_log_likelihood(name):
    model = gp(name, 12, jitter=1e-4)
    _, problem, mode = at_mode(model)
    found = with_average_curvature(problem, mode)
    mean = mode.mean.clone().requires_grad_()
    variance = marginal_variances(problem.covariance, mode.factor, mode.precision.sqrt()).requires_grad_()
    expected = model.likelihood_function(
        problem.values, lambda part: part.expected_log_likelihood(mean, variance, problem.targets.values)
    )
    slope, in_variance = torch.autograd.grad(expected.sum(), (mean, variance))
    precision = (-2 * in_variance).clamp_min(0)
    torch.testing.assert_close(found.precision, precision, rtol=1e-2, atol=1e-3)
    # The density that these sites make, by inversion.
    covariance = torch.linalg.inv(torch.linalg.inv(problem.covariance) + torch.diag_embed(found.precision))
    shift = slope + found.precision * (mode.mean - problem.mean)
    centred = (covariance @ shift.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.mean - problem.mean, centred, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close((problem.covariance @ found.alpha.unsqueeze(-1)).squeeze(-1), found.mean - problem.mean)


def test_what_is_not_finite_leaves_the_mode():
    _, problem, mode = at_mode(gp("student_t", 6))
    broken = problem._replace(
        values={name: value * torch.tensor([[1.0], [torch.nan], [1.0]]) for name, value in problem.values.items()}
    )
    found = with_average_curvature(broken, mode)
    torch.testing.assert_close(found.precision[1], mode.precision[1])
    assert not torch.allclose(found.precision[0], mode.precision[0])


def test_estimates_vary_less_than_around_the_mode():
    # A standard deviation of 0.06, where it is 0.16 around Laplace's approximation and 0.06 around EP's.
    random = torch.Generator().manual_seed(3)
    x = torch.rand(80, 1, generator=random, dtype=torch.float64)
    normal, *squares = torch.randn(3, 80, generator=random, dtype=torch.float64)
    y = (6 * x[:, 0]).sin() + 0.1 * normal / torch.stack(squares).square().mean(0).sqrt()
    likelihood = tg.likelihoods.StudentT()
    likelihood.noise, likelihood.deg_free = 0.01, 2.2
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.3
    model = tg.GP(x, y, kernel.requires_grad_(False), likelihood.requires_grad_(False))
    theta = torch.zeros(60, 0, dtype=torch.float64)
    estimators = [ImportanceEstimator(model, kind, 64, True, model.as_targets(None)) for kind in (Averaged(), tg.Laplace())]
    found, around_mode = (one.draw(theta, torch.Generator().manual_seed(1)).value for one in estimators)
    assert float(found.std()) < 0.7 * float(around_mode.std())
