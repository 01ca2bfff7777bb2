"""Rows of nested containers, and their way through a file."""

from typing import Any, NamedTuple

import torch

from torchgpmc import trees


class Inner(NamedTuple):
    matrix: Any
    named: dict[str, Any]
    missing: None = None


class Outer(NamedTuple):
    row: Any
    inner: Inner
    nothing: tuple[()] = ()
    count: int = 3


def tree(first, chains=4):
    values = torch.arange(first, first + chains, dtype=torch.float64)
    return Outer(values, Inner(values[:, None, None] * torch.ones(2, 2), {"a": values[:, None]}))


def assert_rows(found, expected):
    """Every tensor of ``found`` has these numbers in its rows, and everything else is as it was."""
    expected = torch.tensor(expected, dtype=torch.float64)
    assert type(found) is Outer and type(found.inner) is Inner
    assert torch.equal(found.row, expected) and torch.equal(found.inner.matrix[:, 1, 0], expected)
    assert torch.equal(found.inner.named["a"][:, 0], expected)
    assert found.nothing == () and found.count == 3 and found.inner.missing is None


def test_rows_of_every_tensor():
    old, new = tree(0), tree(10)
    assert_rows(trees.take(old, torch.tensor([3, 1])), [3, 1])
    assert_rows(trees.where(torch.tensor([True, False, False, True]), new, old), [10, 1, 2, 13])
    assert_rows(trees.put(old, torch.tensor([2, 0]), tree(20, 2)), [21, 1, 20, 3])
    assert_rows(trees.concatenate([old, tree(20, 2)]), [0, 1, 2, 3, 20, 21])
    assert_rows(old, [0, 1, 2, 3])  # which nothing has written to


def test_a_tree_comes_back_from_a_file_that_holds_no_code(tmp_path):
    torch.save(trees.pack(tree(5)), tmp_path / "tree")
    packed = torch.load(tmp_path / "tree", weights_only=True)
    assert_rows(trees.unpack(tree(0), packed, torch.device("cpu")), [5, 6, 7, 8])
