"""How long engines take, said before they begin."""

from functools import partial

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, targets
from torchgpmc.calls import forecast, timing
from torchgpmc.calls.engines import candidates
from torchgpmc.models.joint_density import JointLogDensity


@pytest.mark.parametrize(("seconds", "least", "heard"), [(300.0, 0.0, 1), (3.0, 0.0, 0), (300.0, 2e8, 0)])
def test_a_run_of_minutes_says_so_before_it_begins(monkeypatch, recwarn, seconds, least, heard):
    monkeypatch.setattr(forecast, "_MAY_TAKE_LONG", least)
    model = gp("softmax")
    forecast.warn_of_time(model, candidates(model)[0]._replace(seconds=lambda: seconds))
    assert sum("minutes here" in str(warning.message) for warning in recwarn) == heard


@pytest.mark.parametrize(("num_data", "heard"), [(100, 0), (240, 1)])
def test_chains_of_many_hyperparameters_say_how_long_they_take(monkeypatch, recwarn, num_data, heard):
    # 300 labels with 34 hyperparameters took over two minutes without a word.
    # Of as many thetas as are timed at once, fewer of more data.
    monkeypatch.setattr(timing, "_seconds", lambda evaluate: 2.0)
    kernel = RBFKernel(ard_num_dims=17, lengthscale_prior=GammaPrior(2.0, 1.0))
    model = tg.GP(inputs(num_data, 17), targets("probit", num_data), kernel, tg.likelihoods.Bernoulli())
    forecast.warn_of_time(model, candidates(model)[0])
    assert sum("minutes here" in str(warning.message) for warning in recwarn) == heard


def test_six_classes_say_how_long_they_take(monkeypatch, recwarn):
    # 183 data took over 240 CPU seconds without a word.
    monkeypatch.setattr(timing, "_seconds", lambda evaluate: 100.0)
    likelihood = tg.likelihoods.Softmax(num_classes=6, mixing_weights=False)
    model = tg.GP(inputs(183), torch.arange(183) % 6, RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), likelihood)
    forecast.warn_of_time(model, candidates(model)[0])
    assert any("minutes here" in str(warning.message) for warning in recwarn)


def test_explain_speaks_plainly(monkeypatch):
    # It said "About 2.5e+02 seconds", and of three hyperparameters that they may be more than weights survive.
    monkeypatch.setattr(timing, "_seconds", lambda _: 1.0)
    said = tg.explain(gp_regression())
    assert "minutes" in said and "e+" not in said
    assert "more than importance weights survive" not in said
    assert "more than importance weights survive" in tg.explain(gp_regression(num_columns=9))


def test_an_engine_that_cannot_begin_says_so_and_does_not_end_the_forecast(monkeypatch):
    def fails():
        raise ValueError("the bound is finite nowhere.")

    found = [candidate._replace(seconds=fails) for candidate in candidates(gp("student_t"))]
    monkeypatch.setattr(forecast, "candidates", lambda model: found)
    monkeypatch.setattr(forecast, "CHAINS_MAY_TAKE_LONG", 0.0)
    assert tg.explain(gp("student_t")).count("It fails here: the bound is finite nowhere.") == len(found)
    forecast.warn_of_time(gp("student_t"), found[-1])


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
