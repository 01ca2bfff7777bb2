"""The sparse model's streamed density and gradient against autograd through the plain density, which holds everything at once."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior

import torchgpmc as tg
from tests.models.test_whitening import random_sites
from tests.problems import LIKELIHOODS, NOT_SMOOTH, inputs, kernel, sparse_gp, targets
from tests.speed import quick
from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.density import AutogradDensity
from torchgpmc.likelihoods.slopes import slopes_by_autograd
from torchgpmc.models import JointLogDensity


class Plain(JointLogDensity):
    """All of the (C, M, N) covariances, and one graph."""

    def _evaluate(self, position):
        return super()._evaluate(position)


def positions(model, chains):
    generator = torch.Generator().manual_seed(0)
    size = model.layout.size + model.latent_size
    return 0.5 * torch.randn(chains, size, generator=generator, dtype=torch.float64).to(model.train_x)


def assert_same(model, chains=3, targets=None, sites=None, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-10}
    density, position = JointLogDensity(model, targets, sites=sites), positions(model, chains)
    expected = AutogradDensity.value_and_grad(Plain(model, targets, sites=sites), position)
    found = density.value_and_grad(position)
    assert bool(torch.isfinite(expected[0]).all()) and not found[1].requires_grad
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(density(position), expected[0], **tolerance)


def sparse(kernel, likelihood=None, **options):
    options = {"inducing_points": inputs(4, seed=7), "jitter": 1e-4, **options}
    return tg.SparseGP(inputs(15), targets("probit", 15), kernel, likelihood or tg.likelihoods.Bernoulli(), **options)


def matern(smoothness, ard):
    base = MaternKernel(nu=smoothness, ard_num_dims=2 if ard else None, lengthscale_prior=GammaPrior(2.0, 3.0))
    return ScaleKernel(base, outputscale_prior=LogNormalPrior(0.2, 0.5))


KERNELS = {
    "rbf": lambda: kernel(2),
    "isotropic rbf": lambda: kernel(2, ard=False),
    "unscaled": lambda: RBFKernel(lengthscale_prior=LogNormalPrior(-0.5, 0.3)),
    "scale alone": lambda: ScaleKernel(RBFKernel().requires_grad_(False), outputscale_prior=GammaPrior(2.0, 1.5)),
    "matern 1/2": lambda: matern(0.5, ard=True),
    "matern 3/2": lambda: matern(1.5, ard=False),
    "matern 5/2": lambda: matern(2.5, ard=True),
    "a user's": lambda: kernel(2) + LinearKernel(variance_prior=GammaPrior(2.0, 1.0)),
}


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kind_of_kernel(name, chunk):
    assert_same(sparse(KERNELS[name](), data_chunk=chunk))


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("name", KERNELS)
def test_f_at_the_data_is_f_at_any_inputs_that_are_equal(name, dtype):
    """What is bound of the data, some of them inducing points, stands for what is worked out anew of other inputs."""
    model = sparse(KERNELS[name](), inducing_points=inputs(15)[:4], data_dtype=dtype)
    prior = model.prior(positions(model, 3)[:, : model.layout.size])
    of_data, of_others = model.cross(prior, model.train_x), model.cross(prior, model.train_x.clone())
    for ours, theirs in zip(of_data, of_others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Steep(tg.likelihoods.Bernoulli):
    """A user's subclass, whose density is not its parent's."""

    def expected_log_likelihood(self, mean, variance, targets):
        return super().expected_log_likelihood(2 * mean, 4 * variance, targets)


# Rules that adapt to a batch promise 1e-6.
LIMITS = {"laplace": 1e-6}


@pytest.mark.parametrize("chains", quick([5], [1, 5]))
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood_for_any_chunk(name, chains):
    for chunk in (1, 7, 15) if name != "laplace" else (7, 15):
        limit = LIMITS.get(name, 1e-10) if chunk < 15 else 1e-10
        assert_same(sparse_gp(name, num_data=15, jitter=1e-4, data_chunk=chunk), chains, rtol=limit, atol=limit)


def test_a_users_likelihood():
    model = sparse(kernel(2), Steep(), data_chunk=7)
    assert_same(model)
    position = positions(model, 1)
    plain = tg.joint_log_density(sparse(kernel(2)))(position)
    assert float((tg.joint_log_density(model)(position) - plain).abs()) > 0.1


def test_a_sampled_mean_and_one_data_set_a_chain():
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    model = sparse_gp("student_t", num_data=15, mean=mean, jitter=1e-4, data_chunk=4)
    many = torch.stack([targets("student_t", 15, seed) for seed in range(3)])
    assert_same(model, targets=many)
    difference = JointLogDensity(model, many)(positions(model, 3)) - JointLogDensity(model)(positions(model, 3))
    assert float(difference.abs().max()) > 0.1


def test_a_mean_without_closed_form():
    mean = gpytorch.means.LinearMean(2)
    mean.register_prior("weights_prior", NormalPrior(0.0, 1.0), "weights")
    mean.register_prior("bias_prior", NormalPrior(0.0, 1.0), "bias")
    assert_same(sparse(kernel(2), mean=mean, data_chunk=4))


def test_sites():
    assert_same(sparse(kernel(2), data_chunk=4), sites=random_sites(15))


def test_float32():
    assert_same(sparse_gp(num_data=15, jitter=1e-3, dtype=torch.float32, data_chunk=7), rtol=2e-3, atol=2e-3)


def test_products_with_the_data_in_single_precision():
    """Errors of value and gradient stay below 1e-5 and 1e-4 of their sizes."""
    options = {"num_data": 200, "num_inducing": 10, "jitter": 1e-6}
    double, mixed = sparse_gp(**options), sparse_gp(**options, data_dtype=torch.float32, data_chunk=64)
    position = positions(double, 3)
    value, gradient = tg.joint_log_density(double).value_and_grad(position)
    found = tg.joint_log_density(mixed).value_and_grad(position)
    assert found[0].dtype == found[1].dtype == torch.float64
    error = [float((found[0] - value).abs().max() / value.abs().max()), float((found[1] - gradient).norm() / gradient.norm())]
    assert 0 < error[0] < 1e-5 and 0 < error[1] < 1e-4, error


@pytest.mark.parametrize("likelihood", ["robust_max", "probit"])
@pytest.mark.parametrize(("name", "shift"), [("rbf", 0.0), ("rbf", 1000.0), ("a user's", 0.0)])
def test_single_precision_where_inducing_points_are_data(name, shift, likelihood):
    """u then determines f at some data, whose conditional variance, 1e-6 of the prior's, robust-max's slopes are divided by."""
    x = inputs(120)
    y = targets("probit", 120) if likelihood == "probit" else (x > 0).sum(-1)
    moved = x + shift
    made = tg.likelihoods.Bernoulli() if likelihood == "probit" else tg.likelihoods.RobustMax(3)
    double, single = (
        tg.SparseGP(moved, y, KERNELS[name](), made, inducing_points=moved[:20], data_dtype=dtype, data_chunk=50)
        for dtype in (None, torch.float32)
    )
    position = positions(double, 3)
    (value, gradient), found = (tg.joint_log_density(model).value_and_grad(position) for model in (double, single))
    error = [float((found[0] - value).abs().max()), float((found[1] - gradient).norm() / gradient.norm())]
    assert 0 < error[0] < 5e-3 and 0 < error[1] < 1e-3, error
    torch.testing.assert_close(tg.joint_log_density(single)(position), found[0], rtol=1e-10, atol=1e-10)
    alone = tg.joint_log_density(single).value_and_grad(position[:1])[0]
    torch.testing.assert_close(alone, found[0][:1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_row_that_does_not_factorise_fails_alone(chunk):
    """With an enormous lengthscale all rows of K(Z, Z) are the same."""
    model = sparse_gp(num_data=30, num_inducing=12, jitter=0.0, data_chunk=chunk)
    position = positions(model, 3)
    position[1, : model.layout.size] = 9.0
    density = tg.joint_log_density(model)
    value, gradient = density.value_and_grad(position)
    assert float(value[1]) == float(density(position)[1]) == -torch.inf and float(gradient[1].abs().max()) == 0.0
    rows = torch.tensor([0, 2])
    alone = density.value_and_grad(position[rows])
    torch.testing.assert_close(value[rows], alone[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient[rows], alone[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [*LIKELIHOODS, *NOT_SMOOTH])
def test_a_position_that_is_no_number_fails_alone(name):
    model = sparse_gp(name, jitter=1e-4)
    position = positions(model, 3)
    position[1] = torch.nan
    for density in (tg.joint_log_density(model), AutogradDensity(tg.joint_log_density(model)._evaluate)):
        value, gradient = density.value_and_grad(position)
        assert torch.isfinite(value).tolist() == [True, False, True] and float(gradient[1].abs().max()) == 0.0
        value, gradient = density.value_and_grad(position[1:2])
        assert float(value) == -torch.inf and float(gradient.abs().max()) == 0.0


@pytest.mark.parametrize("name", NOT_SMOOTH)
def test_a_density_is_one_function_with_its_gradient_or_without(name):
    model = sparse_gp(name, num_data=200, jitter=1e-4)
    position = positions(model, 4)
    density = tg.joint_log_density(model)
    torch.testing.assert_close(density(position), density.value_and_grad(position)[0], rtol=0.0, atol=1e-10)


class Doubled(tg.SparseGP):
    """A user's model with a likelihood of its own."""

    def log_likelihood(self, *arguments):
        return 2 * super().log_likelihood(*arguments)


def test_a_model_that_overrides_its_density_keeps_it():
    arguments = inputs(15), targets("probit", 15), kernel(2), tg.likelihoods.Bernoulli()
    model, plain = (kind(*arguments, inducing_points=inputs(4, seed=7), jitter=1e-4) for kind in (Doubled, tg.SparseGP))
    assert_same(model)
    position = positions(model, 2)
    assert float((tg.joint_log_density(model)(position) - tg.joint_log_density(plain)(position)).abs().min()) > 0.1


def test_no_tensor_holds_all_covariances():
    """Of 20 chains, 400 data and 5 inducing points no tensor has more than a chunk's share."""
    model = sparse_gp(num_data=400, num_inducing=5, data_chunk=16)
    density, position = tg.joint_log_density(model), positions(model, 20)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.untyped_storage().nbytes() // 8)
            return result

    with Sizes():
        density.value_and_grad(position)
        density(position)
    assert 0 < max(sizes) <= 65 * 20 * 16 < 20 * 400 * 5  # 65 nodes of a rule at each of a chunk's data


@pytest.mark.parametrize("chunk", [0, -3, True, 2.5, "all"])
def test_a_chunk_is_a_whole_number_above_zero(chunk):
    with pytest.raises(ValueError, match=r"data_chunk is .* Expected a whole number of at least 1, or None"):
        sparse_gp(data_chunk=chunk)


def test_a_data_dtype_is_a_floating_one():
    with pytest.raises(ValueError, match=r"data_dtype is torch.int32. Expected torch.float32"):
        sparse_gp(data_dtype=torch.int32)


CLOSED = ["probit", "logit", "gaussian", "student_t", "poisson", "softmax"]


@pytest.mark.parametrize("spread", [0.3, 30.0])
@pytest.mark.parametrize("name", CLOSED)
def test_slopes_of_expectations_are_autograds(name, spread):
    """By either rule; in parameters too."""
    likelihood = as_likelihood(LIKELIHOODS[name]().double())
    generator = torch.Generator().manual_seed(0)
    shape = (2, 6) if likelihood.num_latents == 1 else (2, 6, likelihood.num_latents)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    variance = 0.1 * spread * (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))
    values = {raw: parameter.detach().abs() + torch.tensor([[1.5], [2.5]]) for raw, parameter in likelihood.named_parameters()}
    leaves = [value.requires_grad_(True) for value in values.values()]
    model = sparse_gp(name)

    def call(function):
        return model.likelihood_function(values, lambda module: function(module)(mean, variance, targets(name, 6), leaves))

    found = call(lambda module: module.expected_and_slopes)
    expected = call(lambda module: lambda *arguments: slopes_by_autograd(module, *arguments))
    assert len(found.parameters) == len(expected.parameters) == len(leaves)
    for ours, theirs in zip([*found[:3], *found.parameters], [*expected[:3], *expected.parameters], strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
