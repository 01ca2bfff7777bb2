"""The mass that a restricted prior keeps: against closed forms, and in the log evidence."""

import math

import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, HorseshoePrior, MultivariateNormalPrior, SmoothedBoxPrior

import torchgpmc as tg
from tests.parameters.test_layout import Triangular, layout_of
from tests.problems import inputs
from torchgpmc.parameters.prior_mass import log_prior_mass

CORRELATED = torch.tensor([[1.0, 0.6], [0.6, 1.0]])


def test_a_normal_priors_orthant_in_closed_form():
    """P(x > 0) of two standard normals with correlation r is 1/4 + asin(r) / 2 pi; of two rows the square."""
    one = math.log(0.25 + math.asin(0.6) / (2 * math.pi))
    for shape, copies in (((2,), 1), ((1, 2), 1), ((2, 2), 2)):
        layout = layout_of(MultivariateNormalPrior(torch.zeros(2), covariance_matrix=CORRELATED), Positive(), shape)
        found = log_prior_mass(layout)
        assert found.value == pytest.approx(copies * one, abs=1e-3)
        assert abs(found.value - copies * one) < 6 * found.error + 1e-6


def test_the_density_integrates_to_its_mass():
    prior = MultivariateNormalPrior(torch.tensor([0.4, 0.7]), covariance_matrix=CORRELATED)
    layout = layout_of(prior, Interval(0.1, 1.4), (2,))
    axis = torch.linspace(-20, 20, 801, dtype=torch.float64)
    integral = float(torch.logsumexp(layout.log_prior(torch.cartesian_prod(axis, axis)), 0)) + 2 * math.log(0.05)
    assert log_prior_mass(layout).value == pytest.approx(integral, abs=1e-3)


@pytest.mark.parametrize("constraint", [Positive(), Interval(0.2, 1.5), GreaterThan(0.5), Interval(-2.0, 1.0)])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_a_horseshoe_has_the_mass_that_its_density_integrates_to(constraint, scale):
    """gpytorch leaves the factor 1 / scale out."""
    layout = layout_of(HorseshoePrior(scale), constraint, (1,))
    axis = torch.linspace(-60, 60, 400_001, dtype=torch.float64).unsqueeze(-1)
    integral = float(torch.logsumexp(layout.log_prior(axis), 0)) + math.log(120 / 400_000)
    assert log_prior_mass(layout).value == pytest.approx(integral, abs=1e-3)


def test_draws_stand_in_where_there_is_no_closed_form():
    layout = layout_of(SmoothedBoxPrior(0.5, 1.5, 0.1), GreaterThan(0.9), (1,))
    axis = torch.linspace(-40, 20, 200_001, dtype=torch.float64).unsqueeze(-1)
    integral = float(torch.logsumexp(layout.log_prior(axis), 0)) + math.log(60 / 200_000)
    found = log_prior_mass(layout)
    assert abs(found.value - integral) < 5 * found.error < 0.02


def test_what_is_normalised_already_has_mass_one():
    assert log_prior_mass(layout_of(GammaPrior(2.0, 1.0), Interval(0.1, 1.4))) == (0.0, 0.0)
    assert math.isnan(log_prior_mass(layout_of(Triangular(), Interval(0.1, 1.4))).value)  # it cannot draw


def regression(prior):
    noise = tg.likelihoods.Gaussian()
    noise.noise = 0.1
    noise.requires_grad_(False)
    x = inputs(8, 2)
    return tg.GPRegression(x, torch.sin(8 * x[:, 0]), RBFKernel(ard_num_dims=2, lengthscale_prior=prior), noise)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("method", [tg.AMIS(), tg.MAMIS()])
def test_the_evidence_is_the_mean_likelihood_over_the_restricted_prior(method):
    model = regression(MultivariateNormalPrior(torch.tensor([0.2, 0.3]), covariance_matrix=CORRELATED))
    theta = model.layout.sample_prior(100_000, torch.Generator().manual_seed(0))
    likelihood = tg.approximations.Conjugate().evidence(model, model.prior(theta)).log_evidence.detach()
    truth = float(torch.logsumexp(likelihood, 0)) - math.log(len(theta))
    info = tg.sample(model, method, num_samples=3000, seed=1, progress=False).info
    assert abs(info["log_evidence"] - truth) < 4 * info["log_evidence_error"] + 0.01 < 0.2


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_mass_that_cannot_be_known_is_nan_and_said():
    model = regression(Triangular())
    model.kernel.register_constraint("raw_lengthscale", Interval(0.1, 1.4))
    model = tg.GPRegression(model.train_x, model.train_y, model.kernel, model.likelihood)
    with pytest.warns(tg.SamplingWarning, match="log evidence is NaN"):
        info = tg.sample(model, tg.AMIS(), num_samples=200, seed=1, progress=False).info
    assert math.isnan(info["log_evidence"]) and math.isnan(info["log_evidence_error"])
