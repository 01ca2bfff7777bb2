"""Batched covariances against gpytorch itself, one setting at a time on the user's own kernel."""

import copy

import pytest
import torch
from gpytorch.kernels import (
    AdditiveStructureKernel,
    ArcKernel,
    ConstantKernel,
    CosineKernel,
    LinearKernel,
    MaternKernel,
    NewtonGirardAdditiveKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    RBFKernel,
    RFFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from tests.speed import quick
from torchgpmc.adapter.closed_form import ClosedForm
from torchgpmc.adapter.covariance import BatchMode, OneByOne, covariance_function
from torchgpmc.adapter.functional import constraint_of, parameters_with_owners

KERNELS = {
    "rbf": lambda: RBFKernel(),
    "scaled rbf": lambda: ScaleKernel(RBFKernel()),
    "scaled rbf, ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "rbf, ard, active dims": lambda: RBFKernel(ard_num_dims=2, active_dims=(0, 2)),
    "matern 1/2": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern 3/2, ard": lambda: MaternKernel(nu=1.5, ard_num_dims=3),
    "matern 5/2, active dims": lambda: ScaleKernel(MaternKernel(nu=2.5, active_dims=(1,))),
    "rational quadratic": lambda: ScaleKernel(RQKernel(ard_num_dims=3)),
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "linear": lambda: LinearKernel(),
    "linear, ard": lambda: LinearKernel(ard_num_dims=3),
    "cosine": lambda: CosineKernel(),
    "polynomial": lambda: PolynomialKernel(power=2),
    "spectral mixture": lambda: SpectralMixtureKernel(num_mixtures=3, ard_num_dims=3),
    "piecewise polynomial": lambda: ScaleKernel(PiecewisePolynomialKernel(q=2)),
    "constant": lambda: ConstantKernel(),
    "random features": lambda: RFFKernel(num_samples=5, num_dims=3),
    "arc": lambda: ScaleKernel(ArcKernel(MaternKernel(nu=1.5), ard_num_dims=3)),
    "sum": lambda: ScaleKernel(RBFKernel()) + LinearKernel(),
    "sum with a constant": lambda: ScaleKernel(RBFKernel()) + ConstantKernel(),
    "product": lambda: RBFKernel(active_dims=(0,)) * PeriodicKernel(active_dims=(1,)),
    "scaled sum": lambda: ScaleKernel(RBFKernel() + MaternKernel(nu=2.5)),
    "sum over columns": lambda: ScaleKernel(AdditiveStructureKernel(RBFKernel(), num_dims=3)),
    "sums of products over columns": lambda: NewtonGirardAdditiveKernel(RBFKernel(), num_dims=3, max_degree=2),
    "scaled product of sums": lambda: ScaleKernel((RBFKernel() + LinearKernel()) * RQKernel()),
}
# gpytorch's own distances round at this level in the arc kernel's trigonometric embedding.
TOLERANCE = {"arc": 1e-6}


def inputs(count, seed):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settings(kernel, chains):
    """Random raw values of every parameter, and what gpytorch makes of them."""
    generator = torch.Generator().manual_seed(5)
    raw, constrained = {}, {}
    for name, owner, leaf in parameters_with_owners(kernel):
        shape = getattr(owner, leaf).shape
        raw[name] = 0.5 * torch.randn(chains, *shape, generator=generator, dtype=torch.float64)
        constraint = constraint_of(owner, leaf)
        constrained[name] = (raw[name] if constraint is None else constraint.transform(raw[name])).detach()
    return raw, constrained


def reference(kernel, raw, row, x1, x2):
    """gpytorch at one setting, as a user would: parameters written into the module; gradients in the constrained values."""
    twin = copy.deepcopy(kernel)
    leaves = {}
    for name, owner, leaf in parameters_with_owners(twin):
        parameter = getattr(owner, leaf).requires_grad_(True)
        parameter.data = raw[name][row].clone()
        leaves[name] = (parameter, constraint_of(owner, leaf))
    covariance = twin(x1, x2).to_dense()
    weights = torch.arange(covariance.numel(), dtype=covariance.dtype).view_as(covariance).cos()
    slopes = torch.autograd.grad((covariance * weights).sum(), [leaf for leaf, _ in leaves.values()], allow_unused=True)
    gradients = {}
    for (name, (leaf, constraint)), slope in zip(leaves.items(), slopes, strict=True):
        point = leaf.detach().requires_grad_(True)
        if constraint is not None:
            (jacobian,) = torch.autograd.grad(constraint.transform(point).sum(), point)
            slope = slope / jacobian
        gradients[name] = slope
    return covariance.detach(), gradients


@pytest.mark.parametrize("same", [True, False], ids=["K(x, x)", "K(x, z)"])
@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_equal_gpytorch(name, same):
    kernel = KERNELS[name]().double()
    x1 = inputs(6, 0)
    x2 = x1 if same else inputs(4, 1)
    raw, constrained = settings(kernel, 3)
    values = {key: value.clone().requires_grad_(True) for key, value in constrained.items()}
    found = covariance_function(kernel, x1).bind(x1, x2)(values)
    weights = torch.arange(found[0].numel(), dtype=found.dtype).view_as(found[0]).cos()
    gradients = torch.autograd.grad((found * weights).sum(), list(values.values()), allow_unused=True)
    tolerance = TOLERANCE.get(name, 1e-10)
    for row in range(3):
        expected, slopes = reference(kernel, raw, row, x1, x2)
        torch.testing.assert_close(found[row].detach(), expected, rtol=tolerance, atol=tolerance)
        for key, gradient in zip(values, gradients, strict=True):
            torch.testing.assert_close(gradient[row], slopes[key], rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("count", quick([3], [1, 2, 3, 4, 5]))
@pytest.mark.parametrize("name", KERNELS)
def test_variances_are_the_diagonal_however_many_points_settings_and_columns_there_are(name, count):
    """Of as many points as settings gpytorch's own ``diag=True`` gives the diagonal's diagonal; of as many as columns, too."""
    kernel = KERNELS[name]().double()
    x = inputs(count, 0)
    for chains in (1, 3, 4):
        _, values = settings(kernel, chains)
        found = covariance_function(kernel, inputs(6, 0))
        expected = found.bind(x, x)(values).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(found.diagonal(values, x), expected, rtol=1e-6, atol=1e-6)


PAIRS = {
    "scaled rbf, ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern 3/2, ard": lambda: MaternKernel(nu=1.5, ard_num_dims=2),
    "rational quadratic": lambda: ScaleKernel(RQKernel(ard_num_dims=2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_lengthscales_far_shorter_than_distances_keep_ties_apart_from_the_rest(name):
    """|a|^2 + |b|^2 - 2 ab of equal inputs is noise of either sign there, which once gave covariances of e^{1e8}."""
    kernel = KERNELS[name]().double()
    x = inputs(6, 0)
    x[3:, 1] = x[:3, 1]
    _, values = settings(kernel, 3)
    length = next(key for key in values if "lengthscale" in key)
    values = {key: value.requires_grad_(True) for key, value in values.items()}
    shortened = {**values, length: values[length] * torch.tensor([1.0, 1e-9, 1.0]).double()}
    found = covariance_function(kernel, x).bind(x, x)(shortened)
    assert (found.diagonal(dim1=-2, dim2=-1) - found[:, :1, 0]).abs().max() < 1e-12
    assert torch.equal(found, found.mT)
    assert (torch.linalg.eigvalsh(found.detach()) > -1e-10).all()
    # At ties the covariance is what the other two dimensions make of it.
    rest = x[:, [0, 2]]
    other = {key: value[..., [0, 2]] if key == length else value for key, value in values.items()}
    expected = covariance_function(PAIRS[name]().double(), rest).bind(rest, rest)(other)
    for row, column in ((0, 3), (1, 4), (2, 5)):
        torch.testing.assert_close(found[:, row, column], expected[:, row, column], rtol=1e-6, atol=1e-9)
    (slope,) = torch.autograd.grad(found.cos().sum(), values[length])
    assert slope[..., 1].abs().max() < 1e-6  # no longer matters


ROUGH = {
    "matern 1/2, ard": lambda: ScaleKernel(MaternKernel(nu=0.5, ard_num_dims=3)),
    "rough sum": lambda: ScaleKernel(MaternKernel(nu=0.5)) + LinearKernel(),
    "rough product": lambda: MaternKernel(nu=0.5, ard_num_dims=3) * CosineKernel(),
    "scaled rough sum": lambda: ScaleKernel(MaternKernel(nu=0.5, active_dims=(0, 2)) + RBFKernel()),
}


@pytest.mark.parametrize("same", [True, False], ids=["K(x, x)", "K(x, z)"])
@pytest.mark.parametrize("short", [1.0, 1e-3, 1e-7])
@pytest.mark.parametrize("name", ROUGH)
def test_a_rough_function_has_one_value_at_equal_inputs(name, short, same):
    """The root of what rounding leaves of their distance is 1e-8 of the inputs: many short lengthscales, that once was noise."""
    kernel = ROUGH[name]().double()
    x = inputs(40, 0)
    x[20:] = x[:20]
    _, values = settings(kernel, 3)
    values = {key: value * short if "lengthscale" in key else value for key, value in values.items()}
    found = covariance_function(kernel, x).bind(x, x if same else x[20:])(values)
    variance = covariance_function(kernel, x).diagonal(values, x[:20])
    torch.testing.assert_close(found[:, :20, -20:].diagonal(dim1=-2, dim2=-1), variance, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found[:, 0], found[:, 1])


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_stored_column_by_column_are_served(name):
    """As pandas and slices of numpy arrays hand them over."""
    kernel = KERNELS[name]().double()
    x = inputs(6, 0)
    turned = x.T.contiguous().T
    _, values = settings(kernel, 3)
    with torch.no_grad():
        expected = covariance_function(kernel, x).bind(x, x)(values)
        torch.testing.assert_close(covariance_function(kernel, turned).bind(turned, turned)(values), expected)


@pytest.mark.parametrize("name", KERNELS)
def test_diagonal_equals_the_matrix_diagonal(name):
    kernel = KERNELS[name]().double()
    x = inputs(5, 0)
    _, values = settings(kernel, 2)
    function = covariance_function(kernel, x)
    matrix = function.bind(x, x)(values)
    tolerance = TOLERANCE.get(name, 1e-10)
    torch.testing.assert_close(function.diagonal(values, x), matrix.diagonal(dim1=-2, dim2=-1), rtol=tolerance, atol=tolerance)


def test_routes_are_the_intended_ones():
    routes = {name: type(covariance_function(make().double(), inputs(4, 0))) for name, make in KERNELS.items()}
    assert routes["scaled rbf, ard"] is routes["matern 1/2"] is routes["rational quadratic"] is ClosedForm
    # Not those with a constant: gpytorch before 1.15 forgets the batch dimension of its kernel.
    assert routes["periodic"] is routes["sum"] is routes["product"] is BatchMode


class NoBatchMode(RBFKernel):
    """A user's kernel that forgets the batch dimension: it must fall to the route that always works."""

    def forward(self, x1, x2, diag=False, **params):
        scale = self.lengthscale.flatten()[0]
        result = torch.exp(-(torch.cdist(x1, x2) ** 2) / scale)
        return result.diagonal(dim1=-1, dim2=-2) if diag else result


def test_a_kernel_without_sound_batch_mode_is_still_exact():
    kernel, x = NoBatchMode().double(), inputs(4, 0)
    function = covariance_function(kernel, x)
    assert isinstance(function, OneByOne)
    found = function.bind(x, x)({"raw_lengthscale": torch.tensor([[[0.5]], [[2.0]]], dtype=torch.float64)})
    expected = torch.stack([torch.exp(-(torch.cdist(x, x) ** 2) / scale) for scale in (0.5, 2.0)])
    torch.testing.assert_close(found, expected)


class WrongSomewhere(RBFKernel):
    """A user's kernel whose batch mode goes wrong where ``somewhere(C, x1, x2)``."""

    def __init__(self, somewhere):
        super().__init__()
        self.somewhere = somewhere

    def forward(self, x1, x2, diag=False, **params):
        count = len(self.lengthscale) if self.lengthscale.dim() == 3 else 1
        wrong = count > 1 and not diag and self.somewhere(count, x1, x2)
        return super().forward(x1, x2, diag=diag, **params) + wrong


@pytest.mark.parametrize(
    "somewhere",
    [
        lambda count, x1, x2: torch.equal(x1, x2),
        lambda count, x1, x2: len(x1) > 3,
        lambda count, x1, x2: count == len(x1) > 2,
        lambda count, x1, x2: count == x1.shape[-1],
        lambda count, x1, x2: count > x1.shape[-1],
    ],
    ids=["inputs with themselves", "four inputs", "settings as inputs", "settings as columns", "many settings"],
)
def test_a_batch_mode_is_tried_at_the_shapes_that_occur(somewhere):
    assert isinstance(covariance_function(WrongSomewhere(somewhere).double(), inputs(8, 0)), OneByOne)
    assert isinstance(covariance_function(WrongSomewhere(lambda *shapes: False).double(), inputs(8, 0)), BatchMode)


def rbf(x, z):
    return torch.exp(-0.5 * torch.cdist(x, z) ** 2 / 900)


COMPOSED = {  # kernels at lengthscales of 30, where a covariance of inputs is singular but for rounding, and formulas of them
    "linear times linear": (lambda: ScaleKernel(LinearKernel() * LinearKernel()), lambda x, z: 2 * (x @ z.T) ** 2),
    "rbf plus linear": (lambda: RBFKernel() + LinearKernel(), lambda x, z: rbf(x, z) + x @ z.T),
    "linear plus rbf": (lambda: LinearKernel() + ScaleKernel(RBFKernel()), lambda x, z: 2 * rbf(x, z) + x @ z.T),
    "sum times linear": (lambda: (RBFKernel() + LinearKernel()) * LinearKernel(), lambda x, z: (rbf(x, z) + x @ z.T) * (x @ z.T)),
    "linear times scaled": (lambda: LinearKernel() * ScaleKernel(LinearKernel()), lambda x, z: 2 * (x @ z.T) ** 2),
}


@pytest.mark.filterwarnings("error:.*not p.d.")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", COMPOSED)
def test_sums_and_products_factorise_nothing_and_add_no_jitter(name, dtype):
    """linear_operator adds a low-rank term to a root of the other: with up to 1e-4 on the diagonal where that has none."""
    make, formula = COMPOSED[name]
    kernel, x = make().to(dtype), inputs(6, 0).repeat(4, 1).to(dtype)
    sizes = {"raw_lengthscale": 30.0, "raw_outputscale": 2.0, "raw_variance": 1.0}
    for count in (1, 3, 24):
        values = {
            key: torch.full((count, *getattr(owner, leaf).shape), sizes[leaf], dtype=dtype)
            for key, owner, leaf in parameters_with_owners(kernel)
        }
        function = covariance_function(kernel, x)
        for z in (x, x[:5]):
            expected = formula(x.double(), z.double()).to(dtype).expand(count, -1, -1)
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(function.bind(x, z)(values), expected, rtol=tolerance, atol=tolerance)


def test_no_denormal_numbers_at_short_lengthscales():
    x = torch.linspace(0, 1, 50, dtype=torch.float64).unsqueeze(-1)
    for dtype in (torch.float64, torch.float32):
        for make in (
            lambda: RBFKernel(),
            lambda: RBFKernel(ard_num_dims=1),
            lambda: MaternKernel(nu=2.5),
            lambda: MaternKernel(nu=0.5),
        ):
            points = x.to(dtype)
            value = covariance_function(make().to(dtype), points).bind(points, points)
            covariance = value({"raw_lengthscale": torch.full((1, 1, 1), 1e-3, dtype=dtype)})
            smallest = covariance[covariance > 0].min()
            assert float(smallest) >= torch.finfo(dtype).tiny ** 0.5
            assert bool((covariance.diagonal(dim1=-2, dim2=-1) == 1).all())


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match=r"ard_num_dims=5 but its inputs have 3 columns.*Expected ard_num_dims=3"):
        covariance_function(ScaleKernel(RBFKernel(ard_num_dims=5)).double(), inputs(4, 0))
    with pytest.raises(ValueError, match="active_dims"):
        covariance_function(RBFKernel(active_dims=(7,)).double(), inputs(4, 0))
    with pytest.raises(ValueError, match="batch_shape"):
        covariance_function(RBFKernel(batch_shape=torch.Size([2])).double(), inputs(4, 0))
    with pytest.raises(ValueError, match="check active_dims"):
        covariance_function(ScaleKernel(PeriodicKernel(active_dims=(7,))).double(), inputs(4, 0))
