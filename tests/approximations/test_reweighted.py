"""Steps towards modes under noise of mixed variances, by the mean of each datum's 1 / variance."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from scipy.integrate import quad
from scipy.stats import gamma, norm

import torchgpmc as tg
from torchgpmc.approximations import laplace_mode
from torchgpmc.approximations.gaussian_form import problem_of, without_graph


def model_of(num_data, outliers, dtype=torch.float64):
    """A sine with little noise and outliers on one side of it, under Student-t noise."""
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(num_data, 1, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + 0.05 * torch.randn(num_data, generator=generator, dtype=torch.float64)
    y[:outliers] += 3 + 3 * torch.rand(outliers, generator=generator, dtype=torch.float64)
    prior = GammaPrior(2.0, 1.0)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=prior), outputscale_prior=prior)
    likelihood = tg.likelihoods.StudentT(noise_prior=prior, deg_free_prior=GammaPrior(2.0, 0.1))
    return tg.GP(x, y, kernel, likelihood, dtype=dtype)


def theta_of(model, noise=0.003):
    """Outputscale 1, lengthscale 1 and 2, degrees of freedom 3."""
    values = {"kernel.outputscale": 0.0, "kernel.base_kernel.lengthscale": 0.0, "likelihood.noise": math.log(noise)}
    row = torch.tensor([values.get(name, math.log(3.0)) for name in model.layout.names], dtype=model.train_x.dtype)
    other = row.clone()
    other[model.layout.names.index("kernel.base_kernel.lengthscale")] = math.log(2.0)
    return torch.stack([row, other])


def problem_at(model, theta):
    return without_graph(problem_of(model, model.prior(theta), None))


def test_the_mean_precision_is_that_of_the_mixture():
    """E[l | t] / noise for t ~ N(0, noise / l), l ~ Gamma(nu / 2, nu / 2), by quadrature; at t = 0 from the curvature."""
    model = model_of(8, 2)
    problem = problem_at(model, theta_of(model)[:1])
    noise, degrees = (float(problem.values[f"raw_{name}"]) for name in ("noise", "deg_free"))
    centred = (model.train_y - torch.tensor([0.0, 0.0, 0.01, -0.02, 0.1, 0.3, -1.0, 4.0])).unsqueeze(0)
    alpha = torch.zeros_like(centred)
    found = laplace_mode._mean_precision(problem, laplace_mode._evaluate(problem, alpha, centred)).squeeze(0)
    for residual, mean_precision in zip((model.train_y - centred[0]).tolist(), found.tolist(), strict=True):

        def density(log_scale, power, residual=residual):
            scale = math.exp(log_scale)  # and its slope, for the change of variable
            normal = norm.pdf(residual, scale=math.sqrt(noise / scale))
            return normal * gamma.pdf(scale, degrees / 2, scale=2 / degrees) * scale ** (1 + power)

        whole, first = (quad(density, -25, 6, args=(power,), limit=400, points=[-10, -5, 0])[0] for power in (0, 1))
        assert mean_precision == pytest.approx(first / whole / noise, rel=1e-5)


@pytest.mark.parametrize("num_data", [60, 150])
def test_no_step_goes_downhill(num_data):
    """Each is EM's for the noise's variances; of many data with factors in single precision."""
    model = model_of(num_data, num_data // 6)
    problem = problem_at(model, theta_of(model))
    point = laplace_mode._begin(problem, None)
    heights = [point.objective]
    for steps in range(1, 7):
        reached, _ = laplace_mode._reweighted(problem, point, steps)
        heights.append(reached.objective)
    gains = torch.stack(heights).diff(dim=0)
    assert (gains > -1e-3).all()
    assert (gains[0] > 10).all()


@pytest.mark.parametrize("num_data", [60, 150])
def test_the_mode_is_one_and_takes_few_factorisations(num_data):
    model = model_of(num_data, num_data // 6)
    prior = model.prior(theta_of(model))
    found = tg.Laplace(tolerance=1e-16).importance_density(model, prior)
    problem = without_graph(problem_of(model, prior, None))
    assert found.converged.all()
    slopes = problem.derivatives(found.mean - prior.mean)
    torch.testing.assert_close(slopes.first.detach(), found.alpha, atol=1e-4, rtol=1e-6)
    rough = tg.Laplace().importance_density(model, prior)
    assert (rough.num_iterations <= 10).all()
    assert (rough.log_evidence - found.log_evidence).abs().max() < 0.5


def test_a_start_leads_to_the_same_mode():
    model = model_of(120, 15)
    theta = theta_of(model)
    found = tg.Laplace(tolerance=1e-12).importance_density(model, model.prior(theta))
    near = model.prior(theta + 0.05)
    begun = tg.Laplace(tolerance=1e-12).importance_density(model, near, start=found.start)
    from_nothing = tg.Laplace(tolerance=1e-12).importance_density(model, near)
    torch.testing.assert_close(begun.mean, from_nothing.mean, atol=1e-5, rtol=0.0)


def test_no_lesser_mode_is_found_than_by_plain_reweighting():
    """Of 150 data, 50 of them outliers, Newton's steps from the prior mean end 386 nats lower at one theta of two."""
    model = model_of(150, 50)
    prior = model.prior(theta_of(model, noise=0.0005))
    found = tg.Laplace().importance_density(model, prior)
    problem = without_graph(problem_of(model, prior, None))
    noise, degrees = (problem.values[f"raw_{name}"] for name in ("noise", "deg_free"))
    alpha = centred = torch.zeros_like(prior.mean)
    for _ in range(200):
        residual = model.train_y - prior.mean - centred
        variance = (degrees * noise + residual.square()) / (degrees + 1)
        alpha = torch.linalg.solve(prior.covariance + torch.diag_embed(variance), model.train_y - prior.mean)
        centred = (prior.covariance @ alpha.unsqueeze(-1)).squeeze(-1)
    heights = [laplace_mode._evaluate(problem, *at).objective for at in ((alpha, centred), (found.alpha, found.mean - prior.mean))]
    assert (heights[1] > heights[0] - 1).all()
