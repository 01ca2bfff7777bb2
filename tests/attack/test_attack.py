"""Random models against brute force: forty in every run, a thousand by `make test-long`; planted errors are caught."""

import importlib

import numpy as np
import pytest

from tests.attack import verdict
from tests.attack.engines import SLOW
from tests.attack.problem import random_problem
from tests.attack.record import write_piece
from tests.calibration import SHARE, without_jacobian
from tests.speed import quick
from torchgpmc.adapter.mean_function import MeanFunction
from torchgpmc.evidence import ExactEstimator, ImportanceEstimator
from torchgpmc.likelihoods import gaussian
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.random import normal_like
from torchgpmc.parameters.restricted_priors import RestrictedPrior
from torchgpmc.runs import weighted

MODELS = 40
GROUP = 2


def attack(models, num_engines, leave_out=()):
    result = verdict.NOTHING
    for index in models:
        result = result + verdict.attack(index, num_engines, leave_out=leave_out)
    return result


def alarms(result, share=SHARE):
    """Errors, and comparisons whose gap is too large for chance; runs that warned of themselves are only counted."""
    held = [comparison for comparison in result.comparisons if not comparison.warned]
    return [*result.errors, *(c for c in held if c.tail < share / len(held))]


def listing(found):
    return "\n".join(str(item) for item in found)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("first", range(0, MODELS, GROUP))
def test_random_models_agree_with_brute_force(first):
    result = attack(range(first, first + GROUP), 1, SLOW)
    assert not alarms(result), listing(alarms(result))
    assert len(result.unjudged) <= 1 and result.warned_runs <= max(1, result.runs / 2), f"too little was judged: {result[2:]}"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.statistical
def test_many_random_models_agree_with_brute_force(piece, request):
    option = request.config.getoption
    result = attack(piece, option("--attack-engines"))
    found = alarms(result, SHARE * len(piece) / max(len(piece), option("--attack-models")))
    if option("--attack-record"):
        write_piece(option("--attack-record"), piece, result, found)
    assert not found, listing(found)


# --- planted errors, which the forty models must catch ----------------------------------------------------------------


def joint_alarm():
    """Whether the log density or its gradient is found wrong for any model of the forty."""
    return any(verdict.joint_errors(random_problem(index), np.random.default_rng(index)) for index in SOUND)


# Of the forty those whose joint density agrees, so that an alarm is the planted error's.
SOUND = [0, 2, 3, 5, 8, 9, 10, 13, 15, 17, 18, 20]


def scaled_noise(monkeypatch):
    honest = gaussian._log_normal
    monkeypatch.setattr(gaussian, "_log_normal", lambda residual, variance: honest(residual, 1.01 * variance))


def shrunk_mean(monkeypatch):
    honest = MeanFunction.__call__
    monkeypatch.setattr(MeanFunction, "__call__", lambda self, *arguments: 0.99 * honest(self, *arguments))


def no_jitter(monkeypatch):
    honest = GPModel._bind

    def without(self):
        self.jitter = 0.0
        return honest(self)

    monkeypatch.setattr(GPModel, "_bind", without)


def wrong_prior(monkeypatch):
    honest = RestrictedPrior.log_prob
    monkeypatch.setattr(RestrictedPrior, "log_prob", lambda self, value: 0.99 * honest(self, value))


JOINT_ERRORS = {
    "no Jacobian": without_jacobian,
    "scaled noise": scaled_noise,
    "shrunk mean": shrunk_mean,
    "no jitter": no_jitter,
    "wrong prior": wrong_prior,
}


@pytest.fixture(scope="module")
def none_yet():
    """Without a planted error no model alarms."""
    assert not joint_alarm()


@pytest.mark.parametrize("name", quick(["no Jacobian"], JOINT_ERRORS))
def test_planted_errors_of_the_density_are_caught(name, none_yet, monkeypatch):
    JOINT_ERRORS[name](monkeypatch)
    assert joint_alarm()


def biased_evidence(monkeypatch):
    honest = weighted.log_evidence
    monkeypatch.setattr(weighted, "log_evidence", lambda weights: (honest(weights)[0] + 0.2, honest(weights)[1]))


def tempered_weights(monkeypatch):
    honest = weighted.streamed_log_weights
    monkeypatch.setattr(weighted, "streamed_log_weights", lambda streams: 0.1 * honest(streams))


def slow_momenta(monkeypatch):
    module = importlib.import_module("torchgpmc.samplers.hmc")  # whose name in the package is the function's
    monkeypatch.setattr(module, "normal_like", lambda *arguments: 0.7 * normal_like(*arguments))


def halved_evidence(monkeypatch):
    def halved(honest):
        def evaluate(self, *arguments):
            found = honest(self, *arguments)
            return found._replace(value=0.5 * found.value)

        return evaluate

    for kind in (ImportanceEstimator, ExactEstimator):
        monkeypatch.setattr(kind, "evaluate", halved(kind.evaluate))


ENGINE_ERRORS = {  # an engine, its error, and those of the forty models that show it
    "biased evidence": ("AMIS", biased_evidence, [2, 9]),
    "tempered weights": ("AMIS", tempered_weights, [5, 23]),
    "halved evidence": ("pseudo-marginal, independent proposals", halved_evidence, [9]),
    "slow momenta": ("HMC", slow_momenta, [2, 9]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE_ERRORS)
def test_planted_errors_of_engines_are_caught(name, monkeypatch):
    """At the limit of a whole group, of some two hundred comparisons."""
    engine, plant, models = ENGINE_ERRORS[name]
    plant(monkeypatch)
    assert any(alarms(verdict.attack(index, names=[engine]), SHARE / 10) for index in models)
