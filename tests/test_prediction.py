"""Quantiles, intervals, intensities and joint draws of predictions: against closed forms, weights respected."""

import math

import pytest
import scipy.stats
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, gp, inputs, sparse_gp, targets
from tests.test_posterior import per_draw, posterior_of
from torchgpmc.intensity import normal_mixture_quantile

X = inputs(3, seed=9)
WEIGHTS = torch.linspace(-3, 1, 10, dtype=torch.float64).view(2, 5)
SHARES = torch.softmax(WEIGHTS.flatten(), 0)


def moments(posterior, x=X):
    """Mean and variance of f given every draw, ``(S, T)``."""
    parts = per_draw(posterior, x)
    return torch.cat([part.mean[:, 0] for part in parts]), torch.cat([part.variance[:, 0] for part in parts])


def below(mean, variance, at):
    """P(f <= at) under the mixture."""
    return SHARES @ torch.special.ndtr((at - mean) / variance.sqrt())


@pytest.mark.parametrize("test_chunk", [2048, 2])
@pytest.mark.parametrize("likelihood", ["poisson", "negative_binomial"])
def test_the_intensity_is_a_weighted_mixture_of_log_normals(likelihood, test_chunk):
    posterior = posterior_of(gp(likelihood), WEIGHTS)
    mean, variance = moments(posterior)
    intensity = posterior.predict(X, test_chunk=test_chunk).intensity
    torch.testing.assert_close(intensity.mean, SHARES @ (mean + variance / 2).exp())
    second = SHARES @ (2 * mean + 2 * variance).exp()
    torch.testing.assert_close(intensity.variance, second - intensity.mean.square())
    for level in (0.001, 0.3, 0.975):
        torch.testing.assert_close(
            below(mean, variance, intensity.quantile(level).log()), torch.full((3,), level, dtype=torch.float64)
        )
    lower, upper = intensity.interval(0.9)
    torch.testing.assert_close(torch.stack([lower, upper]), intensity.quantile([0.05, 0.95]))


def test_the_intensity_is_per_unit_of_exposure():
    x, y = inputs(6), targets("poisson", 6)
    plain, exposed = (posterior_of(tg.GP(x, y, fixed_kernel(), tg.likelihoods.Poisson(exposure=e))).predict(X) for e in (1.0, 0.25))
    torch.testing.assert_close(plain.intensity.mean, exposed.intensity.mean)
    torch.testing.assert_close(plain.mean, 4 * exposed.mean)


def test_quantiles_of_extreme_mixtures():
    """Components of no width, of no weight, and a gap between two."""
    mean = torch.tensor([[-5.0, 0.0], [5.0, 1e6]], dtype=torch.float64)
    variance = torch.tensor([[0.0, 1.0], [1e-8, 1.0]], dtype=torch.float64)
    level = torch.tensor(0.75, dtype=torch.float64)
    found = normal_mixture_quantile(mean, variance, torch.tensor([0.5, 0.5]).double(), level)
    assert float(found[0]) == pytest.approx(5.0, abs=1e-8) and float(found[1]) == pytest.approx(1e6)
    found = normal_mixture_quantile(mean, variance, torch.tensor([1.0, 0.0]).double(), level)
    torch.testing.assert_close(found, torch.tensor([-5.0, scipy.stats.norm.ppf(0.75)], dtype=torch.float64))


@pytest.mark.statistical
def test_quantiles_of_a_continuous_response_have_their_probability():
    posterior = posterior_of(gp("gaussian"), WEIGHTS)
    mean, variance = moments(posterior)
    total = variance + posterior.samples["likelihood.noise_covar.noise"].reshape(-1, 1)
    prediction, size = posterior.predict(X), 20_000
    for level in (0.025, 0.5, 0.9):
        found = below(mean, total, prediction.quantile(level))
        # Order statistics: a Beta distribution, all but normal here; eight errors are beyond any false alarm.
        assert float((found - level).abs().max()) < 8 * math.sqrt(level * (1 - level) / size)
        ignored = torch.full((10,), 0.1, dtype=torch.float64) @ torch.special.ndtr(
            (prediction.quantile(level) - mean) / total.sqrt()
        )
        assert float((ignored - level).abs().max()) > 8 * math.sqrt(level * (1 - level) / size)
    lower, upper = prediction.interval(0.8)
    assert torch.equal(torch.stack([lower, upper]), prediction.quantile([0.1, 0.9]))
    assert bool((prediction.quantile([0.1, 0.5, 0.9]).diff(dim=0) > 0).all())


def test_quantiles_of_counts_are_counts():
    prediction = posterior_of(gp("poisson"), WEIGHTS).predict(X)
    found = prediction.quantile([0.05, 0.5, 0.95])
    assert found.shape == (3, 3) and torch.equal(found, found.round())
    counts = torch.arange(60.0, dtype=torch.float64)
    cdf = torch.stack([prediction.log_prob(count.expand(3)).exp() for count in counts]).cumsum(0)
    for level, row in zip((0.05, 0.5, 0.95), found, strict=True):
        at = cdf.gather(0, row.long()[None])[0]
        before = torch.where(row > 0, cdf.gather(0, (row.long() - 1).clamp_min(0)[None])[0], 0.0)
        assert bool((at > level - 0.012).all()) and bool((before < level + 0.012).all())
    parts = posterior_of(gp("poisson"), WEIGHTS).predict(X, test_chunk=2)
    assert float((parts.quantile(0.5) - prediction.quantile(0.5)).abs().max()) <= 1


def test_levels_have_quantiles_and_classes_have_none():
    assert posterior_of(gp("ordinal")).predict(X).quantile(0.5).shape == (3,)
    with pytest.raises(ValueError, match="Softmax has classes without an order"):
        posterior_of(gp("softmax")).predict(X).quantile(0.5)
    prediction = posterior_of(gp("gaussian")).predict(X)
    with pytest.raises(ValueError, match=r"Gaussian has no intensity. Expected a likelihood of counts"):
        _ = prediction.intensity
    for q in (0.0, 1.0, [0.5, 1.5], [[0.5]]):
        with pytest.raises(ValueError, match="Expected levels above 0 and below 1"):
            prediction.quantile(q)
    with pytest.raises(ValueError, match=r"level is 95. Expected a probability above 0 and below 1"):
        prediction.interval(95)


@pytest.mark.statistical
@pytest.mark.parametrize("make", [gp, sparse_gp])
def test_joint_draws_have_the_covariances_between_test_points(make):
    """E y_1 y_2 has the covariance of f within a draw in it, which independent draws lack; means stay."""
    posterior = posterior_of(make("gaussian"), WEIGHTS)
    model, x = posterior.model, inputs(2, seed=9) * 0.05 + 1.5  # neighbours, away from the data
    product = 0.0
    for share, theta, v in zip(SHARES, posterior.theta.flatten(0, 1), posterior.whitened.flatten(0, 1), strict=True):
        prior = model.prior(theta[None])
        across = model.cross(prior, x).covariance[0]
        left = model.covariance.bind(x, x)(prior.values["kernel"])[0] - across.mT @ torch.linalg.solve(prior.covariance[0], across)
        mean = model.marginals(model.at(prior, x), v[None]).mean[0, 0]
        product = product + share * (left[0, 1] + mean[0] * mean[1])
    prediction = posterior.predict(x)
    together, alone = (prediction.sample(40_000, seed=1, joint=joint) for joint in (True, False))
    assert worst_excess(together.prod(1, keepdim=True), product) < 1
    assert worst_excess(alone.prod(1, keepdim=True), product) > 1
    assert worst_excess(together, prediction.mean) < 1


@pytest.mark.parametrize("name", ["softmax", "ordinal", "poisson", "beta"])
def test_joint_draws_of_every_kind_of_response(name):
    prediction = posterior_of(gp(name)).predict(X)
    draws = prediction.sample(50, joint=True)
    assert draws.shape == (50, 3) and bool(torch.isfinite(draws).all())
    assert torch.equal(draws, prediction.sample(50, joint=True))


def test_joint_draws_without_noise_repeat_at_coinciding_test_points():
    """Up to the jitter, which each point has of its own."""
    model = tg.GP(inputs(3), targets("gaussian", 3), fixed_kernel(), tg.likelihoods.Gaussian().requires_grad_(False))
    posterior = posterior_of(model)
    model = posterior.model
    model.likelihood.noise_covar.raw_noise.data.fill_(-30.0)
    model.refresh()
    x = inputs(1, seed=9).expand(2, 2)
    joint, alone = (posterior.predict(x).sample(200, joint=which).diff(dim=1).abs().max() for which in (True, False))
    assert float(joint) < 0.1 < float(alone)


def test_the_covariance_is_factorised_once_for_a_draw_that_is_chosen_often(monkeypatch):
    counts = []
    weights = torch.full((2, 5), -1000.0, dtype=torch.float64)
    weights[0, 3] = 0.0
    posterior = posterior_of(gp("gaussian"), weights)
    original = posterior.model.predict_jointly
    monkeypatch.setattr(posterior.model, "predict_jointly", lambda prior, v, x: counts.append(len(v)) or original(prior, v, x))
    posterior.predict(X).sample(500, joint=True)
    assert counts == [1]


def test_predictions_of_marginals_alone_say_so():
    model = gp("probit")
    prediction = tg.approximations.predict(model, torch.zeros(1, model.layout.size).double(), tg.Laplace(), X)
    with pytest.raises(ValueError, match="knows each test point alone"):
        prediction.sample(joint=True)


@pytest.mark.parametrize(
    ("likelihood", "offered"),
    [
        ("probit", "probs, mean, variance, quantile(q), interval(level), log_prob(y), sample(n), latent_mean, latent_variance"),
        ("softmax", "probs, mean, variance, log_prob(y), sample(n), latent_mean, latent_variance"),
        (
            "poisson",
            "mean, variance, quantile(q), interval(level), log_prob(y), sample(n), latent_mean, latent_variance, intensity",
        ),
    ],
)
def test_a_prediction_says_what_it_has(likelihood, offered):
    prediction = posterior_of(gp(likelihood)).predict(X)
    assert repr(prediction) == f"Prediction(3 test points: {offered})"
    for name in offered.replace("(q)", "").replace("(level)", "").replace("(y)", "").replace("(n)", "").split(", "):
        assert getattr(prediction, name) is not None
    assert repr(posterior_of(gp(likelihood)).predict(X[:1])).startswith("Prediction(1 test point: ")
