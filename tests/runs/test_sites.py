"""NUTS and HMC in coordinates that are white under an approximation's sites."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, gp_regression, inputs, sparse_gp, targets
from torchgpmc.approximations.sparse_laplace import inducing_laplace
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.sites import _sparse_evidence, _sparse_theta, posterior_sites

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
OPTIONS = {"num_samples": 6, "warmup_steps": 20, "num_chains": 3, "seed": 4, "progress": False}


@pytest.mark.slow
@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.EP()])
def test_sites_give_back_the_approximation_at_its_mode(approximation):
    """N(f | 0, K) times the sites has the mean that Laplace or EP finds, by plain linear algebra, where the evidence is highest."""
    model = gp("probit")
    sites = posterior_sites(model, approximation)
    theta = tg.fit(model, approximation).layout.present(model)  # any theta: the sites are the mode's alone
    mode = _mode(model, approximation)
    covariance = model.prior(mode).covariance[0].detach()
    mean = torch.linalg.solve(covariance.inverse() + sites.precision.diag(), sites.shift)
    found = approximation.evidence(model, model.prior(mode))
    torch.testing.assert_close(mean, found.mean[0].detach(), rtol=1e-4, atol=1e-4)
    elsewhere = approximation.evidence(model, model.prior(theta))
    assert not torch.allclose(elsewhere.precision[0].detach(), sites.precision, rtol=1e-4)


def _mode(model, approximation):
    """Of the density of theta, by a plain optimiser."""
    theta = torch.zeros(1, model.layout.size, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([theta], lr=0.5, max_iter=200, tolerance_grad=1e-9)

    def closure():
        optimiser.zero_grad()
        loss = -(approximation.evidence(model, model.prior(theta)).log_evidence + model.layout.log_prior(theta)).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return theta.detach()


def test_several_data_sets_have_sites_of_their_own():
    model = gp("probit")
    other = 1 - model.train_y
    sites = posterior_sites(model.with_targets(torch.stack([model.train_y, other, model.train_y])), tg.Laplace())
    assert sites.precision.shape == (3, 6) and torch.equal(sites.shift[0], sites.shift[2])
    torch.testing.assert_close(sites.shift[0], -sites.shift[1])  # the probit likelihood is symmetric


def test_an_approximation_that_fails_leaves_coordinates_white_under_the_prior():
    with pytest.warns(tg.SamplingWarning, match="as without whitening"):
        sites = posterior_sites(gp("probit", num_data=20), tg.EP(tolerance=1e-12, max_iterations=1))
    assert float(sites.precision.abs().sum()) == 0.0 and float(sites.shift.abs().sum()) == 0.0


@pytest.mark.parametrize("likelihood", ["probit", "poisson", "student_t"])
def test_with_inducing_points_at_the_data_sparse_sites_are_the_full_models(likelihood):
    full = gp(likelihood, num_data=8, jitter=1e-8)
    sparse = tg.SparseGP(full.train_x, full.train_y, full.kernel, full.likelihood, inducing_points=full.train_x, jitter=1e-8)
    theta = 0.5 * torch.randn(4, full.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = tg.approximations.laplace(full, theta)
    found = inducing_laplace(sparse, sparse.at(sparse.prior(theta)), sparse.targets)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.precision, expected.precision, rtol=1e-3, atol=1e-3)
    shift = expected.alpha + expected.precision * expected.mean
    torch.testing.assert_close(found.shift, shift, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_sites_of_a_sparse_model_are_near_the_mode():
    """The rough search: no draw of the prior does better by much."""
    model = sparse_gp("probit", num_data=40)
    theta = _sparse_theta(model)
    scale = normal_scale(model.layout)
    z = torch.randn(2000, model.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value = _sparse_evidence(model, scale.theta(z)[0]) - 0.5 * z.square().sum(-1)
    near = (scale.theta(z)[0] - theta).norm(dim=-1).argmin()
    best = _sparse_evidence(model, theta) - 0.5 * z[near].square().sum()
    assert float(value.max()) < float(best) + 0.3
    sites = posterior_sites(model, tg.Laplace())
    torch.testing.assert_close(sites.precision, inducing_laplace(model, model.at(model.prior(theta)), model.targets).precision[0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [gp, sparse_gp])
@pytest.mark.parametrize("method", [tg.NUTS(max_tree_depth=3, whitening=tg.Laplace()), tg.HMC(num_steps=3, whitening=tg.Laplace())])
def test_draws_are_of_theta_and_v(method, make):
    """What is kept is v, not the coordinates; its density is the joint density; chunks change nothing."""
    model = make("poisson")
    posterior = tg.sample(model, method, **OPTIONS)
    position = torch.cat([posterior.theta, posterior.whitened], -1)
    joint = torch.stack([tg.joint_log_density(model)(draws) for draws in position.unbind(1)], 1)
    torch.testing.assert_close(posterior.stats["lp"], joint)
    assert posterior.info["target"] == "the exact posterior"
    chunked = tg.sample(model, method, **OPTIONS, chain_chunk=2)
    torch.testing.assert_close(chunked.whitened, posterior.whitened)


@pytest.mark.slow
def test_fixed_hyperparameters():
    model = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"]())
    assert tg.sample(model, tg.NUTS(max_tree_depth=3, whitening=tg.Laplace()), **OPTIONS).whitened.shape == (3, 6, 6)


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        (sparse_gp, tg.NUTS(whitening=tg.EP()), r"SparseGP does not have.*Expected whitening=torchgpmc.Laplace"),
        (lambda: sparse_gp("softmax"), tg.NUTS(whitening=tg.Laplace()), "one latent function"),
        (lambda: gp("softmax"), tg.NUTS(whitening=tg.EP()), "one latent function"),
        (gp_regression, tg.HMC(whitening=tg.Laplace()), "no latents to whiten"),
        (gp, tg.NUTS(whitening=tg.Laplace(), marginal=tg.Laplace()), "no latents to whiten"),
        (gp, tg.NUTS(whitening="laplace"), r"torchgpmc.Laplace\(\) or torchgpmc.EP\(\)"),
    ],
)
def test_refusals(model, method, said):
    with pytest.raises((ValueError, TypeError), match=said):
        tg.sample(model(), method, **OPTIONS)
