"""How long engines take, said before they begin."""

import types
from functools import partial

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, targets
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.approximations.held_sites import HeldSitesMarginal
from torchgpmc.calls import chain_engines, class_costs, costs, forecast, timing
from torchgpmc.calls.engines import candidates
from torchgpmc.evidence.exact_estimator import ExactEstimator
from torchgpmc.evidence.importance_sampling import ImportanceEstimator
from torchgpmc.evidence.smooth_probit import SmoothProbitEstimator
from torchgpmc.models.joint_density import JointLogDensity


@pytest.mark.parametrize(("seconds", "least", "heard"), [(300.0, 0.0, 1), (3.0, 0.0, 0), (300.0, 2e8, 0)])
def test_a_run_of_minutes_says_so_before_it_begins(monkeypatch, recwarn, seconds, least, heard):
    monkeypatch.setattr(forecast, "_MAY_TAKE_LONG", least)
    model = gp("softmax")
    forecast.warn_of_time(model, candidates(model)[0]._replace(seconds=lambda: seconds))
    assert sum("will take about" in str(warning.message) for warning in recwarn) == heard


@pytest.mark.parametrize(("num_data", "heard"), [(100, 0), (240, 1)])
def test_chains_of_many_hyperparameters_say_how_long_they_take(monkeypatch, recwarn, num_data, heard):
    # 300 labels with 34 hyperparameters took over two minutes without a word.
    # Of as many thetas as are timed at once, fewer of more data.
    monkeypatch.setattr(costs, "seconds_of", lambda evaluate: 2.0)
    kernel = RBFKernel(ard_num_dims=17, lengthscale_prior=GammaPrior(2.0, 1.0))
    model = tg.GP(inputs(num_data, 17), targets("probit", num_data), kernel, tg.likelihoods.Bernoulli())
    forecast.warn_of_time(model, candidates(model)[0])
    assert sum("will take about" in str(warning.message) for warning in recwarn) == heard


def test_six_classes_say_how_long_they_take(monkeypatch, recwarn):
    # 183 data took over 240 CPU seconds without a word.
    monkeypatch.setattr(class_costs, "seconds_of", lambda evaluate: 100.0)
    likelihood = tg.likelihoods.Softmax(num_classes=6, mixing_weights=False)
    model = tg.GP(inputs(183), torch.arange(183) % 6, RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), likelihood)
    forecast.warn_of_time(model, candidates(model)[0])
    assert any("will take about" in str(warning.message) for warning in recwarn)


def test_explain_speaks_plainly(monkeypatch):
    # It said "About 2.5e+02 seconds", and of three hyperparameters that they may be more than weights survive.
    monkeypatch.setattr(costs, "seconds_of", lambda _: 1.0)
    said = tg.explain(gp_regression())
    assert "minutes" in said and "e+" not in said
    assert "more than importance weights survive" not in said
    assert "more than importance weights survive" in tg.explain(gp_regression(num_columns=9))


def test_an_engine_that_cannot_begin_says_so_and_does_not_end_the_forecast(monkeypatch):
    def fails():
        raise ValueError("the bound is finite nowhere.")

    found = [candidate._replace(seconds=fails, roughly=None) for candidate in candidates(gp("student_t"))]
    monkeypatch.setattr(forecast, "candidates", lambda model: found)
    monkeypatch.setattr(forecast, "CHAINS_MAY_TAKE_LONG", 0.0)
    assert tg.explain(gp("student_t")).count("It fails here: the bound is finite nowhere.") == len(found)
    forecast.warn_of_time(gp("student_t"), found[-1])


@pytest.mark.parametrize(("seconds", "said"), [((3.0, 20.0), "Not timed."), ((80.0, 20.0), "up to 100 seconds if all are needed.")])
def test_later_engines_are_timed_while_the_call_is_worth_it(monkeypatch, seconds, said):
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def timed(number):
        clock.now += 1.5
        return number

    found = [
        engine._replace(seconds=partial(timed, number)) for engine, number in zip(candidates(gp("probit")), seconds, strict=False)
    ]
    monkeypatch.setattr(forecast, "time", clock)
    monkeypatch.setattr(forecast, "candidates", lambda model: found)
    assert said in tg.explain(gp("probit"))


def test_engines_that_only_begin_are_counted_with_the_next(monkeypatch):
    first, second, *_ = (engine._replace(seconds=lambda: 10.0) for engine in candidates(gp("probit")))
    monkeypatch.setattr(forecast, "candidates", lambda model: [first._replace(only_begins=True), second, first])
    assert "about 20 seconds if that is engine 2, up to 30 seconds if all are needed." in tg.explain(gp("probit"))


class GradientClock:
    """A second a gradient."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        whole = JointLogDensity.value_and_grad

        def counted(density, position):
            self.now += 1.0
            return whole(density, position)

        monkeypatch.setattr(JointLogDensity, "value_and_grad", counted)

    def perf_counter(self):
        return self.now


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_chains_are_foretold_the_trees_that_they_grow(monkeypatch):
    # 80 data with Laplace noise take trees of 31 in white coordinates, and 15 were reckoned with: 12 seconds for 88.
    model, method = gp("laplace", num_data=8), tg.NUTS(max_tree_depth=2, target_accept_prob=0.9)
    clock = GradientClock(monkeypatch)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "_WATCHED", 1e9)
    start = partial(tg.initialize, model, progress=False)
    foretold = timing.seconds_of_chains(model, method, 4, 20, start) / (20 + timing._DRAWS_A_CHAIN)
    fit = start()
    clock.now = 0.0
    tg.sample(fit.model, method, start=fit, num_samples=20, warmup_steps=20, seed=0, progress=False)
    assert 0.5 < foretold / (clock.now / 40) < 2.0


def test_no_fit_is_begun_to_foretell_chains_whose_expectations_are_long_integrals(monkeypatch):
    """A fit takes hundreds of them (1980 data of seven classes: a minute and more), so trajectories are of one length."""
    x, prior = inputs(12, 1), GammaPrior(2.0, 4.0)
    likelihood = tg.likelihoods.Softmax(num_classes=4)
    model = tg.SparseGP(x, torch.arange(12) % 4, RBFKernel(lengthscale_prior=prior), likelihood, inducing_points=x[::4])

    def begun(*arguments, **options):
        raise AssertionError("a fit was begun")

    monkeypatch.setattr(chain_engines, "initialize", begun)
    engine = candidates(model)[0]
    assert isinstance(engine.method, tg.HMC) and engine.seconds() > 0
    with pytest.raises(AssertionError, match="a fit was begun"):
        engine.start()


class WorkClock:
    """A second a row of the searched density, and a second an estimate."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for owner, name in ((ApproximateMarginal, "value_and_grad"), (HeldSitesMarginal, "value_and_grad")):
            self.count(monkeypatch, owner, name)
        for owner in (ExactEstimator, ImportanceEstimator, SmoothProbitEstimator):
            self.count(monkeypatch, owner, "draw")

    def count(self, monkeypatch, owner, name):
        whole = getattr(owner, name)

        def counted(part, theta, *others, **options):
            self.now += len(theta)
            return whole(part, theta, *others, **options)

        monkeypatch.setattr(owner, name, counted)

    def perf_counter(self):
        return self.now


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize(
    "model", [gp_regression(), gp_regression(num_data=40, num_columns=8), gp("probit")], ids=["few", "tails", "labels"]
)
def test_weighted_draws_are_foretold_their_searches_and_batches(monkeypatch, model):
    # Searches and the batches after the first were left out: a sixth to a twentieth of what regressions took.
    clock = WorkClock(monkeypatch)
    for part in (timing, costs):
        monkeypatch.setattr(part, "time", clock)
    foretold = candidates(model)[0].seconds()
    clock.now = 0.0
    posterior = tg.sample(model, seed=0, progress=False)
    assert len(posterior.info["tried"]) == 1
    assert 0.4 < foretold / clock.now < 2.5


@pytest.mark.parametrize(("num_classes", "num_inducing", "measured"), [(3, 30, 4.75 + 2.2), (7, 100, 8.1 + 4.6)])
def test_trajectories_are_foretold_by_the_number_of_latents(monkeypatch, num_classes, num_inducing, measured):
    """Of 2000 x 2 and segment+all: their steps, and how many of those gradients an exact test took."""
    monkeypatch.setattr(chain_engines, "seconds_of_evaluations", lambda rehearse, number: number)
    x, prior, likelihood = inputs(200, 1), GammaPrior(2.0, 4.0), tg.likelihoods.Softmax(num_classes=num_classes)
    y = torch.arange(200) % num_classes
    model = tg.SparseGP(x, y, RBFKernel(lengthscale_prior=prior), likelihood, inducing_points=x[:num_inducing])
    with_the_fit = 4 / 3 * (60 + 300)
    assert candidates(model)[0].seconds() == pytest.approx(with_the_fit * measured, rel=0.25)
