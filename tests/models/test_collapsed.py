"""The sparse model under Gaussian noise with v integrated out: against dense algebra, the full GP, and chains of [theta, v]."""

import functools

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior
from torch.distributions import MultivariateNormal

import torchgpmc as tg
from tests.calibration import z_limit
from tests.problems import fixed_kernel, inputs, kernel, sparse_gp, targets
from torchgpmc.approximations import CollapsedMarginal
from torchgpmc.calls.engines import candidates
from torchgpmc.evidence import CollapsedEstimator

SHORT = {"num_samples": 150, "warmup_steps": 150, "num_chains": 16}
QUIET = {"seed": 0, "progress": False}


def model_of(num_data=12, **options):
    return sparse_gp("gaussian", num_data, **options)


def thetas(model, count=3):
    return model.layout.starting_points(count, torch.Generator().manual_seed(0))


def dense(model, theta):
    """log p(theta) plus the log of the integral over v of the joint, in N x N matrices, with its graph; and p(v | y)."""
    hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
    at = model.at_data(hyperparameters)
    noise = hyperparameters.by_module["likelihood"]["noise_covar.raw_noise"].view(-1, 1)
    covariance = at.projection.mT @ at.projection + torch.diag_embed(noise.expand(-1, len(model.train_x)))
    evidence = MultivariateNormal(at.mean, covariance).log_prob(model.targets.values) - 0.5 * (at.variance / noise).sum(-1)
    gain = at.projection @ covariance.inverse()
    mean = (gain @ (model.targets.values - at.mean).unsqueeze(-1)).squeeze(-1)
    return log_prior + evidence, mean, torch.eye(gain.shape[1]) - gain @ at.projection.mT


CASES = {
    "one chunk": {},
    "chunks": {"data_chunk": 5},
    "constant mean": {"mean": ConstantMean(constant_prior=NormalPrior(0.0, 1.0)), "data_chunk": 7},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_value_and_gradient_equal_the_integral_of_the_joint(options):
    model = model_of(**options)
    theta = thetas(model).requires_grad_(True)
    expected = dense(model, theta)[0]
    (slope,) = torch.autograd.grad(expected.sum(), theta)
    marginal = CollapsedMarginal(model)
    value, gradient = marginal.value_and_grad(theta.detach())
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(marginal(theta.detach()), value, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("part", ["kernel", "likelihood", "mean"])
def test_what_is_fixed_has_no_slope(part):
    model = model_of(mean=ConstantMean(constant_prior=NormalPrior(0.0, 1.0)), data_chunk=5)
    getattr(model, part).requires_grad_(False)
    model.refresh()
    theta = thetas(model).requires_grad_(True)
    (slope,) = torch.autograd.grad(dense(model, theta)[0].sum(), theta)
    torch.testing.assert_close(CollapsedMarginal(model).value_and_grad(theta.detach())[1], slope, rtol=1e-9, atol=1e-9)


def test_a_kernel_without_closed_form():
    x = inputs(12)
    likelihood = GaussianLikelihood(noise_prior=GammaPrior(2.0, 2.0))
    model = tg.SparseGP(x, targets("gaussian", 12), kernel() + kernel(), likelihood, inducing_points=x[:4])
    theta = thetas(model).requires_grad_(True)
    expected = dense(model, theta)[0]
    (slope,) = torch.autograd.grad(expected.sum(), theta)
    value, gradient = CollapsedMarginal(model).value_and_grad(theta.detach())
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-8, atol=1e-8)


def test_a_data_set_a_chain_and_some_of_the_chains():
    several = torch.stack([targets("gaussian", 12, seed) for seed in range(3)])
    model = model_of().with_targets(several)
    theta = thetas(model)
    value, gradient = CollapsedMarginal(model).value_and_grad(theta)
    for row in range(3):
        own = CollapsedMarginal(model_of().with_targets(several[row])).value_and_grad(theta[row : row + 1])
        picked = CollapsedMarginal(model).select(torch.tensor([row])).value_and_grad(theta[row : row + 1])
        for found in (own, picked):
            torch.testing.assert_close((found[0], found[1]), (value[row : row + 1], gradient[row : row + 1]))


def test_with_inducing_points_at_the_data_it_is_the_full_gps_evidence():
    x, y = inputs(8), targets("gaussian", 8)
    made = (kernel(), GaussianLikelihood(noise_prior=GammaPrior(2.0, 2.0)))
    sparse = tg.SparseGP(x, y, *made, inducing_points=x, jitter=1e-10)
    full = tg.GPRegression(x, y, *made, jitter=0.0)
    theta = thetas(sparse)
    expected, slope = tg.approximations.ApproximateMarginal(full, tg.approximations.Conjugate()).value_and_grad(theta)
    value, gradient = CollapsedMarginal(sparse).value_and_grad(theta)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)


def test_a_failed_factorisation_is_its_own_chains():
    model = model_of(jitter=0.0)
    theta = thetas(model)
    fine, slope = CollapsedMarginal(model).value_and_grad(theta)
    theta[1, :3] = torch.tensor([0.0, 25.0, 25.0])  # logarithms of outputscale and lengthscales at which K(Z, Z) is all ones
    value, gradient = CollapsedMarginal(model).value_and_grad(theta)
    estimate = CollapsedEstimator(CollapsedMarginal(model)).draw(theta, torch.Generator().manual_seed(0))
    assert value[1] == estimate.value[1] == -torch.inf and not gradient[1].any()
    torch.testing.assert_close((value[[0, 2]], gradient[[0, 2]]), (fine[[0, 2]], slope[[0, 2]]))


def test_single_precision_products():
    model = model_of(data_dtype=torch.float32)
    theta = thetas(model)
    (value, gradient), (expected, slope) = (CollapsedMarginal(m).value_and_grad(theta) for m in (model, model_of()))
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(gradient, slope, rtol=1e-3, atol=1e-2)


def test_latents_come_from_their_normal_posterior_with_their_likelihood():
    model = model_of()
    theta = thetas(model, 1)
    estimator = CollapsedEstimator(CollapsedMarginal(model))
    normals = torch.eye(4, dtype=torch.float64)
    _, mean, covariance = dense(model, theta)
    found = estimator.evaluate(theta.expand(4, -1), normals)
    root = found.whitened - mean
    torch.testing.assert_close(root.mT @ root, covariance.detach()[0], rtol=1e-9, atol=1e-10)
    at = model.at(model.prior(theta.expand(4, -1)))
    torch.testing.assert_close(found.log_likelihood, model.log_likelihood(at, found.whitened))


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize(
    "method",
    [
        tg.PseudoMarginal(),
        tg.PseudoMarginalSlice(),
        tg.Gibbs(hyper=tg.PseudoMarginal()),
        tg.NUTS(marginal=tg.EP(), normal_scale=True),
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_on_theta_take_the_exact_evidence(method):
    """Each refused, or failed for want of f at the data."""
    model = model_of()
    posterior = tg.sample(model, method, num_samples=8, warmup_steps=8, num_chains=2, **QUIET)
    position = torch.cat([posterior.theta, posterior.whitened], -1).flatten(0, 1)
    torch.testing.assert_close(tg.joint_log_density(model)(position), posterior.stats["lp"].flatten())
    if "log_evidence" in posterior.stats:
        theta = posterior.theta.flatten(0, 1)
        expected = CollapsedMarginal(model)(theta) - model.layout.log_prior(theta)
        torch.testing.assert_close(posterior.stats["log_evidence"].flatten(), expected)


def test_an_estimate_given_latents_holds_them():
    model = model_of()
    theta, v = thetas(model, 2), torch.linspace(-1, 1, 2 * model.latent_size, dtype=torch.float64).view(2, -1)
    marginal = CollapsedMarginal(model)
    found = CollapsedEstimator(marginal).given(theta, v, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.whitened, v)
    torch.testing.assert_close(found.value + model.layout.log_prior(theta), marginal(theta))
    torch.testing.assert_close(found.log_likelihood, model.log_likelihood(model.at(model.prior(theta)), v))


def moments(posterior, x):
    """Means of theta, and of f at inputs, with the standard errors of the first."""
    weights = torch.softmax(posterior._log_weights(), 0)[:, None]
    theta = posterior.theta.flatten(0, 1)
    mean = (weights * theta).sum(0)
    sd = (weights * (theta - mean).square()).sum(0).sqrt()
    prediction = posterior.predict(x)
    return mean, sd, prediction.latent_mean, prediction.latent_variance.sqrt()


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("method", [None, tg.NUTS(marginal=tg.Laplace(), from_mode=True)], ids=["default", "NUTS on theta"])
def test_predictions_agree_with_chains_of_theta_and_v(method):
    model, x = model_of(), inputs(5, seed=3)
    options = {"num_samples": 1500} if method is None else SHORT
    alone = tg.sample(model, method, **options, **QUIET)
    together = joint_run()
    assert alone.info["target"].startswith("the exact posterior") and alone.complaints() == []
    found, expected = moments(alone, x), moments(together, x)
    error = (1 / alone.effective_size() + 1 / together.effective_size()) ** 0.5
    limit = z_limit(2 * (len(found[0]) + 5)) * error
    assert float(((found[0] - expected[0]) / expected[1]).abs().max()) < limit
    assert float(((found[2] - expected[2]) / expected[3]).abs().max()) < limit
    torch.testing.assert_close(found[3], expected[3], rtol=2 * limit, atol=0.0)


@functools.cache
def joint_run():
    # Twice as long: it has the latents to move besides.
    return tg.sample(model_of(), tg.NUTS(target_accept_prob=0.9), **{**SHORT, "num_samples": 2 * SHORT["num_samples"]}, **QUIET)


def test_the_default_call_takes_weights_on_theta_then_chains_on_theta():
    *weighted, chains = candidates(model_of())
    assert all(isinstance(engine.method, tg.AMIS) for engine in weighted)
    assert isinstance(chains.method, tg.NUTS) and chains.method.marginal is not None


@pytest.mark.parametrize("change", ["likelihood", "subclass"])
def test_other_models_do_not_collapse(change):
    class Own(tg.SparseGP):
        def log_likelihood(self, *arguments):
            return super().log_likelihood(*arguments)

    x = inputs(6)
    other = (
        sparse_gp("student_t")
        if change == "likelihood"
        else Own(x, x[:, 0], fixed_kernel(), GaussianLikelihood(noise_prior=GammaPrior(2.0, 2.0)), inducing_points=x[:2])
    )
    assert not other.collapses
    with pytest.raises(ValueError, match=r"not a latent of|may give them several modes"):
        tg.sample(other, tg.AMIS(), num_samples=10, **QUIET)
