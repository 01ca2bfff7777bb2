"""Theta and a noise variance for each datum, the latents integrated out: beside quadrature and plain formulas."""

import math

import gpytorch
import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

import torchgpmc as tg
import torchgpmc.models.variances_density as variances_density
from tests.problems import gp, gp_regression, sparse_gp
from torchgpmc.calls.engines import candidates
from torchgpmc.density import FollowedDensity
from torchgpmc.models.variances_density import VariancesLogDensity, mixes_variances, rough_variances
from torchgpmc.runs.run import Settings

WHITE = torch.linspace(-60.0, 40.0, 200_001, dtype=torch.float64)
STEP = WHITE[1] - WHITE[0]


def student(degrees, noise):
    likelihood = tg.likelihoods.StudentT().double()
    likelihood.initialize(deg_free=degrees, noise=noise)
    return likelihood


def laplace(noise):
    likelihood = tg.likelihoods.LaplaceNoise().double()
    likelihood.initialize(noise=noise)
    return likelihood


NOISES = {f"student {degrees}": student(degrees, 0.3) for degrees in (2.05, 5.0, 80.0)} | {"laplace": laplace(0.3)}
EXTREME = {"student 1e5": student(1e5, 0.3), "laplace 1e-4": laplace(1e-4), "laplace 1e4": laplace(1e4)}


@pytest.mark.parametrize("name", [*NOISES, *EXTREME])
def test_normals_of_such_variances_make_that_noise(name):
    """By a sum over w of N(y | f, s(w)) p(w), at residuals in the middle and far out."""
    likelihood = (NOISES | EXTREME)[name]
    with torch.no_grad():
        variances, log_density = likelihood.noise_variances(WHITE[:, None])
        for residual in (0.0, 0.4, 3.0):
            terms = Normal(0.0, variances[:, 0].sqrt()).log_prob(torch.tensor(residual).double()) + log_density
            found = torch.logsumexp(terms, 0) + STEP.log()
            expected = likelihood.log_prob(torch.zeros(1, 1).double(), torch.tensor([residual]).double())
            torch.testing.assert_close(found, expected[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", list(NOISES))
def test_what_variances_are_functions_of_has_mean_zero_and_deviation_one(name):
    with torch.no_grad():
        mass = NOISES[name].noise_variances(WHITE[:, None])[1].exp() * STEP
    torch.testing.assert_close(mass @ WHITE.pow(torch.arange(3)[:, None]).mT, torch.tensor([1.0, 0.0, 1.0]).double())


def of_student_noise(parameters, white):
    """Variances, and the log density of w, by torch's own distributions."""
    degrees, noise = (parameters[name].reshape(()) for name in ("raw_deg_free", "raw_noise"))
    gamma = torch.distributions.Gamma(degrees / 2, degrees / 2)
    deviation = torch.polygamma(1, degrees / 2).sqrt()
    log_precision = torch.digamma(degrees / 2) - (degrees / 2).log() + deviation * white
    return noise * (-log_precision).exp(), gamma.log_prob(log_precision.exp()) + log_precision + deviation.log()


def of_laplace_noise(parameters, white):
    """The variance is exponential, of mean 2 b^2."""
    noise = parameters["raw_noise"].reshape(())
    exponential, deviation = torch.distributions.Exponential(0.5 / noise), math.pi / math.sqrt(6)
    variances = 2 * noise * (deviation * white + torch.digamma(torch.ones_like(white))).exp()
    return variances, exponential.log_prob(variances) + (deviation * variances).log()


def log_density(model, position):
    """By torch's own distributions, one row."""
    theta, white = position.split([model.layout.size, len(model.train_x)])
    prior = model.prior(theta[None])
    mixture = of_student_noise if isinstance(model.likelihood, tg.likelihoods.StudentT) else of_laplace_noise
    variances, of_white = mixture(prior.values["likelihood"], white)
    of_white = of_white.sum()
    normal = MultivariateNormal(prior.mean[0], prior.covariance[0] + torch.diag(variances))
    return model.layout.log_prior(theta[None])[0] + of_white + normal.log_prob(model.train_y)


@pytest.mark.parametrize("kind", ["student_t", "laplace"])
@pytest.mark.parametrize("mean", [None, gpytorch.means.ConstantMean(constant_prior=gpytorch.priors.NormalPrior(0.0, 1.0))])
def test_density_and_gradient_are_those_of_plain_formulas(mean, kind, generator):
    model = gp(kind, mean=mean)
    position = 0.7 * torch.randn(3, model.layout.size + 6, generator=generator, dtype=torch.float64)
    value, gradient = VariancesLogDensity(model).value_and_grad(position)
    for row, found, slope in zip(position, value, gradient, strict=True):
        leaf = row.clone().requires_grad_(True)
        expected = log_density(model, leaf)
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(slope, torch.autograd.grad(expected, leaf)[0])


def test_the_value_alone_is_the_same(generator):
    model = gp("student_t", mean=gpytorch.means.ConstantMean(constant_prior=gpytorch.priors.NormalPrior(0.0, 1.0)))
    position = 0.7 * torch.randn(3, model.layout.size + 6, generator=generator, dtype=torch.float64)
    density = VariancesLogDensity(model)
    torch.testing.assert_close(density(position), density.value_and_grad(position)[0], rtol=1e-12, atol=1e-12)


def near_and_far(model, generator):
    """Three positions of usual noise, and one of next to none, where K is all but singular."""
    size = model.layout.size
    position = 0.3 * torch.randn(4, size + len(model.train_x), generator=generator, dtype=torch.float64)
    position[2, model.layout.columns("likelihood")[-1]] = -14.0
    position[2, :1] = 2.0
    return position


def test_slopes_in_single_precision_are_near_and_where_rounding_shows_they_are_the_exact_ones(generator):
    model = gp("laplace", num_data=60, num_columns=1)
    exact = VariancesLogDensity(model)
    position = near_and_far(model, generator)
    rough = rough_variances(exact)
    value, gradient = exact.value_and_grad(position)
    found_value, found = rough.value_and_grad(position)
    assert not bool((exact.value_and_grad_with_rounding(position)[2] > 1e-6).any())
    of_quick = rough.quick.value_and_grad_with_rounding(position)
    assert (of_quick[2] > variances_density._SEEN).tolist() == [False, False, True, False]
    assert torch.equal(found[2], exact.value_and_grad(position[2:3])[1][0])
    torch.testing.assert_close(found_value, value, rtol=0, atol=0.05)
    assert float((found - gradient).norm(dim=-1).max()) < 0.3
    assert float((found - gradient)[0].norm()) > 1e-7  # single precision it is
    assert not float((of_quick[1] - gradient)[2].norm()) < 0.3  # and would not have done
    rows = torch.tensor([2, 1])
    torch.testing.assert_close(rough.select(rows).value_and_grad(position[rows])[1], found[rows], rtol=1e-4, atol=1e-3)


def test_slopes_that_would_not_do_are_not_worked_out_where_none_would(generator):
    model = gp("laplace", num_data=60, num_columns=1)
    exact = VariancesLogDensity(model)
    position, seen = near_and_far(model, generator), variances_density._SEEN
    rough = rough_variances(exact)
    none_would = position[:2].clone()
    none_would[:, model.layout.columns("likelihood")[-1]], none_would[:, 0] = -10.0, 1.0
    value, gradient, rounding = rough.quick.value_and_grad_with_rounding(none_would, seen)
    assert bool((rounding == torch.inf).all() and (value == -torch.inf).all() and (gradient == 0).all())
    could_be = rough.quick.value_and_grad_with_rounding(none_would)
    assert bool((torch.isfinite(could_be[0]) & (could_be[2] > seen) & torch.isfinite(could_be[2])).all())
    for found, expected in zip(rough.value_and_grad(none_would), exact.value_and_grad(none_would), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(
        rough.quick.value_and_grad_with_rounding(position, seen), rough.quick.value_and_grad_with_rounding(position), strict=True
    ):
        assert torch.equal(found, expected)  # of some rows that would do, as before


def test_a_row_that_fails_in_single_precision_alone_is_not_lost(generator):
    model = gp("laplace", num_data=60, num_columns=1)
    position = near_and_far(model, generator)
    position[2, 0] = 6.0
    exact = VariancesLogDensity(model)
    rough = rough_variances(exact)
    assert torch.isfinite(rough.quick(position)).tolist() == [True, True, False, True]
    assert torch.equal(rough(position)[2], exact(position)[2]) and bool(torch.isfinite(exact(position)).all())


def test_what_is_single_already_or_takes_its_time_elsewhere_is_itself():
    single = VariancesLogDensity(gp("laplace", dtype=torch.float32))
    periodic = gpytorch.kernels.PeriodicKernel().requires_grad_(False)
    made = gp("laplace")
    by_autograd = VariancesLogDensity(tg.GP(made.train_x, made.train_y, periodic, made.likelihood))
    assert rough_variances(single) is single and rough_variances(by_autograd) is by_autograd


@pytest.mark.parametrize("rough", [False, True])
def test_trajectories_may_follow_rough_slopes_and_are_tested_by_the_density(rough):
    model = gp("laplace")
    method = tg.HMC(noise_variances=True, num_steps=3, rough_trajectories=rough)
    density = method.prepare(model, Settings(10, 10, 2, None)).target.density
    assert isinstance(density, FollowedDensity) == rough


def test_a_data_set_a_chain(generator):
    model = gp("student_t")
    y = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    position = 0.5 * torch.randn(3, model.layout.size + 6, generator=generator, dtype=torch.float64)
    rows = torch.tensor([2, 0])
    found = VariancesLogDensity(model, y).select(rows)(position[rows])
    torch.testing.assert_close(found, torch.stack([VariancesLogDensity(model, y[row])(position[row, None])[0] for row in rows]))


def test_latents_are_drawn_from_the_normal_posterior(monkeypatch, generator):
    """As a linear map of the random numbers: its constant is the mean, its square the covariance."""
    model = gp("student_t")
    position = 0.5 * torch.randn(1, model.layout.size + 6, generator=generator, dtype=torch.float64)
    unit = torch.eye(12, dtype=torch.float64)
    numbers = torch.cat([torch.zeros(1, 12, dtype=torch.float64), unit])
    given = iter((numbers[:, :6], numbers[:, 6:]))
    monkeypatch.setattr(variances_density, "normal_like", lambda *_: next(given))
    density = VariancesLogDensity(model)
    v = density.draw_latents(position.expand(13, -1), generator)
    prior = model.prior(position[:, : model.layout.size])
    f = (prior.mean + (prior.factor @ v.unsqueeze(-1)).squeeze(-1)).detach()
    with torch.no_grad():
        covariance = prior.covariance[0]
        likelihood = {name: value.view(1, 1) for name, value in prior.values["likelihood"].items()}
        white = position[:, model.layout.size :]
        noise = model.likelihood_function(likelihood, lambda module: module.noise_variances(white))[0]
        gain = covariance @ torch.linalg.inv(covariance + torch.diag(noise[0]))
    torch.testing.assert_close(f[0], prior.mean[0].detach() + gain @ (model.train_y - prior.mean[0].detach()))
    torch.testing.assert_close((f[1:] - f[0]).mT @ (f[1:] - f[0]), covariance - gain @ covariance, rtol=1e-5, atol=1e-7)


def test_a_row_that_cannot_be_worked_out_is_that_rows_failure():
    model = gp("student_t")
    position = torch.zeros(2, model.layout.size + 6, dtype=torch.float64)
    position[1, -1] = torch.inf
    value, gradient = VariancesLogDensity(model).value_and_grad(position)
    assert torch.isfinite(value[0]) and value[1] == -torch.inf
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (gp, {}, r"GP with Bernoulli.*Expected a GP with Student-t or Laplace noise"),
        (gp_regression, {}, r"GPRegression with Gaussian"),
        (lambda: sparse_gp("student_t"), {}, r"SparseGP with StudentT"),
        (lambda: gp("student_t"), {"whitening": tg.Laplace()}, r"whitening=Laplace.*Expected one of them"),
        (lambda: gp("student_t"), {"marginal": tg.Laplace()}, r"marginal=Laplace.*Expected one of them"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tg.sample(make(), tg.NUTS(noise_variances=True, **options), num_samples=2, num_chains=2, progress=False)


class Censored(tg.likelihoods.StudentT):
    """Another density, whose noise variances nobody has said."""

    def pointwise_log_prob(self, f, targets):
        return super().pointwise_log_prob(f, targets.clamp(max=1.0))


def test_a_density_of_ones_own_is_no_mixture_of_the_same_variances():
    made = gp("student_t")
    own = Censored(noise_prior=made.likelihood.noise_prior, deg_free_prior=made.likelihood.deg_free_prior)
    model = tg.GP(made.train_x, made.train_y, made.kernel, own)
    assert mixes_variances(made) and not mixes_variances(model)
    with pytest.raises(ValueError, match=r"GP with Censored.*Expected a GP with Student-t or Laplace noise"):
        tg.sample(model, tg.NUTS(noise_variances=True), num_samples=2, num_chains=2, progress=False)
    assert not any(getattr(engine.method, "noise_variances", False) for engine in candidates(model))


def test_of_the_wrong_kind_it_is_refused():
    with pytest.raises(ValueError, match=r"noise_variances is 'yes'\. Expected True"):
        tg.sample(gp("student_t"), tg.HMC(noise_variances="yes"), num_samples=2, num_chains=2, progress=False)
