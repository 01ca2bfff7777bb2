"""What the importance estimator promises beside unbiasedness."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import HalfCauchyPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, gp, sparse_gp
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.gaussian_form import problem_of, without_graph
from torchgpmc.evidence.gaussian_draws import draws_around
from torchgpmc.evidence.importance_sampling import _CHUNK_ELEMENTS
from torchgpmc.models.latents import likelihood_values
from torchgpmc.runs.chain_targets import estimator_for

# Others are drawn from mixtures: test_mixtures.py.
LOG_CONCAVE = [name for name in LIKELIHOODS if as_likelihood(LIKELIHOODS[name]()).is_log_concave]
APPROXIMATIONS = {"laplace": tg.Laplace(), "ep": tg.EP(), "class ep": tg.approximations.ClassEP()}


def thetas(model, count=3):
    return 0.5 * torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def dense_precision(found):
    """W as a matrix; of several latents, which are stacked, from its K x K blocks."""
    if found.precision.dim() == 2:
        return torch.diag_embed(found.precision)
    by_pair = torch.diag_embed(found.precision.permute(0, 2, 3, 1))
    return torch.cat([torch.cat(list(row.unbind(1)), -1) for row in by_pair.unbind(1)], -2)


def simple_log_weights(model, theta, found, f):
    """log p(y, f | theta) - log q(f) by dense normal densities; f ``(C, draws, V)``."""
    prior = model.prior(theta)
    latents = model.num_latents
    prior_covariance = torch.stack([torch.block_diag(*[part] * latents) for part in prior.covariance])
    covariance = torch.linalg.inv(torch.linalg.inv(prior_covariance) + dense_precision(found))
    normal = torch.distributions.MultivariateNormal
    values = {name: value.unsqueeze(1) for name, value in likelihood_values(prior).items()}
    at = f if latents == 1 else torch.stack(f.chunk(latents, -1), -1)
    likelihood = model.likelihood_function(values, lambda part: part.pointwise_log_prob(at, model.train_y)).sum(-1)
    prior_mean = torch.cat([prior.mean] * latents, -1)
    prior_density = normal(prior_mean.unsqueeze(1), prior_covariance.unsqueeze(1), validate_args=False).log_prob(f)
    covariance = 0.5 * (covariance + covariance.mT)
    return likelihood + prior_density - normal(found.mean.unsqueeze(1), covariance.unsqueeze(1), validate_args=False).log_prob(f)


@pytest.mark.parametrize("name", LOG_CONCAVE)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_weights_equal_dense_densities(approximation, name):
    if approximation != "laplace" and (approximation == "class ep") != (name == "softmax"):
        pytest.skip("EP serves one latent a datum, ClassEP several classes")
    model = gp(name, 6, jitter=1e-4)
    theta = thetas(model)
    estimator = tg.evidence.importance(model, APPROXIMATIONS[approximation], num_importance=6)
    auxiliary = torch.randn(3, estimator.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimate, log_weight = estimator._evaluate(theta, auxiliary, None)
    prior = model.prior(theta)
    found = APPROXIMATIONS[approximation].importance_density(model, prior)
    spread = draws_around(prior, without_graph(problem_of(model, prior, None)), found, estimator._directions(auxiliary))
    v = spread.whitened(True)
    f = (prior.mean[:, None, None] + v.view(3, 6, model.num_latents, -1) @ prior.factor.mT.unsqueeze(1)).flatten(2)
    torch.testing.assert_close(f, found.mean.unsqueeze(1) + torch.cat([spread.delta, -spread.delta], 1), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(log_weight, simple_log_weights(model, theta, found, f), rtol=1e-6, atol=1e-6)
    chosen = (v - estimate.whitened.unsqueeze(1)).abs().amax(-1).argmin(-1)
    torch.testing.assert_close(v[torch.arange(3), chosen], estimate.whitened)
    torch.testing.assert_close(
        model.log_likelihood(model.at(prior), estimate.whitened), estimate.log_likelihood, rtol=1e-8, atol=1e-8
    )


@pytest.mark.slow
def test_draws_have_the_covariance_of_the_approximation():
    model = gp("probit", 4)
    theta = thetas(model, 1)
    found = tg.approximations.laplace(model, theta)
    estimator = tg.evidence.importance(model, tg.Laplace(tolerance=1e-14), num_importance=1)
    estimate = estimator.draw(theta.expand(40_000, -1), torch.Generator().manual_seed(0))
    prior = model.prior(theta)
    f = prior.mean + estimate.whitened @ prior.factor[0].T
    root = tg.approximations.covariance_factor(prior, found)[0]
    standard = torch.linalg.solve(root, (f - found.mean).T).T
    torch.testing.assert_close(standard.T.cov(), torch.eye(4, dtype=torch.float64), atol=0.05, rtol=0)
    torch.testing.assert_close(standard.mean(0), torch.zeros(4, dtype=torch.float64), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "approximation", [tg.Laplace(), tg.EP(tolerance=1e-3), tg.EP(tolerance=1e-4)]
)  # the first of EP in single precision
def test_a_warm_start_changes_the_work_and_not_the_answer(approximation):
    model = gp("probit", 9)
    theta = thetas(model)
    estimator = tg.evidence.importance(model, approximation, num_importance=64)
    start = approximation.evidence(model, model.prior(theta * 1.02)).start
    cold = estimator.draw(theta, torch.Generator().manual_seed(0))
    warm = estimator.draw(theta, torch.Generator().manual_seed(0), start)
    assert bool((warm.num_factorizations < cold.num_factorizations).all())
    torch.testing.assert_close(warm.value, cold.value, atol=0.05, rtol=0)


@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.approximations.ClassEP(tolerance=1e-4)])
def test_a_warm_start_of_several_latents_changes_the_work_and_not_the_answer(approximation):
    model = gp("softmax", 9)
    theta = thetas(model)
    estimator = tg.evidence.importance(model, approximation, num_importance=64)
    start = estimator.start_at(theta * 1.02)
    cold = estimator.draw(theta, torch.Generator().manual_seed(0))
    warm = estimator.draw(theta, torch.Generator().manual_seed(0), start)
    assert bool((warm.num_factorizations < cold.num_factorizations).all())
    torch.testing.assert_close(warm.value, cold.value, atol=0.05, rtol=0)


@pytest.mark.slow
def test_gradient_with_several_latents_is_that_of_the_estimate():
    """Against the difference of two estimates from the same random numbers."""
    model, step = gp("softmax", 3), 1e-4
    theta = thetas(model, 1)
    estimator = tg.evidence.importance(model, tg.Laplace(tolerance=1e-20), num_importance=100_000)
    at = theta.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(estimator(at, torch.Generator().manual_seed(0)).value.sum(), at)
    for column, shift in enumerate(step * torch.eye(3, dtype=torch.float64)):
        right, left = (estimator(theta + sign * shift, torch.Generator().manual_seed(0)).value for sign in (1, -1))
        torch.testing.assert_close(found[0, column], ((right - left) / (2 * step))[0], atol=0.01, rtol=0.02)


@pytest.mark.parametrize("name", ["probit", "gaussian"])
def test_gradient_is_that_of_the_evidence(name):
    """Against the gradient of EP's evidence, which is right to a hundredth here; exactly for a Gaussian likelihood."""
    model = gp(name, 6)
    theta = thetas(model).requires_grad_(True)
    estimator = tg.evidence.importance(model, tg.EP(), num_importance=40_000)
    value = estimator(theta, torch.Generator().manual_seed(0)).value
    (found,) = torch.autograd.grad(value.sum(), theta)
    (expected,) = torch.autograd.grad(tg.approximations.expectation_propagation(model, theta).log_evidence.sum(), theta)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.03)


def test_chunks_and_targets_of_each_row_change_nothing(monkeypatch):
    model = gp("poisson", 5)
    theta = thetas(model, 5)
    targets = torch.arange(25, dtype=torch.float64).view(5, 5) % 4
    estimator = tg.evidence.importance(model, num_importance=4, targets=targets)
    whole = estimator.draw(theta, torch.Generator().manual_seed(0))
    monkeypatch.setitem(_CHUNK_ELEMENTS, "cpu", 50)
    for found, expected in zip(estimator.draw(theta, torch.Generator().manual_seed(0)), whole, strict=True):
        torch.testing.assert_close(found, expected)
    single = tg.evidence.importance(model.with_targets(targets[3]), num_importance=4)
    auxiliary = torch.randn(5, single.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(single.evaluate(theta[3:4], auxiliary[3:4]).value[0], whole.value[3])


def test_a_covariance_that_cannot_be_factorised_is_minus_infinity_and_its_neighbours_go_on():
    model = gp("probit", 5, jitter=0.0)
    theta = torch.tensor([[0.0, 0.0, 0.0], [0.0, 40.0, 40.0]], dtype=torch.float64)  # the second K is of rank one
    estimate = tg.evidence.importance(model)(theta, torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(estimate.value[0])) and float(estimate.value[1]) == -torch.inf


def test_the_prior_stands_in_for_an_unusable_approximation(monkeypatch):
    from torchgpmc.approximations.ep import EP

    model = gp("probit", 5)
    theta = thetas(model)
    original = EP.importance_density

    def broken(self, *arguments):
        found = original(self, *arguments)
        return found._replace(alpha=found.alpha * torch.tensor([1.0, torch.nan, 1.0]).unsqueeze(-1))

    monkeypatch.setattr(EP, "importance_density", broken)
    estimator = tg.evidence.importance(model, tg.EP(), num_importance=4000)
    estimate = estimator.draw(theta, torch.Generator().manual_seed(0))
    assert estimate.converged.tolist() == [True, False, True]
    torch.testing.assert_close(estimate.value, tg.approximations.laplace(model, theta).log_evidence, atol=0.2, rtol=0)


def test_khat_says_when_the_density_is_poor():
    """Probit weights grow like exp(delta' W delta / 2): finite variance while the prior is narrow, W < K^-1, and no longer."""
    estimator = tg.evidence.importance(gp("probit", 8), tg.Laplace(), num_importance=4000, antithetic=False)
    theta = torch.tensor([[-2.0, -3.0, -3.0], [5.0, -3.0, -3.0]], dtype=torch.float64)
    narrow, wide = estimator.pareto_khat(theta, torch.Generator().manual_seed(0))
    assert float(narrow) < 0.7 < float(wide)


@pytest.mark.parametrize("estimator", [tg.evidence.importance, tg.evidence.annealed])
def test_mistakes_are_named(estimator):
    model = gp("probit")
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_importance"):
            estimator(model, num_importance=wrong)
    with pytest.raises(ValueError, match=r"SparseGP|has several latent functions"):
        estimator(sparse_gp("softmax"))
    with pytest.raises(ValueError, match="even number"):
        tg.evidence.importance(model, num_importance=3, antithetic=True)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_what_single_precision_has_no_digits_for_counts_as_density_zero():
    """Draws of f as differences of numbers a prior's deviation large: their evidence came out up to 247 nats too high."""
    x, y = torch.linspace(0, 1, 5)[:, None], torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5])
    kernel = ScaleKernel(RBFKernel().requires_grad_(False), outputscale_prior=HalfCauchyPrior(2.0))
    likelihood = tg.likelihoods.Gaussian()
    likelihood.noise = 9.0
    likelihood.requires_grad_(False)
    log_outputscale = torch.linspace(0, 40, 81)[:, None]
    values = []
    for dtype in (torch.float32, torch.float64):
        model = tg.GP(x, y, kernel, likelihood, dtype=dtype)
        estimator = estimator_for(model, tg.Laplace(), 16, None, None)
        theta = log_outputscale.to(dtype)
        start = torch.nan_to_num(estimator.start_at(theta))
        values.append(estimator.draw(theta, torch.Generator().manual_seed(0), start, 1).value.double())
    single, double = values
    # Laplace's site is the likelihood, so every draw weighs the same; in double precision none is lost here.
    assert bool(torch.isfinite(double).all()) and bool(torch.isinf(single).any())
    kept = torch.isfinite(single)
    torch.testing.assert_close(single[kept], double[kept], atol=0.05, rtol=0)
    assert bool(kept[log_outputscale[:, 0] < 10].all())


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_what_draws_of_several_functions_have_no_digits_for_counts_as_density_zero():
    """Labels have an evidence of one at most; without the check its logarithm was 1e6 to 1e73 from an outputscale of 1e10 on."""
    x, y = torch.linspace(0, 1, 12).double()[:, None], torch.arange(12) // 4
    base = RBFKernel().requires_grad_(False)
    base.lengthscale = 0.2
    kernel = ScaleKernel(base, outputscale_prior=HalfCauchyPrior(2.0))
    model = tg.GP(x, y, kernel, tg.likelihoods.Softmax(num_classes=3, mixing_weights=False))
    log_outputscale = torch.linspace(0, 60, 61).double()[:, None]
    estimator = estimator_for(model, tg.approximations.ClassEP(), 16, None, None)
    found = estimator.draw(log_outputscale, torch.Generator().manual_seed(0), None, 1).value
    assert bool(torch.isinf(found).any()) and bool((found < 3.0).all())  # the mean of 16 weights may be above what it estimates
    assert bool(torch.isfinite(found[log_outputscale[:, 0] < 10]).all())
