"""Candidates that an approximation refuses before an estimate is made: weights stay exact, whatever it says."""

from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

import torchgpmc as tg
from tests.calibration import z_limit, z_scores
from tests.methods.test_importance import QUIET, grid_truth, small, weighted
from tests.problems import gp, gp_regression, sparse_gp
from torchgpmc.approximations import Approximation, expectation_propagation
from torchgpmc.diagnostics import complaints
from torchgpmc.diagnostics.summaries import summarise
from torchgpmc.importance import log_density_of, streamed_log_weights
from torchgpmc.importance.streams import in_order_drawn
from torchgpmc.numerics.random import make_generator
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.run import Settings
from torchgpmc.runs.weighted import ImportanceRun

FOUR = tg.Screen(candidates=4)


@dataclass(frozen=True)
class Liar(Approximation):
    """Holds high what is low, fails now and then, and knows nothing of some covariances."""

    def quick_evidence(self, model, theta, targets=None):
        prior = model.prior(theta)
        value = -2 * expectation_propagation_at(model, prior)
        kind = (prior.factor[:, -1, 0].abs() * 1e6).long() % 5
        return torch.where(kind == 0, torch.nan, torch.where(kind == 1, -torch.inf, value))


def expectation_propagation_at(model, prior):
    return tg.EP().rough_evidence(model, prior).log_evidence


SCREENS = {
    "four": FOUR,
    "two, Laplace": tg.Screen(2, tg.Laplace()),
    "of a liar": tg.Screen(3, Liar()),
}
METHODS = {
    **{name: tg.AMIS(screen=screen) for name, screen in SCREENS.items()},
    "MAMIS": tg.MAMIS(screen=FOUR),
    "one stream, arms": tg.AMIS(screen=FOUR, num_streams=1, begin=tg.AtPrior(arms=True)),
    "modes may be left": tg.AMIS(screen=FOUR, begin=tg.AtModes(search_tails=True, leave_for=tg.AtPrior(arms=True))),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("likelihood", ["probit", "poisson"])
@pytest.mark.parametrize("name", METHODS)
def test_expectations_and_evidence_equal_a_grid(name, likelihood):
    truth, evidence = grid_truth(likelihood)
    posterior = tg.sample(small(likelihood), METHODS[name], num_samples=2000, **QUIET)
    mean, error = weighted(posterior)
    assert float(((mean - truth).abs() / error).max()) < 5
    assert abs(posterior.info["log_evidence"] - evidence) < 5 * posterior.info["log_evidence_error"] + 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("forgotten", [True, False])
def test_inclusion_that_is_forgotten_is_seen(forgotten, monkeypatch):
    truth, _ = grid_truth("probit")
    if forgotten:
        chosen = ImportanceRun._chosen
        monkeypatch.setattr(ImportanceRun, "_chosen", lambda *args: (chosen(*args)[0], torch.zeros(())))
    mean, error = weighted(tg.sample(small("probit"), METHODS["of a liar"], num_samples=2000, **QUIET))
    assert (float(((mean - truth).abs() / error).max()) > 5) == forgotten


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize("screen", [FOUR, SCREENS["of a liar"]], ids=["near", "of a liar"])
def test_the_evidence_of_short_runs_has_no_bias(screen):
    """Each run's estimate by the proposals that its draws came from is unbiased; 40 estimates of 300 runs are to say so."""
    model, (_, evidence) = small("probit"), grid_truth("probit")
    run = tg.AMIS(screen=screen, begin=tg.AtPrior(), num_importance=4, batch_size=20).prepare(model, Settings(40, None, None, None))
    runs = [carried_out(run, seed) for seed in range(300)]
    relative = torch.tensor([run.info["log_evidence"] - evidence for run in runs], dtype=torch.float64).exp()
    assert abs(float(z_scores(relative.unsqueeze(-1), 1.0)[0])) < z_limit(1, len(runs))


def carried_out(run, seed):
    """The draws of a run."""
    generator = make_generator(seed)
    state, drawn = run.init(generator), []
    while not run.is_finished(state):
        state, draw, _ = run.advance(state, generator)
        drawn.append(draw)
    return run.finish(state, together(drawn))


def together(drawn):
    """Draws of all batches."""
    names = "theta", "whitened", "further_whitened"
    return drawn[0]._replace(**{name: torch.cat([getattr(draw, name) for draw in drawn], 1) for name in names})


def test_draws_keep_their_weights_and_refused_candidates_have_none():
    model, method = small("probit"), tg.AMIS(screen=tg.Screen(3), batch_sizes=(30, 20, 41), begin=tg.AtPrior())
    run, generator = method.prepare(model, Settings(91, None, None, None)), make_generator(0)
    state, drawn, values = run.init(generator), [], []
    while not run.is_finished(state):
        state, draw, stats = run.advance(state, generator)
        drawn.append(draw)
        values.append(stats["log_evidence"][0])
        assert bool((stats["n_candidates"] == 3).all())
    theta = torch.cat([draw.theta[0] for draw in drawn])
    assert len(state.estimated) == 3 * 91 and int(state.estimated.sum()) == 91
    z = in_order_drawn(state.streams, [stream.position for stream in state.streams])
    assert_close(run.scale.theta(z[state.estimated])[0], theta)
    weights = streamed_log_weights(state.streams)
    assert bool(torch.isinf(weights[~state.estimated]).all())
    assert torch.equal(run.finish(state, together(drawn)).log_weights[0], weights[state.estimated])
    # What a weight has beside the target is the mixture's density and how probable it was to be estimated, at most one.
    scale = normal_scale(model.layout)
    log_slope = scale.theta(scale.z(theta))[1]
    target = model.layout.log_prior(theta).detach() + log_slope + torch.cat(values)
    mixtures = [mixture_of(stream) for stream in state.streams]
    denominators = in_order_drawn(state.streams, mixtures)[state.estimated]
    log_inclusion = target - denominators - weights[state.estimated]
    assert float(log_inclusion.max()) < 1e-6 and float(log_inclusion.min()) > torch.tensor(0.1 / 3).log() - 1e-6
    assert float(log_inclusion.max()) > -1e-6 and float(log_inclusion.min()) < -0.5


def mixture_of(stream):
    """Log of the density that a stream's candidates have, of all its proposals."""
    past = [type(stream.current)(*(part[batch] for part in stream.past)) for batch in range(len(stream.counts))]
    parts = torch.stack(
        [count.log() + log_density_of(proposal, stream.position) for count, proposal in zip(stream.counts, past, strict=True)]
    )
    return torch.logsumexp(parts, 0) - stream.counts.sum().log()


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_batches_are_as_large_by_candidates_as_they_are_of_draws_without():
    def sizes(num_samples, **options):
        return tg.AMIS(**options).prepare(gp("probit"), Settings(num_samples, None, None, None)).schedule

    assert sizes(500, screen=tg.Screen(8)) == [25] * 20 and sizes(4000) == [200] * 20
    assert sizes(500, screen=tg.Screen(8), batch_size=70)[:2] == [70, 70]


def test_proposals_are_judged_by_all_their_candidates():
    samples = {"a": torch.randn(1, 1000, generator=make_generator(0))}
    weights = 0.1 * torch.randn(1, 1000, generator=make_generator(1))
    judged = summarise(samples, weights)
    assert complaints(judged, {"n_candidates": torch.full((1, 1000), 8.0)}, 1, weights) == []
    (found,) = complaints(judged, {"n_candidates": torch.full((1, 1000), 16.0)}, 1, weights)
    assert found.startswith("16000 candidates, 1000 of them weighted draws, are worth 99") and "(6.2%; at least 10% is" in found


@pytest.mark.parametrize("likelihood", ["probit", "logit", "poisson"])
def test_ep_is_quick_to_within_some_tenths(likelihood):
    model = gp(likelihood, num_data=40)
    theta = model.layout.sample_prior(50, make_generator(0))
    exact = expectation_propagation(model, theta)
    quick = tg.EP().quick_evidence(model, theta)
    assert quick.dtype == theta.dtype
    gap = (quick - exact.log_evidence)[exact.converged].abs()
    assert float(gap.median()) < 0.1 and float(gap.max()) > 1e-6
    assert_close(tg.Laplace().quick_evidence(model, theta), tg.Laplace().rough_evidence(model, model.prior(theta))[4])


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (gp, {"screen": 8}, TypeError, r"screen is 8\. Expected torchgpmc\.Screen\(\), or None"),
        (gp, {"screen": tg.Screen(candidates=1)}, ValueError, "candidates is 1. Expected"),
        (gp, {"screen": tg.Screen(approximation="EP")}, TypeError, "approximation"),
        (gp_regression, {"screen": FOUR}, ValueError, r"evidence is exact, and nothing is quicker\. Expected screen=None"),
        (lambda: gp("softmax"), {"screen": FOUR}, ValueError, "Screen handles one latent function"),
        (sparse_gp, {"screen": FOUR}, ValueError, "Screen"),
    ],
)
@pytest.mark.parametrize("method", [tg.AMIS, tg.MAMIS])
def test_mistakes_are_named(make, options, error, message, method):
    with pytest.raises(error, match=message):
        tg.sample(make(), method(**options), num_samples=100, progress=False)
