"""Probit classification by orthant integrals: evidence, test probabilities and latents against quadrature and known limits."""

import math

import gpytorch
import numpy as np
import pytest
import scipy.special
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, generator, gp, inputs, kernel, targets
from tests.speed import quick
from torchgpmc.evidence import Orthant, classify, exact_latents
from torchgpmc.evidence.orthants import probit_problem
from torchgpmc.orthant import Count, Sequential
from torchgpmc.orthant.matching import matched_sites, sites_beside_noise

NO_THETA = torch.zeros(1, 0, dtype=torch.float64)


def fixed_gp(x, y, base, **options):
    return tg.GP(x, y, base, tg.likelihoods.Bernoulli(), **options)


def two_points(**options):
    return fixed_gp(inputs(2, 1), torch.tensor([1.0, 0.0]), fixed_kernel(), **options)


def quadrature(model, function):
    """The integral of p(y | v) N(v) function(v), and of function times that over it, for two data."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    v = torch.as_tensor(np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1)).reshape(-1, 2)
    mass = torch.as_tensor(np.outer(weights, weights).ravel() / (2 * math.pi))
    prior = model.prior(NO_THETA.expand(len(v), 0))
    mass = mass * model.log_likelihood(model.at(prior), v).exp()
    return float(mass.sum()), (mass.unsqueeze(-1) * function(v)).sum(0)


def moments(v):
    return torch.cat([v, v.square(), v[:, :1] * v[:, 1:]], -1)


def mean_of(value):
    mean = gpytorch.means.ConstantMean().requires_grad_(False)
    mean.constant = value
    return mean


@pytest.mark.statistical
@pytest.mark.parametrize("mean", quick([None], [None, 0.7]))
def test_estimates_are_unbiased_and_their_draws_exact(mean):
    assert estimate_excess(mean) < 1


@pytest.mark.slow
def test_kept_draws_that_ignore_the_labels_are_caught(monkeypatch):
    latents_without_labels(monkeypatch)
    assert estimate_excess(0.7) > 1


def estimate_excess(mean):
    """E[estimate] = p(y) and E[estimate g(kept draw)] = the integral of p(y | v) p(v) g(v), with two points an estimate."""
    model = two_points(mean=None if mean is None else mean_of(mean))
    evidence, expected = quadrature(model, moments)
    found = Orthant(num_points=2).estimator(model).draw(NO_THETA.expand(40_000, 0), generator())
    values = torch.cat([torch.ones(len(found.value), 1), moments(found.whitened)], -1) * found.value.exp().unsqueeze(-1)
    return worst_excess(values, torch.cat([torch.tensor([evidence]), expected]))


@pytest.mark.statistical
def test_exact_latents_have_the_posterior_moments():
    model = two_points(mean=mean_of(-0.4))
    evidence, expected = quadrature(model, moments)
    found = exact_latents(model, NO_THETA, 50_000, generator())
    assert bool(found.exact) and 0.1 < float(found.acceptance_rate) <= 1
    assert worst_excess(moments(found.whitened), expected / evidence) < 1


def unmatched(model, theta):
    """How far sites made of EP's are from the limits' own."""
    prior = model.prior(theta)
    found = probit_problem(model, prior)
    matched = matched_sites(found.problem, 1e-8)
    near = tg.EP(tolerance=1e-8).importance_density(model, prior)
    made = sites_beside_noise(found.problem, found.sign * near.alpha, near.precision)
    return max(float((a - b).abs().max()) for a, b in zip(made, matched, strict=True))


def test_the_sites_that_guide_estimates_are_those_matched_to_the_limits():
    model = fixed_gp(inputs(12), targets("probit", 12), kernel(), mean=mean_of(-0.7))
    assert unmatched(model, model.layout.starting_points(5, generator())) < 1e-5


def test_estimates_go_on_from_sites_at_nearby_thetas():
    # Of 450 labels a theta's sites, anew and in double precision, took two thirds of an estimate's time.
    model = fixed_gp(inputs(30), targets("probit", 30), kernel())
    theta = model.layout.starting_points(5, generator()) + 3.0  # outputscales so large that sites take sweeps
    estimator = Orthant(num_points=64).estimator(model)
    anew = estimator.draw(theta, generator())
    nearby = estimator.draw(theta, generator(), estimator.start_at(theta))
    assert float(nearby.num_factorizations.sum()) < float(anew.num_factorizations.sum())
    assert float((nearby.value - anew.value).abs().max()) < 0.1


def latents_without_labels(monkeypatch):
    import torchgpmc.evidence.orthants as orthants

    monkeypatch.setattr(orthants, "_latents_given", lambda prior, found, t, first, second: first)


def test_latents_that_ignore_the_labels_are_caught(monkeypatch):
    latents_without_labels(monkeypatch)
    model = two_points()
    evidence, expected = quadrature(model, moments)
    assert worst_excess(moments(exact_latents(model, NO_THETA, 50_000, generator()).whitened), expected / evidence) > 1


def linear_problem(num_data=60, seed=0):
    """Paper B's experiment 2: one feature, two normal classes, the kernel x x'."""
    random = generator(seed)
    y = (torch.arange(num_data) % 2).double()
    x = torch.randn(num_data, generator=random, dtype=torch.float64) * (0.5 + 0.25 * y) + 0.8 * y
    base = LinearKernel()
    base.variance = 1.0
    return fixed_gp(x, y, base.requires_grad_(False), jitter=1e-9), x, y


@pytest.mark.slow
def test_the_linear_kernel_has_its_one_dimensional_integrals():
    """Eq. 66: evidence and class probabilities of the linear classifier."""
    model, x, y = linear_problem()
    tests = torch.linspace(-2, 3, 7, dtype=torch.float64)
    u = np.linspace(-12, 12, 20001)
    log_joint = -0.5 * u * u - 0.5 * math.log(2 * math.pi)
    log_joint += scipy.special.log_ndtr(np.outer(u, ((2 * y - 1) * x).numpy())).sum(1)
    weights = np.exp(log_joint - log_joint.max())
    expected = (scipy.special.ndtr(np.outer(tests.numpy(), u)) * weights).sum(1) / weights.sum()
    truth = scipy.special.logsumexp(log_joint) + math.log(u[1] - u[0])
    for method, wrong_log, wrong in ((None, 2e-3, 5e-4), (Sequential(), 0.1, 0.02), (Sequential(Count.SOFT), 0.3, 0.05)):
        found = classify(model, NO_THETA, num_points=2**13, method=method)
        assert float(found.log_evidence) == pytest.approx(truth, abs=wrong_log)
        np.testing.assert_allclose(found.probabilities(tests)[0].numpy(), expected, atol=wrong)


def test_a_test_point_is_one_more_dimension_of_the_integral():
    """Eq. 28: the probability is a ratio of orthant integrals; one set of points serves every test point."""
    model = gp("probit", num_data=6)
    theta = model.layout.sample_prior(2, generator())
    x = inputs(4, seed=9)
    found = classify(model, theta, num_points=2**13)
    together = found.probabilities(x)
    torch.testing.assert_close(together[:, 2:3], found.probabilities(x[2:3]))
    larger = tg.GP(torch.cat([model.train_x, x[:1]]), torch.cat([model.train_y, torch.ones(1)]), model.kernel, model.likelihood)
    with_point = classify(larger, theta, num_points=2**13)
    torch.testing.assert_close((with_point.log_evidence - found.log_evidence).exp(), together[:, 0], rtol=2e-3, atol=1e-3)


def rbf(lengthscale, outputscale):
    result = ScaleKernel(RBFKernel())
    result.base_kernel.lengthscale, result.outputscale = lengthscale, outputscale
    return result.requires_grad_(False)


@pytest.mark.parametrize(("lengthscale", "outputscale"), [(1.0, 1e-10), (1e-4, 2.0)])
def test_independent_latents_make_every_label_a_coin(lengthscale, outputscale):
    """Section 3.3: for beta to 0 or alpha to 0, L = 2^-N and every probability is a half."""
    x, y = inputs(12), (torch.arange(12) % 3 == 0).double()
    found = classify(fixed_gp(x, y, rbf(lengthscale, outputscale), jitter=1e-12), NO_THETA, num_points=64)
    assert float(found.log_evidence) == pytest.approx(-12 * math.log(2), abs=1e-4)
    np.testing.assert_allclose(found.probabilities(inputs(3, seed=8))[0].numpy(), 0.5, atol=1e-4)


def test_one_common_latent_counts_labels():
    """Eq. 31: for alpha to infinity the probability depends on the counts of the classes alone."""
    beta, counts = 2.0, (8, 4)
    x, y = inputs(12), (torch.arange(12) < counts[0]).double()[torch.randperm(12, generator=generator())]
    u = np.linspace(-10, 10, 20001)
    p = scipy.special.ndtr(math.sqrt(beta) * u)
    mass = np.exp(-0.5 * u * u) * p ** counts[0] * (1 - p) ** counts[1]
    found = classify(fixed_gp(x, y, rbf(1e4, beta), jitter=1e-9), NO_THETA, num_points=2**13)
    np.testing.assert_allclose(found.probabilities(inputs(3, seed=8))[0].numpy(), (mass * p).sum() / mass.sum(), atol=1e-3)


@pytest.mark.slow
def test_fitting_by_orthants_agrees_with_expectation_propagation():
    x = inputs(20, 1, seed=3)
    model = tg.GP(x, (torch.sin(8 * x[:, 0]) > 0).double(), kernel(1), tg.likelihoods.Bernoulli())
    fitted = [tg.fit(model, how, maximum_a_posteriori=True, num_starts=1) for how in (tg.EP(), Orthant(num_points=1024))]
    first, second = (torch.cat([p.detach().flatten() for p in made.kernel.parameters()]) for made in fitted)
    torch.testing.assert_close(first, second, rtol=0.02, atol=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of the short slice chains
def test_fixed_hyperparameters_give_exact_draws_through_sample():
    x = inputs(20, 1, seed=3)
    model = fixed_gp(x, (torch.sin(8 * x[:, 0]) > 0).double(), fixed_kernel())
    posterior = tg.sample(model, tg.OrthantGPC(), num_samples=4000, seed=1, progress=False)
    assert posterior.log_weights is None and posterior.latents.shape == (1, 4000, 20)
    other = tg.sample(model, tg.EllipticalSlice(), num_samples=400, warmup_steps=100, num_chains=64, seed=1, progress=False)
    torch.testing.assert_close(posterior.latents.mean((0, 1)), other.latents.mean((0, 1)), atol=0.15, rtol=0)
    found = classify(model, NO_THETA, num_points=2**13)
    tests = torch.linspace(0, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(posterior.predict(tests).probs, found.probabilities(tests)[0], atol=0.03, rtol=0)
    assert posterior.info["log_evidence"] == pytest.approx(float(found.log_evidence), abs=0.02)


@pytest.mark.parametrize("likelihood", ["logit", "poisson"])
def test_other_likelihoods_are_refused(likelihood):
    model = gp(likelihood)
    for attempt in (
        lambda: classify(model, model.layout.sample_prior(1, generator())),
        lambda: tg.sample(model, tg.OrthantGPC(), num_samples=10, progress=False),
        lambda: tg.sample(model, tg.AMIS(evidence=Orthant()), num_samples=10, progress=False),
    ):
        with pytest.raises(ValueError, match="is for probit classification"):
            attempt()


def test_mistakes_are_named():
    model = gp("probit")
    with pytest.raises(ValueError, match="num_points is 0"):
        tg.sample(model, tg.OrthantGPC(num_points=0), num_samples=10, progress=False)
    with pytest.raises(ValueError, match="num_chains is 2 with OrthantGPC"):
        tg.sample(two_points(), tg.OrthantGPC(), num_samples=10, num_chains=2, progress=False)
    with pytest.raises(TypeError, match=r"Expected options such as torchgpmc\.evidence\.Orthant"):
        tg.sample(model, tg.PseudoMarginal(evidence="orthant"), num_samples=10, progress=False)
    with pytest.raises(ValueError, match="evidence cannot be combined with latent_steps"):
        tg.sample(model, tg.PseudoMarginal(evidence=Orthant(), latent_steps=1), num_samples=10, progress=False)
