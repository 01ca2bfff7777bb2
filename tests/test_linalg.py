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
