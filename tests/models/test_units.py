"""Answers do not depend on the unit of what was measured: of real targets, nor of inputs."""

import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior

import torchgpmc as tg
from tests.problems import generator, inputs, targets
from torchgpmc.models.joint_density import JointLogDensity

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # few draws
X, Y = inputs(12), targets("gaussian", 12) + 3 * inputs(12)[:, 0].double()
# Shifts of theta that a unit of y makes: of variances twice its log, of deviations once.
UNITS = [1e4, 1e-4, 1e-9]


def log_normal(location, scale):
    """gpytorch's own rounds numbers to single precision, which a unit would change."""
    return gpytorch.priors.LogNormalPrior(*torch.tensor([location, scale], dtype=torch.float64))


def likelihood_of(name, unit):
    noise = {"noise_prior": log_normal(-2 + 2 * math.log(unit), 1.0), "noise_constraint": Positive()}
    if name == "gaussian":
        return gpytorch.likelihoods.GaussianLikelihood(**noise)
    return tg.likelihoods.StudentT(deg_free_prior=log_normal(1.0, 0.5), **noise)


def model_of(kind, unit=1.0, name="gaussian", x_unit=1.0, base=RBFKernel, **options):
    kernel = ScaleKernel(
        base(lengthscale_prior=log_normal(math.log(x_unit), 1.0)), outputscale_prior=log_normal(2 * math.log(unit), 2.0)
    )
    points = {"inducing_points": x_unit * X[::3]} if kind in (tg.SparseGP, tg.FITC, tg.ProjectedProcess) else {}
    if kind is tg.ConditionedGP:
        points = {"known_inputs": x_unit * X[:2] + 0.01 * x_unit, "known_values": unit * torch.tensor([1.0, -1.0]).double()}
    return kind(x_unit * X, unit * Y, kernel, likelihood_of(name, unit), **points, **options)


def shifted(model, theta, unit):
    """Theta of the same model with y in another unit."""
    variances = torch.tensor([name.endswith(("outputscale", "noise")) for name in model.layout.names], dtype=torch.float64)
    return theta + 2 * math.log(unit) * variances


KINDS = {
    "full": (tg.GP, "gaussian"),
    "full, Student t": (tg.GP, "student_t"),
    "integrated out": (tg.GPRegression, "gaussian"),
    "sparse": (tg.SparseGP, "gaussian"),
    "sparse, Student t": (tg.SparseGP, "student_t"),
    "FITC": (tg.FITC, "gaussian"),
    "projected": (tg.ProjectedProcess, "gaussian"),
    "conditioned": (tg.ConditionedGP, "gaussian"),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", KINDS)
def test_the_density_of_theta_and_v_is_that_of_any_unit_but_for_a_constant(name, unit):
    kind, likelihood = KINDS[name]
    one, other = model_of(kind, name=likelihood), model_of(kind, unit, likelihood)
    theta = one.layout.starting_points(4, generator(1))
    v = torch.randn(4, one.latent_size, generator=generator(2), dtype=torch.float64)
    value, gradient = JointLogDensity(one).value_and_grad(torch.cat([theta, v], -1))
    found, slopes = JointLogDensity(other).value_and_grad(torch.cat([shifted(one, theta, unit), v], -1))
    constant = value[0] - found[0]
    torch.testing.assert_close(found + constant, value, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(slopes, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", [tg.GPRegression, tg.SparseGP, tg.FITC])
def test_draws_and_predictions_are_those_of_any_unit(kind, unit):
    one, other = (
        tg.sample(model_of(kind, scale), tg.AMIS(batch_size=50), num_samples=100, seed=0, progress=False) for scale in (1.0, unit)
    )
    torch.testing.assert_close(other.theta, shifted(one.model, one.theta, unit), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        other.log_weights, one.log_weights + (other.log_weights - one.log_weights)[0, 0], rtol=1e-5, atol=1e-5
    )
    test_x = inputs(5, seed=3)
    torch.testing.assert_close(other.predict(test_x).mean / unit, one.predict(test_x).mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other.predict(test_x).variance / unit**2, one.predict(test_x).variance, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_unit", [1e6, 1e-6])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_draws_are_those_of_any_unit_of_the_inputs(x_unit, base):
    one, other = (
        tg.sample(
            model_of(tg.GPRegression, x_unit=scale, base=base), tg.AMIS(batch_size=50), num_samples=100, seed=0, progress=False
        )
        for scale in (1.0, x_unit)
    )
    lengths = torch.tensor([name.endswith("lengthscale") for name in one.model.layout.names], dtype=torch.float64)
    torch.testing.assert_close(other.theta, one.theta + math.log(x_unit) * lengths, rtol=1e-6, atol=1e-6)


def test_the_jitter_is_a_millionth_of_the_targets_variance_where_these_are_f_and_noise():
    assert model_of(tg.GPRegression, 100.0).jitter == pytest.approx(1e-2 * float(Y.var(correction=0)))
    laplace = gpytorch.likelihoods.LaplaceLikelihood(noise_prior=log_normal(0.0, 1.0))
    model = tg.GP(X, 100 * Y, RBFKernel(lengthscale_prior=log_normal(0.0, 1.0)), laplace)
    assert model.jitter == pytest.approx(1e-2 * float(Y.var(correction=0)))
    labels = tg.GP(X, (Y > 2).int(), RBFKernel(lengthscale_prior=log_normal(0.0, 1.0)), tg.likelihoods.Bernoulli())
    counts = tg.GP(X, (1e6 * Y.abs()).floor(), RBFKernel(lengthscale_prior=log_normal(0.0, 1.0)), tg.likelihoods.Poisson())
    assert labels.jitter == counts.jitter == 1e-6
    assert model_of(tg.GPRegression, 100.0, jitter=1e-3).jitter == 1e-3


@pytest.mark.parametrize(("value", "jitter"), [(0.1, 1e-8), (700.0, 0.49), (0.0, 1e-6)])
def test_targets_all_alike_have_their_square_for_a_variance_and_zeros_one(value, jitter):
    y = torch.full((7,), value, dtype=torch.float64)
    kernel = RBFKernel(lengthscale_prior=log_normal(0.0, 1.0))
    assert tg.GPRegression(X[:7], y, kernel, likelihood_of("gaussian", 1.0)).jitter == pytest.approx(jitter)


def test_data_sets_of_several_chains_have_one_jitter_which_other_targets_do_not_change():
    y = torch.stack([Y, 3 * Y, Y + 100])
    model = tg.GPRegression(X, y, RBFKernel(lengthscale_prior=log_normal(0.0, 1.0)), likelihood_of("gaussian", 1.0))
    assert model.jitter == pytest.approx(1e-6 * float(Y.var(correction=0)) * 11 / 3)
    one = model_of(tg.GPRegression)
    assert one.with_targets(1e6 * Y).jitter == one.jitter


def test_a_jitter_that_rounding_swallows_is_said_to_be():
    with pytest.warns(UserWarning, match=r"jitter is 1e-06 and the targets' variance .* leave jitter out"):
        model_of(tg.GPRegression, 1e6, jitter=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of(tg.GPRegression, 1e6)
        model_of(tg.GPRegression, jitter=1e-6)
        model_of(tg.GPRegression, 1e6, jitter=0.0)


def test_a_jitter_that_covers_what_was_measured_is_said_to():
    with pytest.warns(UserWarning, match=r"jitter is 1e-06 and the targets' variance .* leave jitter out"):
        model_of(tg.GPRegression, 1e-6, jitter=1e-6)


def test_a_mean_in_the_unit_of_the_targets_changes_nothing():
    def made(unit):
        mean = ConstantMean(constant_prior=NormalPrior(0.0, 5 * unit))
        return model_of(tg.GPRegression, unit, mean=mean)

    one, other = (tg.sample(made(unit), tg.AMIS(batch_size=50), num_samples=100, seed=0, progress=False) for unit in (1.0, 1e4))
    torch.testing.assert_close(other.samples["mean.constant"] / 1e4, one.samples["mean.constant"], rtol=1e-5, atol=1e-5)
