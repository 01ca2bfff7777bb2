"""ChEES-HMC: the slope of its criterion, the length it learns, the steps it shares."""

import importlib
import math

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import gp
from torchgpmc.density import AutogradDensity
from torchgpmc.runs.run import Settings
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.chees import ChEESAdaptation, TrajectoryEnds, chees, chees_slope
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner, identity_preconditioner

F64 = torch.float64
NORMAL = AutogradDensity(lambda x: -0.5 * x.square().sum(-1))


def exact_flow(chains, dimension, time, generator):
    """A standard normal's trajectories, which are circles."""
    x, rho = torch.randn(2, chains, dimension, dtype=F64, generator=generator)
    return x, x * math.cos(time) + rho * math.sin(time), rho * math.cos(time) - x * math.sin(time)


@pytest.mark.parametrize("time", [0.4, 1.2, 2.0])
def test_the_slope_is_the_criterions(time, generator):
    """Of a standard normal the criterion is D sin(t)^2; its slope in log t, over t, is D sin(2 t)."""
    start, end, rho = exact_flow(40_000, 3, time, generator)
    unit = identity_preconditioner(0, 3, start)
    slope = chees_slope(TrajectoryEnds(start, end, rho, 1.0), unit, torch.ones(len(start), dtype=F64))
    assert float(slope) == pytest.approx(3 * math.sin(2 * time), abs=0.12)  # four standard errors
    scaled = Preconditioner(torch.tensor([[2.0, 0.0], [1.5, 0.3]], dtype=F64), torch.tensor([40.0], dtype=F64))
    proposal = TrajectoryEnds(scaled.apply(start), scaled.apply(end), rho, 1.0)
    torch.testing.assert_close(chees_slope(proposal, scaled, torch.ones(len(start), dtype=F64)), slope)


def test_chains_count_by_their_acceptance_and_lost_ones_not_at_all(generator):
    start, end, rho = exact_flow(50, 3, 0.7, generator)
    start[40:] = start[:40].mean(0)  # so that the mean start is that of the others
    unit, acceptance = identity_preconditioner(0, 3, start), torch.rand(50, dtype=F64, generator=generator)
    acceptance[40:] = 0.0
    few = chees_slope(TrajectoryEnds(start[:40], end[:40], rho[:40], 0.5), unit, acceptance[:40])
    end[40:45], end[45:], rho[40:] = math.nan, math.inf, -math.inf
    torch.testing.assert_close(chees_slope(TrajectoryEnds(start, end, rho, 0.5), unit, acceptance), few)
    assert float(chees_slope(TrajectoryEnds(start, end, rho, 0.5), unit, torch.zeros(50, dtype=F64))) == 0.0


def adapted(density, dimension, *, steps, chains=64, mass_matrix=MassMatrix.IDENTITY, step_size=0.1, target=None):
    """The last tuning, the last info, and the harmonic mean acceptance of each transition."""
    generator = torch.Generator().manual_seed(3)
    windows = WindowedAdaptation(steps, mass_matrix, 0, step_size, target, density if target else None)
    warm_up, position = ChEESAdaptation(windows, 1000), torch.randn(chains, dimension, dtype=F64, generator=generator)
    tuning, state, harmonic = warm_up.start(position, None, generator), None, []
    for iteration in range(1, steps + 1):
        tuned, length = tuning.adaptation, tuning.trajectory.log_length.exp()
        sampler = chees(density, step_size=tuned.step_size, preconditioner=tuned.preconditioner, trajectory_length=length)
        state = sampler.init(position, generator) if state is None else state
        state, info = sampler.step(state, generator)
        tuning = warm_up.update(tuning, iteration, state, info, generator)
        harmonic.append(float(1 / (1 / info.acceptance_rate).mean()))
    return tuning, info, harmonic


@pytest.mark.slow
def test_the_length_that_is_learned_is_the_best_one():
    """Of a standard normal and h uniform on (0, 1), E sin(h T)^2 is largest where tan(2 T) = 2 T: T = 2.247."""
    tuning, _, _ = adapted(NORMAL, 10, steps=250)
    assert float(tuning.trajectory.log_length.exp()) == pytest.approx(2.247, rel=0.15)


@pytest.mark.slow
def test_step_size_and_scales_are_learned():
    scales = torch.tensor([0.05, 1.0, 5.0], dtype=F64)
    density = AutogradDensity(lambda x: -0.5 * (x / scales).square().sum(-1))
    tuning, info, harmonic = adapted(density, 3, steps=200, mass_matrix=MassMatrix.DIAGONAL, target=0.651)
    torch.testing.assert_close(tuning.adaptation.preconditioner.deviation, scales, rtol=0.2, atol=0)
    assert sum(harmonic[-40:]) / 40 == pytest.approx(0.651, abs=0.1) and float(info.n_steps[0]) < 20
    assert 1.0 < float(tuning.trajectory.log_length.exp()) < 4.0


def moments_after(density, transitions, length=2 * math.pi):
    """Chains of a density that is standard normal in both coordinates, started at one point."""
    generator = torch.Generator().manual_seed(7)
    unit = identity_preconditioner(0, 2, torch.zeros(1, dtype=F64))
    step_size = torch.tensor(math.pi / 16, dtype=F64)
    sampler = chees(density, step_size=step_size, preconditioner=unit, trajectory_length=torch.tensor(length, dtype=F64))
    state = sampler.init(torch.full((4000, 2), 2.0, dtype=F64), generator)
    counts = []
    for _ in range(transitions):
        state, info = sampler.step(state, generator)
        assert len(info.n_steps.unique()) == 1
        counts.append(int(info.n_steps[0]))
    return state.position, counts


@pytest.mark.slow
@pytest.mark.statistical
def test_jitter_breaks_the_resonance_of_a_whole_period(monkeypatch):
    position, counts = moments_after(NORMAL, 12)
    assert worst_excess(torch.cat([position, position.square()], -1), torch.tensor([0.0, 0.0, 1.0, 1.0])) < 1
    assert len(set(counts)) > 8 and max(counts) <= 32  # of the 12 transitions
    monkeypatch.setattr(importlib.import_module("torchgpmc.samplers.chees"), "van_der_corput", lambda place: 1.0)
    position, _ = moments_after(NORMAL, 12)  # planted error: every trajectory comes back to its start
    assert worst_excess(torch.cat([position, position.square()], -1), torch.tensor([0.0, 0.0, 1.0, 1.0])) > 1


def test_a_handful_of_chains_is_warned_of_and_the_default_is_many():
    model = gp("probit", num_data=3)
    with pytest.warns(tg.SamplingWarning, match="4 of them say little: .* Use num_chains=64, at least 8, or NUTS"):
        tg.ChEES().prepare(model, Settings(5, 5, 4, None))
    run = tg.ChEES().prepare(model, Settings(5, 0, None, None))
    state = run.init(torch.Generator().manual_seed(0))
    assert len(state.chain.position) == 64
    state, draw, stats = run.advance(state, torch.Generator().manual_seed(0))
    assert draw.theta.shape[:2] == (64, 1) and {"step_size", "trajectory_length", "n_steps"} <= set(stats)
    assert all(value.shape == (64,) for value in stats.values())


def test_a_data_set_a_chain_decides_how_many():
    several = gp("probit", num_data=3).with_targets(torch.ones(9, 3))
    run = tg.ChEES().prepare(several, Settings(5, 0, 9, None))
    assert len(run.init(torch.Generator().manual_seed(0)).chain.position) == 9
