"""Chains on an emulator of the evidence: whatever it is, weights make their draws exact."""

import math
from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, sparse_gp, targets
from tests.runs.resume import dies_and_resumes
from torchgpmc.diagnostics import chain_statistics
from torchgpmc.methods import Settings
from torchgpmc.parameters.normal_scale import CentredScale, NormalScale, normal_scale
from torchgpmc.runs import emulated as runs_emulated
from torchgpmc.runs.drawn_start import DrawnStart, drawn_start

OPTIONS = {"num_samples": 4, "warmup_steps": 12, "num_chains": 4, "seed": 1, "progress": False}
METHOD = tg.EmulatedHMC(num_importance=4, num_trajectories=2)


def regression(num_columns=2):
    """Two lengthscales, an outputscale and noise under skewed priors, the evidence exact."""
    x = inputs(12, num_columns, seed=3)
    base = RBFKernel(ard_num_dims=num_columns, lengthscale_prior=LogNormalPrior(0.0, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 1.0))
    return tg.GPRegression(x, torch.sin(6 * x[:, 0]), kernel, GaussianLikelihood(noise_prior=GammaPrior(1.5, 3.0)))


def warmed_up(method, model, settings, seed=0):
    """A run when warm-up is done, its state, and the generator that it goes on with."""
    run = method.prepare(model, settings)
    generator = torch.Generator().manual_seed(seed)
    state = run.init(generator)
    for _ in range(settings.warmup_steps):
        state = run.advance(state, generator)[0]
    return run, state, generator


def mean_and_error(posterior):
    """Weighted means of theta and its square, with errors that count weights and autocorrelation."""
    values = torch.cat([posterior.theta, posterior.theta.square()], -1)
    weights = torch.ones(values.shape[:2], dtype=torch.float64)
    if posterior.log_weights is not None:
        weights = torch.softmax(posterior.log_weights.flatten(), 0).view(values.shape[:2])
    weights = weights / weights.mean()
    mean = (weights.unsqueeze(-1) * values).mean((0, 1))
    terms = weights.unsqueeze(-1) * (values - mean)
    sizes = torch.tensor([chain_statistics.ess(terms[..., i].numpy(), "mean") for i in range(values.shape[-1])])
    return mean, terms.flatten(0, 1).std(0) / sizes.sqrt()


def alarm(found, truth):
    """Above 1 is a false alarm once in 1000 runs, of eight means."""
    (mean, error), (true_mean, true_error) = found, truth
    z = (mean - true_mean).abs() / (error.square() + true_error.square()).sqrt()
    limit = float(torch.special.ndtri(torch.tensor(1 - 0.0005 / len(z), dtype=torch.float64)))
    return float(z.max()) / limit


@pytest.fixture(scope="module")
def reference():
    return mean_and_error(
        tg.sample(regression(), tg.NUTS(), num_samples=500, warmup_steps=200, num_chains=16, seed=1, progress=False)
    )


def rough_run(monkeypatch, tilt):
    """From few points, the emulator tilted besides."""
    learned = runs_emulated.emulated

    def tilted(*args):
        found = learned(*args)
        return found._replace(bends=found.bends._replace(bend=found.bends.bend + tilt))

    monkeypatch.setattr(runs_emulated, "emulated", tilted)
    options = {"num_samples": 150, "warmup_steps": 8, "num_chains": 16, "seed": 3, "progress": False}
    return tg.sample(regression(), tg.EmulatedHMC(), **options)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("tilt", [0.0, 0.2])  # of 0.3 weights have a tail of which 2400 draws see too little
def test_draws_agree_with_nuts_through_their_weights(tilt, reference, monkeypatch):
    posterior = rough_run(monkeypatch, tilt)
    assert alarm(mean_and_error(posterior), reference) < 1
    if tilt:  # the emulator is no posterior
        posterior.log_weights = None
        assert alarm(mean_and_error(posterior), reference) > 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_means_of_many_runs_are_not_off_alike(reference):
    """Of 12 runs, whose emulators differ, of more draws than one has elsewhere: what all share shows five times as well."""
    options = {"num_samples": 40, "warmup_steps": 8, "num_chains": 16, "progress": False}
    runs = [mean_and_error(tg.sample(regression(), tg.EmulatedHMC(), seed=seed, **options))[0] for seed in range(12)]
    means = torch.stack(runs)
    assert alarm((means.mean(0), means.std(0) / math.sqrt(len(runs))), reference) < 1


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("advances", [3, 9, 14])  # among points that are spread, in learning, and among the draws
def test_a_run_that_dies_goes_on_to_the_same_draws(advances, tmp_path, monkeypatch):
    assert dies_and_resumes(gp, METHOD, OPTIONS, advances, tmp_path / "run", monkeypatch)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("model", [gp_regression, lambda: sparse_gp("poisson"), lambda: gp("logit"), lambda: gp("student_t")])
def test_it_serves_what_estimates_serve(model):
    made = model()
    approximation = tg.Laplace() if "StudentT" in type(made.likelihood).__name__ else tg.EP()
    posterior = tg.sample(made, tg.EmulatedHMC(approximation=approximation, num_importance=4), **OPTIONS)
    assert posterior.log_weights.shape == (4, 4) and bool(torch.isfinite(posterior.log_weights).all())
    assert posterior.info["target"] == "an emulator of the posterior: weighted to the exact posterior"


@pytest.mark.parametrize(("warmup_steps", "count"), [(12, 6), (100, 32)])
def test_estimates_of_points_that_are_spread_begin_at_the_nearest_of_some_of_these(warmup_steps, count):
    # A quarter of their number, as of the best of them when chains begin: what a checkpoint holds may not shrink.
    run = METHOD.prepare(gp("student_t"), Settings(4, warmup_steps, 4, None))
    generator = torch.Generator().manual_seed(0)
    tuning = run.warm_up.start(run.warm_up.chains.start(4, generator), None, generator)
    assert len(tuning.anchors) == len(tuning.sites) == min(count, max(1, run.warm_up.spread_steps))
    assert len(torch.unique(tuning.anchors, dim=0)) == len(tuning.anchors)


def some_draws(model, count=60):
    """Of the prior's middle, narrow, as an earlier run might have them."""
    theta = 0.2 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return DrawnStart(theta, torch.linspace(-1, 0, count, dtype=torch.float64))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_weight_is_the_estimate_over_the_emulator(scaled):
    model = gp("probit")
    settings = Settings(2, 12, 4, None, draws=some_draws(model) if scaled else None)
    run, state, generator = warmed_up(replace(METHOD, scaled_to_draws=scaled), model, settings)
    state, draw, stats = run.advance(state, generator)
    z, emulator = state.chain.position, state.tuning.emulator
    scale = run.warm_up.chains.scale
    assert isinstance(scale, CentredScale if scaled else NormalScale)
    theta, log_slope = scale.theta(z)
    log_prior = run.warm_up.chains.model.layout.log_prior(theta).detach()
    torch.testing.assert_close(draw.theta[:, 0], theta)
    least = float(state.tuning.least_weight.log())
    expected = stats["log_evidence"] + log_prior + log_slope - emulator(z)
    torch.testing.assert_close(draw.log_weight[:, 0], expected.clamp_min(least))
    assert len(emulator.points) == len(state.tuning.position) == 11 * 4  # the last step of 12 is where chains are put


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_proposals_are_refused_by_what_their_weight_falls_short_of_the_least(quantile, monkeypatch):
    run, state, _ = warmed_up(tg.EmulatedHMC(num_trajectories=2), regression(), Settings(3, 8, 40, None))
    emulator = state.tuning.emulator
    emulator = emulator._replace(mean=emulator.mean + 2)  # about half of the weights are less than c
    state = state._replace(tuning=state.tuning._replace(emulator=emulator))

    def after(number):
        monkeypatch.setattr(runs_emulated, "uniform", lambda shape, like, generator: like.new_full(shape, number))
        return run.advance(state, torch.Generator().manual_seed(2))[0].chain

    def shortfall(chain):
        return (chain.log_target - emulator(chain.position) + 2).clamp_max(0.0)  # c is e^-2

    proposed = after(0.0)
    gain = shortfall(proposed) - shortfall(state.chain)
    assert bool((gain == 0).any()) and int((gain < 0).sum()) > 2
    level = float(gain.exp()[gain < 0].quantile(quantile))
    accepted = gain > math.log(level)
    found = after(level)
    torch.testing.assert_close(found.position, torch.where(accepted[:, None], proposed.position, state.chain.position))


def test_after_warm_up_nothing_is_learned():
    run, state, generator = warmed_up(METHOD, gp("probit"), Settings(3, 12, 4, None))
    tuning = state.tuning
    for _ in range(3):
        state = run.advance(state, generator)[0]
    assert all(map(torch.equal, tuning.emulator[1:], state.tuning.emulator[1:])) and state.tuning.step_size == tuning.step_size


def test_warm_up_learns_no_more_once_the_latest_weights_are_even():
    """Then nothing is estimated until draws begin."""
    run = tg.EmulatedHMC(num_importance=64, enough=0.6).prepare(gp("probit"), Settings(2, 60, 16, None))
    generator = torch.Generator().manual_seed(0)
    state, learned = run.init(generator), []
    for _ in range(61):
        state, _, stats = run.advance(state, generator)
        learned.append(int(stats["n_steps"].sum()))
    num_learned = sum(learned[:60]) - 16  # where chains are put
    assert 64 + 16 * run.warm_up.spread_steps <= num_learned < 60 * 16 and learned[59] == 0 and learned[60] == 16
    assert len(state.tuning.emulator.points) == len(state.tuning.position) == num_learned and not state.tuning.waits


def learned_by(most_noise, steps=14):
    """Iterations that estimate anything, of two more than it takes to look at the first estimates; and the last tuning."""
    run = tg.EmulatedHMC(num_importance=64, most_noise=most_noise).prepare(gp("probit"), Settings(2, steps, 16, None))
    generator = torch.Generator().manual_seed(0)
    state, made = run.init(generator), 0
    for _ in range(steps):
        state, _, stats = run.advance(state, generator)
        made += float(stats["n_steps"].sum()) > 0
    return made, state.tuning


def test_warm_up_learns_no_more_where_half_of_the_latest_estimates_are_too_noisy():
    """Half of those at thetas that the chains came to: not of the first points, which are spread over all."""
    everything, tuning = learned_by(math.inf)
    looked_at = tuning.variance[: 16 * 11][-64:]  # 7 iterations spread points, of 14; four follow
    assert everything == 14 and len(tuning.variance) == 16 * 13  # the last is where chains are put
    least, middle = float(looked_at.min()), float(looked_at.median())
    for most_noise, ends in ((0.99 * middle, True), (1.01 * least, True), (1.01 * middle, False)):
        assert (learned_by(most_noise)[0] == 7 + 4 + 1) == ends  # and where chains are put then


@pytest.mark.parametrize("enough", [1.0, 0.3])
def test_draws_begin_at_points_that_are_not_astray(enough):
    """At some of the latest that taught, none twice, and none where the emulator had been far too high."""
    _, state, generator = warmed_up(tg.EmulatedHMC(num_importance=64, enough=enough), gp("probit"), Settings(2, 30, 16, None))
    tuning, latest = state.tuning, state.tuning.position[-64:]
    same = (state.chain.position[:, None] == latest).all(-1)
    assert bool(same.any(-1).all()) and len(state.chain.position.unique(dim=0)) == 16
    target = tuning.log_target.clone()
    target[-64::2] -= 1e3
    for _ in range(20):
        begun = runs_emulated._not_astray(tuning._replace(log_target=target), 16, 64, generator)
        assert not bool((begun[:, None] == latest[::2]).all(-1).any())


@pytest.mark.parametrize("iteration", [20, 29])
def test_a_chain_astray_when_learning_ends_is_put_elsewhere(iteration):
    """Enough is known, or all but the last step of warm-up is over; the one chain's latest point is where there is no mass."""
    method = tg.EmulatedHMC(num_importance=64, enough=1.0 if iteration == 29 else 1e-3)
    run = method.prepare(gp("probit"), Settings(2, 30, 16, None))
    generator = torch.Generator().manual_seed(0)
    state = run.init(generator)
    for _ in range(iteration - 1):
        state = run.advance(state, generator)[0]
        if iteration == 20:  # not yet, whatever is known
            state = state._replace(tuning=state.tuning._replace(stage=state.tuning.stage[:0], starts=state.tuning.starts[:0]))
    lost = state.chain._replace(log_target=state.chain.log_target.clone())
    lost.log_target[3] -= 1e3
    info = run.kernel(state.tuning).step(state.chain, generator)[1]
    ended = run.warm_up.update(state.tuning, iteration, lost, info, generator)
    assert ended.waits and len(ended.starts) == 16
    put = run.kernel(ended).step(lost, generator)[0]
    assert torch.equal(put.position, ended.starts) and bool(torch.isfinite(put.log_target).all())
    same = (put.position == lost.position[3]).all(-1)
    assert not bool(same.any())
    after = run.warm_up.update(ended, iteration + 1, put, info, generator)
    assert not len(after.starts)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_chains_leave_where_the_emulator_has_mass_that_is_not_there():
    run, state, generator = warmed_up(METHOD, gp("probit"), Settings(9, 12, 4, None))
    lost = state.chain._replace(log_target=state.chain.log_target - 1e3)
    found = run.advance(state._replace(chain=lost), generator)[0].chain
    assert not bool((found.position == lost.position).all(-1).any())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_draw_of_great_weight_is_kept_no_longer_than_others(monkeypatch):
    run, state, generator = warmed_up(
        tg.EmulatedHMC(num_importance=64, num_trajectories=2), gp("probit"), Settings(9, 40, 16, None)
    )
    high = state.chain._replace(log_target=state.chain.log_target + 1e3)
    found = run.advance(state._replace(chain=high), generator)[0].chain
    assert int((found.position != high.position).any(-1).sum()) > 12


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_it_begins_at_draws_of_an_earlier_run():
    model = gp("probit")
    before = tg.sample(model, tg.AMIS(num_importance=4), num_samples=200, seed=0, progress=False)
    posterior = tg.sample(model, METHOD, start=before, **OPTIONS)
    assert posterior.theta.shape == (4, 4, model.layout.size)


def test_draws_that_come_with_the_evidence_teach_it():
    """But for one far below the others, whose evidence no emulator would follow besides theirs."""
    model = gp("probit")
    before = tg.sample(model, tg.AMIS(), num_samples=200, seed=0, progress=False)
    draws = drawn_start(before, model)
    assert draws.log_evidence is not None
    draws.log_evidence[7] -= 100
    _, state, _ = warmed_up(METHOD, model, Settings(2, 2, 4, None, draws=draws))
    tuning = state.tuning
    assert len(tuning.position) == len(tuning.emulator.points) == 199 + 2 * 4
    theta, log_slope = normal_scale(model.layout).theta(tuning.position[:199])
    kept = torch.arange(200) != 7
    torch.testing.assert_close(theta, draws.theta[kept])
    expected = draws.log_evidence[kept] + model.layout.log_prior(theta).detach() + log_slope
    torch.testing.assert_close(tuning.log_target[:199], expected)
    assert float((tuning.emulator(tuning.position[:199]) - expected).abs().median()) < 0.2
    without = METHOD.prepare(model, Settings(2, 12, 4, None, draws=draws._replace(log_evidence=None)))
    assert without.warm_up.known is None
    # Of 500 x 11 those of proposals on whose scale it moved had it run off between them and the points that are spread.
    assert replace(METHOD, scaled_to_draws=True).prepare(model, Settings(2, 12, 4, None, draws=draws)).warm_up.known is None
    with torch.no_grad():
        draws.log_evidence.fill_(-torch.inf)
    assert METHOD.prepare(model, Settings(2, 12, 4, None, draws=draws)).warm_up.known is None


def test_on_a_scale_of_draws_these_have_mean_zero_and_points_lie_around_them():
    model = gp("probit")
    draws = some_draws(model)
    chains = tg.EmulatedHMC(scaled_to_draws=True).prepare(model, Settings(1, 12, 4, None, draws=draws)).warm_up.chains
    weights = torch.softmax(draws.log_weights, 0)
    w = chains.scale.z(draws.theta)
    torch.testing.assert_close(weights @ w, torch.zeros_like(w[0]), rtol=0, atol=1e-9)
    deviation = (weights @ w.square()).sqrt()
    assert bool(((deviation > 0.6) & (deviation < 1)).all())  # a scale wider than the draws, whose tails are to be covered
    torch.testing.assert_close(chains.scale.theta(w)[0], draws.theta)
    spread = chains.start(400, torch.Generator().manual_seed(0)).std(0)
    assert bool(((spread > 0.8) & (spread < 1.7)).all())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("begin", [tg.AtPrior(), tg.AtPrior(arms=True), tg.AtModes(count=1)])
def test_points_are_spread_over_what_it_begins_with(begin):
    posterior = tg.sample(gp("probit"), tg.EmulatedHMC(num_importance=4, begin=begin), chain_chunk=2, **OPTIONS)
    assert bool(torch.isfinite(posterior.log_weights).all())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_models_in_single_precision_learn_in_double():
    model = gp("probit", num_data=20, dtype=torch.float32)
    posterior = tg.sample(model, tg.EmulatedHMC(), num_samples=20, warmup_steps=40, num_chains=8, seed=0, progress=False)
    assert posterior.theta.dtype == torch.float32
    assert int(posterior.stats["n_failures"].sum()) <= 8  # estimates may fail in single precision, and are counted
    assert float(posterior.log_weights.std()) < 0.5


def test_evidence_of_zero_everywhere_is_an_error():
    model = gp("probit")
    model.jitter = -10.0  # no covariance can be factorised
    with pytest.raises(ValueError, match=r"evidence zero.*Expected some to succeed"):
        tg.sample(model, tg.EmulatedHMC(begin=tg.AtPrior()), **OPTIONS)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (tg.EmulatedHMC(), {"warmup_steps": 1}, "warmup_steps is 1.*Expected at least 2"),
        (tg.EmulatedHMC(num_importance=0), {}, "num_importance"),
        (tg.EmulatedHMC(num_trajectories=0), {}, "num_trajectories"),
        (tg.EmulatedHMC(scaled_to_draws=1), {}, "scaled_to_draws"),
        (tg.EmulatedHMC(enough=0.0), {}, "enough is 0.0. Expected a share above 0"),
        (tg.EmulatedHMC(most_noise=0.0), {}, "most_noise is 0.0. Expected a variance above 0"),
    ],
)
def test_what_cannot_be_is_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        tg.sample(gp("probit"), method, **{**OPTIONS, **options})


def test_a_beginning_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="begin is 3"):
        tg.sample(gp("probit"), tg.EmulatedHMC(begin=3), **OPTIONS)


def test_several_data_sets_are_refused():
    model = gp("probit").with_targets(torch.stack([targets("probit", 6, seed) for seed in range(4)]))
    with pytest.raises(ValueError, match="learns the evidence of one"):
        tg.sample(model, tg.EmulatedHMC(), **OPTIONS)
