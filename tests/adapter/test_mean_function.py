"""A user's mean in batch mode: used only where it proves sound at the shapes that occur."""

import pytest
import torch
from gpytorch.means import Mean

from torchgpmc.adapter.mean_function import MeanFunction


class Slope(Mean):
    """b + sum of the inputs, wrong for several settings where ``somewhere(C, x)``."""

    def __init__(self, somewhere):
        super().__init__()
        self.somewhere = somewhere
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))

    def forward(self, x):
        count = len(self.bias)
        return self.bias + x.sum(-1) + (self.bias.dim() == 2 and self.somewhere(count, x))


@pytest.mark.parametrize(
    "somewhere",
    [
        lambda count, x: count > 2,
        lambda count, x: count == len(x) > 2,
        lambda count, x: count == x.shape[-1],
        lambda count, x: len(x) > 2,
        lambda count, x: False,
    ],
    ids=["many settings", "settings as inputs", "settings as columns", "three inputs", "nowhere"],
)
def test_a_mean_is_right_whatever_its_batch_mode_does(somewhere):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = MeanFunction(Slope(somewhere), x)
    for count in (1, 2, 3, 4, 6, 9):
        bias = torch.arange(count, dtype=x.dtype).view(-1, 1)
        for rows in (1, 3, 6):
            torch.testing.assert_close(mean({"bias": bias}, x[:rows], count), bias + x[:rows].sum(-1))
