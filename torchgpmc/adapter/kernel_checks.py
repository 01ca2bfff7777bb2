"""What a kernel must be to be sampled: a symmetric function of two inputs, with a derivative in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torchgpmc.adapter.functional import perturbed_values, public_name, warn_unseen

_PROBED_ROWS = 3


def check_input_width(kernel: Kernel, x: Tensor) -> None:
    """Raises a ``ValueError`` where a part of the kernel is for other columns than those of ``x`` ``(N, D)``."""
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.ard_num_dims is not None:
            width = x.shape[-1] if part.active_dims is None else len(part.active_dims)
            if part.ard_num_dims not in (1, width):
                raise ValueError(
                    f"{type(part).__name__} has ard_num_dims={part.ard_num_dims} but its inputs have {width} columns. "
                    f"Expected ard_num_dims={width}."
                )
        if isinstance(part, Kernel) and part.active_dims is not None and int(part.active_dims.max()) >= x.shape[-1]:
            raise ValueError(
                f"{type(part).__name__} has active_dims={part.active_dims.tolist()} but the inputs have {x.shape[-1]} columns. "
                f"Expected indices below {x.shape[-1]}."
            )


def check_consistent(name: str, among: Tensor, with_two: Tensor, variances: Tensor) -> None:
    """Checks that three answers at the same inputs tell of one symmetric function of two inputs.

    Args:
        name: of the kernel, for the message.
        among: covariances of N inputs ``(C, N, N)``.
        with_two: of these with the first two ``(C, N, 2)``.
        variances: ``(C, N)``.

    Raises:
        ValueError: they do not.
    """
    two = with_two.shape[-1]
    others = ~torch.eye(among.shape[-1], two, dtype=torch.bool, device=among.device)  # a nugget is of an input with itself
    what = "K(x, x) is not symmetric" if _differ(among, among.mT) else ""
    if _differ(variances, among.diagonal(dim1=-2, dim2=-1)):
        what = "diag=True gives other variances than the diagonal of K(x, x)"
    if _differ(with_two[:, others], among[..., :two][:, others]):
        what = "K(x, x') depends on which other inputs it is asked for"
    if what:
        raise ValueError(
            f"{name} is no covariance function: {what}. Expected forward(x1, x2, diag=False) to give k of each row of x1 and each "
            f"of x2, and of the pairs of rows where diag=True, whatever else is among them."
        )


def _differ(found: Tensor, wanted: Tensor) -> bool:
    size = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if wanted.numel() else 0.0
    return found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-2, atol=1e-3 * size, equal_nan=True)


def warn_without_slopes(bind: Callable[[Tensor, Tensor], Callable[[Mapping[str, Tensor]], Any]], kernel: Kernel, x: Tensor) -> None:
    """Says so where autograd does not see a parameter that is sampled.

    Args:
        bind: of the kernel's :class:`torchgpmc.adapter.covariance.CovarianceFunction`.
        kernel: the kernel itself.
        x: some inputs ``(N, D)``.
    """
    probe, sampled = x[:_PROBED_ROWS], [name for name, parameter in kernel.named_parameters() if parameter.requires_grad]
    with torch.enable_grad():
        values = {name: value.requires_grad_(name in sampled) for name, value in perturbed_values(kernel, 2).items()}
        total = bind(probe, probe)(values).sum()
    leaves, seen = [values[name] for name in sampled], total.requires_grad
    found = torch.autograd.grad(total, leaves, allow_unused=True) if seen else [None] * len(leaves)
    unseen = [public_name(name) for name, slope in zip(sampled, found, strict=True) if slope is None]
    if unseen:
        warn_unseen(f"the kernel ({type(kernel).__name__})", unseen)
