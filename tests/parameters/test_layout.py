"""theta and its prior density: integration, restriction, dtype, drawing, and priors set in every way gpytorch allows."""

import math

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import IndexKernel, LinearKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.priors import (
    GammaPrior,
    HalfCauchyPrior,
    HalfNormalPrior,
    LogNormalPrior,
    MultivariateNormalPrior,
    NormalPrior,
    Prior,
    SmoothedBoxPrior,
    UniformPrior,
)
from torch.distributions import constraints

from tests.calibration import worst_excess
from tests.problems import gp
from tests.speed import quick
from torchgpmc.parameters.layout import build_layout


class Triangular(Prior):
    """A user's own prior on (0, 2): log_prob alone, density x / 2."""

    arg_constraints = {}

    def __init__(self):
        torch.nn.Module.__init__(self)
        super().__init__(validate_args=False)
        self._transform = None

    @property
    def support(self):
        return constraints.interval(0.0, 2.0)

    def log_prob(self, x):
        return torch.log(x / 2)


PRIORS = {
    "gamma": lambda: GammaPrior(1.5, 1 / 3),
    "log normal": lambda: LogNormalPrior(0.1, 0.7),
    "normal": lambda: NormalPrior(0.3, 1.1),
    "half cauchy": lambda: HalfCauchyPrior(0.7),
    "half normal": lambda: HalfNormalPrior(1.3),
    "uniform": lambda: UniformPrior(0.2, 1.7),
    "user's own": lambda: Triangular(),
    "smoothed box": lambda: SmoothedBoxPrior(0.5, 1.5, 0.1),
}
CONSTRAINTS = {
    "positive": lambda: Positive(),
    "above 0.3": lambda: GreaterThan(0.3),
    "below 1.2": lambda: LessThan(1.2),
    "between": lambda: Interval(0.1, 1.4),
}
# These have no cdf in torch, so their restriction is not renormalised; the test checks the mass it should have kept.
UNNORMALISED = {"user's own", "smoothed box"}


class Holder(gpytorch.Module):
    """A module with one parameter ``x``, a prior on it and a constraint."""

    def __init__(self, prior, constraint, shape=()):
        super().__init__()
        self.register_parameter("raw_x", torch.nn.Parameter(torch.zeros(shape)))
        self.register_constraint("raw_x", constraint)
        self.register_prior("x_prior", prior, lambda m: m.raw_x_constraint.transform(m.raw_x))


def layout_of(prior, constraint, shape=(), dtype=torch.float64):
    return build_layout({"kernel": Holder(prior, constraint, shape).to(dtype)}, dtype, torch.device("cpu"))


def grid_integral(layout, function=None):
    """Integral over the unconstrained line of the density (times a function of the constrained value), by the trapezoid rule."""
    grid = torch.linspace(-60, 60, 240_001, dtype=torch.float64).unsqueeze(-1).to(layout.dtype)
    density = layout.log_prior(grid).double().exp().nan_to_num()
    if function is not None:
        density = density * function(layout.constrain(grid)["kernel.x"].double())
    return float(torch.trapezoid(density, grid[:, 0].double()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("prior", PRIORS)
def test_density_of_theta_integrates_to_one(prior, constraint, dtype):
    layout = layout_of(PRIORS[prior](), CONSTRAINTS[constraint](), dtype=dtype)
    interval = layout.entries[0].interval
    expected = 1.0
    if prior == "user's own":  # cdf x^2 / 4
        expected = (min(interval.upper, 2.0) ** 2 - max(interval.lower, 0.0) ** 2) / 4
    elif prior == "smoothed box":
        box = SmoothedBoxPrior(0.5, 1.5, 0.1)
        x = np.linspace(max(interval.lower, -1), min(interval.upper, 3), 400_001)
        expected = scipy.integrate.trapezoid(box.log_prob(torch.as_tensor(x).unsqueeze(-1)).exp().numpy(), x)
    elif prior == "half cauchy" and math.isinf(interval.upper):
        expected = grid_integral(layout)  # heavy tail beyond the grid: at least the rest must be right
        assert expected == pytest.approx(1.0, abs=1e-4)
    assert grid_integral(layout) == pytest.approx(expected, rel=2e-5 if dtype == torch.float64 else 1e-3)


def test_multivariate_normal_prior_integrates_to_one():
    prior = MultivariateNormalPrior(torch.tensor([0.2, -0.1]), covariance_matrix=torch.tensor([[1.0, 0.6], [0.6, 0.8]]))
    module = LinearKernel(ard_num_dims=2)
    module.register_prior("variance_prior", prior, lambda m: m.raw_variance)
    module.raw_variance_constraint._transform = None  # an unconstrained vector parameter
    module.raw_variance_constraint.lower_bound = torch.tensor(-math.inf)
    layout = build_layout({"kernel": module.double()}, torch.float64, torch.device("cpu"))
    axis = torch.linspace(-9, 9, 361, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    assert layout.log_prior(grid).exp().sum() * (axis[1] - axis[0]) ** 2 == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prior", PRIORS)
def test_answers_come_in_the_models_dtype(prior, dtype):
    layout = layout_of(PRIORS[prior](), Positive(), dtype=dtype)
    theta = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    value = layout.log_prior(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    assert value.dtype == gradient.dtype == dtype


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("prior", PRIORS)
def test_slopes_are_autograds(prior, constraint):
    """Written out for some priors, by autograd for others; the restriction's constant included."""
    layout = layout_of(PRIORS[prior](), CONSTRAINTS[constraint](), shape=(2,))
    theta = torch.tensor([[-0.7, 0.3], [0.1, 1.2], [0.0, -0.2]], dtype=torch.float64)
    leaf = theta.clone().requires_grad_(True)
    log_prior = layout.log_prior(leaf)
    (expected,) = torch.autograd.grad(log_prior.sum(), leaf)
    found = layout.evaluate(theta)
    torch.testing.assert_close(found.log_prior, log_prior.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.log_prior_slope, expected, rtol=1e-9, atol=1e-9)
    values = layout.constrain(theta)["kernel.x"]
    assert torch.equal(*(part.by_module["kernel"]["raw_x"] for part in (found.hyperparameters, layout.raw_values(theta))))
    assert values.shape == (3, 2)


@pytest.mark.parametrize("kind", [GammaPrior, LogNormalPrior, NormalPrior])
def test_slopes_of_a_prior_with_a_number_for_each_element(kind):
    layout = layout_of(kind(torch.tensor([1.5, 2.0]), torch.tensor([0.7, 1.1])), Positive(), shape=(2,))
    theta = torch.tensor([[-0.7, 0.3], [0.1, 1.2]], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layout.log_prior(theta).sum(), theta)
    torch.testing.assert_close(layout.evaluate(theta.detach()).log_prior_slope, expected)


def test_a_subclass_of_a_prior_keeps_its_own_density():
    class Doubled(GammaPrior):
        def log_prob(self, x):
            return 2 * super().log_prob(x)

    layouts = [layout_of(prior, Positive()) for prior in (Doubled(2.0, 3.0), GammaPrior(2.0, 3.0))]
    slopes = [float(layout.evaluate(torch.zeros(1, 1).double()).log_prior_slope) - 1 for layout in layouts]
    assert slopes[0] == pytest.approx(2 * slopes[1])


def test_precision_is_float64_not_float32_in_disguise():
    layout = layout_of(HalfCauchyPrior(0.7), Positive())
    theta = torch.tensor([[0.123456789]], dtype=torch.float64)
    scale = float(HalfCauchyPrior(0.7).scale)  # the prior's own number: 0.7 in float32
    x = math.exp(0.123456789)
    expected = scipy.stats.halfcauchy(scale=scale).logpdf(x) + 0.123456789
    assert float(layout.log_prior(theta)) == pytest.approx(expected, rel=1e-13)


FAMILIES = ["gamma", "normal", "half cauchy", "half normal", "uniform", "log normal", "smoothed box"]


@pytest.mark.parametrize("name", quick(["normal", "uniform"], FAMILIES))
@pytest.mark.statistical
def test_draws_follow_the_restricted_density(name):
    layout = layout_of(PRIORS[name](), Interval(0.3, 1.4))
    theta = layout.sample_prior(40_000, torch.Generator().manual_seed(1))
    value = layout.constrain(theta)["kernel.x"]
    assert bool(((value > 0.3) & (value < 1.4)).all())
    mass = grid_integral(layout)
    functions = [lambda x: x, lambda x: x.square(), lambda x: (x < 0.6).double()]
    expected = torch.tensor([grid_integral(layout, function) / mass for function in functions])
    replicates = torch.stack([function(value) for function in functions], -1)
    assert worst_excess(replicates, expected) < 1


@pytest.mark.parametrize("prior", ["smoothed box", "gamma"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 3)])
def test_settings_do_not_mix(prior, shape):
    """SmoothedBoxPrior sums over its last dimension, which must never be the chains'."""
    layout = layout_of(PRIORS[prior](), Positive(), shape)
    theta = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = layout.log_prior(theta)
    alone = torch.cat([layout.log_prior(row.unsqueeze(0)) for row in theta])
    assert together.shape == (4,)
    torch.testing.assert_close(together, alone)


@pytest.mark.statistical
def test_a_wrong_restriction_of_draws_is_caught():
    """The planted error draws from the prior without restricting it: the test of draws must raise the alarm."""
    layout = layout_of(PRIORS["normal"](), Interval(0.3, 1.4))
    mass = grid_integral(layout)
    expected = torch.tensor([grid_integral(layout, lambda x: x) / mass])
    unrestricted = 0.3 + 1.1 * torch.randn(40_000, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert worst_excess(unrestricted, expected) > 1


def joint_excess(covariance):
    """Alarm level of draws from a prior with this covariance against the moments of one with correlation."""
    prior = MultivariateNormalPrior(torch.tensor([0.2, -0.1]), covariance_matrix=covariance)
    layout = layout_of(prior, GreaterThan(-1e6), (2,))
    value = layout.constrain(layout.sample_prior(40_000, torch.Generator().manual_seed(2)))["kernel.x"]
    centred = value - torch.tensor([0.2, -0.1])
    moments = torch.stack([centred[:, 0], centred[:, 1], centred[:, 0] ** 2, centred[:, 0] * centred[:, 1], centred[:, 1] ** 2], -1)
    return worst_excess(moments, torch.tensor([0.0, 0.0, 1.0, 0.6, 0.8]))


@pytest.mark.statistical
def test_multivariate_normal_draws_are_joint():
    assert joint_excess(torch.tensor([[1.0, 0.6], [0.6, 0.8]])) < 1


def test_draws_without_their_correlation_are_caught():
    assert joint_excess(torch.tensor([[1.0, 0.0], [0.0, 0.8]])) > 1


def test_round_trip_and_names():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    layout = build_layout({"kernel": kernel.double()}, torch.float64, torch.device("cpu"))
    assert layout.names == ["kernel.outputscale", "kernel.base_kernel.lengthscale"]
    theta = torch.randn(3, layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = layout.constrain(theta)
    assert values["kernel.base_kernel.lengthscale"].shape == (3, 1, 2)
    assert values["kernel.outputscale"].shape == (3,)
    torch.testing.assert_close(layout.unconstrain(values), theta)


def test_one_prior_object_may_serve_two_parameters():
    prior = GammaPrior(2.0, 1.0)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=prior), outputscale_prior=prior)
    assert build_layout({"kernel": kernel}, torch.float64, torch.device("cpu")).size == 2


def test_a_prior_set_through_a_closure_on_a_parent_is_matched():
    kernel = ScaleKernel(RBFKernel(), outputscale_prior=GammaPrior(2.0, 1.0))
    kernel.register_prior("inner", GammaPrior(2.0, 1.0), lambda m: m.base_kernel.lengthscale)
    assert set(build_layout({"kernel": kernel}, torch.float64, torch.device("cpu")).names) == {
        "kernel.outputscale",
        "kernel.base_kernel.lengthscale",
    }


def test_a_prior_on_a_function_of_a_parameter_is_an_error():
    kernel = RBFKernel()
    kernel.register_prior("log_prior", NormalPrior(0.0, 1.0), lambda m: m.lengthscale.log())
    with pytest.raises(ValueError, match=r"'kernel.log_prior' is set through a closure.*put the prior on the parameter itself"):
        build_layout({"kernel": kernel}, torch.float64, torch.device("cpu"))


def test_a_parameter_with_neither_prior_nor_fixing_is_an_error_with_both_remedies():
    with pytest.raises(
        ValueError, match=r"(?s)'kernel.base_kernel.lengthscale' has no prior.*lengthscale_prior=.*requires_grad_\(False\)"
    ):
        build_layout(
            {"kernel": ScaleKernel(RBFKernel(), outputscale_prior=GammaPrior(2.0, 1.0))}, torch.float64, torch.device("cpu")
        )


def test_all_parameters_without_a_prior_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)2 parameters have no prior.*kernel.outputscale: .*kernel.base_kernel.lengthscale: "):
        build_layout({"kernel": ScaleKernel(RBFKernel())}, torch.float64, torch.device("cpu"))


def test_the_priors_that_the_error_suggests_are_lines_that_run():
    rational = RQKernel(lengthscale_prior=GammaPrior(2.0, 1.0))  # which takes alpha_prior= and drops it
    kernel = ScaleKernel(rational * IndexKernel(num_tasks=2), outputscale_prior=GammaPrior(2.0, 1.0))
    with pytest.raises(ValueError, match="3 parameters have no prior") as caught:
        build_layout({"kernel": kernel}, torch.float64, torch.device("cpu"))
    for line in str(caught.value).splitlines()[1:]:
        exec(line.split(": ")[1].split(", or ")[0])
    assert len(build_layout({"kernel": kernel}, torch.float64, torch.device("cpu")).names) == 5


def test_a_parameter_that_is_nan_is_named():
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
    kernel.raw_lengthscale.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"'kernel.lengthscale' is NaN. Expected a number"):
        build_layout({"kernel": kernel}, torch.float64, torch.device("cpu"))


def test_suggestions_above_a_bound_have_their_mass_above_it():
    with pytest.raises(ValueError, match=r"deg_free_prior=gpytorch.priors.GammaPrior\(2.0, 0.1\)"):
        build_layout({"likelihood": gpytorch.likelihoods.StudentTLikelihood()}, torch.float64, torch.device("cpu"))


def two_at_once():
    return MultivariateNormalPrior(torch.zeros(2), covariance_matrix=torch.eye(2))


@pytest.mark.parametrize(
    ("shape", "prior", "expected"),
    [
        ((2, 1, 1), two_at_once, r"has shape \(2, 1, 1\) and its MultivariateNormalPrior is of values of shape \(2,\) together"),
        ((), two_at_once, r"has shape \(1,\).*of values of shape \(2,\) together.*change the size of the prior"),
        ((3,), two_at_once, r"last dimensions to be those"),
        ((1, 3), lambda: SmoothedBoxPrior(torch.zeros(2), torch.ones(2)), r"SmoothedBoxPrior is of values of shape \(2,\)"),
        ((1, 1), lambda: GammaPrior(torch.ones(3), torch.ones(3)), r"has shape \(1, 1\) and its GammaPrior has numbers.*\(3,\)"),
        ((2, 1, 1), lambda: NormalPrior(torch.zeros(2), torch.ones(2)), "one for all its elements; change the prior's"),
        ((2,), lambda: NormalPrior(torch.zeros(2, 2), torch.ones(2, 2)), r"fit the parameter's shape"),
    ],
)  # fmt: skip
def test_a_prior_of_another_size_is_an_error_and_not_broadcast(shape, prior, expected):
    with pytest.raises(ValueError, match=f"parameter 'kernel.x' {expected}" if expected.startswith("has") else expected):
        layout_of(prior(), Positive(), shape)


@pytest.mark.parametrize(
    ("shape", "prior"),
    [
        ((2,), two_at_once),
        ((3, 2), two_at_once),
        ((), lambda: SmoothedBoxPrior(0.0, 1.0)),
        ((2, 3), lambda: SmoothedBoxPrior(0.0, 1.0)),
        ((2, 3), lambda: SmoothedBoxPrior(torch.zeros(3), torch.ones(3))),
        ((), lambda: NormalPrior(torch.zeros(1), torch.ones(1))),
        ((2, 3), lambda: NormalPrior(torch.zeros(3), torch.ones(3))),
        ((2, 3), lambda: NormalPrior(torch.zeros(2, 1), torch.ones(2, 1))),
    ],
)
def test_a_prior_of_the_parameters_size_scores_every_element_once(shape, prior):
    layout = layout_of(prior(), GreaterThan(-1e6), shape)
    theta = layout.unconstrain({"kernel.x": torch.randn(4, *shape, dtype=torch.float64)})
    value = layout.constrain(theta)["kernel.x"]
    expected = torch.stack([prior().log_prob(row if shape else row.view(1)).sum() for row in value.float()])
    torch.testing.assert_close(layout.log_prior_of_values(theta), expected.double(), rtol=1e-4, atol=1e-4)


def test_a_prior_and_a_constraint_without_common_values_are_an_error():
    with pytest.raises(ValueError, match="no value in common"):
        layout_of(UniformPrior(2.0, 3.0), Interval(0.0, 1.0))


def test_a_fixed_parameter_is_read_when_needed():
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))).double()
    kernel.raw_outputscale.requires_grad_(False)
    layout = build_layout({"kernel": kernel}, torch.float64, torch.device("cpu"))
    kernel.outputscale = 3.0
    values = layout.raw_values(torch.zeros(2, 1, dtype=torch.float64)).by_module["kernel"]
    torch.testing.assert_close(values["raw_outputscale"], torch.full((2,), 3.0, dtype=torch.float64))


def test_a_prior_that_cannot_draw_says_so_and_still_has_starting_points():
    layout = layout_of(Triangular(), Positive())
    with pytest.raises(NotImplementedError, match=r"kernel.x.*log_prob alone"):
        layout.sample_prior(3, torch.Generator().manual_seed(0))
    start = layout.starting_points(5, torch.Generator().manual_seed(0))
    assert start.shape == (5, 1) and bool(torch.isfinite(layout.log_prior(start)).all())


class WithoutShapes(Prior):
    def __init__(self):
        torch.nn.Module.__init__(self)

    def log_prob(self, x):
        return -x.square()


def test_a_prior_whose_constructor_leaves_torchs_out_says_so():
    with pytest.raises(ValueError, match=r"'kernel.x': its WithoutShapes has no batch_shape.*Expected super\(\).__init__\(\)"):
        layout_of(WithoutShapes(), Positive())


def test_columns_of_a_prefix():
    layout = gp("gaussian").layout
    assert layout.names == ["kernel.outputscale", "kernel.base_kernel.lengthscale", "likelihood.noise_covar.noise"]
    assert [layout.columns(prefix) for prefix in ("kernel", "kernel.base_kernel", "kernel.outputscale", "likelihood")] == [
        range(3),
        range(1, 3),
        range(1),
        range(3, 4),
    ]
    theta = torch.arange(4.0, dtype=torch.float64)[None]
    moved, columns = theta.clone(), layout.columns("kernel.base_kernel")
    moved[:, columns.start : columns.stop] += 1
    before, after = layout.constrain(theta), layout.constrain(moved)
    assert [name for name in layout.names if not torch.equal(before[name], after[name])] == ["kernel.base_kernel.lengthscale"]
    with pytest.raises(ValueError, match=r"under 'kern'.*kernel.outputscale"):
        layout.columns("kern")


TAILS = {
    "gamma": (lambda: GammaPrior(1.25, 4.0), lambda: GreaterThan(2.0)),
    "normal above": (lambda: NormalPrior(0.0, 1.0), lambda: GreaterThan(5.0)),
    "normal below": (lambda: NormalPrior(0.0, 1.0), lambda: LessThan(-5.0)),
    "log normal between": (lambda: LogNormalPrior(0.0, 0.25), lambda: Interval(3.0, 3.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1, 2)])
@pytest.mark.parametrize("name", TAILS)
@pytest.mark.statistical
def test_draws_from_a_far_tail(name, shape):
    """Where rejection would take thousands of tries a draw."""
    prior, constraint = TAILS[name]
    layout, one = layout_of(prior(), constraint(), shape), layout_of(prior(), constraint())
    value = layout.constrain(layout.sample_prior(10_000, torch.Generator().manual_seed(1)))["kernel.x"].reshape(10_000, -1)
    middle = grid_integral(one, lambda x: x)
    functions = [lambda x: x, lambda x: x.square(), lambda x: (x < middle).double()]
    expected = torch.tensor([grid_integral(one, function) for function in functions])
    for element in value.unbind(-1):
        assert worst_excess(torch.stack([function(element) for function in functions], -1), expected) < 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_where_rounding_has_left_no_mass_are_an_error(dtype):
    layout = layout_of(NormalPrior(0.0, 1.0), GreaterThan(9.0), dtype=dtype)
    with pytest.raises(RuntimeError, match=r"could not draw from NormalPrior inside \(9.0, inf\)"):
        layout.sample_prior(3, torch.Generator().manual_seed(1))
