"""AMIS, MAMIS and GPRegression: against grids over theta, against one another, and what they promise."""

import functools
import math

import pytest
import torch

import torchgpmc as tg
from tests.approximations.reference import gaussian_evidence
from tests.problems import fixed_kernel, gp, gp_regression, inputs, kernel, sparse_gp, targets
from tests.speed import quick
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.diagnostics import complaints
from torchgpmc.diagnostics.summaries import summarise
from torchgpmc.parameters.normal_scale import NormalScale, OnNormalScale, normal_scale
from torchgpmc.runs.run import Settings

QUIET = {"seed": 1, "progress": False}


def small(likelihood):
    """Two hyperparameters."""
    x = inputs(10, 1, seed=3)
    y = {"probit": (torch.sin(8 * x[:, 0]) > 0).double(), "poisson": (2 + 2 * torch.sin(8 * x[:, 0])).round()}[likelihood]
    return tg.GP(x, y, kernel(1), {"probit": tg.likelihoods.Bernoulli(), "poisson": tg.likelihoods.Poisson()}[likelihood])


def regression():
    noise = tg.likelihoods.Gaussian()
    noise.noise = 0.1
    noise.requires_grad_(False)
    x = inputs(10, 1, seed=3)
    return tg.GPRegression(x, torch.sin(8 * x[:, 0]), kernel(1), noise)


MODELS = {"probit": lambda: small("probit"), "poisson": lambda: small("poisson"), "regression": regression}


@functools.cache
def grid_truth(name):
    """E theta, E theta^2 and the log evidence of one of ``MODELS`` by a dense grid over theta."""
    model = MODELS[name]()
    a, b = torch.linspace(-5.5, 4.5, 61, dtype=torch.float64), torch.linspace(-7, 4.5, 65, dtype=torch.float64)
    grid = torch.cartesian_prod(a, b)
    approximation = tg.approximations.Conjugate() if isinstance(model, tg.GPRegression) else tg.EP()
    estimator = tg.evidence.importance(model, approximation, num_importance=100)  # at each of thousands of points
    estimate = estimator.draw(grid, torch.Generator().manual_seed(0))
    log_density = model.layout.log_prior(grid) + estimate.value
    weights = torch.softmax(log_density, 0)
    evidence = torch.logsumexp(log_density, 0) + math.log((a[1] - a[0]) * (b[1] - b[0]))
    return torch.cat([weights @ grid, weights @ grid.square()]), float(evidence)


def weighted(posterior):
    weights = torch.softmax(posterior.log_weights.flatten(), 0)
    theta = posterior.theta[0]
    values = torch.cat([theta, theta.square()], -1)
    mean = weights @ values
    return mean, ((weights.unsqueeze(-1) * (values - mean)).square().sum(0)).sqrt()


# Normal proposals on the scale of logarithms are left out: they do not cover the long left tail of a log lengthscale, and their
# errors are larger than stated.
METHODS = {
    "AMIS": tg.AMIS(),
    "normal": tg.AMIS(degrees_of_freedom=None),
    "on logarithms": tg.AMIS(normal_scale=False, degrees_of_freedom=5),
    "one sample": tg.AMIS(num_importance=1),
    "64": tg.AMIS(num_importance=64),
    "EP": tg.AMIS(approximation=tg.EP(), num_importance=4),
    "MAMIS": tg.MAMIS(),
    "diagonal": tg.AMIS(diagonal=True),
    "tails": tg.AMIS(begin=tg.AtModes(search_tails=True), degrees_of_freedom=30),
    "modes may be left": tg.AMIS(begin=tg.AtModes(leave_for=tg.AtPrior())),
    "EP's modes, tails once they hold": tg.AMIS(
        begin=tg.AtModes(search_tails=True, leave_for=tg.AtPrior(), approximation=tg.EP(tolerance=0.02))
    ),
    "arms": tg.AMIS(begin=tg.AtPrior(arms=True)),
    "AMIS, then MAMIS": tg.AMIS(switch_to_modified_after=3),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("likelihood", MODELS)
def test_expectations_and_evidence_equal_a_grid(likelihood):
    model = MODELS[likelihood]()
    truth, evidence = grid_truth(likelihood)
    for name, method in METHODS.items():
        posterior = tg.sample(model, method, num_samples=6000, **QUIET)
        mean, error = weighted(posterior)
        assert float(((mean - truth).abs() / error).max()) < 5, name
        assert abs(posterior.info["log_evidence"] - evidence) < 5 * posterior.info["log_evidence_error"] + 1e-3, name
        assert posterior.info["log_evidence_error"] < 0.1, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("error", ["no Jacobian", "halved evidence"])
def test_a_wrong_weight_is_caught_by_the_grid(error, monkeypatch):
    model = small("probit")
    truth, _ = grid_truth("probit")
    theta, evaluate = NormalScale.theta, tg.evidence.ImportanceEstimator.evaluate
    if error == "no Jacobian":
        monkeypatch.setattr(NormalScale, "theta", lambda self, z: (theta(self, z)[0], z.new_zeros(len(z))))
    else:

        def halved(self, *args):
            found = evaluate(self, *args)
            return found._replace(value=0.5 * found.value)

        monkeypatch.setattr(tg.evidence.ImportanceEstimator, "evaluate", halved)
    mean, spread = weighted(tg.sample(model, tg.AMIS(), num_samples=6000, **QUIET))
    assert float(((mean - truth).abs() / spread).max()) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("likelihood", ["probit", "poisson"])
def test_latents_and_predictions_agree_with_pseudo_marginal_chains(likelihood):
    """The chains are held against NUTS in tests/statistical/test_agreement.py."""
    model, x = MODELS[likelihood](), inputs(4, 1, seed=9)
    found = tg.sample(model, tg.AMIS(), num_samples=8000, **QUIET)
    chains = tg.sample(model, tg.PseudoMarginal(), num_samples=250, warmup_steps=200, num_chains=64, **QUIET)
    torch.testing.assert_close(found.predict(x).latent_mean, chains.predict(x).latent_mean, atol=0.1, rtol=0)
    torch.testing.assert_close(found.predict(x).latent_variance, chains.predict(x).latent_variance, atol=0.15, rtol=0.15)
    weights = torch.softmax(found.log_weights[0], 0)
    torch.testing.assert_close(weights @ found.latents[0], chains.latents.mean((0, 1)), atol=0.1, rtol=0)


def test_the_conjugate_evidence_is_exact_with_its_gradient():
    model = gp_regression(num_data=7)
    theta = 0.5 * torch.randn(3, model.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta.requires_grad_(True)
    found = tg.approximations.Conjugate().evidence(model, model.prior(theta)).log_evidence
    torch.testing.assert_close(found.detach(), gaussian_evidence(model, theta.detach()), rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), theta)
    (expected,) = torch.autograd.grad(tg.approximations.laplace(model, theta).log_evidence.sum(), theta)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


@functools.cache
def noisy():
    """Three hyperparameters, the noise among them; with data that lie on a line, it would vanish."""
    x = inputs(10, 1, seed=3)
    y = torch.sin(8 * x[:, 0]) + 0.4 * torch.randn(10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return tg.GPRegression(x, y, kernel(1), gp("gaussian").likelihood)


@functools.cache
def by_prior_draws(num_draws=60_000):
    """Mean and variance of f at four inputs, and of y there, by plain algebra at prior draws that the exact evidence weighs."""
    model, x = noisy(), inputs(4, 1, seed=9)
    theta = model.layout.sample_prior(num_draws, torch.Generator().manual_seed(2))
    values = model.prior(theta).values
    within, cross = (model.covariance.bind(model.train_x, other)(values["kernel"]) for other in (model.train_x, x))
    noise = values["likelihood"]["noise_covar.raw_noise"].view(-1, 1)
    total = within + (noise + model.jitter).unsqueeze(-1) * torch.eye(10)
    log_evidence = torch.distributions.MultivariateNormal(torch.zeros(10).double(), total).log_prob(model.train_y)
    weights = torch.softmax(log_evidence, 0)
    assert 1 / weights.square().sum() > 2000
    gain = torch.linalg.solve(total, cross)
    mean = (gain.mT @ model.train_y).squeeze(-1)
    variance = model.covariance.diagonal(values["kernel"], x) - (gain * cross).sum(-2)
    expected = weights @ mean
    spread = weights @ (variance + (mean - expected).square())
    return expected, spread, spread + weights @ noise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("method", [tg.NUTS(), tg.PseudoMarginal(), tg.AMIS()])
def test_predictions_of_regression_equal_those_of_weighted_prior_draws(method):
    chains = {} if isinstance(method, tg.AMIS) else {"warmup_steps": 100, "num_chains": 64}
    # A Metropolis draw is worth a fifteenth of an independent one, and costs next to nothing here.
    count = {tg.AMIS: 8000, tg.PseudoMarginal: 750}.get(type(method), 75)
    found = tg.sample(noisy(), method, num_samples=count, **chains, **QUIET)
    assert found.info["target"].startswith("the exact posterior")
    prediction = found.predict(inputs(4, 1, seed=9))
    mean, spread, variance = by_prior_draws()
    torch.testing.assert_close(prediction.latent_mean, mean, atol=0.05, rtol=0.05)
    torch.testing.assert_close(prediction.latent_variance, spread, atol=0.01, rtol=0.1)
    torch.testing.assert_close(prediction.variance, variance, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("method", quick([tg.AMIS()], [tg.AMIS(), tg.MAMIS()]))
def test_mistakes_are_named(method):
    for options in ({"num_chains": 2}, {"warmup_steps": 5}, {"chain_chunk": 1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            tg.sample(gp("probit"), method, num_samples=20, **options, **QUIET)
    with pytest.raises(ValueError, match=r"StudentT.*NUTS"):
        tg.sample(sparse_gp("student_t"), method, num_samples=20, **QUIET)
    fixed = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), tg.likelihoods.Bernoulli())
    with pytest.raises(ValueError, match="EllipticalSlice"):
        tg.sample(fixed, method, num_samples=20, **QUIET)
    for option in ("num_importance", "batch_size", "effective_size", "prior_strength"):
        with pytest.raises(ValueError, match=option):
            tg.sample(gp("probit"), type(method)(**{option: -1}), num_samples=20, **QUIET)
    for sizes in ((), (10, 0)):
        with pytest.raises(ValueError, match="batch_sizes"):
            tg.sample(gp("probit"), type(method)(batch_sizes=sizes), num_samples=20, **QUIET)
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="defensive_share"):
            tg.sample(gp("probit"), type(method)(defensive_share=share), num_samples=20, **QUIET)
    with pytest.raises(ValueError, match="normal_scale"):
        tg.sample(gp("probit"), type(method)(normal_scale="log"), num_samples=20, **QUIET)
    for options, problem in (
        ({"begin": "prior"}, "begin is 'prior'"),
        ({"begin": tg.AtModes}, "begin is <class"),
        ({"begin": tg.AtModes(count=0)}, "count is 0"),
        ({"begin": tg.AtModes(search_tails=1)}, "search_tails is 1"),
        ({"begin": tg.AtModes(leave_for=True)}, "leave_for is True"),
        ({"begin": tg.AtModes(leave_for=tg.AtPrior(arms=None))}, "arms is None"),
        ({"begin": tg.AtModes(leave_for=tg.AtPrior()), "defensive_share": 0.0}, "defensive_share=0"),
        ({"begin": tg.AtPrior(arms="x")}, "arms is 'x'"),
        ({"begin": tg.AtModes(approximation=tg.EP)}, "approximation is <class"),
    ):
        with pytest.raises((TypeError, ValueError), match=problem):
            tg.sample(gp("probit"), type(method)(**options), num_samples=20, **QUIET)
    with pytest.raises(ValueError, match="degrees_of_freedom"):
        tg.sample(gp("probit"), type(method)(degrees_of_freedom=2), num_samples=20, **QUIET)


def test_a_likelihood_that_is_not_gaussian_is_refused_by_regression():
    with pytest.raises(TypeError, match="GaussianLikelihood"):
        tg.GPRegression(inputs(5), torch.randn(5), kernel(), tg.likelihoods.StudentT())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_it_stops_at_the_effective_size_asked_for():
    posterior = tg.sample(small("probit"), tg.AMIS(effective_size=150.0), num_samples=20_000, **QUIET)
    assert posterior.num_draws < 20_000
    assert tg.diagnostics.weights.kish_effective_size(posterior.log_weights) >= 150


@pytest.mark.slow
def test_a_posterior_without_a_mode_begins_from_the_prior_and_says_so(monkeypatch):
    monkeypatch.setattr("torchgpmc.runs.starts.find_modes", lambda *arguments, **options: [])
    with pytest.warns(tg.SamplingWarning, match="begins from the prior"):
        posterior = tg.sample(small("probit"), tg.AMIS(), num_samples=3000, **QUIET)
    truth, _ = grid_truth("probit")
    mean, error = weighted(posterior)
    assert float(((mean - truth).abs() / error).max()) < 5


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_search_of_tails_adds_components_to_the_first_proposal(diagonal):
    settings = Settings(400, None, None, None)
    plain, searched = (
        tg.AMIS(begin=tg.AtModes(1, search_tails=search), diagonal=diagonal).prepare(regression(), settings)
        for search in (False, True)
    )
    few, more = (run.init(torch.Generator().manual_seed(0)).streams[0].first for run in (plain, searched))
    added = len(more.mean) - len(few.mean)
    assert added > 0  # ten data leave the log lengthscale's tail longer than the mode's curvature says
    torch.testing.assert_close(more.mean[: len(few.mean) - 2], few.mean[:-2])  # the modes; the last two are the prior
    torch.testing.assert_close(more.log_share[-2 - added : -2].exp().sum(), torch.tensor(0.4 * 0.8**2, dtype=torch.float64))
    assert float(more.log_share.exp().sum()) == pytest.approx(1.0)
    assert not diagonal or bool((more.factor == torch.diag_embed(more.factor.diagonal(dim1=-2, dim2=-1))).all())
    # Later proposals leave each component its part, but for the defensive one.
    state = searched.advance(searched.init(torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1))[0]
    least = 0.8 * 0.3 / (len(more.mean) - 1) / 1.3
    assert len(state.streams[0].current.mean) == len(more.mean) and float(state.streams[0].current.log_share.exp().min()) > least


def test_arms_of_the_prior_are_begun_with_along_each_hyperparameter():
    model = small("probit")
    settings = Settings(400, None, None, None)
    plain, more = (
        tg.AMIS(begin=tg.AtPrior(arms=arms)).prepare(model, settings).init(torch.Generator()).streams[0].first
        for arms in (False, True)
    )
    assert len(plain.mean) == 2 and len(more.mean) == 2 + 2 * model.layout.size
    arms = more.mean[1:-1]
    assert bool(((arms != 0).sum(-1) == 1).all()) and bool((arms.sum(0) == 0).all())
    torch.testing.assert_close(more.log_share[1:-1].exp().sum(), torch.tensor(0.8 * 2 / 3, dtype=torch.float64))


@pytest.mark.parametrize("arms", [False, True])
@pytest.mark.parametrize("hold", [True, False])
def test_modes_are_left_where_the_first_draws_say_that_little_mass_is_there(hold, arms, monkeypatch):
    monkeypatch.setattr("torchgpmc.runs.weighted.hold_their_part", lambda draws, modes: hold)
    method = tg.AMIS(begin=tg.AtModes(leave_for=tg.AtPrior(arms=arms)))
    run = method.prepare(regression(), Settings(400, None, None, None))
    state = run.init(torch.Generator().manual_seed(0))
    modes = len(state.streams[0].first.mean) - 2
    second = run.advance(state, torch.Generator().manual_seed(1))[0]
    after = second.streams[0]
    assert modes > 0 and bool((state.streams[0].first.mean[:modes] != 0).all())
    if hold:
        torch.testing.assert_close(after.first.mean, state.streams[0].first.mean)
    else:
        assert bool((after.first.mean.unique(dim=0) != 0).any()) is arms and bool((after.first.mean[[0, -1]] == 0).all())
    # Once: later batches go on as they are.
    monkeypatch.setattr("torchgpmc.runs.weighted.hold_their_part", None)
    run.advance(second, torch.Generator().manual_seed(2))


@pytest.mark.parametrize("hold", [True, False])
def test_tails_are_searched_once_modes_have_held(hold, monkeypatch):
    monkeypatch.setattr("torchgpmc.runs.weighted.hold_their_part", lambda draws, modes: hold)
    settings, prior = Settings(400, None, None, None), tg.AtPrior(arms=True)
    at_once = tg.AMIS(begin=tg.AtModes(1, search_tails=True)).prepare(regression(), settings)
    run = tg.AMIS(begin=tg.AtModes(1, search_tails=True, leave_for=prior)).prepare(regression(), settings)
    state = run.init(torch.Generator().manual_seed(0))
    assert len(state.streams[0].first.mean) == 3 and int(state.num_modes) == 1
    plans = []
    teach = tg.importance.teach_each
    monkeypatch.setattr("torchgpmc.runs.weighted.teach_each", lambda streams, plan: plans.append(plan) or teach(streams, plan))
    second = run.advance(state, torch.Generator().manual_seed(1))[0]
    first = second.streams[0].first
    if hold:
        expected = at_once.init(torch.Generator().manual_seed(0)).streams[0].first
        torch.testing.assert_close(first[:3], expected[:3], atol=1e-8, rtol=1e-6)
        assert len(first.mean) > 3 and int(second.num_modes) == 1 and plans == [run.plan]
    else:
        assert len(first.mean) == 2 + 2 * 2 and int(second.num_modes) == 0 and plans == [run.plan_at_prior]


def test_a_run_begins_at_the_modes_of_the_approximation_that_it_is_given():
    model = small("probit")
    scale = normal_scale(model.layout)
    exact = {kind: OnNormalScale(ApproximateMarginal(model, kind()), scale) for kind in (tg.Laplace, tg.EP)}
    for kind, other in ((tg.Laplace, tg.EP), (tg.EP, tg.Laplace)):
        method = tg.AMIS(begin=tg.AtModes(1, approximation=kind(tolerance=1e-6)))
        first = method.prepare(model, Settings(400, None, None, None)).init(torch.Generator().manual_seed(0)).streams[0].first
        left, elsewhere = (exact[of].value_and_grad(first.mean[:1])[1] @ first.factor[0] for of in (kind, other))
        assert float(left.norm()) < 0.5 * float(elsewhere.norm())  # deviations from the mode


def test_modes_of_an_approximation_that_does_not_serve_the_model_are_refused():
    with pytest.raises(ValueError, match="AMIS handles one latent function"):
        tg.sample(gp("softmax"), tg.AMIS(begin=tg.AtModes(approximation=tg.EP())), num_samples=20, **QUIET)


def test_no_mode_is_looked_for_where_none_is_wanted(monkeypatch, recwarn):
    monkeypatch.setattr("torchgpmc.runs.weighted.posterior_modes", None)
    tg.sample(small("probit"), tg.AMIS(begin=tg.AtPrior()), num_samples=200, **QUIET)
    assert not any("begins from the prior" in str(found.message) for found in recwarn)


@pytest.mark.parametrize(("count", "too_few"), [(90, True), (200, False)])
def test_even_weights_of_few_draws_are_too_few_to_trust(count, too_few, generator):
    values = torch.randn(1, count, dtype=torch.float64, generator=generator)
    even = torch.zeros(1, count, dtype=torch.float64)
    said = complaints(summarise({"theta": values}, even), {}, 1, even)
    assert [("effective draws" in sentence) for sentence in said] == [True] * too_few


def test_collapsed_weights_are_said_in_words():

    heavy = -1.5 * torch.rand(1, 2000, generator=torch.Generator().manual_seed(0)).log()
    (said,) = complaints(summarise({}), {}, 1, heavy)
    assert "k-hat" in said and "NUTS" in said
    uneven = torch.zeros(1, 2000)
    uneven[0, :20] = 12.0
    (said,) = complaints(summarise({}), {}, 1, uneven)
    assert "worth 20 even ones (1.0%" in said and "Orthant" in said and "NUTS" in said
    even = torch.zeros(1, 2000)
    failed = {"n_failures": torch.ones(1, 2000), "approximation_converged": torch.zeros(1, 2000)}
    unconverged, failures = complaints(summarise({}), failed, 1, even)
    assert "did not converge for 100%" in unconverged and "2000 density evaluations failed" in failures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_resampled_draws_weigh_the_same_and_say_that_they_repeat():
    posterior = tg.sample(small("probit"), tg.AMIS(), num_samples=3000, **QUIET)
    equal = posterior.resampled(20_000)
    assert equal.log_weights is None and equal.theta.shape == (1, 20_000, 2)
    mean, error = weighted(posterior)
    assert float(((equal.theta.mean((0, 1)) - mean[:2]).abs() / error[:2]).max()) < 3
    assert "differ" in equal.info["resampled"]
    with pytest.raises(ValueError, match="num_draws"):
        posterior.resampled(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_weighted_draws_survive_files_and_arviz(tmp_path):
    posterior = tg.sample(small("probit"), tg.AMIS(), num_samples=100, **QUIET)
    posterior.save(tmp_path / "run.pt")
    again = tg.Posterior.load(tmp_path / "run.pt", posterior.model)
    assert torch.equal(again.log_weights, posterior.log_weights) and again.info == posterior.info
    pytest.importorskip("arviz_base")
    assert "log_weight" in posterior.to_arviz()["sample_stats"]


def test_the_search_for_modes_asks_nothing_of_ep(monkeypatch):
    monkeypatch.delattr(tg.EP, "evidence")
    posterior = tg.sample(small("probit"), tg.AMIS(approximation=tg.EP()), num_samples=200, **QUIET)
    assert posterior.complaints() == []
