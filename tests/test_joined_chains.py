"""Weighted chains of two runs, one after the other: what a run counts for, what goes together, default calls that join."""

import math

import pytest
import torch

from tests.calibration import z_limit
from tests.problems import gp
from torchgpmc import AMIS, EmulatedHMC
from torchgpmc.calls.candidate import Candidate, Limits
from torchgpmc.calls.default_call import sample_by_default, with_those_before
from torchgpmc.calls.pooling import can_be_joined, joined
from torchgpmc.diagnostics.weights import effective_size_of_chains, kish_effective_size
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws

SIZE, LATENTS = 3, 6
INFO = {"seconds": 2.0, "warmup_seconds": 1.0, "num_evaluations": 80.0, "interrupted": False, "method": "EmulatedHMC()"}


def of_chains(theta, log_weights, **info):
    """Draws ``(C, S, P)`` with weights ``(C, S)``."""
    draws = Draws(theta, torch.zeros(*theta.shape[:2], LATENTS).double(), log_weights)
    return Posterior(gp("probit"), draws, {"lp": theta[..., 0]}, {**INFO, **info})


def run(seed, count=100, *, chains=8, mean=0.0, deviation=1.3, scale=0.0, move=0.0):
    """Of a standard normal density, drawn from another; weights are on a scale of their own."""
    noise = torch.randn(chains, count, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theta = mean + deviation * noise
    log_weights = (-0.5 * theta.square() + 0.5 * noise.square()).sum(-1) + scale
    return of_chains(theta + move, log_weights)


def weighted_mean(posterior):
    weights = torch.softmax(posterior.log_weights.flatten(), 0)
    return weights @ posterior.theta.flatten(0, 1)


def test_a_run_counts_by_what_its_weights_are_worth_whatever_their_scale():
    first, second = run(0, scale=70.0), run(1, 60, mean=0.2)
    both = joined([first, second])
    sizes = [kish_effective_size(part.log_weights) for part in (first, second)]
    expected = sum(size * weighted_mean(part) for size, part in zip(sizes, (first, second), strict=True)) / sum(sizes)
    torch.testing.assert_close(weighted_mean(both), expected)
    assert kish_effective_size(both.log_weights) == pytest.approx(sum(sizes))
    assert both.theta.shape == (8, 160, SIZE) and both.stats["lp"].shape == (8, 160)
    assert both.info["num_evaluations"] == 160 and both.info["seconds"] == 4 and both.info["num_runs"] == 2
    assert both.complaints() == [] and both.effective_size() > 0.9 * sum(part.effective_size() for part in (first, second))


@pytest.mark.statistical
def test_means_of_joined_runs_scatter_around_the_truth_as_their_effective_sizes_say():
    """200 pairs of runs drawn from unlike densities; means and scatter of three quantities each.

    Means of 240 weighted draws are off by less than a tenth of their error, sizes by less than a fifth, on average.
    """
    pairs = [joined([run(2 * seed, 20, mean=0.3), run(2 * seed + 1, 10, deviation=1.1)]) for seed in range(200)]
    means = torch.stack([weighted_mean(pair) for pair in pairs])
    sizes = torch.tensor([[effective_size_of_chains(h, pair.log_weights) for h in pair.theta.unbind(-1)] for pair in pairs])
    chi_square, limit = float((sizes * means.square()).mean()), z_limit(4)
    assert abs(chi_square - 1) < 0.2 + limit * math.sqrt(2 / means.numel())
    assert float((means.mean(0) / means.std(0)).abs().max()) < 0.1 + limit / math.sqrt(len(pairs))


@pytest.mark.parametrize(
    ("other", "goes"),
    [
        (run(1), True),
        (run(1, 40), True),
        (run(1, move=0.2), False),  # means are known to 0.05 each
        (run(1, chains=4), False),
        (of_chains(run(1).theta, None), False),
        (of_chains(run(1).theta, torch.full((8, 100), -math.inf)), False),
        (of_chains(run(1).theta[:, :3], torch.zeros(8, 3)), False),  # too few to tell
    ],
)
def test_what_goes_together(other, goes):
    assert can_be_joined(run(0), other) == goes


def test_one_chain_of_weights_is_pooled_by_its_evidence_not_so():
    one = run(0, 800, chains=1)
    assert not can_be_joined(one, run(1, 800, chains=1))


@pytest.mark.parametrize(("gap", "goes"), [(5.0, True), (51.0, False), (-51.0, False)])
def test_runs_of_which_one_has_seen_what_the_other_missed_stay_apart(gap, goes):
    """Means that agree by large errors would hide it."""
    first, second = run(0), run(1)
    first.stats["log_evidence"] = torch.full((8, 100), gap)
    second.stats["log_evidence"] = torch.zeros(8, 100)
    assert can_be_joined(first, second) and (with_those_before(second, [first]) is not None) == goes


def engine(method, most):
    return Candidate(method, "tested.", 8, 10, Limits(20, most, math.inf), lambda: 1.0)


def carried_out(draws, rule):
    """The draws kept when the rule says that it is enough."""
    for kept in range(20, draws.num_draws + 1, 20):
        part = of_chains(draws.theta[:, :kept], draws.log_weights[:, :kept], num_evaluations=8.0 * kept)
        if rule(kept, 8.0 * kept, lambda part=part: part):
            break
    return part


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("agree", [True, False])
def test_a_default_call_joins_chains_whose_weights_were_too_few(agree):
    """Half as many again are wanted as the first run's draws are worth; runs that disagree stay apart."""
    first, second = run(0, 100, deviation=1.4), run(1, 400, move=0.0 if agree else 0.3)
    wanted = round(1.5 * first.effective_size())
    engines = [engine(EmulatedHMC(), 100), engine(EmulatedHMC(enough=0.7), 400)]
    made = [first, second]
    posterior = sample_by_default(engines, wanted, lambda number, engine, rule, begin: carried_out(made[number], rule))
    evaluations = [trial["evaluations"] for trial in posterior.info["tried"]]
    assert evaluations[0] == 800 and posterior.complaints() == [] and posterior.effective_size() >= wanted
    assert torch.equal(posterior.theta[:, :100], first.theta) == agree
    assert posterior.num_draws == (100 if agree else 0) + evaluations[1] / 8


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_weighted_draws_join_the_latest_of_their_kind():
    """Chains between two runs of importance samples leave these to be pooled."""
    one_chain = {"log_evidence": 0.0, "log_evidence_error": 0.0}
    flat = [run(seed, 200, chains=1) for seed in (0, 1)]
    flat = [of_chains(part.theta, part.log_weights, **one_chain) for part in flat]
    made = [flat[0], run(2, 10), flat[1]]
    engines = [engine(AMIS(), 200), engine(EmulatedHMC(), 10), engine(AMIS(growth=2.0), 200)]
    posterior = sample_by_default(engines, 10_000, lambda number, engine, rule, begin: made[number])
    assert posterior.num_chains == 1 and posterior.num_draws == 400
