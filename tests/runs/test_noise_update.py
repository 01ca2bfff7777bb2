"""The move of noise beside trajectories of [theta, w]: what it leaves as it is, and what it is drawn from."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.calls.chain_engines import given_variances
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
    """Positions [theta, w], v and data from the prior, these as one density of a data set a chain."""
    model = gp(kind, num_data=3)
    theta = model.layout.sample_prior(chains, generator)
    with torch.no_grad():
        prior = model.prior(theta)
        v, noise = (torch.randn(chains, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        white, variances = MIXTURES[kind](likelihood_values(prior), noise, generator)
        y = model.latents(prior, v) + variances.sqrt() * noise
    return VariancesLogDensity(model, y), torch.cat([theta, white], -1), v


def worst_error(kind, generator, *repeats):
    """Of means of functions of theta, w, v and y before and after the move, in standard errors of their paired differences."""
    density, before, v = simulated(kind, 20_000, generator)
    after, drawn, _ = NoiseUpdate(density, *repeats)(before, generator)
    model = density.model
    size, first = model.layout.size, model.layout.columns("likelihood")[0]
    moved = after != before
    assert not bool(moved[:, :first].any()) and bool(moved[:, first:].all())
    size_of_y = density.targets.values.abs().log1p()
    statistics = []
    for position, latents in ((before, v), (after, drawn)):
        eta, white = position[:, first:size].tanh(), position[:, size:].tanh()
        seen = [eta, eta.square(), white, white.square(), white * size_of_y, eta * size_of_y.sum(-1, keepdim=True)]
        seen += [latents.tanh(), latents.square().tanh(), latents.tanh() * white, latents.tanh() * density.targets.values.tanh()]
        seen += [column[:, None] * part for column in eta.unbind(-1) for part in (white, latents.square().tanh())]
        statistics.append(torch.cat(seen, -1))
    difference = statistics[1] - statistics[0]
    return float((difference.mean(0) / (difference.std(0) / math.sqrt(len(difference)))).abs().max())


@pytest.mark.parametrize("repeats", [(1, 1), (3, 2)])
@pytest.mark.parametrize("kind", list(MIXTURES))
def test_the_joint_distribution_of_hyperparameters_variances_latents_and_data_stays_as_it_is(kind, repeats, generator):
    """39 statistics, of Laplace noise 30, at five standard errors: a false alarm in 40,000 runs."""
    assert worst_error(kind, generator, *repeats) < 5


@pytest.mark.parametrize("kind", list(MIXTURES))
@pytest.mark.parametrize("plant", ["w of other noise", "parameters without their prior", "latents of other noise"])
def test_errors_in_the_move_are_caught(plant, kind, monkeypatch, generator):
    model = gp(kind)
    if plant == "w of other noise":
        likelihood, name = type(model.likelihood), "white_given_noise"
        honest = likelihood.white_given_noise
        monkeypatch.setattr(likelihood, name, lambda self, noise, made: honest(self, 1.2 * noise, made))
    elif plant == "latents of other noise":
        honest = VariancesLogDensity.draw_given
        monkeypatch.setattr(VariancesLogDensity, "draw_given", lambda self, prior, w, made: honest(self, prior, w + 0.2, made))
    else:
        layout = type(model.layout)
        honest = layout.raw_values_and_log_prior
        monkeypatch.setattr(layout, "raw_values_and_log_prior", lambda self, theta: (honest(self, theta)[0], 0 * theta[:, 0]))
    assert worst_error(kind, generator) > 5


class OtherVariances(StudentT):
    """As StudentT, but its variances are functions of something else."""

    def noise_variances(self, white):
        return super().noise_variances(-white)


def of_other_variances(num_data=6):
    model = gp("student_t", num_data=num_data)
    own = OtherVariances(noise_prior=model.likelihood.noise_prior, deg_free_prior=model.likelihood.deg_free_prior)
    return tg.GP(model.train_x, model.train_y, model.kernel, own)


def test_a_likelihood_that_says_nothing_of_it_has_no_such_move():
    model, other = gp("student_t"), of_other_variances()
    assert draws_variances(model) and not draws_variances(other)
    targets = [variances_target(one, Settings(10, 10, 2, None)) for one in (model, other)]
    assert [target.refresh is None for target in targets] == [False, True]
    chains = [given_variances(one).method for one in (gp("student_t", num_data=101), of_other_variances(101))]
    assert [method.given_variances for method in chains] == [True, False] and all(method.rough_trajectories for method in chains)


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_it_says_the_joint_density_where_it_ends_and_where_it_could_not_move(kind, monkeypatch, generator):
    model = gp(kind)
    position = torch.randn(3, model.layout.size + 6, generator=generator, dtype=torch.float64)
    likelihood = type(model.likelihood)
    honest = likelihood.white_given_noise

    def failing(self, noise, made):
        drawn = honest(self, noise, made)
        return torch.where(torch.arange(3)[:, None] == 1, torch.nan, drawn)

    monkeypatch.setattr(likelihood, "white_given_noise", failing)
    moved = NoiseUpdate(VariancesLogDensity(model), 2)(position, generator)
    assert (moved.position != position).any(-1).tolist() == [True, False, True]
    theta = moved.position[:, : model.layout.size]
    torch.testing.assert_close(moved.log_density, tg.joint_log_density(model)(torch.cat([theta, moved.whitened], -1)))


@pytest.mark.parametrize("mass_matrix", list(tg.MassMatrix))
def test_given_variances_trajectories_move_theta_and_leave_them_exactly(mass_matrix, generator):
    model = gp("student_t", num_data=5)
    method = tg.HMC(noise_variances=True, given_variances=True, mass_matrix=mass_matrix, num_steps=3, from_mode=True)
    run = method.prepare(model, Settings(10, 40, 4, None))
    state = run.init(generator)
    for _ in range(40):
        state, *_ = run.advance(state, generator)
    after, info = run.kernel(state.tuning).step(state.chain, generator)
    moved = after.position != state.chain.position
    size = model.layout.size
    assert bool(moved[:, :size].any()) and not bool(moved[:, size:].any()) and bool((info.n_failures == 0).all())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of so few draws
def test_draws_of_a_run_come_with_their_joint_density():
    model = gp("student_t", num_data=5)
    method = tg.HMC(noise_variances=True, given_variances=True, num_steps=2)
    posterior = tg.sample(model, method, num_samples=5, warmup_steps=5, num_chains=3, progress=False)
    position = torch.cat([posterior.theta, posterior.whitened], -1).flatten(0, 1)
    torch.testing.assert_close(posterior.stats["lp"].flatten(), tg.joint_log_density(model)(position))


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda: gp("student_t"), {}, r"given_variances=True moves theta given variances.*Expected noise_variances=True"),
        (lambda: gp("student_t"), {"noise_variances": "no"}, r"noise_variances is 'no'"),
        (
            lambda: with_fixed_hyperparameters(),
            {"noise_variances": True},
            r"given_variances=True samples hyperparameters.*are fixed",
        ),
        (lambda: of_other_variances(), {"noise_variances": True}, r"OtherVariances does not say how.*white_given_noise"),
    ],
)
def test_where_variances_cannot_be_given_it_is_refused(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tg.sample(make(), tg.HMC(given_variances=True, **options), num_samples=2, num_chains=2, progress=False)


def with_fixed_hyperparameters():
    model = gp("student_t")
    for part in (model.likelihood, model.kernel):
        part.requires_grad_(False)
    model.refresh()
    return model


def test_fixed_noise_has_its_variances_drawn_all_the_same(generator):
    model = gp("student_t")
    model.likelihood.requires_grad_(False)
    model.refresh()
    position = torch.zeros(2, model.layout.size + 6, dtype=torch.float64)
    moved = NoiseUpdate(VariancesLogDensity(model))(position, generator).position
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
