"""Sums over groups, by either way."""

from types import SimpleNamespace

import torch

from torchgpmc.numerics.groups import sums_of_groups

GROUP = torch.tensor([2, 0, 2, 1, 2])


class Elsewhere(torch.Tensor):
    """On the CPU, and says that it is not."""

    @property
    def device(self):
        return SimpleNamespace(type="elsewhere")


def test_both_ways_add_up_the_same(monkeypatch):
    values = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([values[..., u == GROUP].sum(-1) for u in range(4)], -1)
    torch.testing.assert_close(sums_of_groups(values, GROUP, 4), expected)
    monkeypatch.setattr(torch.Tensor, "index_add", None)  # which the other does without
    elsewhere = sums_of_groups(values.as_subclass(Elsewhere), GROUP, 4)
    torch.testing.assert_close(elsewhere.as_subclass(torch.Tensor), expected)
