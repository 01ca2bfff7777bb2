"""Starts of likelihoods that do not factorise: the normal approximation at the joint mode, against closed forms and differences."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import inputs, kernel
from torchgpmc.importance import find_modes
from torchgpmc.likelihoods import Activation, LogLikelihood, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.variational import joint_mode

VARIANCE = 0.3


class Sums(LogLikelihood, gpytorch.likelihoods.Likelihood):
    """y_n is the sum of f up to the n-th input, with normal noise: v given theta and y is normal."""

    def forward(self, function_samples):
        raise AssertionError("it does not factorise")

    def log_prob(self, f, targets):
        return -0.5 * (f.cumsum(-1) - targets).square().sum(-1) / VARIANCE


class Jumps(Sums):
    is_smooth = False


def sums(likelihood=Sums):
    return tg.GP(inputs(5), torch.tensor([1.0, 1.5, 0.5, -0.5, 0.2]), kernel(), likelihood())


def posterior_of_v(model, theta):
    """Mean and covariance of p(v | theta, y)."""
    factor = model.prior(theta[None]).factor[0].detach()
    design = torch.ones(5, 5).tril().double() @ factor
    covariance = torch.linalg.inv(torch.eye(5) + design.mT @ design / VARIANCE)
    return covariance @ design.mT @ model.train_y / VARIANCE, covariance, design


def test_it_is_the_posterior_where_that_is_normal():
    start = tg.initialize(sums(), progress=False)
    mean, covariance, design = posterior_of_v(start.model, start.theta)
    torch.testing.assert_close(start.mean[0], mean, atol=2e-3, rtol=0)
    torch.testing.assert_close(start.scale[0] @ start.scale[0].mT, covariance, atol=1e-5, rtol=0)
    assert not bool(start.scale.triu(1).any())
    for column, step in enumerate(1e-3 * torch.eye(len(start.theta)).double()):
        ahead, behind = (posterior_of_v(start.model, start.theta + sign * step)[0] for sign in (1, -1))
        torch.testing.assert_close(start.slope[:, column], (ahead - behind) / 2e-3, atol=5e-3, rtol=0)
    # q(v) is then p(v | theta, y), so the bound is the evidence; it is an average over 256 draws.
    noise = VARIANCE * torch.eye(5)
    whole = torch.distributions.MultivariateNormal(torch.zeros(5).double(), design @ design.mT + noise)
    scale = 2.5 * torch.log(torch.tensor(2 * torch.pi * VARIANCE))  # that the likelihood leaves out
    assert start.elbo == pytest.approx(float(whole.log_prob(start.model.train_y) + scale), abs=5 * (2.5 / 256) ** 0.5)


def transcription():
    grid = torch.linspace(0, 4, 9, dtype=torch.float64)
    options = {"num_genes": 2, "num_replicates": 2, "response": Activation(), "variances": torch.full((2, 2, 3), 0.02)}
    likelihood = Transcription(grid, grid[::4], **options)
    y = 1 + torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0)), likelihood)


@pytest.fixture(scope="module")
def start():
    return tg.initialize(transcription(), progress=False)


@pytest.mark.slow
def test_the_curvature_is_that_of_the_joint_density(start):
    """From the parts of a start the whole covariance, and its inverse by other differences; replicates do not mix given theta."""
    given_theta = torch.block_diag(*(root @ root.mT for root in start.scale))
    shared = start.slope @ start.theta_covariance
    covariance = torch.cat(
        [torch.cat([start.theta_covariance, shared.mT], 1), torch.cat([shared, given_theta + shared @ start.slope.mT], 1)]
    )
    mode = torch.cat([start.theta, start.mean.flatten()])
    steps = 3e-4 * torch.eye(len(mode)).double()
    value_and_grad = JointLogDensity(start.model).value_and_grad
    curvature = (value_and_grad(mode - steps)[1] - value_and_grad(mode + steps)[1]) / 6e-4
    torch.testing.assert_close(curvature @ covariance, torch.eye(len(mode)).double(), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of few draws
def test_chains_begin_there_and_give_draws_of_v(start):
    run = {"num_samples": 4, "warmup_steps": 4, "num_chains": 4, "seed": 0, "progress": False}
    posterior = tg.sample(start.model, tg.NUTS(max_tree_depth=2), start=start, **run)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
    torch.testing.assert_close(tg.joint_log_density(start.model)(position), posterior.stats["lp"][:, -1])


def test_what_has_no_mode_to_climb_to_is_refused():
    with pytest.raises(ValueError, match=r"^Jumps neither factorises over data nor has slopes in f\. Expected one or the other"):
        tg.initialize(sums(Jumps), progress=False)
    with pytest.raises(ValueError, match=r"(?s)^no mode of the hyperparameters and latents.*2 searches of 1 rounds.*raise"):
        tg.initialize(transcription(), max_iterations=1, progress=False)


def test_as_many_searches_begin_as_are_asked_for(monkeypatch):
    counts = []

    def counted(density, starts, **options):
        counts.append(len(starts))
        return find_modes(density, starts, **options)

    monkeypatch.setattr(joint_mode, "find_modes", counted)
    found = [tg.initialize(sums(), num_starts=number, progress=False).elbo for number in (None, 1, 12)]
    assert counts == [2, 1, 12] and found == pytest.approx([found[0]] * 3, abs=0.5)
