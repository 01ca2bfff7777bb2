"""The move of noise beside trajectories of [theta, w]: what it leaves as it is, and what it is drawn from."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.likelihoods import LaplaceNoise, StudentT
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.variances_density import VariancesLogDensity
from torchgpmc.runs.noise_update import NoiseUpdate, draws_variances
from torchgpmc.runs.run import Settings
from torchgpmc.runs.variances_target import _mode, variances_target

WHITE = torch.linspace(-60.0, 40.0, 100_001, dtype=torch.float64)


@pytest.mark.parametrize("degrees", [None, 2.05, 5.0, 80.0])
def test_what_variances_are_functions_of_is_drawn_given_the_noise(degrees, generator):
    """Mean and mean square beside sums over N(t | s(w)) p(w), at noise in the middle and far out; five standard errors."""
    likelihood = LaplaceNoise().double() if degrees is None else StudentT().double()
    likelihood.initialize(noise=0.3, **({} if degrees is None else {"deg_free": degrees}))
    with torch.no_grad():
        variances, log_density = likelihood.noise_variances(WHITE[:, None])
        for noise in (0.0, 0.4, 3.0):
            log_weight = torch.distributions.Normal(0.0, variances[:, 0].sqrt()).log_prob(torch.tensor(noise).double())
            weight = torch.softmax(log_weight + log_density, 0)
            drawn = likelihood.white_given_noise(torch.full((1, 40_000), noise).double(), generator)[0]
            for power in (1, 2):
                values = drawn**power
                error = float(values.mean() - weight @ WHITE**power) / float(values.std() / math.sqrt(len(values)))
                assert abs(error) < 5, (degrees, noise, power)


def student_noise(parameters, normal, generator):
    """Draws of w, and variances."""
    degrees = parameters["raw_deg_free"].expand_as(normal)
    precision = torch._standard_gamma(0.5 * degrees, generator=generator) / (0.5 * degrees)
    white = (precision.log() - torch.digamma(0.5 * degrees) + (0.5 * degrees).log()) / torch.polygamma(1, 0.5 * degrees).sqrt()
    return white, parameters["raw_noise"] / precision


def laplace_noise(parameters, normal, generator):
    share = torch.empty_like(normal).exponential_(generator=generator)
    return (share.log() - torch.digamma(torch.ones_like(share))) * math.sqrt(6) / math.pi, 2 * parameters["raw_noise"] * share


MIXTURES = {"student_t": student_noise, "laplace": laplace_noise}


def simulated(kind, chains, generator):
    """Positions [theta, w] and data from the prior, as one density of a data set a chain."""
    model = gp(kind, num_data=3)
    theta = model.layout.sample_prior(chains, generator)
    with torch.no_grad():
        prior = model.prior(theta)
        v, noise = (torch.randn(chains, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        white, variances = MIXTURES[kind](likelihood_values(prior), noise, generator)
        y = model.latents(prior, v) + variances.sqrt() * noise
    return VariancesLogDensity(model, y), torch.cat([theta, white], -1)


def worst_error(kind, generator):
    """Of means of functions of theta, w and y before and after the move, in standard errors of their paired differences."""
    density, before = simulated(kind, 20_000, generator)
    after = NoiseUpdate(density)(before, generator)
    model = density.model
    size, first = model.layout.size, model.layout.columns("likelihood")[0]
    moved = after != before
    assert not bool(moved[:, :first].any()) and bool(moved[:, first:].all())
    size_of_y = density.targets.values.abs().log1p()
    statistics = []
    for position in (before, after):
        eta, white = position[:, first:size].tanh(), position[:, size:].tanh()
        seen = [eta, eta.square(), white, white.square(), white * size_of_y, eta * size_of_y.sum(-1, keepdim=True)]
        statistics.append(torch.cat([*seen, *(column[:, None] * white for column in eta.unbind(-1))], -1))
    difference = statistics[1] - statistics[0]
    return float((difference.mean(0) / (difference.std(0) / math.sqrt(len(difference)))).abs().max())


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_the_joint_distribution_of_hyperparameters_variances_and_data_stays_as_it_is(kind, generator):
    """21 statistics, of Laplace noise 15, at five standard errors: a false alarm in 80,000 runs."""
    assert worst_error(kind, generator) < 5


@pytest.mark.parametrize("kind", list(MIXTURES))
@pytest.mark.parametrize("plant", ["w of other noise", "parameters without their prior"])
def test_errors_in_the_move_are_caught(plant, kind, monkeypatch, generator):
    model = gp(kind)
    if plant == "w of other noise":
        likelihood, name = type(model.likelihood), "white_given_noise"
        honest = likelihood.white_given_noise
        monkeypatch.setattr(likelihood, name, lambda self, noise, made: honest(self, 1.2 * noise, made))
    else:
        layout = type(model.layout)
        honest = layout.raw_values_and_log_prior
        monkeypatch.setattr(layout, "raw_values_and_log_prior", lambda self, theta: (honest(self, theta)[0], 0 * theta[:, 0]))
    assert worst_error(kind, generator) > 5


class OtherVariances(StudentT):
    """As StudentT, but its variances are functions of something else."""

    def noise_variances(self, white):
        return super().noise_variances(-white)


def test_a_likelihood_that_says_nothing_of_it_has_no_such_move():
    model = gp("student_t")
    own = OtherVariances(noise_prior=model.likelihood.noise_prior, deg_free_prior=model.likelihood.deg_free_prior)
    other = tg.GP(model.train_x, model.train_y, model.kernel, own)
    assert draws_variances(model) and not draws_variances(other)
    targets = [variances_target(one, Settings(10, 10, 2, None)) for one in (model, other)]
    assert [target.refresh is None for target in targets] == [False, True]


def test_fixed_noise_has_its_variances_drawn_all_the_same(generator):
    model = gp("student_t")
    model.likelihood.requires_grad_(False)
    model.refresh()
    position = torch.zeros(2, model.layout.size + 6, dtype=torch.float64)
    moved = NoiseUpdate(VariancesLogDensity(model))(position, generator)
    assert bool((moved[:, model.layout.size :] != 0).all()) and bool((moved[:, : model.layout.size] == 0).all())


def test_a_mode_is_one_of_the_density_and_its_covariance_that_of_its_curvature(generator):
    density = VariancesLogDensity(gp("student_t", num_data=12))
    mode, covariance = _mode(density, generator)
    value, slope = density.value_and_grad(mode[None])
    size = density.model.layout.size
    around = mode + 0.1 * torch.randn(50, len(mode), generator=generator, dtype=mode.dtype)
    assert float(slope.abs().max()) < 0.1 and bool((value >= density(around)).all())
    hessian = mode.new_zeros(size, size)
    for column in range(size):
        step = torch.zeros_like(mode)
        step[column] = 1e-4
        slopes = density.value_and_grad(torch.stack([mode - step, mode + step]))[1][:, :size]
        hessian[column] = slopes[0] - slopes[1]
    precision = torch.linalg.inv(covariance[:size, :size])
    values, vectors = torch.linalg.eigh(hessian / 2e-4)
    torch.testing.assert_close(precision, (vectors * values.clamp_min(1.0)) @ vectors.mT, rtol=1e-2, atol=1e-2)
    assert torch.equal(covariance[size:, size:], torch.eye(12, dtype=torch.float64))
