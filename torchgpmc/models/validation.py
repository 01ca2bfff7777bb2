"""Checks of what users pass to a model: expected, got, remedy, before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchgpmc.checks import warn
from torchgpmc.models.targets import Targets


def check_inputs(name: str, x: Any, dtype: torch.dtype, num_columns: int | None = None) -> Tensor:
    """Inputs as an ``(N, D)`` copy in ``dtype``; 1-D inputs become ``(N, 1)``.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape, no rows, NaN or infinite values, or not ``num_columns`` columns.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}. Expected a torch tensor of shape (N, D); use torch.as_tensor({name}).")
    if x.dim() == 1:
        x = x.unsqueeze(-1)
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected (N, D), or (N,) for one input dimension.")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected at least one row and one column.")
    if num_columns is not None and x.shape[1] != num_columns:
        raise ValueError(
            f"{name} has {x.shape[1]} columns but the model's train_x has {num_columns}. Expected {num_columns} columns."
        )
    _check_finite(name, x)
    return x.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def check_targets(y: Any, x: Tensor, likelihood: Any, dtype: torch.dtype) -> Targets:
    """A copy of the targets in ``dtype``: of the likelihood's shape, or with chains first, and values as it wants them.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape, NaN or infinite values, or values outside the set the likelihood describes.
    """
    if not isinstance(y, Tensor):
        raise TypeError(f"train_y is {type(y).__name__}. Expected a torch tensor of shape (N,); use torch.as_tensor(train_y).")
    shape = tuple(likelihood.target_shape(len(x)))
    one_a_chain = y.dim() == len(shape) + 1
    if tuple(y.shape[one_a_chain:]) != shape:
        remedy = " Use train_y.squeeze(-1)." if tuple(y.shape) == (*shape, 1) else ""
        raise ValueError(f"train_y has shape {tuple(y.shape)} but train_x has {len(x)} rows. Expected {shape}.{remedy}")
    _check_finite("train_y", y)
    return Targets(likelihood.validate_targets(y.detach().to(dtype, copy=True)), one_a_chain)


def check_inducing_points(inducing_points: Tensor, num_data: int) -> None:
    """Warns of inducing points ``(M, D)`` that coincide.

    Raises:
        ValueError: more of them than data.
    """
    count = len(inducing_points)
    if count > num_data:
        raise ValueError(
            f"inducing_points has {count} rows and train_x has {num_data}. Expected at most as many as data; take fewer, or "
            f"torchgpmc.GP, which is exact and no dearer then."
        )
    distinct = len(torch.unique(inducing_points, dim=0))
    if distinct < count:
        warn(
            f"{count - distinct} of {count} inducing points coincide with others: they add cost and no information, and jitter "
            f"alone keeps their covariance from being singular. torchgpmc.kmeans_inducing_points gives distinct ones.",
            UserWarning,
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        raise ValueError(f"{name} is complex. Expected real numbers.")
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"{name} has {int((~finite).sum())} NaN or infinite values, the first in row {row}. "
            f"Expected finite numbers; drop or impute those rows."
        )


def check_devices(**parts: Tensor | nn.Module | None) -> None:
    """Checks that tensors and the parameters of modules share one device.

    Raises:
        ValueError: they do not; the message lists who is where.
    """
    devices: dict[str, torch.device] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            devices[name] = part.device
        elif isinstance(part, nn.Module):
            devices.update({f"{name}.{leaf}": parameter.device for leaf, parameter in part.named_parameters()})
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"the model's parts are on different devices: {listing}. Expected one device; move them with .to(device).")
