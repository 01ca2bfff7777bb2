"""Exposures: what they mean, where they are wrong, and that data and test points keep theirs."""

import gpytorch
import pytest
import torch
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import fixed_kernel, inputs, kernel
from tests.test_posterior import posterior_of
from torchgpmc.numerics.special import log_standard_normal

X, Y = inputs(4), torch.tensor([0.0, 3.0, 1.0, 2.0])
KINDS = {
    "poisson": lambda **options: tg.likelihoods.Poisson(**options),
    "negative binomial": lambda **options: tg.likelihoods.NegativeBinomial(GammaPrior(2.0, 4.0), **options),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exposure_shifts_f_by_its_logarithm(kind):
    exposure = torch.tensor([0.5, 2.0, 0.01, 30.0], dtype=torch.float64)
    plain, exposed = KINDS[kind]().double(), KINDS[kind](exposure=exposure).double()
    f = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    variance = torch.full_like(f, 0.3)
    torch.testing.assert_close(exposed.pointwise_log_prob(f, Y), plain.pointwise_log_prob(f + exposure.log(), Y))
    for part, other in zip(exposed.derivatives(f, Y), plain.derivatives(f + exposure.log(), Y), strict=True):
        torch.testing.assert_close(part, other)
    for name in ("expected_log_likelihood", "predictive_log_prob"):
        found, expected = getattr(exposed, name)(f, variance, Y), getattr(plain, name)(f + exposure.log(), variance, Y)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    for part, other in zip(
        exposed.response_moments(f, variance), plain.response_moments(f + exposure.log(), variance), strict=True
    ):
        torch.testing.assert_close(part, other)
    part = exposed.for_data(slice(1, 3))
    torch.testing.assert_close(part.pointwise_log_prob(f[:, 1:3], Y[1:3]), exposed.pointwise_log_prob(f, Y)[:, 1:3])


@pytest.mark.parametrize(
    ("exposure", "match"),
    [
        (-1.0, r"exposure holds \[-1.0\]. Expected positive, finite numbers"),
        (torch.tensor([1.0, 0.0, 2.0, 1.0]), r"exposure holds \[0.0\]"),
        (float("nan"), "exposure holds"),
        (torch.ones(2, 2), r"exposure has shape \(2, 2\). Expected a number, or a tensor of shape \(N,\)"),
        (torch.ones(3), r"exposure has shape \(3,\) and there are 4 counts. Expected one exposure a count"),
    ],
)
def test_impossible_exposures_are_named(exposure, match):
    for make in KINDS.values():
        with pytest.raises(ValueError, match=match):
            tg.GP(X, Y, kernel(), make(exposure=exposure))


@pytest.mark.parametrize("kind", KINDS)
def test_counts_that_are_not_whole_are_named(kind):
    name = type(KINDS[kind]()).__name__
    with pytest.raises(ValueError, match=rf"the targets hold \[0.5\]. Expected counts 0, 1, 2, .... {name} models whole numbers"):
        tg.GP(X, torch.tensor([0.0, 0.5, 1.0, 2.0]), kernel(), KINDS[kind]())


def test_test_points_have_the_number_or_what_predict_is_told():
    number = posterior_of(tg.GP(X, Y, fixed_kernel(), tg.likelihoods.Poisson(exposure=0.5)))
    each = posterior_of(tg.GP(X, Y, fixed_kernel(), tg.likelihoods.Poisson(exposure=torch.full((4,), 0.5).double())))
    x, y = inputs(3, seed=9), torch.tensor([0.0, 1.0, 4.0])
    prediction, told = number.predict(x), each.predict(x, exposure=torch.full((3,), 0.5))
    torch.testing.assert_close(told.mean, prediction.mean)
    torch.testing.assert_close(told.log_prob(y), prediction.log_prob(y))
    torch.testing.assert_close(number.predict(x, exposure=1.0).mean, 2 * prediction.mean)
    parts = each.predict(x, exposure=torch.tensor([0.5, 1.0, 2.0]), test_chunk=2)
    torch.testing.assert_close(parts.mean, prediction.mean * torch.tensor([1.0, 2.0, 4.0]))
    assert parts.sample(4).shape == (4, 3)


def test_test_points_of_unknown_exposure_have_an_intensity_and_no_counts():
    exposure = torch.tensor([0.5, 1.0, 2.0, 1.0])
    prediction = posterior_of(tg.GP(X, Y, fixed_kernel(), tg.likelihoods.Poisson(exposure=exposure))).predict(inputs(4, seed=9))
    assert prediction.intensity.mean.shape == prediction.latent_mean.shape == (4,)
    asked = (lambda: prediction.mean, lambda: prediction.log_prob(Y), prediction.sample, lambda: prediction.quantile(0.5))
    for ask in asked:
        with pytest.raises(ValueError, match=r"need theirs. Expected posterior.predict\(x, exposure=...\)"):
            ask()


@pytest.mark.parametrize(
    ("exposure", "match"),
    [(torch.ones(2), r"exposure has shape \(2,\). Expected a number, or \(3,\), one a test point"), (-1.0, "Expected positive")],
)
def test_exposures_of_test_points_are_checked(exposure, match):
    posterior = posterior_of(tg.GP(X, Y, fixed_kernel(), tg.likelihoods.Poisson()))
    with pytest.raises(ValueError, match=match):
        posterior.predict(inputs(3), exposure=exposure)
    with pytest.raises(ValueError, match="Bernoulli has no exposure"):
        posterior_of(tg.GP(X, (Y > 1).double(), fixed_kernel(), tg.likelihoods.Bernoulli())).predict(inputs(3), exposure=1.0)


def test_a_saved_posterior_knows_its_exposures(tmp_path):
    def model(exposure):
        return tg.GP(X, Y, fixed_kernel(), tg.likelihoods.Poisson(exposure=exposure))

    posterior_of(model(torch.tensor([0.5, 1.0, 2.0, 1.0]))).save(tmp_path / "run.pt")
    tg.Posterior.load(tmp_path / "run.pt", model(torch.tensor([0.5, 1.0, 2.0, 1.0])))
    with pytest.raises(ValueError, match="another model"):
        tg.Posterior.load(tmp_path / "run.pt", model(torch.tensor([0.5, 1.0, 2.0, 3.0])))


def test_the_poisson_limit_of_the_negative_binomial():
    likelihood = tg.likelihoods.NegativeBinomial(dispersion_constraint=gpytorch.constraints.Positive()).double()
    likelihood.dispersion = 1e-6
    f = torch.linspace(-2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(
        likelihood.pointwise_log_prob(f, Y).detach(), tg.likelihoods.Poisson().pointwise_log_prob(f, Y), rtol=0, atol=1e-3
    )


def test_every_datum_keeps_its_exposure_however_the_sparse_model_cuts_the_data():
    exposure = torch.tensor([0.5, 1.0, 2.0, 30.0], dtype=torch.float64)
    values = []
    for chunk in (None, 3, 1):
        likelihood = tg.likelihoods.Poisson(exposure=exposure)
        model = tg.SparseGP(X, Y, kernel(), likelihood, inducing_points=X[:2], data_chunk=chunk)
        position = torch.full((1, model.layout.size + 2), 0.3, dtype=torch.float64)
        values.append(tg.joint_log_density(model).value_and_grad(position))
        at = model.at(model.prior(position[:, : model.layout.size]))
        mean, variance = (moment.squeeze(1) for moment in model.marginals(at, position[:, model.layout.size :]))
        expected = Y * (mean + exposure.log()) - exposure * (mean + variance / 2).exp() - torch.lgamma(Y + 1)
        prior = model.layout.log_prior(position[:, : model.layout.size]) + log_standard_normal(position[:, model.layout.size :])
        torch.testing.assert_close(values[-1][0], expected.sum(-1) + prior)
    for other in values[1:]:
        torch.testing.assert_close(other, values[0])


FAR = [(1e9, 1.0), (3.0, 1e8), (0.0, 1e12)]  # a count and its exposure: twenty nats and more from where f lies a priori


@pytest.mark.parametrize(("count", "exposure"), FAR)
def test_moments_of_counts_far_from_what_the_prior_expects(count, exposure):
    """Twelve Newton steps did not get there, and the moments were those of a density somewhere on the way."""
    likelihood, y = tg.likelihoods.Poisson(exposure=exposure), torch.tensor([count]).double()
    found = likelihood.tilted_moments(torch.zeros(1, 1).double(), torch.ones(1, 1).double(), y)
    centre, width = (0.0, 0.0)
    for grid in (torch.linspace(-40, 40, 400_001).double(), torch.linspace(-12, 12, 20_001).double()):
        f = centre + (width or 1.0) * grid
        weights = torch.softmax(likelihood.pointwise_log_prob(f, y) - 0.5 * f.square(), 0)
        centre = float(weights @ f)
        width = max(float((weights @ (f - centre).square()).sqrt()), 2e-4)
    assert float(found.mean) == pytest.approx(centre, abs=1e-3 * width)
    assert float(found.variance) == pytest.approx(float(weights @ (f - centre).square()), rel=0.01)


@pytest.mark.parametrize(("count", "exposure"), [(1e8, 1.0), (1e9, 1.0), (3.0, 1e8)])
def test_expectation_propagation_settles_for_any_exposure(count, exposure):
    """Of a marginal nearly all of whose precision is its site's, what the others say was left to rounding."""
    y = torch.tensor([0.0, 1.0, 1.0, 0.0]) * count
    model = tg.GP(X, y, kernel(), tg.likelihoods.Poisson(exposure=exposure))
    theta = 0.6 * torch.randn(6, model.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = tg.EP().importance_density(model, model.prior(theta))
    assert bool(found.converged.all())
    rate = found.mean[:, 1:3].exp() * exposure
    if count > 1e7:
        torch.testing.assert_close(rate, torch.full_like(rate, count), rtol=1e-3, atol=0)
