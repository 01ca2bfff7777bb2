"""Log densities by torch's own distributions, whose checks raise for all settings where one has failed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call


def log_prob_by_rows(module: Any, f: Tensor, targets: Tensor, num_latents: int) -> Tensor:
    """``module.forward(f).log_prob(targets)``, NaN in those rows of f, each a setting, for which it raises a ``ValueError``.

    A scale that underflows at one setting would else end all chains.

    Args:
        module: a gpytorch likelihood whose parameters are those of C settings, ``(C, ...)``.
        f: ``(..., C, N)``, or ``(..., C, N, K)``.
        targets: ``(N,)``, or ``(C, N)``.
        num_latents: K.
    """
    try:
        log_prob: Tensor = module.forward(f).log_prob(targets)
        return log_prob
    except ValueError:
        dim = -2 if num_latents == 1 else -3
        if f.dim() < -dim:
            raise
    count = f.shape[dim]
    shape = f.shape if num_latents == 1 else f.shape[:-1]
    parameters, targets = dict(module.named_parameters()), targets.expand(count, -1)

    def part(start: int, stop: int) -> Tensor:
        rows = slice(start, stop)
        values = {name: value[rows] if value.dim() and len(value) == count else value for name, value in parameters.items()}
        try:
            found: Tensor = functional_call(module, values, (f.narrow(dim, start, stop - start),)).log_prob(targets[rows])
            return found
        except ValueError:
            if stop - start == 1:
                # Made of f, so that where all rows fail there still is a slope: of zero.
                one = f.narrow(dim, start, 1).reshape(*shape[:-2], 1, shape[-1], num_latents)[..., 0]
                return one.masked_fill(torch.ones_like(one, dtype=torch.bool), torch.nan)
            middle = (start + stop) // 2
            return torch.cat([part(start, middle), part(middle, stop)], -2)

    return part(0, count)
