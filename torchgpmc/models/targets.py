"""What was observed: one data set for all chains, or one data set a chain."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    """Observed values, and whether every chain has a data set of its own; the one place that knows which rows go with which chain.

    Example:
        >>> import torch
        >>> shared, own = Targets(torch.zeros(4), False), Targets(torch.zeros(3, 4), True)
        >>> rows = torch.tensor([0, 2])
        >>> shared.select(rows).values.shape, own.select(rows).values.shape
        (torch.Size([4]), torch.Size([2, 4]))
    """

    values: Tensor  # as the likelihood has them for N inputs, mostly (N,); with a chain dimension before that if one_a_chain
    one_a_chain: bool

    def select(self, rows: Tensor | slice) -> Targets:
        """Those of some of the chains."""
        return Targets(self.values[rows], True) if self.one_a_chain else self

    def for_draws(self) -> Tensor:
        """The values with a dimension for several latent draws a chain after that of chains: ``(C, 1, N)``, or ``(N,)``."""
        return self.values.unsqueeze(1) if self.one_a_chain else self.values

    @property
    def num_data_sets(self) -> int:
        """One, or one a chain."""
        return len(self.values) if self.one_a_chain else 1
