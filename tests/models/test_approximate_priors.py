"""FITC and the projected process: the prior is the formula, Z = X is the full GP, and under Gaussian noise all is known."""

import pytest
import torch
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fitc, fixed_kernel, gp, inputs, kernel, targets
from torchgpmc.approximations import Conjugate, marginal_of
from torchgpmc.approximations.functions import predict
from torchgpmc.runs.chain_targets import estimator_for, suited_approximation
from torchgpmc.runs.run import Settings
from torchgpmc.runs.sites import posterior_sites

F64 = torch.float64
PRIORS = {"FITC": tg.FITC, "ProjectedProcess": tg.ProjectedProcess}
X, Z, TEST = inputs(7), inputs(3, seed=7), inputs(4, seed=3)
NOISE = 0.3
SETTINGS = Settings(5, 5, 2, None)


def noisy():
    likelihood = tg.likelihoods.Gaussian().double()
    likelihood.noise = NOISE
    return likelihood.requires_grad_(False)


def regression(kind, x=X, k=None, **options):
    return kind(x, targets("gaussian", len(x)), kernel() if k is None else k, noisy(), **options)


def formulas(model, theta):
    """Q among the data, of the data with the tests, K's diagonals, all without jitter but that of K(Z, Z), for one theta."""
    values = model.prior(theta).values["kernel"]
    both = torch.cat([X, TEST])
    inner = model.covariance.bind(Z, Z)(values)[0] + model.jitter * torch.eye(len(Z), dtype=F64)
    outer = model.covariance.bind(Z, both)(values)[0]
    low_rank = outer.T @ torch.linalg.solve(inner, outer)
    return low_rank[:7, :7], low_rank[:7, 7:], model.covariance.bind(both, both)(values)[0].diagonal(), outer


@pytest.mark.parametrize("name", PRIORS)
def test_the_covariance_of_f_is_the_formula(name):
    model = regression(PRIORS[name], inducing_points=Z)
    theta = torch.tensor([[0.1, -0.3, 0.2], [-1.0, 0.4, 0.7]], dtype=F64)
    at = model.at(model.prior(theta))
    found = at.projection.mT @ at.projection + torch.diag_embed(at.variance)
    for row in range(2):
        low_rank, _, diagonal, _ = formulas(model, theta[row : row + 1])
        expected = low_rank
        if name == "FITC":
            expected = low_rank + torch.diag(diagonal[:7] - low_rank.diagonal() + model.jitter)
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PRIORS)
def test_new_values_are_together_as_each_prior_says(name):
    """Under FITC independent given u; else as the full GP has them."""
    model = regression(PRIORS[name], inducing_points=Z)
    theta = torch.tensor([[0.1, -0.3, 0.2]], dtype=F64)
    prior = model.prior(theta)
    expected = model.covariance.bind(TEST, TEST)(prior.values["kernel"])[0]
    if name == "FITC":
        inner = model.covariance.bind(Z, Z)(prior.values["kernel"])[0] + model.jitter * torch.eye(3, dtype=F64)
        outer = model.covariance.bind(Z, TEST)(prior.values["kernel"])[0]
        expected = torch.where(torch.eye(4, dtype=torch.bool), expected, outer.T @ torch.linalg.solve(inner, outer))
    torch.testing.assert_close(model.prior_covariance(prior, TEST)[0], expected)
    jointly = model.predict_jointly(prior, torch.zeros(1, model.latent_size, dtype=F64), TEST)
    variance = model.at(prior, TEST).variance
    torch.testing.assert_close(jointly.covariance.diagonal(dim1=-2, dim2=-1), variance + model.jitter)


def test_steps_in_f_are_steps_of_the_projected_process():
    """Unlike the sparse model it takes no expectations that would smooth them."""
    steps = tg.likelihoods.RobustMax(num_classes=3)
    y = targets("softmax", 7)
    made = {kind: kind(X, y, fixed_kernel(), steps, inducing_points=Z) for kind in (tg.ProjectedProcess, tg.FITC, tg.SparseGP)}
    assert [model.is_smooth for model in made.values()] == [False, False, True]


def closed_form(name, model):
    """Predictive mean and variance of f at the tests: f = A u + e, and under both priors f* given u is the kernel's."""
    low_rank, across, diagonal, _ = formulas(model, torch.zeros(1, 0, dtype=F64))
    prior = low_rank
    if name == "FITC":
        prior = low_rank + torch.diag(diagonal[:7] - low_rank.diagonal() + model.jitter)
    gain = torch.linalg.solve(prior + NOISE * torch.eye(7, dtype=F64), across).T
    return gain @ model.train_y, diagonal[7:] - (gain * across.T).sum(-1)


def test_fitc_predicts_as_its_closed_form_under_gaussian_noise():
    model = regression(tg.FITC, k=fixed_kernel(), inducing_points=Z)
    mean, variance = closed_form("FITC", model)
    found = predict(model, torch.zeros(1, 0, dtype=F64), Conjugate(), TEST)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.latent_variance, variance)


def test_the_projected_process_predicts_as_its_closed_form_under_gaussian_noise():
    """By the normal posterior of v: precision I + A A' / noise, with f = A' v at the data."""
    model = regression(tg.ProjectedProcess, k=fixed_kernel(), inducing_points=Z)
    prior = model.prior(torch.zeros(1, 0, dtype=F64))
    map_ = model.at(prior).projection[0]
    covariance = torch.linalg.inv(torch.eye(3, dtype=F64) + map_ @ map_.T / NOISE)
    at = model.at(prior, TEST)
    mean, variance = closed_form("ProjectedProcess", model)
    torch.testing.assert_close(at.projection[0].T @ covariance @ map_ @ model.train_y / NOISE, mean)
    spread = (at.projection[0] * (covariance @ at.projection[0])).sum(0)
    torch.testing.assert_close(at.variance[0] + spread, variance)


@pytest.mark.parametrize("likelihood", ["probit", "poisson", "softmax"])
@pytest.mark.parametrize("name", PRIORS)
def test_with_inducing_points_at_the_data_both_are_the_full_gp(name, likelihood):
    made = [
        kind(X, targets(likelihood, 7), kernel(), LIKELIHOODS[likelihood](), jitter=1e-9, **points)
        for kind, points in ((tg.GP, {}), (PRIORS[name], {"inducing_points": X}))
    ]
    position = 0.5 * torch.randn(3, 3 + made[0].latent_size, generator=torch.Generator().manual_seed(0), dtype=F64)
    expected, found = (tg.joint_log_density(model).value_and_grad(position) for model in made)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRIORS)
def test_gradients_are_those_of_the_density(name):
    density = tg.joint_log_density(PRIORS[name](X, targets("poisson", 7), kernel(), LIKELIHOODS["poisson"](), inducing_points=Z))
    size = density.model.layout.size + density.model.latent_size
    position = 0.5 * torch.randn(2, size, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert torch.autograd.gradcheck(density, (position.requires_grad_(),))


@pytest.mark.slow
def test_the_projected_process_serves_whitening_and_refuses_what_needs_f_at_the_data():
    model = tg.ProjectedProcess(X, targets("probit", 7), kernel(), LIKELIHOODS["probit"](), inducing_points=Z)
    assert float(tg.NUTS(whitening=tg.Laplace()).prepare(model, SETTINGS).target.dimension) == 3 + 3
    assert bool((posterior_sites(model, tg.Laplace()).precision > 0).all())
    with pytest.raises(ValueError, match="f at the data, which is not a latent of ProjectedProcess"):
        tg.NUTS(marginal=tg.Laplace()).prepare(model, SETTINGS)


@pytest.mark.parametrize(
    ("points", "match"),
    [(X[:0], "at least one row"), (torch.rand(3, 4), "4 columns"), (torch.full((2, 2), torch.nan), "NaN or infinite")],
)
@pytest.mark.parametrize("name", PRIORS)
def test_inducing_points_are_checked(name, points, match):
    with pytest.raises(ValueError, match=match):
        regression(PRIORS[name], inducing_points=points)


def test_evidence_by_rank_is_that_of_the_whole_covariance():
    model = fitc("gaussian", num_data=9, num_inducing=3, mean=ConstantMean(constant_prior=NormalPrior(0.0, 1.0)))
    theta = model.layout.starting_points(5, torch.Generator().manual_seed(0))
    value, gradient = marginal_of(model, suited_approximation(model, tg.EP())).value_and_grad(theta)

    def whole(theta):
        hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
        prior = model.prior_at(hyperparameters)
        noise = model.layout.raw_values(theta).by_module["likelihood"]["noise_covar.raw_noise"]
        total = prior.covariance + noise.unsqueeze(-1) * torch.eye(9, dtype=F64)
        return log_prior + torch.distributions.MultivariateNormal(prior.mean, total).log_prob(model.train_y)

    torch.testing.assert_close(value, whole(theta), rtol=1e-8, atol=1e-8)
    for row, slope in zip(theta, gradient, strict=True):
        steps = 1e-5 * torch.eye(len(row), dtype=F64)
        expected = (whole(row + steps) - whole(row - steps)) / 2e-5
        torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [fitc, gp])
def test_estimates_under_gaussian_noise_are_exact_whatever_is_asked_for(make):
    """One importance sample says what the marginal does, since f is drawn from its posterior."""
    model = make("gaussian")
    theta = model.layout.starting_points(3, torch.Generator().manual_seed(0))
    approximation = suited_approximation(model, tg.EP())
    found = estimator_for(model, approximation, 1, None, None).draw(theta, torch.Generator().manual_seed(1))
    expected = marginal_of(model, approximation)(theta) - model.layout.log_prior(theta)
    torch.testing.assert_close(found.value, expected.detach(), rtol=1e-8, atol=1e-8)
