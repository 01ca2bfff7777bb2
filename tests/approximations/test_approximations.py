"""Laplace and EP against quadrature, closed forms, a plain Newton iteration and finite differences."""

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.approximations.reference import evidence_by_quadrature, gaussian_evidence, plain_laplace
from tests.problems import conditioned_gp, fitc, gp, sparse_gp
from tests.speed import quick
from torchgpmc.approximations import laplace_mode
from torchgpmc.approximations import marginal as marginal_module
from torchgpmc.approximations.gaussian_form import problem_at, problem_of
from torchgpmc.approximations.site_algebra import dense_r, factor_of_b, marginal_variances, site_marginals
from torchgpmc.models.gp_model import GPModel

SMOOTH = ["probit", "logit", "poisson", "gaussian"]
FUNCTIONS = {"laplace": tg.approximations.laplace, "ep": tg.approximations.expectation_propagation}


def thetas(model, count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(count, model.layout.size, generator=generator, dtype=torch.float64)


def with_mean(name, num_data):
    base = gp(name, num_data)
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.3, 1.0))
    return tg.GP(base.train_x, base.train_y, base.kernel, base.likelihood, mean=mean)


def dense_covariance(prior, found):
    return prior.covariance - prior.covariance @ dense_r(found.factor, found.precision.sqrt()) @ prior.covariance


@pytest.mark.parametrize("num_data", quick([1, 2], [1, 2, 3]))
@pytest.mark.parametrize("name", ["probit", "logit", "poisson"])
@pytest.mark.parametrize("method", FUNCTIONS)
def test_close_to_dense_quadrature(method, name, num_data):
    """EP is within a hundredth here, Laplace within a tenth; a wrong sign or factor of two would be far outside."""
    model = with_mean(name, num_data)
    theta = thetas(model)
    found = FUNCTIONS[method](model, theta)
    log_evidence, mean, covariance = evidence_by_quadrature(model, theta)
    tolerance = {"laplace": 0.1, "ep": 0.01}[method]
    assert bool(found.converged.all())
    torch.testing.assert_close(found.log_evidence.detach(), log_evidence, atol=tolerance, rtol=0)
    # One site is matched exactly by EP, so that its moments are the posterior's.
    exact = method == "ep" and num_data == 1
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert bool(((found.mean - mean).abs() / scale < (1e-6 if exact else 5 * tolerance)).all())
    if exact:
        torch.testing.assert_close(found.log_evidence.detach(), log_evidence, atol=1e-7, rtol=0)
        torch.testing.assert_close(dense_covariance(model.prior(theta), found).detach(), covariance, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", FUNCTIONS)
def test_exact_for_a_gaussian_likelihood(method):
    model = with_mean("gaussian", 7)
    theta = thetas(model)
    found = FUNCTIONS[method](model, theta)
    torch.testing.assert_close(found.log_evidence.detach(), gaussian_evidence(model, theta), rtol=1e-9, atol=1e-9)
    prior = model.prior(theta)
    noise = prior.values["likelihood"]["noise_covar.raw_noise"]
    total = prior.covariance + noise.unsqueeze(-1) * torch.eye(7, dtype=torch.float64)
    gain = prior.covariance @ torch.linalg.inv(total)
    residual = (model.train_y - prior.mean).unsqueeze(-1)
    torch.testing.assert_close(found.mean, prior.mean + (gain @ residual).squeeze(-1), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(dense_covariance(prior, found), prior.covariance - gain @ prior.covariance, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", SMOOTH)
def test_laplace_equals_the_plain_iteration(name):
    model = with_mean(name, 8)
    theta = thetas(model)
    found = tg.approximations.laplace(model, theta)
    mode, log_evidence = plain_laplace(model, theta)
    torch.testing.assert_close(found.mean, mode, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_evidence.detach(), log_evidence, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", [*SMOOTH, "student_t"])
def test_factors_in_single_precision_lead_to_the_same_mode(name, monkeypatch):
    model = with_mean(name, 30)
    theta = thetas(model)
    expected, gradient = evidence_and_gradient(model, theta)
    monkeypatch.setattr(laplace_mode, "_WORTH_SINGLE", 0)
    found, slope = evidence_and_gradient(model, theta)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(slope, gradient, atol=1e-5, rtol=1e-5)


def test_where_single_precision_overflows_double_takes_over(monkeypatch):
    model = gp("probit", 20)
    theta = thetas(model)
    theta[1, model.layout.names.index("kernel.outputscale")] = 95.0  # its exponential is beyond single precision
    expected = tg.approximations.laplace(model, theta)
    monkeypatch.setattr(laplace_mode, "_WORTH_SINGLE", 0)
    found = tg.approximations.laplace(model, theta)
    assert torch.equal(found.converged, expected.converged)
    torch.testing.assert_close(found.log_evidence[[0, 2, 3]], expected.log_evidence[[0, 2, 3]], atol=1e-9, rtol=1e-9)


def evidence_and_gradient(model, theta):
    theta = theta.clone().requires_grad_(True)
    found = tg.approximations.laplace(model, theta)
    (gradient,) = torch.autograd.grad(found.log_evidence.sum(), theta)
    return found._replace(log_evidence=found.log_evidence.detach()), gradient


@pytest.mark.parametrize("name", quick(["probit", "gaussian"], [*SMOOTH, "student_t"]))
@pytest.mark.parametrize("method", FUNCTIONS)
def test_gradients_equal_finite_differences(method, name):
    if (method, name) == ("ep", "student_t"):
        pytest.skip("sites held at the least precision are not a fixed point of EP; its gradient is documented as inexact there")
    model = with_mean(name, 6)
    function = FUNCTIONS[method]
    tolerance = 1e-20 if method == "laplace" else 1e-12
    theta = thetas(model).requires_grad_(True)
    (gradient,) = torch.autograd.grad(function(model, theta, tolerance=tolerance).log_evidence.sum(), theta)
    step = 1e-5
    for column in range(model.layout.size):
        shift = torch.zeros(model.layout.size, dtype=torch.float64)
        shift[column] = step
        with torch.no_grad():
            right, left = (function(model, theta + sign * shift, tolerance=tolerance).log_evidence for sign in (1, -1))
        torch.testing.assert_close(gradient[:, column], (right - left) / (2 * step), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", FUNCTIONS)
def test_the_covariance_factor_is_a_root_of_the_covariance(method):
    model = with_mean("probit", 8)
    theta = thetas(model)
    found, prior = FUNCTIONS[method](model, theta), model.prior(theta)
    root = tg.approximations.covariance_factor(prior, found)
    torch.testing.assert_close(root @ root.mT, dense_covariance(prior, found), rtol=1e-8, atol=1e-9)


def test_variances_of_data_whose_sites_say_next_to_nothing_keep_their_digits():
    """1 - B^-1 is the site's precision times the variance: of 1e-12 four digits are left, of 1e-16 none."""
    model = gp("probit", 6)
    covariance = model.prior(thetas(model, 3)).covariance
    root = 10 ** torch.linspace(-8, 1, 18).double().view(3, 6)
    factor, ok = factor_of_b(covariance, root)
    factor[1], ok[1] = 0.0, False
    found = site_marginals(covariance, factor, ok, root)
    expected = marginal_variances(covariance, factor, root)
    torch.testing.assert_close(found.variance[[0, 2]], expected[[0, 2]], rtol=1e-7, atol=0.0)
    unit = torch.eye(6).double().expand(2, -1, -1)
    torch.testing.assert_close(found.inverse_factor[[0, 2]] @ factor[[0, 2]], unit, rtol=0.0, atol=1e-10)
    whole = torch.linalg.inv((factor @ factor.mT)[[0, 2]])
    torch.testing.assert_close(found.inverse_diagonal[[0, 2]], whole.diagonal(dim1=-2, dim2=-1), rtol=1e-10, atol=0.0)


def with_a_mean_and_a_kernel_of_ones_own():
    x = torch.linspace(0, 1, 7, dtype=torch.float64)
    kernel = gpytorch.kernels.PeriodicKernel(lengthscale_prior=GammaPrior(2.0, 1.0), period_length_prior=GammaPrior(3.0, 3.0))
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.5, 1.0))
    return tg.GP(x, (x > 0.4).int(), kernel, tg.likelihoods.Bernoulli(), mean=mean)


@pytest.mark.parametrize("make", [gp, lambda: gp("negative_binomial"), with_a_mean_and_a_kernel_of_ones_own, conditioned_gp, fitc])
def test_the_problem_at_a_theta_is_that_of_its_prior(make, monkeypatch):
    model = make()
    theta = thetas(model, 3)
    expected = problem_of(model, model.prior(theta), None)
    if isinstance(model, tg.GP):
        monkeypatch.setattr(GPModel, "_factorised", lambda *given: pytest.fail("factorised"))
    found = problem_at(model, theta)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-14, atol=0.0)
    torch.testing.assert_close((found.mean, found.values, found.targets.values), (expected.mean, expected.values, model.train_y))


@pytest.mark.parametrize("method", FUNCTIONS)
def test_a_theta_does_not_see_its_neighbours(method):
    """Masks: the result of a row is the same alone and beside rows that take longer."""
    model = gp("poisson", 9)
    theta = thetas(model, 6) * torch.linspace(0.1, 3.0, 6, dtype=torch.float64)[:, None]
    together = FUNCTIONS[method](model, theta)
    assert len(together.num_iterations.unique()) > 1, "all took the same number of steps, so this shows nothing"
    for row in range(6):
        alone = FUNCTIONS[method](model, theta[row : row + 1])
        assert int(alone.num_iterations[0]) == int(together.num_iterations[row])
        torch.testing.assert_close(alone.mean[0], together.mean[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("count", [30.0, 3000.0])
def test_large_counts_converge(method, count):
    """They throw an undamped Newton step to exp(1000)."""
    x = torch.linspace(0, 1, 12, dtype=torch.float64)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).requires_grad_(False)
    kernel.outputscale = 40.0
    model = tg.GP(x, torch.tensor([0.0, count] * 6, dtype=torch.float64), kernel, tg.likelihoods.Poisson())
    found = FUNCTIONS[method](model, torch.zeros(1, 0, dtype=torch.float64))
    if method == "laplace":
        mode = plain_mode_by_lbfgs(model)
        torch.testing.assert_close(found.mean[0], mode, rtol=1e-4, atol=1e-3)
    assert bool(found.converged.all())
    # By importance sampling from the mode's curvature, whose error is below 1e-3 here.
    estimator = tg.evidence.importance(model, tg.Laplace(tolerance=1e-8), num_importance=20_000)
    truth = estimator(torch.zeros(1, 0, dtype=torch.float64), torch.Generator().manual_seed(0))
    assert float(truth.variance) < 1e-6
    torch.testing.assert_close(found.log_evidence, truth.value, rtol=0, atol={"laplace": 0.02, "ep": 0.005}[method])


def plain_mode_by_lbfgs(model):
    import scipy.optimize

    prior = model.prior(torch.zeros(1, 0, dtype=torch.float64))

    def objective(v):
        v = torch.tensor(v, requires_grad=True)
        value = 0.5 * (v**2).sum() - model.log_likelihood(model.at(prior), v[None])[0]
        return value.item(), torch.autograd.grad(value, v)[0].numpy()

    best = scipy.optimize.minimize(
        objective,
        torch.zeros(12).double().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 20000, "ftol": 1e-15, "gtol": 1e-9, "maxfun": 50000},
    )
    return prior.factor[0] @ torch.tensor(best.x)


@pytest.mark.slow
@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.EP()])
def test_a_loss_trains_kernel_and_features_together(approximation):
    torch.manual_seed(0)
    raw = torch.linspace(-2, 2, 40, dtype=torch.float64).unsqueeze(-1)
    y = (raw[:, 0].abs() > 1).double()
    features = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    kernel = gpytorch.kernels.ScaleKernel(
        gpytorch.kernels.RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 1.0)),
        outputscale_prior=gpytorch.priors.GammaPrior(2.0, 1.0),
    )
    model = tg.GP(features(raw).detach(), y, kernel, tg.likelihoods.Bernoulli())
    parameters = [*features.parameters(), *model.kernel.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    optimiser = torch.optim.Adam(parameters, lr=0.05)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = tg.approximations.negative_log_evidence(model, approximation, inputs=features(raw))
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert losses[-1] < losses[0] - 5


def test_inputs_in_place_of_the_data_are_refused_where_latents_are_elsewhere():
    model = sparse_gp("probit")
    loss = tg.approximations.negative_log_evidence(model, tg.approximations.Variational())
    assert bool(torch.isfinite(loss))
    with pytest.raises(ValueError, match="SparseGP are at its inducing points"):
        tg.approximations.negative_log_evidence(model, tg.approximations.Variational(), inputs=model.train_x)


@pytest.mark.parametrize("method", FUNCTIONS)
def test_predictions_are_exact_for_a_gaussian_likelihood(method):
    model = with_mean("gaussian", 7)
    theta = thetas(model, 1)
    x = torch.tensor([[0.2, 0.4], [0.9, 0.1]], dtype=torch.float64)
    approximation = {"laplace": tg.Laplace(), "ep": tg.EP()}[method]
    prediction = tg.approximations.predict(model, theta, approximation, x)
    prior = model.prior(theta)
    cross = model.covariance.bind(model.train_x, x)(prior.values["kernel"])[0]
    total = prior.covariance[0] + prior.values["likelihood"]["noise_covar.raw_noise"][0] * torch.eye(7, dtype=torch.float64)
    mean = prior.mean[0, 0] + cross.T @ torch.linalg.solve(total, model.train_y - prior.mean[0])
    variance = prior.values["kernel"]["raw_outputscale"][0] - (cross * torch.linalg.solve(total, cross)).sum(0)
    torch.testing.assert_close(prediction.latent_mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(prediction.latent_variance, variance, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("method", FUNCTIONS)
def test_models_that_cannot_be_approximated_are_refused(method):
    from tests.problems import sparse_gp

    with pytest.raises(ValueError, match=r"SparseGP.*NUTS"):
        FUNCTIONS[method](sparse_gp("probit"), torch.zeros(1, 3, dtype=torch.float64))
    if method == "ep":
        with pytest.raises(ValueError, match=r"one latent function.*Laplace"):
            FUNCTIONS[method](gp("softmax"), torch.zeros(1, 3, dtype=torch.float64))


def test_a_batch_too_large_for_memory_is_worked_out_in_parts(monkeypatch):
    from torchgpmc.approximations import ApproximateMarginal

    model = gp("probit")
    several = model.with_targets((torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) > 0.5).double())
    theta = model.layout.starting_points(5, torch.Generator().manual_seed(0))
    for marginal in (ApproximateMarginal(model, tg.Laplace()), ApproximateMarginal(several, tg.Laplace())):
        whole = marginal.value_and_grad(theta)
        with monkeypatch.context() as patched:
            patched.setattr(marginal_module, "_CHUNK_ELEMENTS", 2 * 6**2)
            parts = marginal.value_and_grad(theta)
        torch.testing.assert_close(parts, whole)


def test_two_factorisations_are_enough_to_draw_from(monkeypatch):
    model = gp("probit", 150)
    theta = thetas(model)
    theta[:, model.layout.names.index("kernel.outputscale")] += 2.0  # far from f = 0
    prior = model.prior(theta)
    found = tg.Laplace().importance_density(model, prior)
    assert bool(found.converged.all()) and bool((found.num_iterations <= 2).all())
    assert bool(((found.mean - tg.approximations.laplace(model, theta).mean).square().mean(-1) < 1e-4).all())
    monkeypatch.setattr(laplace_mode, "_accelerate", lambda point, step, *before: step)
    plain = tg.Laplace().importance_density(model, prior)
    assert bool((plain.num_iterations > 2).any()), "steps are enough as they are, so this shows nothing"


@pytest.mark.parametrize("name", ["probit", "student_t"])
@pytest.mark.parametrize("started", [False, True])
def test_thetas_at_rest_leave_a_factors_steps_and_nothing_changes(started, name, monkeypatch):
    """From f = mean with factors in single precision, and from an earlier approximation; each theta as if it were alone."""
    model = gp(name, 100)
    theta = 2 * thetas(model, 8)
    prior = model.prior(theta)
    start = tg.Laplace().importance_density(model, model.prior(thetas(model, 8, seed=1))).start if started else None
    rows, original = [], laplace_mode._evaluate

    def counting(problem, alpha, centred):
        rows.append(len(alpha))
        return original(problem, alpha, centred)

    monkeypatch.setattr(laplace_mode, "_evaluate", counting)
    monkeypatch.setattr(laplace_mode, "_WORTH_LEAVING", math.inf)
    expected = tg.Laplace().importance_density(model, prior, start=start)
    stayed = sum(rows)
    rows.clear()
    monkeypatch.setattr(laplace_mode, "_WORTH_LEAVING", 0)
    found = tg.Laplace().importance_density(model, prior, start=start)
    assert sum(rows) < stayed, "none left, so this shows nothing"
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("least", "shares"), [(0.0, {1.0}), (1.0, {0.0})])
def test_steps_without_products_with_the_covariance_end_at_the_same_mode(least, shares, monkeypatch):
    model = gp("probit", 150)
    theta = thetas(model)
    prior = model.prior(theta)
    took = set()
    original = laplace_mode._times_covariance

    def noting(problem, precision, move, rest, firm):
        took.update([] if firm is None else firm.double().flatten().tolist())
        return original(problem, precision, move, rest, firm)

    monkeypatch.setattr(laplace_mode, "_FIRM", least)
    monkeypatch.setattr(laplace_mode, "_times_covariance", noting)
    found = tg.Laplace().importance_density(model, prior)
    assert took == shares
    centred = (prior.covariance @ found.alpha.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.mean - prior.mean, centred, rtol=1e-9, atol=1e-9)  # no rounding is left in f
    assert bool(((found.mean - tg.approximations.laplace(model, theta).mean).square().mean(-1) < 1e-4).all())


def counts_alike(rate):
    """200 counts of one rate, its logarithm sampled."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    y = torch.poisson(torch.full((200,), rate), generator=generator).long()
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0))
    kernel = ScaleKernel(kernel, outputscale_prior=GammaPrior(2.0, 2.0))
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(math.log(rate), 1.0))
    return tg.GP(x, y, kernel, tg.likelihoods.Poisson(), mean=mean)


def test_sites_of_another_theta_that_lead_nowhere_are_left_for_none():
    model = counts_alike(2000.0)
    begin = tg.EP().importance_density(model, model.prior(torch.tensor([[-7.6, 0.4, 7.6]]).double()))
    prior = model.prior(torch.tensor([[1.8, 1.3, 6.5], [1.9, -1.8, 8.7], [0.2, 0.1, 10.7], [-7.0, 0.5, 7.6]]).double())
    found = tg.EP().importance_density(model, prior, start=begin.start.repeat(4, 1))
    assert begin.converged.all() and found.converged.all()
    expected = tg.EP(tolerance=1e-9).importance_density(model, prior)
    assert ((found.mean - expected.mean).abs() < 0.01).all()


def test_sites_of_another_theta_end_where_the_mean_that_they_share_is_found():
    """What each of 200 counts lacks is little, and adds up: sites that all matched to 0.03 left it five deviations off."""
    model = counts_alike(4.0)
    grid = torch.cartesian_prod(*(torch.tensor(part).double() for part in ([-4.0, -2.0, 0.0], [0.5, 1.5, 3.0], [1.0, 1.4, 2.0])))
    prior, another = model.prior(grid), model.prior(torch.tensor([[-2.0, 1.5, 1.3]]).double())
    start = tg.EP().importance_density(model, another).start.repeat(len(grid), 1)
    found = tg.EP().importance_density(model, prior, start=start)
    expected = tg.EP(tolerance=1e-9).importance_density(model, prior)
    variance = marginal_variances(prior.covariance, expected.factor, expected.precision.sqrt())
    off = ((found.mean - expected.mean).abs() * variance.rsqrt()).amax(-1)
    assert off.max() < 0.6 and off.median() < 0.05
