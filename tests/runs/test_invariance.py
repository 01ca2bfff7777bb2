"""f goes up, parameters of the likelihood take it back: what the likelihood does not see moves under the priors alone."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from torchgpmc.likelihoods import Activation, Linear, Repression, Response, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.invariance import InvarianceUpdate, direction_of
from torchgpmc.samplers import sweep

pytestmark = [
    pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
GENES, POINTS = 3, 7
OPTIONS = {"num_samples": 4, "warmup_steps": 10, "num_chains": 3, "seed": 4, "progress": False}


def model_of(response, replicates=1):
    grid = torch.linspace(0, 4, POINTS, dtype=torch.float64)
    likelihood = Transcription(grid, grid[::2], num_genes=GENES, num_replicates=replicates, response=response, free_initial=True)
    y = 1 + torch.rand(likelihood.target_shape(POINTS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0)), likelihood)


def one_position(model, generator):
    theta = model.layout.sample_prior(1, generator)
    return torch.cat([theta, torch.randn(1, model.latent_size, generator=generator, dtype=torch.float64)], -1)


@pytest.mark.parametrize("replicates", [1, 2])
@pytest.mark.parametrize("response", [Linear(), Activation(), Repression()])
def test_the_likelihood_stays_and_the_priors_decide(response, replicates, generator):
    """All priors along it are normal, so the number added to f has a normal density in closed form."""
    model = model_of(response, replicates)
    joint, direction = JointLogDensity(model), direction_of(model)
    chains, size = 3000, model.layout.size
    before = one_position(model, generator)
    sampler = sweep(JointWithPrior(joint), [InvarianceUpdate(joint, direction, 2)])
    state = sampler.init(before.expand(chains, -1), generator)
    for _ in range(6):
        state, info = sampler.step(state, generator)
    torch.testing.assert_close(state.log_density, joint(state.position))
    assert float(info.n_factorizations.max()) == 0

    prior, v = model.prior(before[:, :size]), before[:, size:]
    likelihoods = [
        model.log_likelihood(model.at_data(model.layout.raw_values(x[:, :size])), x[:, size:]) for x in (state.position, before)
    ]
    torch.testing.assert_close(likelihoods[0], likelihoods[1].expand(chains))
    f = model.latents(model.prior(state.position[:, :size]), state.position[:, size:]) - model.latents(prior, v)
    shift = f.flatten(1)[:, 0]
    torch.testing.assert_close(f.flatten(1), shift.unsqueeze(-1).expand(-1, f[0].numel()))

    ones = torch.ones(POINTS, 1, dtype=torch.float64)
    along = torch.linalg.solve_triangular(prior.factor[0], ones, upper=False).mT.repeat(1, replicates)
    variances = torch.full((size,), math.inf, dtype=torch.float64)
    for name, variance in (("sensitivity", 2.0), ("michaelis_constant", 1.5)):
        if f"likelihood.{name}" in model.layout.names:
            variances[list(model.layout.columns(f"likelihood.{name}"))] = variance
    precision = (direction.square() / variances).sum() + along.square().sum()
    mean = -((direction * before[0, :size] / variances).sum() + (along * v).sum()) / precision
    assert abs(float((shift.mean() - mean) * (precision * chains).sqrt())) < 5
    assert abs(float(shift.var() * precision) - 1) < 5 * math.sqrt(2 / chains)


def test_it_is_part_of_a_sweep_where_asked_for():
    method = tg.Gibbs(latent=tg.EllipticalSlice(), parameterization=tg.Surrogate(precision=2.0), latent_steps=1, invariance_steps=2)
    posterior = tg.sample(model_of(Repression()), method, **OPTIONS)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
    torch.testing.assert_close(tg.joint_log_density(posterior.model)(position), posterior.stats["lp"][:, -1])


class Own(Response):
    def __call__(self, log_concentration, log_michaelis):
        return log_concentration.square()


class Shifted(Activation):
    """Redefines the response, so that what is known of its parent's does not hold."""

    def __call__(self, log_concentration, log_michaelis):
        return super().__call__(log_concentration, log_michaelis) + log_concentration


def with_fixed_sensitivity():
    model = model_of(Linear())
    model.likelihood.raw_sensitivity.requires_grad_(False)
    return tg.GP(model.train_x, model.train_y, model.kernel, model.likelihood)


def classes():
    x = torch.linspace(0, 1, 6)
    return tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (classes, "Bernoulli has none"),
        (lambda: model_of(Own()), "Transcription has none"),
        (lambda: model_of(Shifted()), "Transcription has none"),
        (with_fixed_sensitivity, r"likelihood\.sensitivity of Transcription is fixed"),
    ],
)
def test_models_without_it_are_refused(model, sentence):
    with pytest.raises(ValueError, match=sentence + r".*Expected invariance_steps=0"):
        tg.sample(model(), tg.Gibbs(invariance_steps=1), **OPTIONS)


def test_options_of_parts_and_noise_out_of_place_are_refused():
    with pytest.raises(ValueError, match=r"^parts is HMC.*Expected parts=None"):
        tg.sample(classes(), tg.Gibbs(parts=tg.HMC(num_steps=2)), **OPTIONS)
    with pytest.raises(ValueError, match=r"^precision is -1.0"):
        tg.sample(classes(), tg.Gibbs(parameterization=tg.Surrogate(precision=-1.0)), **OPTIONS)
    with pytest.raises(ValueError, match="Expected one of them"):
        tg.sample(classes(), tg.Gibbs(parameterization=tg.Surrogate(whitening=tg.Laplace(), precision=1.0)), **OPTIONS)
    with pytest.raises(ValueError, match=r"Surrogate\(\) matches"):
        tg.sample(model_of(Linear()), tg.Gibbs(parameterization=tg.Surrogate()), **OPTIONS)
