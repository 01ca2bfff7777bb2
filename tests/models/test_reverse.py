"""The full GP's gradient by parts against autograd through the whole joint density."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.priors import GammaPrior, HalfCauchyPrior, LogNormalPrior, NormalPrior, UniformPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, Halved, fixed_kernel, gp, inputs, kernel, targets
from torchgpmc.density import AutogradDensity
from torchgpmc.models import JointLogDensity, joint_log_density


def scaled(base):
    return ScaleKernel(base, outputscale_prior=LogNormalPrior(0.2, 0.5))


def rational_quadratic():
    result = RQKernel(lengthscale_prior=GammaPrior(2.0, 3.0))
    result.register_prior("alpha_prior", GammaPrior(2.0, 1.0), "alpha")
    return result


KERNELS = {
    "ard": lambda: kernel(2),
    "isotropic": lambda: kernel(2, ard=False),
    "unscaled": lambda: RBFKernel(lengthscale_prior=LogNormalPrior(-0.5, 0.3)),
    "one column": lambda: scaled(RBFKernel(active_dims=[1], lengthscale_prior=HalfCauchyPrior(0.7))),
    "bounded": lambda: RBFKernel(
        lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0), lengthscale_prior=NormalPrior(0.5, 0.4)
    ),
    "uniform": lambda: RBFKernel(lengthscale_prior=UniformPrior(0.1, 3.0)),
    "fixed": fixed_kernel,
    "scale alone": lambda: scaled(RBFKernel().requires_grad_(False)),
    "matern": lambda: scaled(MaternKernel(nu=1.5, lengthscale_prior=GammaPrior(2.0, 3.0))),
    "rational quadratic": lambda: scaled(rational_quadratic()),
    "sum": lambda: kernel(2) + LinearKernel(variance_prior=GammaPrior(2.0, 1.0)),
}


def both(model, chains=3, targets=None, seed=0):
    """Value and gradient by parts and by autograd at random positions."""
    density = joint_log_density(model, targets)
    generator = torch.Generator().manual_seed(seed)
    size = model.layout.size + model.latent_size
    position = 0.5 * torch.randn(chains, size, generator=generator, dtype=torch.float64).to(model.train_x)
    return density.value_and_grad(position), AutogradDensity.value_and_grad(density, position)


def assert_equal(found, expected, **tolerance):
    assert bool(torch.isfinite(found[0]).all()) and not found[1].requires_grad
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kind_of_kernel(name):
    model = tg.GP(inputs(7), targets("probit", 7), KERNELS[name](), tg.likelihoods.Bernoulli(), jitter=1e-4)
    assert_equal(*both(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood(name):
    assert_equal(*both(gp(name, jitter=1e-4)), rtol=1e-9, atol=1e-9)


def test_a_sampled_mean_and_one_data_set_a_chain():
    mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    model = gp("student_t", mean=mean, jitter=1e-4)
    many = torch.stack([targets("student_t", 6, seed) for seed in range(3)])
    found, expected = both(model, targets=many)
    assert_equal(found, expected, rtol=1e-9, atol=1e-9)
    assert float(both(model)[0][0][1]) != float(found[0][1])


def test_float32():
    assert_equal(*both(gp(jitter=1e-3, dtype=torch.float32)), rtol=2e-3, atol=2e-3)


def test_a_row_that_does_not_factorise_fails_alone():
    """With an enormous lengthscale all rows of K are the same."""
    model = gp(num_data=30, jitter=0.0)
    position = torch.full((2, model.layout.size + 30), -3.0, dtype=torch.float64)
    position[1, : model.layout.size] = 9.0
    value, gradient = joint_log_density(model).value_and_grad(position)
    assert bool(torch.isfinite(value[0])) and float(value[1]) == -torch.inf
    assert bool(torch.isfinite(gradient).all()) and float(gradient[1].abs().max()) == 0.0


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_where_no_chain_has_a_density_all_have_density_zero(name):
    """Steps that are far too long take variances to 0, which torch's own distributions refuse, and positions to NaN."""
    model = gp(name)
    size = model.layout.size + model.latent_size
    for far, may_be_finite in ((-800.0, True), (torch.nan, False)):
        value, gradient = joint_log_density(model).value_and_grad(torch.full((2, size), far, dtype=torch.float64))
        assert bool(((value == -torch.inf) | (torch.isfinite(value) & may_be_finite)).all())
        assert bool(torch.isfinite(gradient).all()) and (may_be_finite or float(gradient.abs().max()) == 0.0)


class Shifted(tg.likelihoods.Bernoulli):
    """A user's subclass, whose density is not its parent's."""

    def pointwise_log_prob(self, f, targets):
        return super().pointwise_log_prob(f + 1.0, targets)


def test_a_subclass_is_not_given_its_parents_derivative():
    plain = gp(jitter=1e-4)
    model = tg.GP(plain.train_x, plain.train_y, kernel(2), Shifted(), jitter=1e-4)
    found, expected = both(model)
    assert_equal(found, expected, rtol=1e-9, atol=1e-9)
    assert float((found[0] - both(plain)[0][0]).abs().max()) > 0.1


def test_a_model_that_overrides_its_density_keeps_it():
    plain = gp(jitter=1e-4)
    model = Halved(plain.train_x, plain.train_y, kernel(2), tg.likelihoods.Bernoulli(), jitter=1e-4)
    found, expected = both(model)
    assert_equal(found, expected, rtol=1e-9, atol=1e-9)
    assert float((found[0] - both(plain)[0][0]).abs().max()) > 0.1


class HalfAsSure(JointLogDensity):
    def _evaluate(self, position):
        return 0.5 * super()._evaluate(position)


def test_a_density_that_overrides_its_value_keeps_it():
    model = gp(jitter=1e-4)
    position = torch.zeros(2, model.layout.size + model.latent_size, dtype=torch.float64)
    whole, half = joint_log_density(model).value_and_grad(position), HalfAsSure(model).value_and_grad(position)
    assert_equal(half, [0.5 * part for part in whole])
