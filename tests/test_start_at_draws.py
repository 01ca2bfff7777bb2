"""sample(start=posterior): chains and proposals that begin at earlier draws, what they sample, what refuses."""

import functools
import math
import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfNormalPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs
from tests.runs.resume import same
from torchgpmc.importance import log_density_of
from torchgpmc.numerics.random import make_generator
from torchgpmc.parameters.normal_scale import linear_scale, normal_scale
from torchgpmc.posterior import Posterior
from torchgpmc.runs import weighted
from torchgpmc.runs.drawn_start import DrawnStart, drawn_start
from torchgpmc.runs.run import Settings
from torchgpmc.storage.draws import Draws

QUIET = {"seed": 3, "progress": False}


def two_hyperparameters():
    x = inputs(8, 1)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0))
    return tg.GPRegression(x, torch.sin(6 * x[:, 0]), kernel, GaussianLikelihood(noise_prior=HalfNormalPrior(1.0)))


@functools.cache
def rough():
    return tg.sample(two_hyperparameters(), tg.AMIS(), num_samples=300, **QUIET)


def with_draws(posterior, theta, log_weights=None):
    """The same posterior, of other draws ``(C, S, P)``."""
    lp = torch.zeros(theta.shape[:2], dtype=theta.dtype)
    whitened = lp.unsqueeze(-1).expand(-1, -1, posterior.whitened.shape[-1])
    return Posterior(posterior.model, Draws(theta, whitened, log_weights), {"lp": lp}, {})


def test_the_scale_of_priors_goes_back_and_forth():
    for scale in (normal_scale(gp_regression().layout), linear_scale(gp_regression().layout)):
        z = torch.linspace(-7, 7, 40, dtype=torch.float64).view(10, 4)
        assert torch.allclose(scale.z(scale.theta(z)[0]), z, atol=1e-6)


def test_starts_have_the_draws_covariance_and_are_half_as_wide_again():
    # Of 4000 draws by weight and 4000 starts each variance is known to 3 %: five errors.
    generator = make_generator(0)
    root = torch.tensor([[1.0, 0.0], [3.0, 0.5]], dtype=torch.float64)
    theta = torch.randn(4000, 2, generator=generator, dtype=torch.float64) @ root.mT
    tilt = theta[:, 0]  # moves the mean by the covariance with it, and leaves the covariance
    start = DrawnStart(theta, tilt)
    assert torch.allclose(start.covariance(), root @ root.mT, rtol=0.3)
    positions, covariance = start.positions(lambda position: torch.zeros(len(position)), 4000, generator)
    assert torch.allclose(positions.mean(0), (root @ root.mT)[:, 0], atol=0.4)
    assert torch.allclose(positions.var(0) / covariance.diagonal(), torch.full((2,), 2.25, dtype=torch.float64), rtol=0.2)


def test_a_chain_begins_at_the_draw_itself_where_the_noise_leads_nowhere():
    theta = torch.randn(50, 2, generator=make_generator(0), dtype=torch.float64)
    start = DrawnStart(theta, torch.zeros(50, dtype=torch.float64))
    positions, _ = start.positions(lambda position: torch.full((len(position),), -torch.inf), 6, make_generator(1))
    assert all(bool((theta == position).all(-1).any()) for position in positions)


def test_chains_that_begin_at_draws_have_the_density_that_others_have():
    model, method = two_hyperparameters(), tg.NUTS(step_size=0.2)
    begun, plain = (method.prepare(model, Settings(5, 0, 3, None, draws=draws)) for draws in (drawn_start(rough(), model), None))
    theta = model.layout.starting_points(6, make_generator(0))
    for one, other in zip(begun.target.density.value_and_grad(theta), plain.target.density.value_and_grad(theta), strict=True):
        assert torch.equal(one, other)
    # The mass matrix is the draws' covariance, and warm-up keeps it.
    _, covariance = begun.target.start(make_generator(0))
    tuning = begun.init(make_generator(0)).tuning
    assert torch.allclose(tuning.preconditioner.factor @ tuning.preconditioner.factor.mT, covariance)
    assert not tuning.learns_mass_matrix


def test_too_few_draws_are_where_learning_of_the_mass_matrix_begins():
    few = with_draws(rough(), rough().theta[:, :8])
    assert drawn_start(few, two_hyperparameters()).is_guess and not drawn_start(rough(), two_hyperparameters()).is_guess


def test_weighted_draws_from_a_fitted_proposal_have_the_right_evidence_and_mean():
    # Against a lattice over theta; a randomised net of 4000 draws in two dimensions is right to 0.01.
    model = two_hyperparameters()
    found = tg.sample(model, tg.AMIS(), start=rough(), num_samples=4000, **QUIET)
    grid = torch.linspace(-16, 6, 221, dtype=torch.float64)  # noise next to none included
    theta = torch.cartesian_prod(grid, grid)
    approximate = tg.approximations.ApproximateMarginal(model, tg.approximations.Conjugate())
    with torch.no_grad():
        value = torch.cat([approximate(part) for part in theta.split(2000)])
    total = float(torch.logsumexp(value, 0)) + 2 * math.log(float(grid[1] - grid[0]))
    assert found.info["log_evidence"] == pytest.approx(total, abs=0.03)
    mean = torch.softmax(value, 0) @ theta
    weights = torch.softmax(found.log_weights.flatten(), 0)
    spread = (torch.softmax(value, 0) @ (theta - mean).square()).sqrt()
    assert float(((weights @ found.theta[0] - mean).abs() / spread).max()) < 0.05


@pytest.mark.parametrize(("components", "covers"), [(4, True), (1, False)])
def test_an_arm_that_draws_have_been_to_has_a_component_of_its_own(monkeypatch, components, covers):
    # A hundredth of the mass, ten deviations off: under one component for all of the draws, draws there would weigh a thousand.
    monkeypatch.setattr(weighted, "_FITTED_COMPONENTS", components)
    model, generator = two_hyperparameters(), make_generator(0)
    scale = normal_scale(model.layout)
    arm, noise = torch.tensor([2.0, -1.0]).double(), 0.2 * torch.randn(400, 2, generator=generator, dtype=torch.float64)
    z = torch.where(torch.arange(400)[:, None] < 396, noise, arm + noise)
    drawn = DrawnStart(scale.theta(z)[0], torch.zeros(400, dtype=torch.float64))
    method = tg.AMIS(degrees_of_freedom=30, defensive_share=0.0)  # the prior would lend a hand in two dimensions, not in fifteen
    proposal = method.prepare(model, Settings(1000, None, None, None, draws=drawn))._first_proposal(generator)[0]
    log_target = math.log(0.01) - 0.5 * (noise[:50] / 0.2).square().sum(-1) - math.log(2 * math.pi * 0.2**2)
    heaviest = float((log_target - log_density_of(proposal, arm + noise[:50])).max())
    assert heaviest < math.log(20) if covers else heaviest > math.log(1000)


@functools.cache
def other_posterior():
    model = two_hyperparameters()
    other = model.with_buffers(train_y=model.train_y + 1.0)
    return with_draws(tg.sample(other, tg.AMIS(), num_samples=20, **QUIET), rough().theta)


def joint():
    return gp("probit")


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize(
    ("model", "method", "start", "match"),
    [
        (two_hyperparameters, tg.NUTS(), other_posterior, "posterior of another model"),
        (
            two_hyperparameters,
            tg.NUTS(),
            lambda: with_draws(rough(), rough().theta[:, :1]),
            "1 different draws of 2 hyperparameters",
        ),
        (two_hyperparameters, tg.NUTS(), lambda: with_draws(rough(), rough().theta[:, [0, 1, 1, 0]]), "2 different draws"),
        (two_hyperparameters, tg.AMIS(), lambda: with_draws(rough(), rough().theta[:, :2]), "2 different draws"),
        (two_hyperparameters, tg.NUTS(from_mode=True), rough, "from_mode=True looks for a mode"),
        (two_hyperparameters, tg.Slice(), rough, "Slice cannot begin at a posterior's draws"),
        (joint, tg.NUTS(), lambda: tg.sample(joint(), tg.AMIS(), num_samples=30, **QUIET), r"this samples \[theta, v\]"),
    ],
)
def test_what_cannot_begin_at_a_posterior_refuses_in_words(model, method, start, match):
    with pytest.raises(ValueError, match=match):
        tg.sample(model(), method, start=start(), num_samples=4, **QUIET)


def test_a_checkpoint_sees_the_draws_that_a_run_began_at(tmp_path):
    options = {"num_samples": 30, "checkpoint": tmp_path / "run.ckpt", **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = tg.sample(two_hyperparameters(), tg.AMIS(), start=rough(), **options)
        assert same(first, tg.sample(two_hyperparameters(), tg.AMIS(), start=rough(), **options))
        with pytest.raises(ValueError, match="belongs to another run"):
            tg.sample(two_hyperparameters(), tg.AMIS(), start=with_draws(rough(), rough().theta + 1e-6), **options)
    assert "300 draws of theta" in first.info["start"]


def test_without_a_method_the_engines_of_the_default_call_begin_there():
    posterior = tg.sample(two_hyperparameters(), start=rough(), num_samples=150, **QUIET)
    assert "300 draws of theta" in posterior.info["start"] and posterior.info["tried"] and posterior.log_weights is not None
    mean = lambda found: torch.softmax(found.log_weights.flatten(), 0) @ found.theta[0]  # noqa: E731
    # Both are known to a tenth of a deviation.
    assert torch.allclose(mean(posterior), mean(rough()), atol=0.5 * float(rough().theta.std()))
    joint_draws = tg.sample(joint(), tg.AMIS(), num_samples=300, **QUIET)
    with pytest.raises(ValueError, match=r"samples this model by NUTS.* of \[theta, v\]. Expected start=None"):
        tg.sample(joint(), start=joint_draws, num_chains=4, **QUIET)  # of engines with chains alone
