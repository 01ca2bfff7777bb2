"""Gaussian noise makes the posterior known: of f by conjugacy at fixed hyperparameters, of theta by quadrature of the evidence."""

import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.calibration import without_jacobian, worst_excess
from tests.problems import fixed_kernel, inputs
from torchgpmc.likelihoods.likelihood import Derivatives
from torchgpmc.methods import adaptive_metropolis
from torchgpmc.types import Sampler

NOISE = 0.3
METHODS = {
    "NUTS": (tg.NUTS(), 75, 75),
    "NUTS, white under sites": (tg.NUTS(whitening=tg.Laplace()), 75, 75),
    "HMC": (tg.HMC(), 75, 75),
    "AdaptiveMH": (tg.AdaptiveMH(thinning=20), 75, 800),
    "Slice": (tg.Slice(), 50, 30),
    "EllipticalSlice": (tg.EllipticalSlice(thinning=5), 75, 100),
    "AuxiliaryGradient": (tg.AuxiliaryGradient(thinning=3), 75, 100),
    "PCN": (tg.PCN(thinning=5), 75, 150),
    "GibbsLike": (tg.GibbsLike(), 75, 100),
    "LocalRegions": (tg.LocalRegions(), 75, 100),
    "ControlVariables": (tg.ControlVariables(), 75, 100),
}
OF_THETA = {
    "Gibbs, interwoven": (tg.Gibbs(hyper_steps=3, latent_steps=3), 75, 100),
    "Gibbs, surrogate": (tg.Gibbs(parameterization=tg.Surrogate(), hyper_steps=3, latent_steps=3), 75, 100),
}


def noisy_likelihood():
    likelihood = tg.likelihoods.Gaussian().double()
    likelihood.noise = NOISE
    return likelihood.requires_grad_(False)


def data(count):
    x = inputs(count)
    return x, torch.sin(6 * x[:, 0]) + 0.4 * torch.randn(count, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def run(model, name, num_chains=256):
    method, num_samples, warmup_steps = {**METHODS, **OF_THETA}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tg.sample(
            model, method, num_samples=num_samples, warmup_steps=warmup_steps, num_chains=num_chains, seed=3, progress=False
        )


def conjugate(model):
    """Mean and covariance of f at the inputs given y."""
    prior = model.prior(torch.zeros(1, 0, dtype=torch.float64))
    covariance = (prior.factor @ prior.factor.mT)[0]
    gain = torch.linalg.solve(covariance + NOISE * torch.eye(len(covariance), dtype=torch.float64), covariance).T
    return gain @ model.train_y, covariance - gain @ covariance


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", METHODS)
def test_means_variances_and_covariances_of_f(name):
    x, y = data(5)
    model = tg.GP(x, y, fixed_kernel(), noisy_likelihood())
    mean, covariance = conjugate(model)
    f = run(model, name).latents
    centred = f - mean
    products = torch.einsum("csi,csj->cij", centred, centred) / f.shape[1]
    row, column = torch.triu_indices(5, 5)
    replicates = torch.cat([f.mean(1), products[:, row, column]], -1)  # one independent replicate a chain
    assert worst_excess(replicates, torch.cat([mean, covariance[row, column]])) < 1


def predictions_excess(make):
    """Alarm level, predictions, and the latent means that the draws predict at test inputs."""
    x, y = data(5)
    test_x = inputs(7, seed=3)
    options = {"jitter": 1e-10} if make == "GP" else {"jitter": 1e-10, "inducing_points": x}
    model = getattr(tg, make)(x, y, fixed_kernel(), noisy_likelihood(), **options)
    posterior = run(model, "NUTS")
    theta = torch.zeros(1, 0, dtype=torch.float64)
    cross = model.covariance.bind(model.train_x, test_x)(model.prior(theta).values["kernel"])[0]
    within = model.covariance.bind(x, x)(model.prior(theta).values["kernel"])[0]
    gain = torch.linalg.solve(within + NOISE * torch.eye(5, dtype=torch.float64), cross).T
    expected_mean = gain @ y
    expected_variance = model.covariance.diagonal(model.prior(theta).values["kernel"], test_x)[0] - (gain * cross.T).sum(-1)
    v = posterior.whitened
    flat = v.flatten(0, 1)
    marginals = model.marginals(model.at(model.prior(theta), test_x), flat)
    means = marginals.mean[:, 0].reshape(*v.shape[:2], -1)
    replicates = torch.cat([means.mean(1), (marginals.variance[0, 0] + (means - expected_mean).square()).mean(1)], -1)
    return worst_excess(replicates, torch.cat([expected_mean, expected_variance])), posterior.predict(test_x), means


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("make", ["GP", "SparseGP"])
def test_predictions_equal_the_conjugate_ones(make):
    excess, prediction, means = predictions_excess(make)
    assert excess < 1
    torch.testing.assert_close(prediction.mean, means.mean((0, 1)))
    torch.testing.assert_close(prediction.variance, prediction.latent_variance + NOISE)


def one_hyperparameter():
    """A model with its output scale free, a grid over theta, and the posterior weights on it by the closed-form evidence."""
    x, y = data(8)
    kernel = ScaleKernel(RBFKernel(), outputscale_prior=GammaPrior(2.0, 1.5))
    kernel.base_kernel.lengthscale = 0.4
    kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    model = tg.GP(x, y, kernel, noisy_likelihood())
    grid = torch.linspace(-8, 5, 4001, dtype=torch.float64).unsqueeze(-1)
    prior = model.prior(grid)
    total = prior.factor @ prior.factor.mT + NOISE * torch.eye(8, dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=torch.float64), total).log_prob(y)
    return model, grid[:, 0], torch.softmax(evidence + model.layout.log_prior(grid), 0)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(
    "name", ["NUTS", "HMC", "AdaptiveMH", "Slice", "Gibbs, interwoven", pytest.param("Gibbs, surrogate", marks=pytest.mark.long)]
)
def test_hyperparameters_follow_the_evidence(name):
    model, grid, weights = one_hyperparameter()
    expected = torch.stack([(weights * grid.exp()).sum(), (weights * grid).sum(), (weights * grid.square()).sum()])
    theta = run(model, name).theta[..., 0]
    replicates = torch.stack([theta.exp().mean(1), theta.mean(1), theta.square().mean(1)], -1)
    assert worst_excess(replicates, expected) < 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", ["NUTS", "NUTS, white under sites"])
def test_sparse_samplers_agree_with_the_optimal_gaussian(name):
    assert sparse_excess(name) < 1


def sparse_excess(name="NUTS"):
    """With Gaussian noise the optimal q(u) is Titsias's (2009): mean and covariance in closed form."""
    x, y = data(12)
    z = inputs(4, seed=7)
    model = tg.SparseGP(x, y, fixed_kernel(), noisy_likelihood(), inducing_points=z)
    prior = model.prior(torch.zeros(1, 0, dtype=torch.float64))
    projection = model.at(prior).projection[0]  # A: mean of f is A' v, so q(v) has precision I + A A' / noise
    covariance = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + projection @ projection.T / NOISE)
    mean = covariance @ projection @ y / NOISE
    v = run(model, name).whitened
    centred = v - mean
    products = torch.einsum("csi,csj->cij", centred, centred) / v.shape[1]
    row, column = torch.triu_indices(4, 4)
    replicates = torch.cat([v.mean(1), products[:, row, column]], -1)
    return worst_excess(replicates, torch.cat([mean, covariance[row, column]]))


# --- the same tests on planted errors, which they must catch ----------------------------------------------------------


def f_excess(name):
    x, y = data(5)
    model = tg.GP(x, y, fixed_kernel(), noisy_likelihood())
    mean, covariance = conjugate(model)
    f = run(model, name).latents
    spread = (f - mean).square().mean(1)
    return worst_excess(torch.cat([f.mean(1), spread], -1), torch.cat([mean, covariance.diagonal()]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "GibbsLike"])
def test_a_halved_likelihood_is_caught(name, monkeypatch):
    original = tg.GP.log_likelihood
    monkeypatch.setattr(tg.GP, "log_likelihood", lambda self, *args: 0.5 * original(self, *args))
    assert f_excess(name) > 1


@pytest.mark.slow
def test_a_halved_site_is_caught(monkeypatch):
    """Gibbs sampling of normal sites does not ask the model for its likelihood."""
    original = tg.likelihoods.Gaussian.derivatives
    halved = lambda *args: Derivatives(*(0.5 * part for part in original(*args)))  # noqa: E731
    monkeypatch.setattr(tg.likelihoods.Gaussian, "derivatives", halved)
    assert f_excess("GibbsLike") > 1


@pytest.mark.slow
@pytest.mark.parametrize("make", ["GP", "SparseGP"])
def test_a_halved_likelihood_is_caught_in_predictions_and_inducing_values(make, monkeypatch):
    kind = getattr(tg, make)
    original = kind.log_likelihood
    monkeypatch.setattr(kind, "log_likelihood", lambda self, *args: 0.5 * original(self, *args))
    assert predictions_excess(make)[0] > 1
    if make == "SparseGP":
        assert sparse_excess() > 1


@pytest.mark.slow
def test_a_log_density_left_stale_by_a_move_is_caught(monkeypatch):
    """For Metropolis; Geweke's test plants it in the others, where a stale density alone moves f too little to be seen here."""
    original = adaptive_metropolis.metropolis

    def stale(*args, **options):
        honest = original(*args, **options)

        def step(state, generator):
            new, info = honest.step(state, generator)
            return new._replace(log_density=state.log_density), info

        return Sampler(honest.init, step)

    monkeypatch.setattr(adaptive_metropolis, "metropolis", stale)
    assert f_excess("AdaptiveMH") > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NUTS", "HMC", "AdaptiveMH", "Slice"])
def test_a_missing_jacobian_is_caught(name, monkeypatch):
    """Against the prior density of theta with its Jacobian, which the planted sampler leaves out."""
    model, grid, weights = one_hyperparameter()
    without_jacobian(monkeypatch)
    theta = run(model, name).theta[..., 0]
    assert worst_excess(theta.mean(1, keepdim=True), (weights * grid).sum().view(1)) > 1
