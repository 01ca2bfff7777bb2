"""Laplace's approximation of several latents a datum against quadrature, a closed form, scipy's mode and finite differences."""

import gpytorch
import pytest
import scipy.optimize
import torch
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.approximations.reference import evidence_by_quadrature
from tests.problems import gp, inputs, kernel
from tests.speed import quick
from torchgpmc.approximations import several_latents
from torchgpmc.likelihoods import Factorised
from torchgpmc.models.latents import likelihood_values
from torchgpmc.numerics.random import normal_like


class Sum(Factorised, gpytorch.likelihoods.Likelihood):
    """y = f_1 + 2 f_2 + noise: conjugate, so that Laplace's approximation is exact."""

    num_latents = 2
    deviation = 0.3

    def forward(self, function_samples):
        mean = function_samples[..., 0] + 2 * function_samples[..., 1]
        return torch.distributions.Normal(mean, self.deviation)

    def sample(self, f, generator):
        mean = self.forward(f).mean
        return mean + self.deviation * normal_like(mean, generator)


class NoiseOfItsOwn(Factorised, gpytorch.likelihoods.Likelihood):
    """y = f_1 + exp(f_2) noise: the Hessian of its logarithm is never negative definite."""

    num_latents = 2

    def forward(self, function_samples):
        return torch.distributions.Normal(function_samples[..., 0], function_samples[..., 1].exp())


LIKELIHOODS = {
    "softmax": lambda: tg.likelihoods.Softmax(num_classes=3, mixing_weights=False),
    "mixed softmax": lambda: tg.likelihoods.Softmax(num_classes=3, num_features=2, mixing_weights_prior=NormalPrior(0.0, 1.0)),
    "noise of its own": NoiseOfItsOwn,
}


def model_of(name, num_data):
    x = inputs(num_data)
    noise = torch.randn(num_data, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = (noise.abs() * 1.5).floor().clamp_max(2) if "softmax" in name else noise
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.3, 1.0))
    likelihood = Sum() if name == "sum" else LIKELIHOODS[name]()
    return tg.GP(x, y, kernel(), likelihood, mean=mean, jitter=1e-4)


def thetas(model, count=4):
    return 0.6 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("name", "num_data"), quick([("softmax", 1)], [("softmax", 1), ("mixed softmax", 2)]))
def test_close_to_dense_quadrature(name, num_data):
    model = model_of(name, num_data)
    theta = thetas(model, 2)
    found = tg.approximations.laplace(model, theta)
    log_evidence, mean, covariance = evidence_by_quadrature(model, theta, num_points=35 if num_data == 2 else 61)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.log_evidence.detach(), log_evidence, atol=0.1, rtol=0)
    # A mode stands for a mean, as with one latent.
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert bool(((found.mean - mean).abs() / scale < 0.5).all())


def test_exact_where_the_likelihood_is_gaussian():
    model = model_of("sum", 6)
    theta = thetas(model)
    found = tg.approximations.laplace(model, theta)
    prior = model.prior(theta)
    noise = Sum.deviation**2 * torch.eye(6, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(3 * prior.mean, 5 * prior.covariance + noise, validate_args=False)
    torch.testing.assert_close(found.log_evidence, normal.log_prob(model.train_y), rtol=1e-9, atol=1e-9)
    residual = torch.linalg.solve(5 * prior.covariance + noise, model.train_y - 3 * prior.mean).unsqueeze(-1)
    expected = torch.cat([prior.mean + factor * (prior.covariance @ residual).squeeze(-1) for factor in (1, 2)], -1)
    torch.testing.assert_close(found.mean, expected, rtol=1e-8, atol=1e-8)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = torch.kron(torch.outer(weights, weights) / Sum.deviation**2, torch.eye(6, dtype=torch.float64))
    twice = torch.stack([torch.block_diag(part, part) for part in prior.covariance])
    covariance = torch.linalg.inv(torch.linalg.inv(twice) + expected)
    root = tg.approximations.covariance_factor(prior, found)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-6, atol=1e-7)


def mode_by_scipy(model, theta):
    """Mode of v, and log evidence with the Hessian that autograd finds there."""
    with torch.no_grad():
        prior = model.prior(theta[None])

    def log_density(v):
        f = model._at_boundary(prior.mean + (v.view(1, *model.latent_shape) @ prior.factor.mT))
        value = model.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.log_prob(f, model.train_y))
        return value[0] - 0.5 * v.square().sum()

    def objective(v):
        v = torch.tensor(v, requires_grad=True)
        value = -log_density(v)
        return value.item(), torch.autograd.grad(value, v)[0].numpy()

    best = scipy.optimize.minimize(
        objective, torch.zeros(model.latent_size).double().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    v = torch.tensor(best.x)
    hessian = -torch.autograd.functional.hessian(log_density, v)
    mean = (prior.mean + v.view(model.latent_shape) @ prior.factor[0].T).flatten()
    return mean, log_density(v).detach() - 0.5 * torch.linalg.slogdet(hessian).logabsdet


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_equals_scipys_mode(name):
    model = model_of(name, 7)
    theta = thetas(model)
    found = tg.approximations.laplace(model, theta)
    assert bool(found.converged.all())
    for row in range(len(theta)):
        mean, log_evidence = mode_by_scipy(model, theta[row])
        torch.testing.assert_close(found.mean[row], mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.log_evidence[row].detach(), log_evidence, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("num_data", quick([1], [1, 6]))
@pytest.mark.parametrize("name", ["sum", *LIKELIHOODS])
def test_gradients_equal_finite_differences(name, num_data):
    model = model_of(name, num_data)
    theta = thetas(model).requires_grad_(True)
    (gradient,) = torch.autograd.grad(tg.approximations.laplace(model, theta, tolerance=1e-20).log_evidence.sum(), theta)
    step = 1e-5
    for column, shift in enumerate(step * torch.eye(model.layout.size, dtype=torch.float64)):
        with torch.no_grad():
            right, left = (tg.approximations.laplace(model, theta + sign * shift, tolerance=1e-20).log_evidence for sign in (1, -1))
        torch.testing.assert_close(gradient[:, column], (right - left) / (2 * step), rtol=2e-5, atol=2e-6)


def test_a_theta_does_not_see_its_neighbours():
    model = gp("softmax", 9)
    theta = thetas(model, 6) * torch.linspace(0.1, 6.0, 6, dtype=torch.float64)[:, None]
    together = tg.approximations.laplace(model, theta)
    assert len(together.num_iterations.unique()) > 1, "all took the same number of steps, so this shows nothing"
    for row in range(6):
        alone = tg.approximations.laplace(model, theta[row : row + 1])
        assert int(alone.num_iterations[0]) == int(together.num_iterations[row])
        torch.testing.assert_close(alone.mean[0], together.mean[row], rtol=1e-11, atol=1e-11)


def test_an_indefinite_curvature_on_the_way_still_leads_to_the_mode(monkeypatch):
    """Where the noise is far too small H is indefinite at the start, and W loses its negative eigenvalues there."""
    seen, original = [], several_latents._root_of_h

    def watched(*arguments):
        found = original(*arguments)
        seen.append(bool(found[1].all()))
        return found

    monkeypatch.setattr(several_latents, "_root_of_h", watched)
    x = inputs(8)
    y = torch.tensor([30.0, -30.0] * 4, dtype=torch.float64)
    model = tg.GP(x, y, kernel(), NoiseOfItsOwn())
    theta = thetas(model)
    found = tg.approximations.laplace(model, theta)
    assert bool(found.converged.all()) and not all(seen)
    for row in range(len(theta)):
        torch.testing.assert_close(found.log_evidence[row].detach(), mode_by_scipy(model, theta[row])[1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_loss_trains_a_softmax_model():
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).unsqueeze(-1)
    y = (x[:, 0] > -0.7).double() + (x[:, 0] > 0.6).double()
    own = gpytorch.kernels.RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
    own.lengthscale = 0.1
    model = tg.GP(x, y, own, LIKELIHOODS["softmax"]())
    optimiser = torch.optim.Adam(model.kernel.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = tg.approximations.negative_log_evidence(model)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 3
    fitted = tg.fit(model, num_starts=1, maximum_a_posteriori=True)
    assert float(tg.approximations.negative_log_evidence(fitted).detach()) < losses[0]


def test_what_cannot_be_had_is_said():
    model = gp("softmax")
    theta = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"one latent function.*NUTS"):
        tg.approximations.predict(model, theta, tg.Laplace(), inputs(3))
    with pytest.raises(ValueError, match=r"EP.*one latent function.*Laplace"):
        tg.sample(model, tg.PseudoMarginal(approximation=tg.EP()), num_samples=2, warmup_steps=2, num_chains=2)
    with pytest.raises(ValueError, match="one latent function"):
        tg.sample(model, tg.NUTS(whitening=tg.Laplace()), num_samples=2, warmup_steps=2, num_chains=2)
