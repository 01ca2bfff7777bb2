"""Emulators that an approximation has taught: draws are weighed by estimates all the same."""

from dataclasses import dataclass, replace

import pytest
from torch.testing import assert_close

import torchgpmc as tg
from tests.methods.test_emulated_hmc import METHOD, OPTIONS, alarm, mean_and_error, warmed_up
from tests.problems import gp, gp_regression
from tests.runs.resume import dies_and_resumes
from torchgpmc.approximations import Approximation
from torchgpmc.methods import Settings
from torchgpmc.runs.drawn_start import drawn_start

TAUGHT = replace(METHOD, taught_by=tg.EP(tolerance=0.3))
SETTINGS = Settings(4, 12, 4, None)


@dataclass(frozen=True)
class Elsewhere(Approximation):
    """EP's evidence, so much higher and tilted."""

    above: float = 0.0
    tilt: float = 0.0

    def quick_evidence(self, model, theta, targets=None):
        prior = model.prior(theta)
        short = prior.factor[:, -1, -1].log()
        return tg.EP().rough_evidence(model, prior).log_evidence + self.above + self.tilt * short


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("teacher", [tg.EP(tolerance=0.3), Elsewhere(5.0, 0.7)], ids=["near", "tilted"])
def test_draws_agree_with_nuts_through_their_weights(teacher):
    model = gp("probit", num_data=8)
    options = {"num_samples": 300, "num_chains": 16, "seed": 3, "progress": False}
    method = tg.EmulatedHMC(num_importance=64, taught_by=teacher)
    posterior = tg.sample(model, method, warmup_steps=16, **options)
    truth = mean_and_error(tg.sample(model, tg.NUTS(), warmup_steps=200, **options))
    assert alarm(mean_and_error(posterior), truth) < 1
    if teacher != tg.EP(tolerance=0.3):  # the emulator is no posterior
        posterior.log_weights = None
        assert alarm(mean_and_error(posterior), truth) > 1


def test_no_estimate_is_made_until_all_is_learned(monkeypatch):
    model, drawn = gp("probit"), []
    estimated = tg.evidence.ImportanceEstimator.draw

    def counted(self, theta, *args, **options):
        drawn.append(len(theta))
        return estimated(self, theta, *args, **options)

    monkeypatch.setattr(tg.evidence.ImportanceEstimator, "draw", counted)
    run, state, generator = warmed_up(TAUGHT, model, SETTINGS)
    assert drawn == [4]  # where chains are put when learning has ended
    run.advance(state, generator)
    assert drawn == [4, 4]
    assert bool((state.chain.estimate.whitened != 0).any(-1).all())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_teacher_that_is_higher_by_a_constant_gives_the_same_draws():
    """What a weight falls short of is told from what weights are near to."""
    low, high = (
        tg.sample(gp("probit"), replace(METHOD, taught_by=Elsewhere(above)), **{**OPTIONS, "num_samples": 20})
        for above in (0.0, 30.0)
    )
    assert_close(high.theta, low.theta, rtol=1e-4, atol=1e-4)
    assert_close(high.log_weights, low.log_weights - 30.0, rtol=0.0, atol=1e-3)


def test_what_draws_tell_does_not_teach_beside_an_approximation():
    model = gp("probit")
    before = tg.sample(model, tg.AMIS(), num_samples=200, seed=0, progress=False)
    given = SETTINGS._replace(draws=drawn_start(before, model))
    assert TAUGHT.prepare(model, given).warm_up.known is None and METHOD.prepare(model, given).warm_up.known is not None


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("advances", [3, 9, 14])  # among points that are spread, in learning, and among the draws
def test_a_run_that_dies_goes_on_to_the_same_draws(advances, tmp_path, monkeypatch):
    assert dies_and_resumes(gp, TAUGHT, OPTIONS, advances, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    ("make", "method", "options", "error", "message"),
    [
        (gp, TAUGHT, {"warmup_steps": 2}, ValueError, "warmup_steps is 2, .* Expected at least 3"),
        (gp, replace(METHOD, taught_by="EP"), {}, TypeError, "taught_by"),
        (gp_regression, TAUGHT, {}, ValueError, r"evidence is exact, and nothing is quicker\. Expected taught_by=None"),
        (lambda: gp("softmax"), replace(TAUGHT, approximation=tg.Laplace()), {}, ValueError, "handles one latent function"),
    ],
)
def test_mistakes_are_named(make, method, options, error, message):
    with pytest.raises(error, match=message):
        tg.sample(make(), method, **{**OPTIONS, **options})
