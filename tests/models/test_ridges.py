"""Coordinates that straighten a likelihood's ridges: the same posterior, whatever is predicted, as long as it is of others."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import gp, some_fit
from torchgpmc.likelihoods import Activation, Repression, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.models.ridges import Ridges, StraightDensity, ridges_of

GENES = 2


def model_of(response, variance=0.01):
    grid = torch.linspace(0, 4, 5, dtype=torch.float64)
    y = torch.ones(1, GENES, 3, dtype=torch.float64)
    variances = torch.full_like(y, variance)
    options = {"num_genes": GENES, "num_replicates": 1, "response": response, "variances": variances}
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), Transcription(grid, grid[::2], **options))


def positions(model, generator, count=3):
    return torch.randn(count, model.layout.size + model.latent_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("response", [Activation(), Repression()], ids=lambda response: type(response).__name__)
def test_the_density_and_its_gradient_are_those_of_the_joint_density_there(response, generator):
    model = model_of(response)
    joint, ridges = JointLogDensity(model), ridges_of(model)
    z = positions(model, generator).requires_grad_()
    theta, v = z.tensor_split([model.layout.size], -1)
    expected = joint(torch.cat([ridges.original(theta), v], -1))
    (slope,) = torch.autograd.grad(expected.sum(), z)
    density = StraightDensity(joint, ridges)
    torch.testing.assert_close(density.value_and_grad(z.detach()), (expected.detach(), slope))
    torch.testing.assert_close(density(z.detach()), expected.detach())
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(density.select(rows).value_and_grad(z.detach()[rows])[1], slope[rows])


def test_a_decay_rate_is_measured_from_the_level_of_its_gene(generator):
    model = model_of(Repression())
    ridges = ridges_of(model)
    theta = positions(model, generator)[:, : model.layout.size]
    z, values = ridges.straight(theta), model.layout.constrain(theta)
    level = values["likelihood.basal"] + values["likelihood.sensitivity"] / (1 + values["likelihood.michaelis_constant"])
    decay = model.layout.columns("likelihood.decay")
    expected = (values["likelihood.decay"] / level).log()
    torch.testing.assert_close(z[:, decay.start : decay.stop], expected)
    torch.testing.assert_close(ridges.original(z), theta)


def test_volumes_stay(generator):
    model = model_of(Activation())
    ridges = ridges_of(model)
    slope = ridges.slope(positions(model, generator, 1)[0, : model.layout.size])
    torch.testing.assert_close(torch.linalg.det(slope), torch.ones_like(slope[0, 0]))
    assert bool((slope != torch.eye(len(slope))).any())


def test_white_coordinates_of_a_fit_follow_the_ridge(generator):
    model = model_of(Activation())
    fit, ridges = some_fit(model), ridges_of(model)
    plain, followed = fit.white_coordinates(), ridges.straight_map(fit.white_coordinates())
    near = followed.origin + 1e-4 * positions(model, generator)[:, : model.layout.size]
    w = torch.zeros(len(near), model.latent_size).double()
    torch.testing.assert_close(followed.latents(near, w), plain.latents(ridges.original(near), w), rtol=0, atol=1e-6)
    run = {"num_samples": 3, "warmup_steps": 4, "num_chains": 3, "seed": 4, "progress": False}
    posterior = tg.sample(model, tg.HMC(num_steps=2), start=fit, **run)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
    torch.testing.assert_close(tg.joint_log_density(model)(position), posterior.stats["lp"][:, -1])


def test_models_without_ridges_are_left_alone():
    assert ridges_of(gp("probit")) is None
    fixed = model_of(Activation())
    fixed.likelihood.raw_decay.requires_grad_(False)
    fixed.refresh()
    assert ridges_of(fixed) is None


def excess_over_prior(seed=3):
    """Of log decay rates, whose posterior is their prior N(0, 2) where data say nothing."""
    model = model_of(Activation(), variance=1e8)
    options = {"num_samples": 60, "warmup_steps": 60, "num_chains": 64, "seed": seed, "progress": False}
    draws = tg.sample(model, tg.HMC(num_steps=4), **options).samples["likelihood.decay"].log() / math.sqrt(2)
    return worst_excess(torch.stack([draws.mean(1), draws.square().mean(1) - 1], -1).flatten(1))


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_where_data_say_nothing_draws_are_the_priors():
    assert excess_over_prior() < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_coordinates_that_change_the_volume_are_caught(monkeypatch):
    honest = Ridges.original
    monkeypatch.setattr(Ridges, "original", lambda self, z: honest(self, z).index_add(-1, self.columns, z[:, self.columns].tanh()))
    assert excess_over_prior() > 1


def test_a_ridge_that_follows_its_own_parameter_is_refused(monkeypatch):
    honest = Transcription.ridges
    monkeypatch.setattr(Transcription, "ridges", lambda self: {"decay": honest(self)["decay"] + self.decay.log().tanh()})
    with pytest.raises(ValueError, match="depends on the parameters that it is of"):
        ridges_of(model_of(Activation()))
