"""What models with inducing points share."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.checks import is_number
from torchgpmc.models.gp_model import GPModel


class InducingModel(GPModel):
    """A latent Gaussian model with inducing points Z ``(M, D)``, fixed while sampling; see :class:`SparseGP`."""

    inducing_points: Tensor

    def __init__(
        self,
        train_x: Tensor | ArrayLike,
        train_y: Tensor | ArrayLike,
        kernel: Kernel,
        likelihood: Any,
        *,
        inducing_points: Tensor | ArrayLike,
        mean: Mean | None = None,
        jitter: float | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        if is_number(inducing_points):
            raise TypeError(
                f"inducing_points is {inducing_points!r}. Expected their places (M, D): "
                f"torchgpmc.kmeans_inducing_points(train_x, {inducing_points!r}) finds so many."
            )
        extra_inputs = {"inducing_points": inducing_points}
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype, extra_inputs=extra_inputs)
