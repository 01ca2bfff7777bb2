"""Gradients leave the host alone: it waits at most once a leapfrog step, to learn which chains go on, or how many steps to take."""

import pytest

import torchgpmc as tg
from tests.device.other import DEVICE
from tests.device.waits import of_a_run
from tests.problems import LIKELIHOODS
from tests.speed import quick
from tests.test_conformance import MODELS

# The latents of an exact marginal are drawn with each theta; known inputs are compared with others at each gradient.
BESIDE = {"GPRegression": lambda leapfrogs: 1, "ConditionedGP": lambda leapfrogs: 2 * leapfrogs}


@pytest.mark.parametrize("model", quick(["GP"], MODELS))
@pytest.mark.parametrize(
    "method",
    quick([tg.HMC(num_steps=3)], [tg.NUTS(max_tree_depth=2), tg.HMC(num_steps=3)]),
    ids=lambda method: type(method).__name__,
)
def test_models(waits, model, method):
    made = MODELS[model]("gaussian" if model == "GPRegression" else "probit", num_data=4, device=DEVICE)
    waited, leapfrogs = of_a_run(type(method).__name__, made, waits, method)
    assert waited <= leapfrogs + BESIDE.get(model, lambda steps: 0)(leapfrogs)


OF_LENGTHS = {("SparseGP", "softmax"): 5, ("GP", "laplace"): 3, ("SparseGP", "laplace"): 30}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GP", "SparseGP"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_likelihoods(waits, model, likelihood):
    """But for integrals that are as long as latents reach, or refined until they settle, as those of gpytorch's likelihoods."""
    waited, leapfrogs = of_a_run("NUTS", MODELS[model](likelihood, num_data=4, device=DEVICE), waits, tg.NUTS(max_tree_depth=2))
    assert waited <= (1 + OF_LENGTHS.get((model, likelihood), 0)) * leapfrogs


@pytest.mark.parametrize("name", ["PCN", "AuxiliaryGradient"])
def test_moves_without_a_search_never_wait(waits, name):
    waited, _ = of_a_run(name, MODELS["GP"](num_data=4, device=DEVICE), waits)
    assert waited == 0
