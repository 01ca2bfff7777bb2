"""Independent runs of weighted draws as one: shares by evidence, what runs that disagree are called, default calls that pool."""

import functools
import math

import pytest
import scipy.stats
import torch

import torchgpmc as tg
from tests.calibration import SHARE
from tests.problems import gp
from torchgpmc.calls import sampling
from torchgpmc.calls.candidate import Candidate, Limits
from torchgpmc.diagnostics import ENOUGH_ESS, MAX_RUN_ERRORS, MIN_ESS_PER_CHAIN
from torchgpmc.diagnostics.weights import error_by_runs, evidence_error_by_runs, kish_effective_size
from torchgpmc.importance import Adaptation, adapt, add_draws, draw_from, from_modes, log_weights, start
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws

QUIET = {"progress": False, "num_samples": 300}


@functools.cache
def run(seed, **options):
    return tg.sample(gp("probit"), tg.AMIS(**options), seed=seed, **QUIET)


def log_mean_weight(posterior):
    return float(torch.logsumexp(posterior.log_weights.flatten(), 0)) - math.log(posterior.num_draws)


@pytest.mark.slow
def test_a_pool_has_all_draws_and_its_evidence_is_the_runs_mean_by_draws():
    short = tg.sample(gp("probit"), tg.AMIS(), seed=2, **{**QUIET, "num_samples": 200})
    pool = tg.pool([tg.pool([run(0), run(1)]), short])
    assert torch.equal(pool.theta, torch.cat([run(0).theta, run(1).theta, short.theta], 1)) and pool.num_draws == 800
    assert [int((pool.stats["run"] == number).sum()) for number in range(3)] == [300, 300, 200] and pool.info["num_runs"] == 3
    expected = math.log(sum(n * math.exp(p.info["log_evidence"]) for n, p in ((3, run(0)), (3, run(1)), (2, short))) / 8)
    assert pool.info["log_evidence"] == pytest.approx(expected)
    assert pool.info["log_evidence_error"] < run(0).info["log_evidence_error"]
    shares = torch.softmax(pool.log_weights[0], 0).split([300, 300, 200])
    means = [torch.softmax(p.log_weights[0], 0) @ p.theta[0] for p in (run(0), run(1), short)]
    by_evidence = sum(share.sum() * mean for share, mean in zip(shares, means, strict=True))
    torch.testing.assert_close(torch.softmax(pool.log_weights[0], 0) @ pool.theta[0], by_evidence)
    x = torch.zeros(1, 2)
    ends = sorted(float(p.predict(x).probs) for p in (run(0), run(1), short))
    assert ends[0] <= float(pool.predict(x).probs) <= ends[-1]


@pytest.mark.slow
def test_a_pool_is_saved_and_resampled(tmp_path):
    pool = tg.pool([run(0), run(1)])
    pool.save(tmp_path / "pool.pt")
    loaded = Posterior.load(tmp_path / "pool.pt", gp("probit"))
    assert torch.equal(loaded.stats["run"], pool.stats["run"]) and loaded.complaints() == pool.complaints()
    assert pool.resampled(10).num_draws == 10


@pytest.mark.slow
def test_weights_of_every_kind_have_the_evidence_for_their_mean():
    """On one scale, whatever is proposed, estimated or smoothed; without that a pool would prefer a kind."""
    kinds = [{"normal_scale": False}, {"smooth": True}, {"evidence": tg.evidence.SmoothProbit(), "begin": tg.AtPrior()}]
    truth = log_mean_weight(tg.pool([run(0), run(1)]))
    for kind in kinds:
        assert log_mean_weight(run(5, **kind)) == pytest.approx(truth, abs=5 / math.sqrt(200)), kind


@pytest.mark.slow
def test_what_cannot_be_pooled_is_said():
    with pytest.raises(ValueError, match="Expected two or more"):
        tg.pool([run(0)])
    with pytest.raises(ValueError, match=r"^1 posteriors were given"):
        tg.pool(run(0))
    with pytest.raises(TypeError, match=r"posteriors hold int\. Expected a list"):
        tg.pool([run(0), 3])
    with pytest.raises(ValueError, match="the same draws"):
        tg.pool([run(0), run(0)])
    with pytest.raises(ValueError, match="cannot be pooled by weight"):
        tg.pool([run(0), run(1).resampled(50)])
    with pytest.raises(ValueError, match="different models"):
        tg.pool([run(0), tg.sample(gp("probit", num_data=7), tg.AMIS(), seed=1, **QUIET)])


def pool_of(log_weight, theta, noise=0.0):
    """Two runs ``(2, S)`` of weights, and of all hyperparameters."""
    size = 3
    count = log_weight.shape[1]
    posteriors = []
    for weights, position in zip(log_weight, theta, strict=True):
        draws = Draws(position[None, :, None].expand(1, count, size), torch.zeros(1, count, 6).double(), weights[None])
        stats = {"lp": position[None], "log_evidence_variance": torch.full_like(weights[None], noise)}
        info = {"seconds": 0.0, "warmup_seconds": 0.0, "num_evaluations": 0.0, "interrupted": False, "method": "AMIS()"}
        posteriors.append(Posterior(gp("probit"), draws, stats, {**info, "log_evidence": 0.0, "log_evidence_error": 0.0}))
    return posteriors


def uneven(noise=0.0, second=(0.0, 0.0)):
    """Two runs of 4000 draws worth about 200 each, the second with its evidence and position moved."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    weights = torch.where(torch.rand(2, 4000, generator=generator) < 0.06, 0.0, -8.0).double()
    move = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return pool_of(weights + second[0] * move, theta + second[1] * move, noise)


def test_uneven_weights_are_reliable_where_runs_agree_and_evidence_is_nearly_exact():
    runs = uneven()
    assert "even ones" in runs[0].complaints()[0] and "even ones" in runs[1].complaints()[0]
    pool = tg.pool(runs)
    assert pool.complaints() == [] and pool.effective_size() > 400
    (complaint,) = tg.pool(uneven(noise=0.05)).complaints()  # estimates may miss the same in every run
    assert "even ones" in complaint


@pytest.mark.parametrize(("second", "words"), [((0.8, 0.0), "as if the evidence"), ((0.0, 0.5), "as if the mean")])
def test_runs_that_disagree_are_not_to_be_trusted(second, words):
    (complaint,) = tg.pool(uneven(second=second)).complaints()
    assert words in complaint and "2 runs disagree" in complaint


# --- on a target of which everything is known ---------------------------------------------------------------------------------

PLAN = Adaptation(False, False, 4.0)


def lobes(x):
    """Half the mass around (-9, -1), half around (9, 1)."""
    middle = x.new_tensor([9.0, 1.0])
    return torch.logaddexp(*(-2 * (x - sign * middle).square().sum(-1) for sign in (-1, 1)))


def adapted(seed):
    """Draws ``(S, 2)``, and weights, of a run that begins between the lobes."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.zeros(1, 2, dtype=torch.float64)
    state = start(from_modes(middle, 4 * torch.eye(2, dtype=torch.float64)[None], middle[0, :1], 30.0))
    for count in (50, 100, 200):
        x = draw_from(state.current, count, generator)
        state = adapt(add_draws(state, x, lobes(x)), PLAN)
    return state.position, log_weights(state)


def excess(runs):
    """The largest error by runs over its limit, Kish's size, and how much of each run's weight is in the right half."""
    x, weights = (torch.cat(parts) for parts in zip(*runs, strict=True))
    number = torch.arange(len(runs)).repeat_interleave(len(x) // len(runs))
    errors = [*(error_by_runs(column, weights, number) for column in x.T), evidence_error_by_runs(weights, number)]
    found = [float(torch.softmax(w, 0) @ (z[:, 0] > 0).double()) for z, w in runs]
    size = kish_effective_size(weights)
    return max(errors) * math.sqrt(min(size, ENOUGH_ESS)) / MAX_RUN_ERRORS, size, found


@pytest.mark.slow
def test_runs_that_find_a_lobe_each_by_chance_disagree_or_are_worth_few_draws():
    """Planted: first proposals that reach a lobe with a draw or two and follow it, which a run's own weights do not show."""
    apart = []
    for replicate in range(60):
        level, size, found = excess([adapted(2 * replicate + run) for run in range(2)])
        if min(found) < 0.1 and max(found) > 0.9:
            apart.append(level > 1 or size < MIN_ESS_PER_CHAIN)
    assert len(apart) >= 10 and all(apart)


def from_a_normal(seed):
    """Draws and weights, some 30 % efficient, of a Gumbel in x0 times a normal in x1 given x0, drawn from a wider normal."""
    x = 1 + 2.5 * torch.randn(150, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target = -x[:, 0] - (-x[:, 0]).exp() - 0.5 * (x[:, 1] - 0.5 * x[:, 0]).square()
    return x, target + 0.5 * ((x - 1) / 2.5).square().sum(-1)


def alarms(copies):
    """Of 300 pools of two runs that miss nothing, how many are told that they disagree; each draw counted so many times."""
    count = 0
    for replicate in range(300):
        runs = [from_a_normal(1000 + 2 * replicate + number) for number in range(2)]
        count += excess([tuple(part.repeat_interleave(copies, 0) for part in run) for run in runs])[0] > 1
    return count


LIMIT = scipy.stats.binom.isf(SHARE, 300, 0.03)


@pytest.mark.slow
@pytest.mark.statistical
def test_runs_that_miss_nothing_seldom_disagree():
    """At most 3 pools in 100, the rate for 12 means of two runs."""
    assert alarms(1) <= LIMIT


@pytest.mark.slow
def test_effective_sizes_that_are_overstated_show_between_runs():
    """The planted error: correlated draws taken for independent ones, four copies of each."""
    assert alarms(4) > LIMIT


# --- the default call ---------------------------------------------------------------------------------------------------------


def engine(method, most):
    return Candidate(method, "tested.", None, None, Limits(1, most, math.inf), lambda: 1.0)


@pytest.mark.slow
def test_a_default_call_pools_engines_that_have_too_few_draws_each(monkeypatch):
    engines = [engine(tg.AMIS(), 250), engine(tg.AMIS(begin=tg.AtPrior()), 250)]
    monkeypatch.setattr(sampling, "candidates", lambda model, wanted: engines)
    posterior = tg.sample(gp("probit"), num_samples=250, seed=0, progress=False)
    assert posterior.info["num_runs"] == 2 and posterior.effective_size() >= 250 and posterior.complaints() == []
    first, second = posterior.info["tried"]
    assert first["verdict"].startswith("Too few") and "Pooled with those before: Trustworthy" in second["verdict"]
    assert first["evaluations"] == 250 > second["evaluations"]  # it ended as soon as the pool was good


@pytest.mark.slow
def test_engines_in_turn_have_random_numbers_of_their_own(monkeypatch):
    engines = [engine(tg.AMIS(), 100), engine(tg.AMIS(), 100)]
    monkeypatch.setattr(sampling, "candidates", lambda model, wanted: engines)
    with pytest.warns(tg.SamplingWarning, match="no engine gave"):
        posterior = tg.sample(gp("probit"), num_samples=10_000, seed=0, progress=False)
    assert len(posterior.theta[0].unique(dim=0)) == posterior.num_draws > 0 and posterior.info["num_runs"] == 2
    assert posterior.info["seed"] == 0  # the call's, which gives all of it again


def test_draws_chosen_by_weight_are_worth_no_more_than_those_they_came_from(tmp_path):
    """Repeats are no independent draws, and what spoke against the weights speaks on."""
    whole = run(0)
    uneven = torch.full_like(whole.log_weights, -12.0)
    uneven[0, :20] = 0.0
    poor = Posterior(whole.model, Draws(whole.theta, whole.whitened, uneven), whole.stats, whole.info)
    assert poor.complaints()
    chosen = poor.resampled(1000)
    assert chosen.complaints() == poor.complaints() and chosen.verdict().startswith("Do not trust")
    for posterior in (whole, poor):
        chosen = posterior.resampled(1000)
        assert chosen.effective_size() == pytest.approx(1 / (1 / posterior.effective_size() + 1 / 1000))
        assert "Resampled: 1000 draws by weight" in str(chosen.summary())
        chosen.save(tmp_path / "chosen.pt")
        loaded = Posterior.load(tmp_path / "chosen.pt", posterior.model)
        assert loaded.verdict() == chosen.verdict() and loaded.complaints() == chosen.complaints()
    assert "increase num_draws" in whole.resampled(20).verdict()
