"""Draws of hyperparameters under gpytorch's names."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor


class NamedSamples(dict[str, Tensor]):
    """Draws by name, which know what else a name that is not there may have meant.

    Example:
        >>> import torch
        >>> NamedSamples({"kernel.lengthscale": torch.ones(4, 100, 1, 1)})["lengthscale"]
        Traceback (most recent call last):
            ...
        KeyError: "no hyperparameter 'lengthscale'. Expected 'kernel.lengthscale', or another of ..."
    """

    def __missing__(self, name: Any) -> Tensor:
        near = [key for key in self if str(name) in key] or difflib.get_close_matches(str(name), self, n=1, cutoff=0.0)
        expected = f"Expected {' or '.join(map(repr, near))}, or another of {list(self)}" if near else "All are fixed"
        raise KeyError(f"no hyperparameter {name!r}. {expected}; function values are in posterior.latents.")
