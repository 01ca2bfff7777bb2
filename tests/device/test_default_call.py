"""The default call on a device that is not the CPU: every engine that it may come to, each begun at the draws of the one before."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior

import torchgpmc as tg
from tests.device.other import DEVICE, is_real
from tests.problems import LIKELIHOODS, gp, gp_regression, inputs, kernel, sparse_gp, targets
from tests.test_conformance import quiet_sample
from torchgpmc.calls import default_call, sampling
from torchgpmc.calls.candidate import anything
from torchgpmc.calls.engines import candidates
from torchgpmc.calls.timing import seconds_of


def alike(likelihood, num_columns=2, device="cpu"):
    """Of rows that are three times there."""
    x = inputs(4, num_columns).repeat(3, 1)
    return tg.GP(x, targets(likelihood, len(x)), kernel(num_columns), LIKELIHOODS[likelihood]()).to(device)


MODELS = {
    "labels": (gp, "probit", 2),
    "many labels' lengthscales": (gp, "probit", 9),
    "counts": (gp, "poisson", 2),
    "counts with a mean": (partial(gp, mean=ConstantMean(constant_prior=NormalPrior(0.5, 1.0))), "poisson", 2),
    "counts, many lengthscales": (gp, "poisson", 13),
    "levels, many lengthscales": (gp, "ordinal", 13),
    "labels of rows that are alike": (alike, "probit", 2),
    "counts of rows that are alike": (alike, "poisson", 2),
    "outliers of rows that are alike": (alike, "student_t", 2),
    "classes": (gp, "softmax", 2),
    "classes, many lengthscales": (gp, "softmax", 7),
    "outliers": (gp, "student_t", 2),
    "sparse": (sparse_gp, "probit", 2),
    "sparse, many lengthscales": (sparse_gp, "probit", 9),
    "regression": (gp_regression, "gaussian", 2),
    "regression, many lengthscales": (gp_regression, "gaussian", 9),
}


LONG = ("many labels' lengthscales", "sparse", "outliers")
LONG += ("counts, many lengthscales", "levels, many lengthscales", "classes", "classes, many lengthscales")
# Chains on an emulator of levels and classes make of rounding what chance makes of others.
EMULATED = ("levels, many lengthscales", "classes, many lengthscales")


def shortened(engine):
    """With few draws, fewer of chains, and short trees."""
    if engine.num_chains is None:
        return engine.with_limits(most=min(engine.limits.most, 40), every=20)._replace(given=anything)
    method = replace(engine.method, max_tree_depth=3) if hasattr(engine.method, "max_tree_depth") else engine.method
    return engine.with_limits(most=12, every=6)._replace(method=method, given=anything, warmup_steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in MODELS])
def test_every_engine(monkeypatch, name):
    make, likelihood, columns = MODELS[name]

    monkeypatch.setattr(sampling, "candidates", lambda model, wanted: [shortened(engine) for engine in candidates(model, wanted)])
    monkeypatch.setattr(default_call, "is_good", lambda posterior, wanted: False)
    options = {"num_samples": 20, "warmup_steps": None, "num_chains": None}
    models = [make(likelihood, num_columns=columns, device=device) for device in (DEVICE, "cpu")]
    there, here = (quiet_sample(model, **options) for model in models)
    assert [trial["engine"] for trial in there.info["tried"]] == [trial["engine"] for trial in here.info["tried"]]
    if name in EMULATED:
        (found, _), (expected, sd) = (torch.std_mean(run.theta.flatten(0, 1), 0)[::-1] for run in (there, here))
        assert float(((found - expected).abs() / sd).max()) < 1
    else:
        # Those of labels were learned from orthants, whose guide is in single precision.
        precision = 0.05 if name == "many labels' lengthscales" else 1e-3 if is_real() else 1e-5
        torch.testing.assert_close(there.theta, here.theta, rtol=precision, atol=precision)
    assert ("Do not trust" in str(there.summary())) == bool(there.complaints())


@pytest.mark.slow
def test_a_forecast():
    assert "seconds" in str(tg.explain(gp(device=DEVICE)))


def test_what_is_timed_is_waited_for(waits):
    """A gradient of MNIST's classifier takes a GPU 38 ms and the host some four."""
    x = torch.zeros(3, device=DEVICE)
    waits.clear()
    calls = []
    seconds_of(lambda: calls.append(0) or (x + 1, {"more": x}))
    assert waits.total() == 2 * len(calls) > 0
