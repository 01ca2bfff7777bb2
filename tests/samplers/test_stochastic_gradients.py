"""Stochastic-gradient HMC: closed forms of its stationary variance, its bias on a model, and what is said about it."""

import numpy as np
import pytest
import scipy.linalg
import torch

import torchgpmc as tg
from tests.calibration import worst_excess, z_limit, z_scores
from tests.problems import fixed_kernel, gp, inputs, sparse_gp, targets
from tests.runs.resume import same
from torchgpmc.diagnostics.summaries import summarise
from torchgpmc.samplers import Preconditioner, stochastic_gradient_hmc

F64 = torch.float64
QUIET = {"progress": False, "seed": 1}


class Normal:
    """A standard normal target, seen through slopes with noise of deviation ``noise``, cut off beyond ``limit``."""

    def __init__(self, noise=0.0, limit=torch.inf, dimension=1):
        self.noise, self.limit = noise, limit
        self.centre = torch.zeros(dimension, dtype=F64)

    def __call__(self, x):
        return torch.where(x.abs().amax(-1) < self.limit, -0.5 * x.square().sum(-1), -torch.inf)

    def estimate(self, x, generator):
        value = self(x)
        slope = -x + self.noise * torch.randn(x.shape, generator=generator, dtype=F64)
        return value, torch.where(torch.isinf(value)[:, None], 0.0, slope)


def sampler(density, step_size, num_steps, scale=1.0, friction=1.0):
    return stochastic_gradient_hmc(
        density,
        step_size=torch.tensor(step_size, dtype=F64),
        preconditioner=Preconditioner(torch.zeros(0, 0, dtype=F64), torch.full((len(density.centre),), scale, dtype=F64)),
        friction=friction,
        num_steps=num_steps,
    )


def stationary_variance(noise, step_size, scale, friction):
    """Of x where noisy slopes -x + noise z are used: that of the linear map of (x, rho) from one drift's end to the next."""
    half, keep = 0.5 * step_size * scale, np.exp(-friction * step_size)
    drift = np.array([[1.0, half], [0.0, 1.0]])
    damp_and_drift = drift @ np.diag([1.0, keep])
    step = damp_and_drift @ drift @ np.array([[1.0, 0.0], [-2 * half, 1.0]])
    fresh, kicked = drift[:, 1:] * np.sqrt(1 - keep**2), 2 * half * noise * (damp_and_drift @ drift)[:, 1:]
    return scipy.linalg.solve_discrete_lyapunov(step, fresh @ fresh.T + kicked @ kicked.T)[0, 0]


CHAINS = 6000


def variance_excess(density, expected, step_size, num_steps, **options):
    """Alarm level of x^2 after independent chains have run, against what it should be."""
    generator = torch.Generator().manual_seed(3)
    kernel = sampler(density, step_size, num_steps, **options)
    state = kernel.init(torch.randn(CHAINS, 1, generator=generator, dtype=F64), generator)
    state, _ = kernel.step(state, generator)
    return worst_excess(state.position.square(), expected)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("step_size", "scale", "friction"), [(0.9, 1.0, 1.0), (0.3, 2.0, 0.5)])
def test_exact_gradients_of_a_normal_target_give_its_variance_at_any_step(step_size, scale, friction):
    assert variance_excess(Normal(), 1.0, step_size, 40, scale=scale, friction=friction) < 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("step_size", [0.8, 0.2])
def test_noisy_gradients_heat_as_the_linear_map_says(step_size):
    """The limit is 5.1 errors of 0.02: at the longer step the heat is ten times that."""
    expected = stationary_variance(2.0, step_size, 1.0, 1.0)
    assert variance_excess(Normal(2.0), expected, step_size, int(16 / step_size)) < 1
    assert variance_excess(Normal(2.0), 1.0, step_size, int(16 / step_size)) > 1


def test_the_heat_is_proportional_to_the_step_and_inverse_to_the_friction():
    heat = {(h, friction): stationary_variance(1.0, h, 1.0, friction) - 1 for h in (0.02, 0.01) for friction in (1.0, 2.0)}
    assert heat[0.02, 1.0] / heat[0.01, 1.0] == pytest.approx(2.0, rel=0.02)
    assert heat[0.02, 1.0] / heat[0.02, 2.0] == pytest.approx(2.0, rel=0.02)
    assert stationary_variance(0.0, 0.9, 2.0, 0.5) == pytest.approx(1.0)


def test_a_chain_that_leaves_the_support_is_put_back():
    generator = torch.Generator().manual_seed(0)
    kernel = sampler(Normal(limit=0.5), 0.5, 3)
    start = kernel.init(torch.zeros(200, 1, dtype=F64), generator)
    state, info = kernel.step(start, generator)
    lost = info.acceptance_rate == 0
    assert 0 < int(lost.sum()) < 200 and bool((state.position[lost] == 0).all()) and bool((state.position[~lost] != 0).all())
    assert bool((info.n_failures[lost] >= 2).all()) and torch.equal(info.temperature.isnan(), lost)
    assert not torch.equal(state.rho[lost], start.rho[lost])


# --- on models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start():
    return tg.initialize(sparse_gp("probit", num_data=12), optimize_inducing_points=False, progress=False)


@pytest.fixture(scope="module")
def known():
    """A posterior that is its fit: Gaussian noise, hyperparameters fixed, so that w is standard normal."""
    noise = tg.likelihoods.Gaussian().requires_grad_(False)
    noise.noise = 0.1
    model = tg.SparseGP(inputs(16), targets("gaussian", 16), fixed_kernel(), noise, inducing_points=inputs(16)[:3])
    return tg.initialize(model, optimize_inducing_points=False, progress=False)


def widths(fit, batch_size, step_size):
    """Of 24 runs of 200 chains each: w^2 averaged over chains and the last draws, and the temperature, ``(24, 2)``."""
    method, runs = tg.StochasticGradientHMC(batch_size=batch_size, step_size=step_size, num_steps=round(2 / step_size)), []
    for seed in range(24):  # the chains of a run share their minibatches
        posterior = tg.sample(
            fit.model, method, start=fit, num_samples=3, warmup_steps=1, num_chains=200, seed=seed, progress=False
        )
        centred = (posterior.whitened - fit.mean[0]).flatten(0, 1)
        w = torch.linalg.solve_triangular(fit.scale[0], centred.mT, upper=False)
        runs.append(torch.stack([w.square().mean(), posterior.stats["temperature"].mean()]))
    return torch.stack(runs)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_on_a_model_the_bias_shrinks_with_the_step_and_is_none_with_all_data(known):
    """Batches of four widen w^2 by some 0.4 at the longer step, nine of the errors that 24 runs have; the limit is at 6.3."""
    whole, long, short = (widths(known, *settings) for settings in ((16, 0.8), (4, 0.8), (4, 0.4)))
    assert worst_excess(whole, 1.0) < 1
    assert bool((torch.from_numpy(z_scores(long, 1.0)) > z_limit(2, 24)).all())
    assert float(z_scores(long - short).min()) > 0 and float((short - 1).mean()) < 0.6 * float((long - 1).mean())


def test_chains_that_are_too_hot_are_told():
    noise = 0.3 * torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=F64)
    rows = summarise({"x": noise})
    for temperature, few, match in ((1.3, 200, "temperature of the chains is 1.30"), (1.05, 200, None), (1.3, 3, None)):
        found = tg.diagnostics.complaints(rows, {"temperature": (temperature + noise - noise.mean())[:, :few]}, 4, None)
        assert [match in complaint for complaint in found] == [True] if match else not found


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_what_is_biased_says_so(start):
    method = tg.StochasticGradientHMC(batch_size=5, step_size=0.2, num_steps=2)
    posterior = tg.sample(start.model, method, start=start, num_samples=8, warmup_steps=2, num_chains=64, **QUIET)
    said = "stochastic gradients, 5 data a step, step size 0.2"
    assert posterior.info["biased"] == said and posterior.info["target"] == f"biased: {said}"
    rows = posterior._rows()
    assert tg.diagnostics.verdict(rows, ("lp", 500.0), [], said).startswith(f"Biased: {said}: worst effective size 500 (lp)")
    assert "biased" not in tg.sample(start.model, tg.NUTS(max_tree_depth=1), start=start, num_samples=4, **QUIET).info


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_checkpoints_and_chunks_of_chains_change_nothing(start, tmp_path):
    method = tg.StochasticGradientHMC(batch_size=5, num_steps=2)
    options = {"start": start, "warmup_steps": 2, "num_chains": 3, **QUIET}
    whole = tg.sample(start.model, method, num_samples=5, **options)
    kept = tg.Checkpoint(tmp_path / "run", every=2)
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, 4)
        tg.sample(start.model, method, num_samples=5, checkpoint=kept, **options)
    assert same(whole, tg.sample(start.model, method, num_samples=5, checkpoint=kept, **options))
    chunked = tg.sample(start.model, method, num_samples=5, chain_chunk=2, **options)
    torch.testing.assert_close(chunked.whitened, whole.whitened)


def _interrupt_after(patch, advances):
    from torchgpmc.runs.chain import ChainRun

    advance = ChainRun.advance

    def interrupted(self, state, generator):
        if state.iteration == advances:
            raise KeyboardInterrupt
        return advance(self, state, generator)

    patch.setattr(ChainRun, "advance", interrupted)


def test_what_it_cannot_do_is_refused_in_words(start):
    method = tg.StochasticGradientHMC()
    for model, changed, given, match in (
        (start.model, method, None, "needs a start"),
        (gp("probit"), method, None, "GP with Bernoulli has a latent for every datum.*Expected a SparseGP"),
        (start.model, tg.StochasticGradientHMC(batch_size=0), start, "batch_size is 0"),
        (start.model, tg.StochasticGradientHMC(step_size=-0.1), start, "step_size is -0.1"),
        (start.model, tg.StochasticGradientHMC(friction=0.0), start, "friction is 0.0"),
    ):
        with pytest.raises(ValueError, match=match):
            tg.sample(model, changed, start=given, num_samples=2, **QUIET)
