import torch

from torchgpmc.density import AutogradDensity, ChunkedDensity


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
