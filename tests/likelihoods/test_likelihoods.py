"""Every override against quadrature and autograd, against scipy, and against gpytorch's own variational training."""

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import LIKELIHOODS, NOT_SMOOTH, inputs, kernel, targets
from tests.problems import make as make_module
from tests.speed import quick
from torchgpmc.adapter.conversion import as_likelihood, convert_likelihood
from torchgpmc.adapter.functional import PureModule
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.likelihoods import Factorised

# Of one latent and a response with a mean; for the others see the files of their own.
SCALAR = [name for name in LIKELIHOODS if name not in ("softmax", "heteroskedastic", "ordinal")]
MEAN = torch.tensor([[-2.0, -0.3, 0.0, 0.7, 1.5], [0.1, 3.0, -4.0, 0.2, 0.9]], dtype=torch.float64)
VARIANCE = torch.tensor([[0.1, 1.0, 0.5, 2.0, 0.01], [0.4, 0.2, 1.0, 0.3, 0.6]], dtype=torch.float64)


def make(name):
    return as_likelihood(convert_likelihood(make_module(name)).double())


def several(likelihood, f):
    """Values of as many latents as the likelihood has."""
    return f if likelihood.num_latents == 1 else torch.stack([f, -f, f.square()], -1)[..., : likelihood.num_latents]


def dense_expectation(function, mean, variance):
    """The trapezoid rule on +-12 standard deviations: independent of Gauss-Hermite."""
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    weights = torch.exp(-0.5 * grid**2) / (2 * np.pi) ** 0.5
    points = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * grid
    return torch.trapezoid(function(points.movedim(-1, 0)).movedim(0, -1) * weights, grid)


@pytest.mark.parametrize("name", SCALAR)
def test_expected_log_likelihood_equals_dense_quadrature(name):
    likelihood, y = make(name), targets(name, 5)
    found = likelihood.expected_log_likelihood(MEAN, VARIANCE, y)
    expected = dense_expectation(lambda f: likelihood.pointwise_log_prob(f, y), MEAN, VARIANCE)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCALAR)
def test_predictive_log_prob_equals_dense_quadrature(name):
    likelihood, y = make(name), targets(name, 5)
    found = likelihood.predictive_log_prob(MEAN, VARIANCE, y)
    expected = dense_expectation(lambda f: likelihood.pointwise_log_prob(f, y).exp(), MEAN, VARIANCE).log()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCALAR)
def test_response_moments_equal_dense_quadrature(name):
    likelihood = make(name)
    found = likelihood.response_moments(MEAN, VARIANCE)
    mean = dense_expectation(lambda f: likelihood.forward(f).mean, MEAN, VARIANCE)
    second = dense_expectation(lambda f: likelihood.forward(f).variance + likelihood.forward(f).mean.square(), MEAN, VARIANCE)
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.variance, second - mean.square(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LIKELIHOODS | NOT_SMOOTH)
def test_pointwise_log_prob_equals_the_distribution_gpytorch_sees(name):
    likelihood, y = make(name), targets(name, 5)
    f = several(likelihood, MEAN)
    torch.testing.assert_close(likelihood.pointwise_log_prob(f, y), likelihood.forward(f).log_prob(y), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(likelihood.log_prob(f, y), likelihood.pointwise_log_prob(f, y).sum(-1))


@pytest.mark.parametrize("name", SCALAR)
def test_expectations_have_the_right_gradients(name):
    likelihood, y = make(name), targets(name, 5)
    mean, variance = MEAN.clone().requires_grad_(True), VARIANCE.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m, v: likelihood.expected_log_likelihood(m, v, y), (mean, variance))


@pytest.mark.parametrize("name", ["gaussian", "student_t", "laplace"])
def test_parameters_at_many_settings_act_row_by_row(name):
    module = convert_likelihood(LIKELIHOODS[name]()).double()
    pure = PureModule(module)
    values = {raw: torch.tensor([[0.5], [2.5]], dtype=torch.float64) + len(raw) for raw, _ in module.named_parameters()}
    y = targets(name, 5)

    def evaluate(part):
        return as_likelihood(part).log_prob(MEAN, y)

    together = pure(values, evaluate)
    for row in range(2):
        alone = pure({raw: value[row] for raw, value in values.items()}, evaluate)
        torch.testing.assert_close(together[row], alone[row])


def test_formulas_equal_scipy():
    y, f = np.array([0.3, -1.0, 2.0]), np.array([0.5, 0.1, -0.4])
    student = tg.likelihoods.StudentT().double()
    student.noise, student.deg_free = 0.7, 4.0
    expected = scipy.stats.t(4.0, loc=f, scale=0.7**0.5).logpdf(y)
    np.testing.assert_allclose(student.pointwise_log_prob(torch.tensor(f), torch.tensor(y)).detach(), expected, rtol=1e-6)
    counts = np.array([0.0, 3.0, 7.0])
    found = tg.likelihoods.Poisson().pointwise_log_prob(torch.tensor(f), torch.tensor(counts))
    np.testing.assert_allclose(found, scipy.stats.poisson(np.exp(f)).logpmf(counts), rtol=1e-12)
    found = tg.likelihoods.Bernoulli("logit").pointwise_log_prob(torch.tensor(f), torch.tensor([1.0, 0.0, 1.0]))
    np.testing.assert_allclose(found, -np.log1p(np.exp(-f * np.array([1, -1, 1]))), rtol=1e-12)


def test_probit_is_not_floored_and_its_gradient_neither():
    f = torch.tensor([[-40.0, 40.0]], dtype=torch.float64, requires_grad=True)
    value = tg.likelihoods.Bernoulli().log_prob(f, torch.ones(2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), f)
    assert float(value) == pytest.approx(-804.608442, abs=1e-5)
    assert float(gradient[0, 0]) == pytest.approx(40.02496882, rel=1e-8)


@pytest.mark.parametrize("name", LIKELIHOODS | NOT_SMOOTH)
@pytest.mark.statistical
def test_samples_have_the_distributions_moments(name, generator):
    likelihood = make(name)
    f = several(likelihood, torch.tensor([0.4, -0.6], dtype=torch.float64).expand(40_000, 2))
    if name in ("softmax", "robust_max", "ordinal"):
        probabilities = likelihood.forward(f[0]).probs.detach()
        draws = torch.nn.functional.one_hot(likelihood.sample(f, torch.Generator().manual_seed(1)).long(), probabilities.shape[-1])
        assert worst_excess(draws[..., 1:].double(), probabilities[..., 1:]) < 1
        assert worst_excess(draws[..., 1:].double(), probabilities.flip(0)[..., 1:]) > 1
        return
    draws = likelihood.sample(f, torch.Generator().manual_seed(1))
    edges = torch.tensor([0.0, 0.5, 1.5], dtype=torch.float64)
    bounded = torch.stack([(draws <= edge).double() for edge in edges], -1)  # every distribution has these means
    distribution = likelihood.forward(f[0])
    if hasattr(distribution, "enumerate_support") and distribution.has_enumerate_support:
        cdf = torch.stack([(1 - distribution.probs) if edge < 1 else torch.ones(2) for edge in edges], -1)
        bounded, cdf = bounded[..., :2], cdf[..., :2]
    elif name == "poisson":
        cdf = torch.as_tensor(scipy.stats.poisson(f[0].exp().numpy()[:, None]).cdf(edges.numpy()))
    elif name == "negative_binomial":
        size = 1 / float(likelihood.dispersion)
        share = size / (size + f[0].exp().numpy()[:, None])
        cdf = torch.as_tensor(scipy.stats.nbinom(size, share).cdf(edges.numpy()))
    elif name == "beta":
        edges = torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
        bounded = torch.stack([(draws <= edge).double() for edge in edges], -1)
        shapes = (part.detach().numpy()[:, None] for part in (distribution.concentration1, distribution.concentration0))
        cdf = torch.as_tensor(scipy.stats.beta(*shapes).cdf(edges.numpy()))
    elif name == "student_t":
        scale = float(likelihood.noise.sqrt())
        cdf = torch.as_tensor(scipy.stats.t(float(likelihood.deg_free), f[0].numpy()[:, None], scale).cdf(edges.numpy()))
    else:
        cdf = torch.stack([distribution.cdf(edge.expand(2)) for edge in edges], -1)
    assert worst_excess(bounded, cdf) < 1
    assert worst_excess(bounded, cdf.flip(0)) > 1  # draws at the other latent value are caught


def test_conversions_keep_parameters_priors_and_names():
    original = LIKELIHOODS["gaussian"]()
    plain = gpytorch.likelihoods.GaussianLikelihood(noise_prior=original.noise_covar.noise_prior)
    plain.noise = 0.123
    converted = convert_likelihood(plain)
    assert isinstance(converted, tg.likelihoods.Gaussian)
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert float(converted.noise) == pytest.approx(0.123, rel=1e-6)
    converted.noise = 0.5
    assert float(plain.noise) == pytest.approx(0.123, rel=1e-6)


def test_gpytorchs_bernoulli_is_replaced_with_a_note():
    with pytest.warns(UserWarning, match="floors small probabilities"):
        converted = convert_likelihood(gpytorch.likelihoods.BernoulliLikelihood())
    assert isinstance(converted, tg.likelihoods.Bernoulli) and converted.is_probit


TRAINED = ["probit", "gaussian", "poisson", "student_t", "negative_binomial", "beta", "ordinal"]


@pytest.mark.parametrize("name", quick(["probit"], TRAINED))
def test_ours_train_in_gpytorchs_own_variational_models(name):
    """The evidence lower bound of gpytorch, with our likelihood, rises."""
    x, y = inputs(30), targets(name, 30)

    class Approximate(gpytorch.models.ApproximateGP):
        def __init__(self):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(5)
            super().__init__(gpytorch.variational.VariationalStrategy(self, x[:5].clone(), distribution))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), ScaleKernel(RBFKernel())

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    model, likelihood = Approximate().double(), LIKELIHOODS[name]().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=30)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    values = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < values[0] - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["robust_max", "heteroskedastic"])
def test_those_of_several_latents_train_in_gpytorchs_own_multitask_models(name):
    x, y = inputs(30), targets(name, 30)
    likelihood = make(name)
    latents = torch.Size([likelihood.num_latents])

    class Approximate(gpytorch.models.ApproximateGP):
        def __init__(self):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(5, batch_shape=latents)
            strategy = gpytorch.variational.VariationalStrategy(self, x[:5].clone(), distribution)
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=latents[0]))
            self.mean_module = gpytorch.means.ZeroMean(batch_shape=latents)
            self.covar_module = ScaleKernel(RBFKernel(batch_shape=latents), batch_shape=latents)

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    model = Approximate().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < values[0] - 0.01
    assert likelihood.log_marginal(y, model(x)).shape == y.shape


class Exponential(gpytorch.likelihoods.Likelihood):
    """A user's likelihood: forward alone."""

    def forward(self, function_samples):
        return torch.distributions.Exponential(torch.exp(-function_samples))


def test_any_factorised_gpytorch_likelihood_works():
    y = torch.linspace(0.1, 2.0, 8, dtype=torch.float64)
    for model in (
        tg.GP(inputs(8), y, kernel(), Exponential()),
        tg.SparseGP(inputs(8), y, kernel(), Exponential(), inducing_points=inputs(3, seed=4)),
    ):
        position = torch.zeros(2, model.layout.size + model.latent_size, dtype=torch.float64)
        value, gradient = tg.joint_log_density(model).value_and_grad(position)
        assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all())


class Gumbel(torch.distributions.Distribution):
    """A user's, with what sampling needs of one, and no support."""

    def __init__(self, location):
        self.location = location
        super().__init__(location.shape, validate_args=False)

    def log_prob(self, value):
        z = value - self.location
        return -z - (-z).exp()

    def sample(self, shape=()):
        return self.location - (-torch.rand(*shape, *self.location.shape).to(self.location).log()).log()


class OfGumbel(gpytorch.likelihoods._OneDimensionalLikelihood):
    def forward(self, function_samples, **options):
        return Gumbel(function_samples)


def test_a_distribution_of_ones_own_need_not_state_its_support():
    y = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    model = tg.GP(inputs(8), y, kernel(), OfGumbel())
    found = tg.approximations.laplace(model, torch.zeros(1, model.layout.size, dtype=torch.float64))
    assert bool(found.converged.all()) and bool(torch.isfinite(found.log_evidence).all())


class OwnLaplace(tg.likelihoods.Factorised, gpytorch.likelihoods.LaplaceLikelihood):
    """A user's, by this package's base class."""

    forward = gpytorch.likelihoods.LaplaceLikelihood.forward


REFUSING = [gpytorch.likelihoods.LaplaceLikelihood, OwnLaplace, tg.likelihoods.StudentT]


@pytest.mark.parametrize("sparse", [False, True], ids=["full", "sparse"])
@pytest.mark.parametrize("likelihood", quick([tg.likelihoods.StudentT], REFUSING))
def test_a_setting_that_torch_refuses_has_density_zero_and_leaves_the_others_theirs(likelihood, sparse):
    """exp(-800) is a scale of zero, for which gpytorch's own distributions raise, for all chains together."""
    made = likelihood(noise_prior=GammaPrior(2.0, 1.0))
    if likelihood is tg.likelihoods.StudentT:
        made.raw_deg_free.requires_grad_(False)
    options = {"inducing_points": inputs(3, seed=4)} if sparse else {}
    model = (tg.SparseGP if sparse else tg.GP)(inputs(6), torch.linspace(-1, 1, 6).double(), kernel(), made, **options)
    density = tg.joint_log_density(model)
    position = torch.randn(
        5, model.layout.size + model.latent_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    position[[1, 4], model.layout.size - 1] = -800.0
    value, gradient = density.value_and_grad(position)
    assert value.isinf().tolist() == density(position).isinf().tolist() == [False, True, False, False, True]
    assert not gradient[[1, 4]].any()
    others = [0, 2, 3]
    expected = density.value_and_grad(position[others])
    torch.testing.assert_close((value[others], gradient[others]), expected)
    if not sparse:
        for approximation in (tg.Laplace(), tg.EP()):
            found = ApproximateMarginal(model, approximation)(position[:, : model.layout.size])
            assert found.isinf().tolist() == [False, True, False, False, True]


def test_targets_that_a_gpytorch_likelihood_cannot_give_are_an_error():
    with pytest.raises(
        ValueError, match=r"the targets hold \[-0.5\]. Expected .*lower_bound=0.0.*the support of Exponential's Exponential"
    ):
        tg.GP(inputs(4), torch.tensor([0.2, 1.5, -0.5, 0.5]), kernel(), Exponential())


class WholeVector(gpytorch.likelihoods.Likelihood):
    def forward(self, function_samples):
        return torch.distributions.Independent(torch.distributions.Normal(function_samples, 1.0), 1)


def test_a_likelihood_that_does_not_factorise_is_an_error():
    with pytest.raises(ValueError, match=r"batch shape \(2,\).*Expected \(2, 3\)"):
        tg.GP(inputs(4), torch.zeros(4), kernel(), WholeVector())


class SumOfAll(tg.likelihoods.LogLikelihood, gpytorch.likelihoods.Likelihood):
    """Not factorised: only the sum of f is observed."""

    def forward(self, function_samples):
        raise AssertionError("never needed")

    def log_prob(self, f, targets):
        return -0.5 * (f.sum(-1) - targets.sum(-1)).square()


def test_log_prob_alone_is_enough_for_the_full_gp():
    model = tg.GP(inputs(4), torch.ones(4), kernel(), SumOfAll())
    value = tg.joint_log_density(model)(torch.zeros(2, model.layout.size + 4, dtype=torch.float64))
    assert bool(torch.isfinite(value).all())
    with pytest.raises(ValueError, match="does not factorise"):
        tg.SparseGP(inputs(4), torch.ones(4), kernel(), SumOfAll(), inducing_points=inputs(2))


def test_every_likelihood_of_the_package_is_in_the_table():
    public = {getattr(tg.likelihoods, name) for name in tg.likelihoods.__all__}
    public = {kind for kind in public if issubclass(kind, Factorised)} - {Factorised}
    assert public == {type(make(name)) for name in LIKELIHOODS | NOT_SMOOTH}


def test_quadrature_defaults_agree_with_the_overrides():
    """The generic method, called past the override, gives the override's answer."""
    for name in ("probit", "gaussian", "poisson"):
        likelihood, y = make(name), targets(name, 5)
        generic = Factorised.expected_log_likelihood(likelihood, MEAN, VARIANCE, y)
        torch.testing.assert_close(likelihood.expected_log_likelihood(MEAN, VARIANCE, y), generic, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", [*LIKELIHOODS, *NOT_SMOOTH])
@pytest.mark.parametrize(("mean", "variance"), [(torch.nan, 1.0), (0.5, torch.nan), (torch.nan, torch.nan)])
def test_a_normal_that_is_no_number_has_no_expectation_and_other_settings_keep_theirs(name, mean, variance):
    likelihood, y = make(name), targets(name, 5)
    means, variances = several(likelihood, MEAN).clone(), several(likelihood, VARIANCE).abs().clone()
    means[0, 1], variances[0, 1] = mean, variance
    for function in (likelihood.expected_log_likelihood, likelihood.predictive_log_prob):
        found = function(means, variances, y).detach()
        assert bool(found[0, 1].isnan())
        torch.testing.assert_close(found[1:], function(means[1:], variances[1:], y).detach(), rtol=1e-6, atol=1e-6)
        assert bool(function(means[:1, 1:2], variances[:1, 1:2], y[1:2]).isnan())
