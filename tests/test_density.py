import pytest
import torch

import torchgpmc as tg
from tests.models.test_whitening import random_sites
from tests.problems import (
    LIKELIHOODS,
    Halved,
    conditioned_gp,
    fitc,
    gp,
    gp_regression,
    inputs,
    kernel,
    projected_process,
    sparse_gp,
    targets,
)
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.density import AutogradDensity, ChunkedDensity
from torchgpmc.models import JointLogDensity


def half_line(x):
    return torch.where(x[:, 0] > 0, -x.square().sum(-1), torch.nan)


def test_a_failed_row_is_minus_infinity_with_gradient_zero():
    value, gradient = AutogradDensity(half_line).value_and_grad(torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
    assert value.tolist() == [-5.0, -torch.inf]
    assert gradient.tolist() == [[-2.0, -4.0], [0.0, 0.0]]


def test_an_infinite_gradient_is_a_failure_too():
    value, gradient = AutogradDensity(lambda x: x.sqrt().sum(-1)).value_and_grad(torch.tensor([[0.0], [1.0]]))
    assert value.tolist() == [-torch.inf, 1.0]
    assert gradient.tolist() == [[0.0], [0.5]]


class PerRow(AutogradDensity):
    """One centre a row: rows have an identity that selection must keep."""

    def __init__(self, centres):
        super().__init__(lambda x: -(x - centres).square().sum(-1))
        self.centres = centres

    def select(self, rows):
        return PerRow(self.centres[rows])


def test_chunks_give_the_same_values_and_keep_rows_with_their_chains():
    centres = torch.arange(10.0).view(5, 2)
    position = torch.zeros(5, 2)
    whole, chunked = PerRow(centres), ChunkedDensity(PerRow(centres), 5, 2)
    for a, b in zip(whole.value_and_grad(position), chunked.value_and_grad(position), strict=True):
        assert torch.equal(a, b)
    rows = torch.tensor([1, 4, 0])
    assert torch.equal(whole.select(rows)(position[rows]), chunked.select(rows)(position[rows]))


DENSITIES = {
    "full": lambda: tg.joint_log_density(gp("probit")),
    "several latents": lambda: tg.joint_log_density(gp("softmax")),
    "sparse": lambda: tg.joint_log_density(sparse_gp("student_t")),
    "regression": lambda: tg.joint_log_density(gp_regression()),
    "fitc": lambda: tg.joint_log_density(fitc("poisson")),
    "projected process": lambda: tg.joint_log_density(projected_process("logit")),
    "conditioned": lambda: tg.joint_log_density(conditioned_gp("beta")),
    "a user's own": lambda: tg.joint_log_density(Halved(inputs(6), targets("logit", 6), kernel(), LIKELIHOODS["logit"]())),
    "sites": lambda: JointLogDensity(gp("logit"), sites=random_sites(6)),
    "chunked": lambda: ChunkedDensity(tg.joint_log_density(gp("probit")), 3, 2),
    "marginal": lambda: ApproximateMarginal(gp("probit"), tg.Laplace()),
}


def positions(density):
    density = density.density if isinstance(density, ChunkedDensity) else density
    latents = 0 if isinstance(density, ApproximateMarginal) else density.model.latent_size
    generator = torch.Generator().manual_seed(0)
    return 0.5 * torch.randn(3, density.model.layout.size + latents, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("make", DENSITIES.values(), ids=DENSITIES)
def test_a_density_called_at_a_position_that_requires_a_gradient_has_one(make):
    density = make()
    position = positions(density).requires_grad_(True)
    value = density(position)
    (gradient,) = torch.autograd.grad((torch.tensor([1.0, -2.0, 0.5]) * value).sum(), position)
    expected_value, expected = density.value_and_grad(position.detach())
    assert torch.equal(value, expected_value)
    torch.testing.assert_close(gradient, torch.tensor([[1.0], [-2.0], [0.5]]) * expected)
    step = 1e-5 * torch.nn.functional.one_hot(torch.tensor(1), position.shape[1])
    with torch.no_grad():
        slope = (density(position + step) - density(position - step)) / 2e-5
    torch.testing.assert_close(gradient[:, 1] / torch.tensor([1.0, -2.0, 0.5]), slope, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.func.grad(lambda z: density(z).sum())(position.detach()), expected)


def test_a_failed_row_has_slope_zero_and_leaves_the_others_theirs():
    position = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], requires_grad=True)
    AutogradDensity(half_line)(position).sum().backward()
    assert position.grad.tolist() == [[-2.0, -4.0], [0.0, 0.0]]


@pytest.mark.slow
def test_second_derivatives_and_rough_densities_raise_in_place_of_being_wrong():
    density = DENSITIES["full"]()
    position = positions(density)
    leaf = position.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(density(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative"):
        gradient.sum().backward()
    for hessian in (torch.autograd.functional.hessian, lambda function, z: torch.func.hessian(function)(z)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            hessian(lambda z: density(z).sum(), position)
    rough = ApproximateMarginal(gp("probit"), tg.Laplace(), loose=True)
    with pytest.raises(NotImplementedError, match="loose=True has no gradient"):
        rough(positions(rough).requires_grad_(True))


def test_no_graph_is_kept_where_none_is_asked_for():
    density = DENSITIES["full"]()
    assert not density(positions(density)).requires_grad
    with torch.no_grad():
        assert not density(positions(density).requires_grad_(True)).requires_grad
