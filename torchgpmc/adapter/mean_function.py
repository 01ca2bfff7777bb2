"""Any gpytorch mean at C hyperparameter settings at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gpytorch.means import ConstantMean, Mean, ZeroMean
from torch import Tensor

from torchgpmc.adapter.functional import PureModule, check_same_at_own_values, perturbed_values, probing_counts


class MeanFunction:
    """A gpytorch mean as a function of its constrained parameters; batched if its batch mode proves sound, else one by one.

    Args:
        mean: a gpytorch mean without batch dimensions; copied.
        x: some inputs ``(N, D)``, N at least 1.

    Raises:
        ValueError: the mean cannot be evaluated at ``x``.
    """

    def __init__(self, mean: Mean, x: Tensor):
        self.is_zero = type(mean) is ZeroMean
        self.constant = "raw_constant" if type(mean) is ConstantMean else None  # the name of what is the mean everywhere
        self.pure = PureModule(mean)
        probe = x[:3]
        try:
            expected = self._one_by_one(perturbed_values(mean, 2), probe, 2)
        except Exception as error:  # whatever a user's mean may raise
            raise ValueError(
                f"the mean could not be evaluated at inputs of shape {tuple(probe.shape)}: {error}. "
                f"Expected a gpytorch mean for {x.shape[-1]} input dimensions."
            ) from error
        if expected.shape != (2, len(probe)):
            raise ValueError(
                f"{type(mean).__name__} gives means of shape {tuple(expected.shape[1:])} for {len(probe)} inputs. Expected one an "
                f"input: a mean without batch_shape."
            )
        check_same_at_own_values(f"the mean ({type(mean).__name__})", mean, lambda part: part(probe))
        self.batched = True
        try:
            found = (self(perturbed_values(mean, count), probe, count) for count in probing_counts(probe))
            self.batched = all(torch.allclose(value[[0, -1]], expected) for value in found)
        except Exception:  # no usable batch mode: one by one
            self.batched = False

    def __call__(self, values: Mapping[str, Tensor], x: Tensor, num_settings: int) -> Tensor:
        """Prior means ``(num_settings, N)`` at ``x`` ``(N, D)``."""
        if self.is_zero:
            return x.new_zeros(num_settings, len(x))
        if self.batched:
            return self.pure(values, lambda mean: mean(x)).expand(num_settings, len(x))
        return self._one_by_one(values, x, num_settings)

    def _one_by_one(self, values: Mapping[str, Tensor], x: Tensor, num_settings: int) -> Tensor:
        settings = ({name: value[row] for name, value in values.items()} for row in range(num_settings))
        return torch.stack([self.pure(setting, lambda mean: mean(x)) for setting in settings])
