"""A sampler from scratch, as an example of the contract: what has to be written, and all that it then can do.

The Metropolis-adjusted Langevin algorithm (Roberts & Tweedie 1996): a step along the gradient with noise, accepted or not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, inputs, sparse_gp, targets
from tests.runs.resume import dies_and_resumes
from tests.speed import quick
from tests.statistical.kernels import SAMPLERS, HalvedLogDensity, Row
from tests.statistical.kernels import preconditioner as unequal_scales
from tests.statistical.test_geweke import geweke
from torchgpmc.models import JointLogDensity
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import joint_target, marginal_target
from torchgpmc.runs.run import chain_settings, in_chunks
from torchgpmc.samplers import Block, MassMatrix, given_the_rest, sweep
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.sweep import SweepWarmUp
from torchgpmc.trees import where
from torchgpmc.types import Sampler

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")

# --- the sampler ------------------------------------------------------------------------------------------------------


class LangevinState(NamedTuple):
    position: Tensor
    log_density: Tensor
    gradient: Tensor


class LangevinInfo(NamedTuple):
    acceptance_rate: Tensor
    n_steps: Tensor
    n_failures: Tensor


def langevin(density, *, step_size, preconditioner):
    """Proposals x + step^2 S S' gradient / 2 + step S z."""

    def init(position, generator):
        return LangevinState(position, *density.value_and_grad(position))

    def step(state, generator):
        z = normal_like(state.position, generator)
        drift = 0.5 * step_size * preconditioner.apply_transpose(state.gradient)
        position = state.position + step_size * preconditioner.apply(drift + z)
        new = LangevinState(position, *density.value_and_grad(position))
        back = drift + z + 0.5 * step_size * preconditioner.apply_transpose(new.gradient)  # minus the z of the way back
        log_ratio = new.log_density - state.log_density + 0.5 * (z.square().sum(-1) - back.square().sum(-1))
        log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf)
        accepted = log_uniform(log_ratio.shape, log_ratio, generator) < log_ratio
        failures = torch.isinf(new.log_density).to(log_ratio)
        return where(accepted, new, state), LangevinInfo(log_ratio.clamp_max(0).exp(), torch.ones_like(log_ratio), failures)

    return Sampler(init, step)


# --- methods: what it samples, and how it is tuned --------------------------------------------------------------------


def adaptation(warmup, search_on=None):
    return WindowedAdaptation(warmup, MassMatrix.DIAGONAL, dense_size=0, step_size=0.1, target_acceptance=0.57, search_on=search_on)


def tuned(density, tuning):
    return langevin(density, step_size=tuning.step_size, preconditioner=tuning.preconditioner)


@dataclass(frozen=True)
class Langevin:
    thinning: int = 1
    marginal: object = None

    def prepare(self, model, settings):
        if self.marginal is None:
            target = joint_target(model, settings)
        else:
            target = marginal_target(model, settings, self.marginal, 0, from_mode=False)
        warmup, _ = chain_settings(settings)
        warm_up = adaptation(warmup, search_on=target.density)
        kernel = lambda tuning: tuned(target.density, tuning)  # noqa: E731
        return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, self.thinning)


@dataclass(frozen=True)
class LangevinInBlocks:
    """Theta given v, then v given theta, each with a step size of its own."""

    thinning: int = 1

    def prepare(self, model, settings):
        target = joint_target(model, settings)
        warmup, chains = chain_settings(settings)
        parts = JointWithPrior(JointLogDensity(model))
        joint = in_chunks(parts, chains, settings.chain_chunk)
        columns = range(model.layout.size), range(model.layout.size, target.dimension)
        conditionals = given_the_rest(joint, columns[0]), parts.latents

        def kernel(tunings):
            kernels = [lambda density, own=own: tuned(density, own) for own in tunings]
            return sweep(joint, [Block(*block) for block in zip(columns, conditionals, kernels, strict=True)])

        warm_up = SweepWarmUp(columns, (adaptation(warmup), adaptation(warmup)))
        return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, self.thinning)


# --- what it then can do ----------------------------------------------------------------------------------------------


def latents_alone(likelihood):
    return tg.GP(inputs(6), targets(likelihood, 6), fixed_kernel(), LIKELIHOODS[likelihood]())


CASES = {
    "[theta, v]": (gp, Langevin(thinning=2)),
    "inducing values": (sparse_gp, Langevin(thinning=2)),
    "v": (latents_alone, Langevin(thinning=2)),
    "theta, under a marginal": (gp, Langevin(marginal=tg.Laplace(), thinning=2)),
    "blocks": (gp, LangevinInBlocks(thinning=2)),
}
OPTIONS = {"num_samples": 9, "warmup_steps": 30, "num_chains": 3, "seed": 4, "progress": False}


@pytest.mark.parametrize("case", quick(["v"], CASES))
def test_it_samples_with_statistics_and_progress(case, capsys):
    make, method = CASES[case]
    posterior = tg.sample(make("probit"), method, **{**OPTIONS, "warmup_steps": 200, "progress": True})
    assert posterior.whitened.shape[:2] == (3, 9)
    assert {"lp", "acceptance_rate", "n_steps", "n_failures"} <= set(posterior.stats)
    assert all(value.shape == (3, 9) for value in posterior.stats.values())
    blocks = 2 if case == "blocks" else 1
    assert bool((posterior.stats["n_steps"] == 2 * blocks).all())  # they add up over thinning
    assert 0.2 < float(posterior.stats["acceptance_rate"].mean()) < 0.95  # warm-up has done something
    assert "accept" in capsys.readouterr().err
    if case != "theta, under a marginal":  # whose draws are not of the joint density's Markov chain
        position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
        torch.testing.assert_close(tg.joint_log_density(make("probit"))(position), posterior.stats["lp"][:, -1])


@pytest.mark.parametrize("case", quick(["v"], CASES))
@pytest.mark.parametrize("advances", quick([33], [2, 17, 33]))
def test_a_run_that_died_resumes_to_the_same_bits(case, advances, tmp_path, monkeypatch):
    make, method = CASES[case]
    assert dies_and_resumes(make, method, OPTIONS, advances, tmp_path / "run.ckpt", monkeypatch)


@pytest.mark.parametrize("case", quick(["[theta, v]", "v", "blocks"], CASES))
def test_chunks_do_not_change_the_draws(case):
    make, method = CASES[case]
    options = {**OPTIONS, "num_samples": 2, "warmup_steps": 4}
    whole, chunked = (tg.sample(make("probit"), method, **options, chain_chunk=chunk) for chunk in (None, 2))
    torch.testing.assert_close(chunked.theta, whole.theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked.whitened, whole.whitened, rtol=1e-6, atol=1e-6)


def _whole(model, density, like):
    return langevin(density, step_size=torch.tensor(0.8).to(like), preconditioner=unequal_scales(model, like))


def _in_blocks(model, density, like):
    size = model.layout.size
    joint = JointWithPrior(JointLogDensity(model, density.targets))
    of_theta, of_v = (
        unequal_scales(model, like)._replace(**empty) for empty in ({"deviation": like[:0, 0]}, {"factor": like[:0, :0]})
    )
    step = torch.tensor(0.8).to(like)
    return sweep(
        joint,
        [
            Block(
                range(size),
                given_the_rest(joint, range(size)),
                lambda part: langevin(part, step_size=step, preconditioner=of_theta),
            ),
            Block(range(size, like.shape[1]), joint.latents, lambda part: langevin(part, step_size=step, preconditioner=of_v)),
        ],
    )


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("make", [_whole, _in_blocks])
def test_it_leaves_the_joint_distribution_as_it_is(make, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "toy", Row("langevin", make))
    assert geweke(gp("poisson", num_data=3), "toy", seed=51) < 1


@pytest.mark.slow
def test_a_halved_log_ratio_is_caught(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "toy", Row("langevin", _whole))
    assert geweke(gp("poisson", num_data=3), "toy", seed=52, density_class=HalvedLogDensity, rounds=10) > 1
