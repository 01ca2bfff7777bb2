"""Long expectations by few points: models, fits, and trajectories that are tested by the exact ones."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp, inputs, kernel, sparse_gp
from torchgpmc.density import FollowedDensity
from torchgpmc.models import JointLogDensity
from torchgpmc.models.rough import has_long_expectations, with_rough_expectations
from torchgpmc.runs.run import Settings
from torchgpmc.variational.start import variational_bound

QUIET = {"progress": False}


def four_classes(num_data=60, num_inducing=8, **options):
    x = inputs(num_data, 2)
    y = (x[:, 0] > 0.1).long() + 2 * (x[:, 1] > -0.2).long()
    softmax = tg.likelihoods.Softmax(num_classes=4)
    return tg.SparseGP(x, y, kernel(2), softmax, inducing_points=x[:num_inducing], jitter=1e-4, **options)


def two_classes():
    x = inputs(6)
    return tg.SparseGP(x, torch.arange(6) % 2, kernel(1), tg.likelihoods.Softmax(num_classes=2), inducing_points=x[:3])


@pytest.fixture(scope="module")
def model():
    return four_classes()


@pytest.fixture(scope="module")
def fits(model):
    return [tg.initialize(model, rough_expectations=rough, optimize_inducing_points=False, **QUIET) for rough in (False, True)]


def test_a_rough_model_is_near_and_leaves_the_other_as_it_was(model):
    position = 0.3 * torch.randn(5, model.layout.size + model.latent_size, generator=torch.Generator().manual_seed(0)).double()
    exact = JointLogDensity(model)(position)
    rough = with_rough_expectations(model)
    gap = (JointLogDensity(rough)(position) - exact).abs()
    assert 1e-6 < float(gap.max()) < 0.5
    torch.testing.assert_close(JointLogDensity(model)(position), exact, rtol=0, atol=0)
    assert rough.train_x is model.train_x and rough.kernel is model.kernel and rough.layout.names == model.layout.names
    later = rough.with_theta(0.1 * torch.ones(model.layout.size).double())  # as where a fit ends
    torch.testing.assert_close(JointLogDensity(later)(position), JointLogDensity(rough)(position))
    for found, known in zip(
        JointLogDensity(rough).value_and_grad(position), (JointLogDensity(rough)(position), slopes(rough, position)), strict=True
    ):
        torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-6)


def slopes(model, position):
    columns = []
    for unit in 1e-5 * torch.eye(position.shape[1]).double():
        columns.append((JointLogDensity(model)(position + unit) - JointLogDensity(model)(position - unit)) / 2e-5)
    return torch.stack(columns, -1)


@pytest.mark.parametrize("other", [lambda: sparse_gp("probit"), lambda: sparse_gp("student_t"), two_classes, lambda: gp("poisson")])
def test_models_whose_expectations_are_quick_stay_themselves(other):
    model = other()
    assert not has_long_expectations(model) and with_rough_expectations(model) is model
    method = tg.HMC(num_steps=3, rough_trajectories=True)
    assert not isinstance(method.prepare(model, Settings(5, 5, 2, None)).target.density, FollowedDensity)


@pytest.mark.slow
def test_a_rough_fit_is_near_and_one_of_the_model(model, fits):
    exact, rough = fits
    rough.check(model)
    assert not has_long_expectations(with_rough_expectations(model)) and has_long_expectations(rough.model)
    gap = (rough.theta - exact.theta).abs() / exact.theta_covariance.diagonal().sqrt()
    assert float(gap.max()) < 0.5
    assert exact.elbo - 1.0 < rough.elbo < exact.elbo + 0.01
    assert rough.elbo == pytest.approx(variational_bound(rough.model, rough.theta, rough.latents()))


@pytest.mark.slow
def test_of_a_rough_fit_inducing_points_may_move():
    model = four_classes(30, 5)
    fit = tg.initialize(model, rough_expectations=True, max_iterations=5, num_starts=1, **QUIET)
    assert not torch.equal(fit.model.inducing_points, model.inducing_points) and has_long_expectations(fit.model)
    torch.testing.assert_close(fit.model.layout.present(fit.model)[0], fit.theta)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_trajectories_follow_the_rough_density_and_end_at_the_exact_one(model, fits):
    fit = fits[1]
    run = tg.HMC(num_steps=5, rough_trajectories=True).prepare(fit.model, Settings(20, 20, 4, None, fit))
    plain = tg.HMC(num_steps=5).prepare(fit.model, Settings(20, 20, 4, None, fit))
    density = run.target.density
    assert isinstance(density, FollowedDensity)
    position, _ = run.target.start(torch.Generator().manual_seed(0))
    torch.testing.assert_close(density(position), plain.target.density(position))
    near, exact = density.value_and_grad(position)[1], plain.target.density.value_and_grad(position)[1]
    cosine = torch.nn.functional.cosine_similarity(near, exact)
    assert float(cosine.min()) > 0.95 and not torch.allclose(near, exact)
    posterior = tg.sample(
        fit.model,
        tg.HMC(num_steps=10, least_steps=3, rough_trajectories=True),
        start=fit,
        num_samples=40,
        warmup_steps=40,
        num_chains=4,
        seed=0,
        **QUIET,
    )
    assert float(posterior.stats["acceptance_rate"].mean()) > 0.6
    exact = JointLogDensity(fit.model)(torch.cat([posterior.theta[:, -1], posterior.whitened[:, -1]], -1))
    torch.testing.assert_close(posterior.stats["lp"][:, -1], exact)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize(("step_size", "most"), [(0.05, 20), (0.3, 9), (2.0, 4)])
def test_no_trajectory_is_longer_than_wanted(step_size, most):
    method = tg.HMC(num_steps=20, least_steps=4, trajectory_length=2.8, step_size=step_size, adapt_step_size=False)
    posterior = tg.sample(gp("probit", num_data=3), method, num_samples=300, warmup_steps=0, num_chains=1, seed=0, **QUIET)
    lengths = posterior.stats["n_steps"]
    assert (float(lengths.min()), float(lengths.max())) == (4, most)


def test_options_that_mean_nothing_there_are_refused(model):
    with pytest.raises(ValueError, match="trajectory_length"):
        tg.HMC(trajectory_length=0.0).check_options()
    with pytest.raises(ValueError, match="rough_trajectories"):
        tg.HMC(rough_trajectories="yes").check_options()
    with pytest.raises(ValueError, match="rough_expectations"):
        tg.initialize(model, rough_expectations=1.0, **QUIET)
    with pytest.raises(ValueError, match="rough_trajectories"):
        tg.sample(model, tg.Gibbs(latent=tg.HMC(rough_trajectories=True)), num_samples=5, warmup_steps=5, **QUIET)
