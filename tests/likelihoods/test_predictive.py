"""Predictive densities and probabilities against dense rules that know where each likelihood is narrow."""

import math
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan

import torchgpmc as tg
from tests.problems import inputs, kernel
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.likelihoods.softmax import _LATTICE, log_probabilities_of_normals
from torchgpmc.numerics import quadrature
from torchgpmc.numerics.bump import log_integral_of_bump
from torchgpmc.prediction import Prediction

MEANS = torch.tensor([-10.0, -3.0, -0.4, 0.0, 1.0, 5.0], dtype=torch.float64)
VARIANCES = torch.tensor([1e-4, 0.01, 1.0, 4.0, 25.0, 400.0], dtype=torch.float64)


def student_t(scale, degrees):
    likelihood = tg.likelihoods.StudentT(deg_free_constraint=GreaterThan(1.0), noise_constraint=GreaterThan(1e-9)).double()
    likelihood.noise, likelihood.deg_free = scale**2, degrees
    return likelihood.requires_grad_(False)


def foreign(made, **parameters):
    for name, value in parameters.items():
        setattr(made, name, value)
    return made.double().requires_grad_(False)


def gaussian(noise):
    made = tg.likelihoods.Gaussian(noise_constraint=GreaterThan(1e-9)).double()
    made.noise = noise
    return made.requires_grad_(False)


def beta(scale):
    made = tg.likelihoods.Beta().double()
    made.scale = scale
    return made.requires_grad_(False)


def negative_binomial(dispersion):
    made = tg.likelihoods.NegativeBinomial().double()
    made.dispersion = dispersion
    return made.requires_grad_(False)


def ordinal(gap):
    made = tg.likelihoods.Ordinal(num_levels=4).double()
    made.initialize(first_cut=0.3)
    made.gaps = gap
    return made.requires_grad_(False)


class Noise(gpytorch.likelihoods.Likelihood):
    """A user's Gaussian noise of sd 0.003: forward alone."""

    def forward(self, function_samples):
        return torch.distributions.Normal(function_samples, 0.003)


# Likelihood, targets, and where each is narrow and how narrow.
CASES = {
    "probit": (tg.likelihoods.Bernoulli(), [0.0, 1.0], lambda y: (0.0, 1.0)),
    "logit": (tg.likelihoods.Bernoulli("logit"), [0.0, 1.0], lambda y: (0.0, 1.0)),
    "gaussian": (gaussian(1e-4), [0.0, 3.0], lambda y: (y, 0.01)),
    "poisson": (tg.likelihoods.Poisson(), [0.0, 1.0, 30.0, 1100.0, 10000.0], lambda y: (math.log(y + 0.5), (1 + y) ** -0.5)),
    "laplace": (foreign(tg.likelihoods.LaplaceNoise(), noise=0.01), [0.0, 3.0], lambda y: (y, 0.01)),
    "foreign laplace": (foreign(gpytorch.likelihoods.LaplaceLikelihood(), noise=0.01), [0.0, 3.0], lambda y: (y, 0.01)),
    "noise": (Noise(), [0.0, 3.0], lambda y: (y, 0.003)),
    "poisson, exposed": (
        tg.likelihoods.Poisson(exposure=0.02),
        [0.0, 5.0],
        lambda y: (math.log((y + 0.5) / 0.02), (1 + y) ** -0.5),
    ),
}
for scale in (1.0, 30.0, 3000.0):
    CASES[f"beta-{scale}"] = (
        beta(scale),
        [0.1, 0.7, 1 - 1e-6],
        lambda y, s=scale: (math.log(y / (1 - y)), 1 / (1 + s * y * (1 - y)) ** 0.5),
    )
for dispersion in (0.001, 0.5, 20.0):
    CASES[f"negative binomial-{dispersion}"] = (
        negative_binomial(dispersion),
        [0.0, 3.0, 1100.0],
        lambda y, a=dispersion: (math.log(y + 0.5), (1 / (1 + y) + a) ** 0.5),
    )
for gap in (1e-3, 0.5, 3.0, 30.0):
    CASES[f"ordinal-{gap}"] = ordinal(gap), [0.0, 1.0, 3.0], lambda y, gap=gap: (0.3 + gap * min(y, 2.0), 1.0)
for scale in (1.0, 0.05, 0.01, 1e-4):
    for degrees in (1.1, 4.0, 50.0):
        CASES[f"student_t-{scale}-{degrees}"] = student_t(scale, degrees), [0.0, 3.0, -20.0], lambda y, scale=scale: (y, scale)


def dense_log_integral(log_function, mean, variance, centre, scale):
    """Ten Gauss-Legendre nodes on each of 4500 panels: even ones, and others in geometric progression about the likelihood."""
    edges = np.unique(
        np.concatenate(
            [
                mean + variance**0.5 * np.linspace(-400, 400, 1001),
                mean + variance**0.5 * np.linspace(-20, 20, 501),
                centre + scale * np.sinh(np.linspace(-16, 16, 1001)),
                np.linspace(mean, centre, 2001),
            ]
        )
    )
    nodes, weights = np.polynomial.legendre.leggauss(10)
    widths = np.diff(edges)[:, None]
    points, weights = edges[:-1, None] + widths * (nodes + 1) / 2, widths * weights / 2
    at = torch.as_tensor(points.ravel())
    logs = log_function(at) - 0.5 * (at - mean) ** 2 / variance - 0.5 * math.log(2 * math.pi * variance)
    logs = torch.where(logs.isnan(), -torch.inf, logs) + torch.as_tensor(weights.ravel()).log()
    return float(torch.logsumexp(logs, 0))


# Of these, cases whose rules others of the list try already: some seconds each.
REPEATS = (
    "poisson, exposed",
    "beta-1.0",
    "beta-3000.0",
    "negative binomial-0.001",
    "negative binomial-20.0",
    "ordinal-0.001",
    "ordinal-3.0",
)
QUICK = ("gaussian", "probit", "logit", "student_t-0.05-4.0", "beta-30.0", "negative binomial-0.5")
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in REPEATS else () if name in QUICK else pytest.mark.slow) for name in CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_predictive_log_prob_is_right_to_1e_6_however_narrow_the_likelihood(name):
    module, targets, narrow = CASES[name]
    likelihood = as_likelihood(module)
    means, variances = MEANS, VARIANCES
    if name.startswith(("beta", "negative", "ordinal")):
        means, variances = means[1::2], variances[[0, 2, 5]]
    if name == "poisson":
        means = torch.cat([means, torch.tensor([7.0, 9.0]).double()])
    mean, variance = torch.meshgrid(means, variances, indexing="ij")
    for y in targets:
        target = torch.tensor(y, dtype=torch.float64)
        with torch.no_grad():
            found = likelihood.predictive_log_prob(mean, variance, target)
        expected = torch.tensor(
            [
                dense_log_integral(lambda f, t=target: likelihood.pointwise_log_prob(f[None], t)[0], m, v, *narrow(y))
                for m, v in zip(mean.flatten().tolist(), variance.flatten().tolist(), strict=True)
            ],
            dtype=torch.float64,
        ).view(mean.shape)
        # Logarithms of many thousands nats have no sixth decimal.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "mean", "variance", "y", "expected"),
    [
        (student_t(0.05, 4.0), 0.0, 1.0, 0.0, -0.921),
        (student_t(0.01, 4.0), 0.0, 1.0, 0.0, -0.919),
        (tg.likelihoods.Poisson(), 7.0, 1.0, 1100.0, -7.92),
        (tg.likelihoods.Poisson(), 9.0, 1.0, 10000.0, -10.15),
        (tg.likelihoods.Bernoulli("logit"), 5.0, 400.0, 1.0, math.log(0.598)),
    ],
)
def test_narrow_likelihoods_that_were_wrong_by_nats(module, mean, variance, y, expected):
    mean, variance, y = (torch.tensor([[value]], dtype=torch.float64) for value in (mean, variance, y))
    found = module.predictive_log_prob(mean, variance, y[0])
    assert float(found) == pytest.approx(expected, abs=6e-3)


@pytest.mark.parametrize("variance", [0.01, 0.1, 0.2, 1.0])
def test_counts_far_from_their_mean(variance):
    """In double precision: a variance of 0.1 rounded to single moves the density by 1.1e-6, more than the rule may err."""
    target = torch.tensor(50.0, dtype=torch.float64)
    likelihood = tg.likelihoods.Poisson()
    mean, spread = (torch.tensor([[value]], dtype=torch.float64) for value in (-1.5, variance))
    expected = dense_log_integral(
        lambda f: likelihood.pointwise_log_prob(f[None], target)[0], -1.5, variance, math.log(50.5), 51**-0.5
    )
    assert float(likelihood.predictive_log_prob(mean, spread, target[None])) == pytest.approx(expected, rel=1e-12, abs=1e-9)


def prediction_of(likelihood, mean, variance):
    """A prediction from one draw with these marginals of f, ``(K, T)``."""
    model = tg.GP(inputs(3), torch.tensor([0.0, 1.0, 1.0]), kernel(), likelihood)
    points = mean.shape[-1]
    return Prediction(model, lambda _: lambda _: (mean[None], variance[None]), points, points, 1, {}, torch.zeros(1).double())


def test_probs_and_log_prob_of_the_logit_are_one_number():
    mean, variance = (part.reshape(1, -1) for part in torch.meshgrid(MEANS, VARIANCES, indexing="ij"))
    prediction = prediction_of(tg.likelihoods.Bernoulli("logit"), mean, variance)
    ones = prediction.log_prob(torch.ones(mean.shape[1]))
    zeros = prediction.log_prob(torch.zeros(mean.shape[1]))
    torch.testing.assert_close(prediction.probs.log(), ones, rtol=0, atol=1e-6)
    torch.testing.assert_close((1 - prediction.probs).log(), zeros, rtol=1e-6, atol=1e-6)


def dense_softmax(mean, variance):
    """Log of E softmax by a product of trapezoid rules."""
    grids = [torch.arange(-11, 11, min(0.4, 0.4 / v**0.5), dtype=torch.float64) for v in variance.tolist()]
    mesh = torch.stack(torch.meshgrid(*grids, indexing="ij"), -1).flatten(0, -2)
    weights = -0.5 * mesh.square().sum(-1, keepdim=True)
    logs = torch.log_softmax(mean + variance.sqrt() * mesh, -1)
    return torch.logsumexp(logs + weights, 0) - torch.logsumexp(weights, 0)


SOFTMAX = [
    ([0.0, 0.0, 0.0], [0.01, 0.01, 0.01]),
    ([10.0, 0.0, 0.0], [4.0, 4.0, 4.0]),
    ([10.0, 0.0, 1.0], [0.3, 0.5, 0.2]),
    ([-3.0, 2.0, 5.0], [1.0, 0.7, 0.6]),
    ([3.0, -2.0, 0.0], [9.0, 0.04, 1.0]),
    ([0.0, 15.0], [25.0, 0.25]),
    ([0.0, 0.0], [100.0, 1e-4]),
    ([1.0, 30.0], [9.0, 5.0]),
    ([20.0, 0.0], [1.0, 1.0]),
]


@pytest.mark.parametrize(("mean", "variance"), SOFTMAX)
def test_softmax_probabilities_and_log_prob_are_right_to_1e_6(mean, variance):
    mean, variance = torch.tensor(mean).double(), torch.tensor(variance).double()
    expected = dense_softmax(mean, variance)
    likelihood = tg.likelihoods.Softmax(num_classes=len(mean), mixing_weights=False)
    prediction = prediction_of(likelihood, mean[:, None], variance[:, None])
    logs = torch.cat([prediction.log_prob(torch.tensor([float(k)])) for k in range(len(mean))])
    torch.testing.assert_close(logs, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(prediction.probs[0].log(), logs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("deviation", [0.1, 0.5, 0.7, 1.0, 2.0, 5.0, 12.0, 40.0])
def test_softmax_of_two_normals_is_the_logistic_function_of_one_whatever_its_width(deviation):
    """The wider they are the coarser the lattice; a step too long by a tenth shows."""
    means = deviation * torch.linspace(-3, 3, 7, dtype=torch.float64)
    mean = torch.stack([means, torch.zeros_like(means)], -1)
    variance = torch.tensor([1.0, 0.6]).double() * deviation**2
    found = log_probabilities_of_normals(mean, variance.expand_as(mean))
    width = 1.6**0.5 * deviation
    grid = torch.arange(-11, 11, min(0.1, 0.1 / width), dtype=torch.float64)
    weights = torch.log_softmax(-0.5 * grid.square(), 0)
    signs = torch.tensor([[1.0], [-1.0]]).double()
    at_nodes = torch.nn.functional.logsigmoid(signs * (means[:, None, None] + width * grid))
    torch.testing.assert_close(found, torch.logsumexp(at_nodes + weights, -1), rtol=0, atol=2.5e-7)


def test_softmax_of_a_class_that_is_all_but_impossible_is_right_beside_others():
    """Products of distribution functions must not underflow where they matter."""
    mean = torch.tensor([[0.0, -290.0, 0.0, 0.0], [0.0, -3.0, -270.0, -280.0]]).double()
    found = log_probabilities_of_normals(mean, torch.full_like(mean, 1e-8))
    torch.testing.assert_close(found, torch.log_softmax(mean, -1), rtol=0, atol=1e-6)


def test_wide_normals_take_no_more_lattice_points_than_narrow_ones():
    """Predictions of separable classes took ten times as long as others, with lattices that grew with the normals."""
    points = [len(_LATTICE.sums(torch.zeros(1, 3), torch.full((1, 3), s**2))[0]) for s in (0.3, 12.0)]
    assert points[1] <= points[0]


@pytest.mark.parametrize(("arguments", "match"), [((), r"num_classes is None\. "), ((2,), r"Softmax\(num_classes=2\)")])
def test_softmax_without_a_number_of_classes_says_how_to_name_it(arguments, match):
    with pytest.raises(ValueError, match=match):
        tg.likelihoods.Softmax(*arguments)


def test_softmax_with_mixing_weights_serves_both_from_the_same_points():
    likelihood = tg.likelihoods.Softmax(num_features=2, num_classes=3).double()
    torch.nn.init.normal_(likelihood.mixing_weights, generator=torch.Generator().manual_seed(0))
    mean, variance = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[0.5, 1.0]]).double()
    logs = torch.cat([likelihood.predictive_log_prob(mean, variance, torch.tensor([float(k)])) for k in range(3)])
    torch.testing.assert_close(likelihood.response_moments(mean, variance).mean[0].log(), logs)
    grid = torch.arange(-9, 9, 0.1, dtype=torch.float64)
    mesh = torch.cartesian_prod(grid, grid)
    weights = torch.softmax(-0.5 * mesh.square().sum(-1), 0)
    expected = weights @ torch.softmax((mean + variance.sqrt() * mesh) @ likelihood.mixing_weights.mT, -1)
    torch.testing.assert_close(logs, expected.log(), rtol=0, atol=2e-3)


class Wavy(tg.likelihoods.Factorised, gpytorch.likelihoods.Likelihood):
    """No rule follows this."""

    def pointwise_log_prob(self, f, targets):
        return 5 * torch.sin(1e5 * f)


def test_an_integral_that_does_not_settle_is_a_warning():
    zero = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="did not settle"):
        Wavy().predictive_log_prob(zero, zero + 1, zero[0])


@pytest.mark.slow
def test_predictive_log_prob_has_the_right_gradients():
    mean, variance = MEANS[None, 2:].clone().requires_grad_(True), VARIANCES[None, 1:5].clone().requires_grad_(True)
    likelihood, y = student_t(0.3, 4.0), torch.tensor(0.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m, v: likelihood.predictive_log_prob(m, v, y), (mean, variance))
    classes = tg.likelihoods.Softmax(num_classes=4, mixing_weights=False)
    assert torch.autograd.gradcheck(lambda m, v: classes.predictive_log_prob(m, v, torch.ones(1)), (mean, variance), atol=1e-6)


class Sigmoid(gpytorch.likelihoods.Likelihood):
    """A user's classifier: forward alone."""

    def forward(self, function_samples):
        return torch.distributions.Bernoulli(logits=function_samples)


def test_response_moments_of_a_foreign_likelihood_are_right_for_wide_latents():
    mean, variance = torch.tensor([[5.0, 0.5]]).double(), torch.tensor([[400.0, 1.0]]).double()
    found = as_likelihood(Sigmoid()).response_moments(mean, variance)
    probability = tg.likelihoods.Bernoulli("logit").predictive_log_prob(mean, variance, torch.ones(2).double()).exp()
    torch.testing.assert_close(found.mean, probability, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance, probability * (1 - probability), rtol=1e-6, atol=0)


class Heteroscedastic(gpytorch.likelihoods.Likelihood):
    """A user's likelihood of two latents, mean and log scale: forward alone."""

    num_latents = 2

    def forward(self, function_samples):
        return torch.distributions.Normal(function_samples[..., 0], function_samples[..., 1].exp())


class OwnHeteroscedastic(tg.likelihoods.Factorised, Heteroscedastic):
    num_latents = 2
    forward = Heteroscedastic.forward


@pytest.mark.parametrize("made", [Heteroscedastic, OwnHeteroscedastic])
def test_a_likelihood_of_two_latents_with_forward_alone_gets_nodes_over_both(made):
    x, y = inputs(6), torch.linspace(-1, 1, 6, dtype=torch.float64)
    sparse = tg.SparseGP(x, y, kernel(), made(), inducing_points=inputs(3, seed=7))
    prior = sparse.prior(torch.zeros(2, sparse.layout.size, dtype=torch.float64))
    v = torch.randn(2, sparse.latent_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at = sparse.at(prior)
    mean, variance = (moment.mT for moment in sparse.marginals(at, v))
    expected = -0.5 * math.log(2 * math.pi) - mean[..., 1]
    expected -= 0.5 * ((y - mean[..., 0]).square() + variance[..., 0]) * torch.exp(2 * variance[..., 1] - 2 * mean[..., 1])
    torch.testing.assert_close(sparse.log_likelihood(at, v), expected.sum(-1), rtol=1e-6, atol=0)

    model = tg.GP(x, y, kernel(), made())
    marginals = torch.tensor([[[0.2], [-0.5]], [[0.4], [0.3]]], dtype=torch.float64)
    whole = tuple(marginal[None] for marginal in marginals)
    points = whole[0].shape[-1]
    prediction = Prediction(model, lambda _: lambda _: whole, points, points, 1, {}, torch.zeros(1).double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = prediction.log_prob(torch.tensor([0.7]).double())
    grid = torch.arange(-9, 9, 0.05, dtype=torch.float64)
    mesh = torch.cartesian_prod(grid, grid)
    f = marginals[0].T + marginals[1].T.sqrt() * mesh
    weights = torch.log_softmax(-0.5 * mesh.square().sum(-1), 0)
    truth = torch.logsumexp(weights + torch.distributions.Normal(f[:, 0], f[:, 1].exp()).log_prob(torch.tensor(0.7)), 0)
    assert float(found) == pytest.approx(float(truth), abs=5e-3)
    assert float(prediction.mean) == pytest.approx(0.2, abs=1e-9)
    assert float(prediction.variance) == pytest.approx(0.4 + math.exp(-1.0 + 0.6), rel=1e-6)


def test_a_density_of_several_latents_that_points_cannot_see_is_a_warning():
    likelihood = as_likelihood(Heteroscedastic())
    mean, variance = torch.tensor([[[0.0, -7.0]]]).double(), torch.tensor([[[1.0, 0.1]]]).double()
    with pytest.warns(UserWarning, match="standard error of up to"):
        likelihood.predictive_log_prob(mean, variance, torch.tensor([0.3]).double())


def test_two_humps_far_apart_of_similar_mass():
    """The mean's, of width 1, and that of a datum 15 deviations away, of width 1e-4."""
    zero = torch.zeros(1, dtype=torch.float64)
    floor, height = -118.0, 5.0

    def log_p(f):
        return torch.logaddexp(torch.full_like(f, floor), -0.5 * ((f - 15) / 1e-4).square() + height)

    found = quadrature.log_integral(log_p, zero, zero + 1, (zero + 15, zero + 1e-4))
    hump = height + math.log(1e-4) - 0.5 * 225 / (1 + 1e-8) - 0.5 * math.log1p(1e-8)
    assert abs(floor - hump) < 2
    assert float(found) == pytest.approx(np.logaddexp(floor, hump), abs=1e-6)


def test_a_kink_anywhere_costs_little():
    """Laplace noise beside its closed form, over normals with the kink anywhere between the nodes."""
    generator = torch.Generator().manual_seed(0)
    mean = 4 * torch.randn(1000, generator=generator, dtype=torch.float64)
    variance = (3 * torch.randn(1000, generator=generator, dtype=torch.float64)).exp()
    for noise in (0.1, 1.0):
        made = foreign(gpytorch.likelihoods.LaplaceLikelihood(), noise=noise)
        likelihood, b = as_likelihood(made), float(made.noise) ** 0.5  # a noise that was set passes through softplus
        found, deviation = likelihood.predictive_log_prob(mean, variance, mean.new_zeros(())), variance.sqrt()
        sides = [torch.special.log_ndtr((s * mean - variance / b) / deviation) - s * mean / b for s in (1, -1)]
        expected = variance / (2 * b**2) + torch.logaddexp(*sides) - math.log(2 * b)
        likely = expected > -40  # beyond, the closed form cancels
        errors = (found - expected)[likely].abs()
        assert float(errors.max()) < quadrature.PROMISED


@pytest.mark.parametrize("make", [tg.likelihoods.Poisson, lambda: negative_binomial(0.7), lambda: ordinal(0.4)])
def test_the_quick_rule_of_log_concave_likelihoods_is_the_adaptive_one(make):
    likelihood, y = make().double(), torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    mean, variance = torch.meshgrid(MEANS, VARIANCES, indexing="ij")
    with torch.no_grad():
        found = likelihood.predictive_log_prob(mean, variance, y)
        expected = quadrature.log_integral(lambda f: likelihood.pointwise_log_prob(f, y), mean, variance, likelihood._peak(y))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_quick_rule_knows_where_it_fails():
    """Widths that are wrong, a kink, and a bump beside which nothing was looked at."""
    zero, one = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    centre = torch.tensor([0.0, 0.0, 0.0, 30.0, 0.0], dtype=torch.float64)
    scale = torch.tensor([0.7, 1e-2, 50.0, 0.7, 0.7], dtype=torch.float64)
    rate = torch.tensor([1.0, 1.0, 1.0, 1.0, 20.0], dtype=torch.float64)

    def log_p(f):
        return torch.where(rate == 20, -rate * (f - 0.1).abs(), -0.5 * f.square())

    value, ok = log_integral_of_bump(log_p, zero, one, centre, scale)
    assert ok.tolist() == [True, False, False, False, False]
    assert float(value[0]) == pytest.approx(-0.5 * math.log(2))
