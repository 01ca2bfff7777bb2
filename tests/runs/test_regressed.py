"""Theta moved along a fit: the joint density in other coordinates, of all of theta at once."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp, some_fit
from tests.runs.test_likelihood_parts import model_of
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.chain_targets import joint_target, original_target
from torchgpmc.runs.parameterizations import ThetaBlock
from torchgpmc.runs.run import Settings
from torchgpmc.samplers import Preconditioner, hmc, metropolis, sweep

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
CHAINS = 4
OPTIONS = {"num_samples": 4, "warmup_steps": 8, "num_chains": CHAINS, "seed": 4, "progress": False}


def position_in(model, generator):
    size = model.layout.size + model.latent_size
    return 0.5 * torch.randn(CHAINS, size, generator=generator, dtype=torch.float64)


def block_of(model, kernel):
    return ThetaBlock(JointLogDensity(model), kernel, 3, CHAINS, None)


def unit(model):
    return Preconditioner(torch.zeros(0, 0), torch.ones(model.layout.size).double())


def test_gradients_are_those_of_the_joint_density_with_the_latents_following(generator):
    model = gp("poisson")
    theta, v = position_in(model, generator).tensor_split([model.layout.size], -1)
    fit, joint = some_fit(model), JointLogDensity(model)
    given, excess = tg.Regressed(fit).given(joint, theta, None, v, generator)
    there = (theta + 0.3).requires_grad_()
    expected = joint(torch.cat([there, v + (there - theta) @ fit.slope.mT], -1))
    (slope,) = torch.autograd.grad(expected.sum(), there)
    value, gradient = given.value_and_grad(there.detach())
    torch.testing.assert_close((value, gradient), (expected.detach(), slope))
    drawn, moved = given.draw(there.detach(), generator)
    torch.testing.assert_close((drawn, moved.log_density, given(there.detach())), (value, value, value))
    torch.testing.assert_close(moved.v, (v + (there - theta) @ fit.slope.mT).detach())
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(given.select(rows).value_and_grad(there[rows].detach())[1], gradient[rows])
    assert not bool(excess.any())


@pytest.mark.parametrize("kernel", [metropolis, hmc], ids=lambda kernel: kernel.__name__)
def test_where_latents_do_not_follow_it_is_the_ancillary_move(kernel, generator):
    model, ends = gp("probit"), []
    position = position_in(model, generator)
    options = {"step_size": torch.tensor(0.3).double(), "preconditioner": unit(model)}
    options |= {"num_steps": 2} if kernel is hmc else {}
    for parameterization in (tg.Ancillary(), tg.Regressed(some_fit(model, steepness=0.0))):
        seeded = torch.Generator().manual_seed(5)
        update = parameterization.update(block_of(model, lambda density: kernel(density, **options)))
        sampler = sweep(JointWithPrior(JointLogDensity(model)), [update])
        ends.append(sampler.step(sampler.init(position, seeded), seeded)[0])
    torch.testing.assert_close(ends[1].position, ends[0].position)
    torch.testing.assert_close(ends[1].log_density, ends[0].log_density)
    assert bool((ends[0].position != position).any())


@pytest.mark.slow
def test_genes_move_with_the_lengthscale_and_the_sweep_knows_where_it_is():
    model = model_of()
    method = tg.Gibbs(hyper=tg.HMC(num_steps=2), parameterization=tg.Regressed(some_fit(model)), latent_steps=1)
    posterior = tg.sample(model, method, **OPTIONS)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
    torch.testing.assert_close(tg.joint_log_density(posterior.model)(position), posterior.stats["lp"][:, -1])
    moved = posterior.theta.diff(dim=1) != 0
    assert bool(moved.any()) and bool((moved.any(-1) == moved.all(-1)).all())
    other = tg.sample(model, method, **OPTIONS, chain_chunk=3)
    torch.testing.assert_close(other.theta, posterior.theta)


def test_sweeps_begin_where_others_do_with_the_same_start(generator):
    model = gp("probit")
    fit, settings = some_fit(model), Settings(1, 1, CHAINS, None)._replace(start=some_fit(model))
    theta, w = joint_target(model, settings).start(torch.Generator().manual_seed(6))[0].tensor_split([model.layout.size], -1)
    position, covariance = original_target(model, settings).start(torch.Generator().manual_seed(6))
    torch.testing.assert_close(position, torch.cat([theta, fit.white_coordinates().latents(theta, w)], -1))
    assert covariance is None
    assert tg.sample(model, tg.Gibbs(latent_steps=1), start=fit, **OPTIONS).theta.isfinite().all()


def test_a_warm_up_keeps_the_fits_covariance(generator):
    fit = some_fit(gp("probit"))
    own = tg.HMC().hyper_move(len(fit.theta), 50).warm_up
    tuning = tg.Regressed(fit).warm_up(own).start(torch.zeros(CHAINS, len(fit.theta)).double(), None, generator)
    torch.testing.assert_close(tuning.preconditioner.factor @ tuning.preconditioner.factor.mT, fit.theta_covariance)
    assert not tuning.learns_mass_matrix


def test_what_cannot_be_is_refused():
    model = gp("probit")
    for start, error, match in (
        (tg.Laplace(), TypeError, r"start is Laplace\. Expected what torchgpmc.initialize"),
        (some_fit(gp("poisson")), ValueError, "start belongs to another model"),
    ):
        with pytest.raises(error, match=match):
            tg.sample(model, tg.Gibbs(parameterization=tg.Regressed(start)), **OPTIONS)
