"""How long engines take, said before they begin."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, targets
from torchgpmc.calls import forecast
from torchgpmc.calls.engines import candidates


@pytest.mark.parametrize(("typical", "least", "heard"), [(1e9, 0.0, 1), (1e-9, 0.0, 0), (1e9, 2e8, 0)])
def test_a_run_of_minutes_says_so_before_it_begins(monkeypatch, recwarn, typical, least, heard):
    monkeypatch.setattr(forecast, "_MAY_TAKE_LONG", least)
    model = gp("softmax")
    forecast.warn_of_time(model, candidates(model)[0]._replace(typical=typical))
    assert sum("minutes here" in str(warning.message) for warning in recwarn) == heard


@pytest.mark.parametrize(("num_data", "heard"), [(100, 0), (240, 1)])
def test_chains_of_many_hyperparameters_say_how_long_they_take(monkeypatch, recwarn, num_data, heard):
    # 300 labels with 34 hyperparameters took over two minutes without a word.
    monkeypatch.setattr(forecast, "_seconds", lambda evaluate: 0.05)
    kernel = RBFKernel(ard_num_dims=17, lengthscale_prior=GammaPrior(2.0, 1.0))
    model = tg.GP(inputs(num_data, 17), targets("probit", num_data), kernel, tg.likelihoods.Bernoulli())
    forecast.warn_of_time(model, candidates(model)[0])
    assert sum("minutes here" in str(warning.message) for warning in recwarn) == heard


def test_six_classes_say_how_long_they_take(monkeypatch, recwarn):
    # 183 data took over 240 CPU seconds without a word.
    monkeypatch.setattr(forecast, "_seconds", lambda evaluate: 100.0)
    likelihood = tg.likelihoods.Softmax(num_classes=6, mixing_weights=False)
    model = tg.GP(inputs(183), torch.arange(183) % 6, RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), likelihood)
    forecast.warn_of_time(model, candidates(model)[0])
    assert any("minutes here" in str(warning.message) for warning in recwarn)


def test_explain_speaks_plainly(monkeypatch):
    # It said "About 2.5e+02 seconds", and of three hyperparameters that they may be more than weights survive.
    monkeypatch.setattr(forecast, "_seconds", lambda _: 1.0)
    said = tg.explain(gp_regression())
    assert "minutes" in said and "e+" not in said
    assert "more than importance weights survive" not in said
    assert "more than importance weights survive" in tg.explain(gp_regression(num_columns=9))
