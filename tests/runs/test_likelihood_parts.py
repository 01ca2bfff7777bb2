"""Genes as blocks: rows of a batch that accept independently, under the density of the whole."""

import copy

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, MultivariateNormalPrior

import torchgpmc as tg
from torchgpmc.likelihoods import Activation, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.likelihood_parts import PartsGivenF, PartsUpdate, parts_of
from torchgpmc.runs.part_coordinates import Parts, unit_coordinates
from torchgpmc.samplers import Preconditioner, metropolis, sweep

pytestmark = [
    pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
GENES, CHAINS = 3, 4
OPTIONS = {"num_samples": 5, "warmup_steps": 15, "num_chains": 3, "seed": 4, "progress": False}


def model_of(**options):
    grid = torch.linspace(0, 4, 7, dtype=torch.float64)
    options = {"num_genes": GENES, "num_replicates": 2, "response": Activation()} | options
    likelihood = Transcription(grid, grid[::2], **options)
    y = 1 + torch.rand(likelihood.target_shape(7), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0)), likelihood)


def positions(model, generator):
    theta = model.layout.sample_prior(CHAINS, generator)
    return theta, torch.randn(CHAINS, model.latent_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [{}, {"integrate_variances": True}, {"variances": torch.full((2, GENES, 4), 0.3), "free_initial": True}],
    ids=["sampled", "integrated", "measured"],
)
def test_a_rows_density_is_the_joints_with_that_gene_alone_moved(options, generator):
    model = model_of(**options)
    theta, v = positions(model, generator)
    joint, parts = JointLogDensity(model), parts_of(model)
    given = PartsGivenF(joint, parts, theta, model.latents(model.prior(theta), v))
    here = parts.rows(theta[:, parts.columns.start :])
    there = here + 0.3 * torch.randn(here.shape, generator=generator, dtype=torch.float64)
    gain = (given(there) - given(here)).view(CHAINS, GENES)
    for gene in range(GENES):
        moved = here.view(CHAINS, GENES, -1).clone()
        moved[:, gene] = there.view(CHAINS, GENES, -1)[:, gene]
        whole = torch.cat([theta[:, : parts.columns.start], parts.from_rows(moved.flatten(0, 1)), v], -1)
        torch.testing.assert_close(gain[:, gene], joint(whole) - joint(torch.cat([theta, v], -1)))
    rows = torch.tensor([1, 4, 9])
    torch.testing.assert_close(given.select(rows)(there[rows]), given(there)[rows])
    torch.testing.assert_close(given.select(rows).select(rows[:1])(there[[4]]), given(there)[[4]])


def test_rows_and_back():
    parts = Parts(range(2, 8), 3)
    columns = torch.arange(12.0).view(2, 6)  # two parameters of three parts
    assert parts.rows(columns)[0].tolist() == [0.0, 3.0]
    assert torch.equal(parts.from_rows(parts.rows(columns)), columns)


def test_genes_are_taken_one_by_one_and_the_sweep_knows_where_it_is(generator):
    model = model_of()
    joint, parts = JointLogDensity(model), parts_of(model)
    unit = Preconditioner(torch.zeros(0, 0), torch.ones(parts.size))
    coordinates = unit_coordinates(parts, torch.zeros(1).double())
    update = PartsUpdate(
        joint, parts, lambda given: metropolis(given, step_size=torch.tensor(0.7), preconditioner=unit), 2, coordinates
    )
    sampler, before = sweep(JointWithPrior(joint), [update]), torch.cat(positions(model, generator), -1)
    state, info = sampler.step(sampler.init(before, generator), generator)
    moved = parts.rows((state.position != before)[:, parts.columns.start : parts.columns.stop]).view(CHAINS, GENES, -1)
    assert bool((moved.any(-1) == moved.all(-1)).all()) and 0 < int(moved.any(-1).sum()) < CHAINS * GENES
    assert bool(moved.any(-1).any(-1).any()) and not bool(moved.all(-1).all(-1).all())
    assert torch.equal(state.position[:, : parts.columns.start], before[:, : parts.columns.start])
    torch.testing.assert_close(state.log_density, joint(state.position))
    assert info.n_factorizations.tolist() == [0.0] * CHAINS and info.n_steps.tolist() == [2.0] * CHAINS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hyper", "parameterization"),
    [
        (tg.AdaptiveMH(), tg.Interwoven()),
        pytest.param(tg.Slice(max_steps_out=2), tg.Ancillary(), marks=pytest.mark.long),
        pytest.param(tg.NUTS(max_tree_depth=2), tg.Sufficient(), marks=pytest.mark.long),
    ],
)
def test_gibbs_moves_genes_so_and_the_lengthscale_as_ever(hyper, parameterization):
    method = tg.Gibbs(hyper=hyper, latent=tg.EllipticalSlice(), parameterization=parameterization, latent_steps=1)
    posterior = tg.sample(model_of(), method, **OPTIONS)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
    torch.testing.assert_close(tg.joint_log_density(posterior.model)(position), posterior.stats["lp"][:, -1])
    genes = parts_of(posterior.model)
    assert bool((posterior.theta.std(1) > 0)[:, genes.columns.start :].any())


@pytest.mark.slow
def test_genes_alone_where_the_kernel_is_fixed():
    model = model_of()
    model.kernel.requires_grad_(False)
    posterior = tg.sample(model, tg.Gibbs(latent=tg.EllipticalSlice()), **OPTIONS)
    assert float(posterior.stats["n_factorizations"].max()) == 0


def test_parameters_that_a_prior_ties_together_are_no_parts():
    tied = MultivariateNormalPrior(torch.full((GENES,), 1.0), torch.eye(GENES))
    likelihood = copy.deepcopy(model_of().likelihood)
    assert parts_of(model_of()) is not None
    likelihood.register_prior("decay_prior", tied, lambda module: module.decay, lambda module, value: None)
    model = model_of()
    assert parts_of(tg.GP(model.train_x, model.train_y, model.kernel, likelihood)) is None
    assert parts_of(model_of(num_genes=1)) is None
