import pytest
import torch

from torchgpmc.numerics import linalg


def positive_definite(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return root @ root.mT + torch.eye(shape[-1], dtype=torch.float64)


def test_one_bad_matrix_leaves_the_others_alone():
    matrices = positive_definite(3, 4)
    matrices[1] -= 50 * torch.eye(4, dtype=torch.float64)
    factor, ok = linalg.cholesky(matrices)
    assert ok.tolist() == [True, False, True]
    assert torch.allclose(factor[::2] @ factor[::2].mT, matrices[::2])


def test_nothing_is_added_to_the_diagonal():
    singular = torch.ones(1, 2, 2, dtype=torch.float64)
    assert not bool(linalg.cholesky(singular).ok)


@pytest.mark.parametrize("num_vectors", [1, 3])
def test_apply_factor_equals_differentiating_the_factorisation(num_vectors):
    matrix = positive_definite(2, 5).requires_grad_(True)
    v = torch.randn(2, num_vectors, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)

    def weights(result):
        return (result * torch.arange(result.numel(), dtype=torch.float64).view_as(result)).sum()

    factor = torch.linalg.cholesky(matrix)
    expected = torch.autograd.grad(weights(v @ factor.mT), (matrix, v))
    found = torch.autograd.grad(weights(linalg.apply_factor(matrix, factor, v)), (matrix, v))
    assert torch.allclose(found[0] + found[0].mT, expected[0] + expected[0].mT, rtol=1e-11)
    assert torch.allclose(found[1], expected[1], rtol=1e-12)


def test_whiten_equals_differentiating_the_factorisation():
    matrix = positive_definite(2, 5).requires_grad_(True)
    right = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)

    def weights(white, squares):
        order = torch.arange(white.numel(), dtype=torch.float64).view_as(white)
        return (white * order).sum() + (squares * order[:, 0]).sin().sum()

    factor = torch.linalg.cholesky(matrix)
    white = torch.linalg.solve_triangular(factor, right, upper=False)
    expected = torch.autograd.grad(weights(white, white.square().sum(-2)), (matrix, right))
    found = torch.autograd.grad(weights(*linalg.whiten(matrix, factor, right)), (matrix, right))
    assert torch.allclose(found[0] + found[0].mT, expected[0] + expected[0].mT, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found[1], expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
def test_in_place_factors_are_the_same(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        half = torch.randn(5, 40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        matrix = half @ half.mT + torch.eye(40)
        matrix = 0.5 * (matrix + matrix.mT)
        matrix[3] = -matrix[3]
        factor, ok = linalg.cholesky(matrix)
        same, fine = linalg.cholesky_in_place(matrix.clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ok, fine) and not fine[3]
    torch.testing.assert_close(same[ok], factor[ok])
    assert (same[ok].triu(1) == 0).all()


@pytest.mark.parametrize("size", [1, 4, 41, 130, 251])  # of the last two by several blocks
def test_products_between_triangular_factors_leave_nothing_out(size):
    random = torch.Generator().manual_seed(0)
    factor = torch.randn(2, size, size, generator=random, dtype=torch.float64).tril()
    weight = torch.rand(2, size, generator=random, dtype=torch.float64)
    torch.testing.assert_close(linalg.weighed_square(factor, weight), factor.mT @ torch.diag_embed(weight) @ factor)
    root, ok = linalg.root_under_sites(factor, weight)
    assert bool(ok.all()) and (root.triu(1) == 0).all()
    torch.testing.assert_close(root.mT @ root, torch.eye(size) + factor.mT @ torch.diag_embed(weight) @ factor)
    by_autograd = linalg.root_under_sites(factor.clone().requires_grad_(), weight)
    torch.testing.assert_close(by_autograd.factor.detach(), root)
    matrix = torch.randn(2, size + 2, size, generator=random, dtype=torch.float64)
    torch.testing.assert_close(linalg.times_lower(matrix, factor), matrix @ factor)
    torch.testing.assert_close(linalg.times_lower(matrix[0], factor), matrix[0] @ factor)
    torch.testing.assert_close(linalg.outer_square(matrix), matrix @ matrix.mT)


def test_in_single_precision_factors_have_no_denormal_numbers():
    """Of a kernel that falls off to 1e-38 and less between neighbours of neighbours."""
    x = torch.linspace(0, 40, 60, dtype=torch.float64)
    matrix = 5 * torch.exp(-0.5 * (x[:, None] - x).square()) + torch.eye(60)

    def denormal(single):
        factor = linalg.cholesky(single).factor
        return int(((factor != 0) & (factor.abs() < torch.finfo(torch.float32).tiny)).sum())

    single = linalg.in_single_precision(matrix)
    assert denormal(matrix.float()) > 0 and denormal(single) == 0
    torch.testing.assert_close(single.double(), matrix, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("size", [7, 256, 601, 2060])  # from 256 rows on by blocks, of as many rows by blocks of these
def test_inverses_and_ratios_of_lower_matrices(size):
    generator = torch.Generator().manual_seed(size)
    count = 3 if size < 1000 else 1
    lower, other = torch.randn(2, count, size, size, generator=generator).double().tril()
    for matrix in (lower, other):
        matrix.diagonal(dim1=-2, dim2=-1).abs_().add_(size**0.5)
    unit = torch.eye(size, dtype=torch.float64).expand(count, -1, -1)
    inverse, ratio = linalg.inverse_lower(lower), linalg.divided_by_root(lower, other)
    torch.testing.assert_close(inverse @ lower, unit)
    torch.testing.assert_close(ratio @ other, lower)
    assert all(torch.equal(found, found.tril()) for found in (inverse, ratio))
    lower.requires_grad_(True)
    (slope,) = torch.autograd.grad(linalg.inverse_lower(lower).sum(), lower)
    # By a solve: torch's inverse of so many rows, by two threads, hung or had no pivots on an AMD EPYC.
    (expected,) = torch.autograd.grad(torch.linalg.solve_triangular(lower, unit, upper=False).sum(), lower)
    torch.testing.assert_close(slope, expected.tril())


def test_a_batch_is_solved_by_torch_with_two_threads():
    """Torch's own of these sizes hung or said that there were no pivots."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix = torch.randn(3, 251, 251, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 16 * torch.eye(251)
        right = torch.ones(3, 251, dtype=torch.float64)
        found = linalg.solve(matrix, right)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close((matrix @ found.unsqueeze(-1)).squeeze(-1), right)
