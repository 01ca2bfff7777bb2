"""The parts of BoTorch's fully Bayesian models that gpytorch has not, as its kernels and means, with BoTorch's priors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from botorch.models.transforms.utils import kumaraswamy_warp
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, LogNormalPrior, NormalPrior, Prior
from torch import Tensor

_EDGE = 1e-7  # how far from 0 and 1 warped inputs are kept


class _Parameter:
    """A parameter called ``raw_NAME`` of its module, read constrained as ``NAME``, with a prior ``NAME_prior``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        raw = getattr(module, f"raw_{self.name}")
        constraint = module.constraint_for_parameter_name(f"raw_{self.name}")
        return raw if constraint is None else constraint.transform(raw)

    def add(self, module: Any, shape: Sequence[int], prior: Prior, positive: bool = True) -> None:
        """Gives the module its parameter, at 0 before the constraint."""
        module.register_parameter(f"raw_{self.name}", torch.nn.Parameter(torch.zeros(torch.Size(shape))))
        if positive:
            module.register_constraint(f"raw_{self.name}", Positive())
        module.register_prior(f"{self.name}_prior", prior, self.name)


class SparseLinear(Kernel):
    r"""sum_d :math:`\sqrt{\tau^2 \lambda_d} (x_d - 1/2)(x'_d - 1/2)`, tau^2 HalfCauchy(0.1), lambda_d HalfCauchy(1)."""

    tausq = _Parameter()
    relevance = _Parameter()

    def __init__(self, num_dims: int, **options: Any):
        super().__init__(**options)
        type(self).tausq.add(self, (), HalfCauchyPrior(0.1))
        type(self).relevance.add(self, (1, num_dims), HalfCauchyPrior(1.0))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        weighted = (x1 - 0.5) * (self.tausq[..., None, None] * self.relevance).sqrt()
        return (weighted * (x2 - 0.5)).sum(-1) if diag else weighted @ (x2 - 0.5).mT


class Warped(Kernel):
    r"""A kernel on inputs through Kumaraswamy's distribution function, :math:`1 - (1 - x^{c_0})^{c_1}`, column by column.

    c0 and c1 are LogNormal(0, sqrt(0.1)) each.

    Args:
        base_kernel: of warped inputs.
        columns: which inputs are warped; the others pass.
    """

    c0 = _Parameter()
    c1 = _Parameter()

    def __init__(self, base_kernel: Kernel, columns: Sequence[int]):
        super().__init__()
        self.base_kernel = base_kernel
        self.columns = list(columns)
        for parameter in (type(self).c0, type(self).c1):
            parameter.add(self, (1, len(self.columns)), LogNormalPrior(0.0, math.sqrt(0.1)))

    def _warped(self, x: Tensor) -> Tensor:
        inside = kumaraswamy_warp(x[..., self.columns], c0=self.c0, c1=self.c1, eps=_EDGE)
        wide = x.expand(*inside.shape[:-2], *x.shape[-2:]).clone()
        wide[..., self.columns] = inside
        return wide

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return self.base_kernel(self._warped(x1), self._warped(x2), diag=diag, **params)


class TaskKernel(Kernel):
    """Matern-5/2 between tasks' latent features, N(0, 1) each, with lengthscales Gamma(6, 3); inputs are numbers of tasks."""

    latent_features = _Parameter()
    task_lengthscale = _Parameter()

    def __init__(self, num_tasks: int, rank: int, **options: Any):
        super().__init__(**options)
        type(self).latent_features.add(self, (num_tasks, rank), NormalPrior(0.0, 1.0), positive=False)
        type(self).task_lengthscale.add(self, (1, rank), GammaPrior(6.0, 3.0))
        # Features that are all equal have a distance without a derivative.
        generator = torch.Generator().manual_seed(0)
        self.raw_latent_features.data = torch.randn(num_tasks, rank, generator=generator)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        scaled = self.latent_features / self.task_lengthscale
        square = (scaled.unsqueeze(-2) - scaled.unsqueeze(-3)).square().sum(-1)
        distance = (5 * square.clamp_min(1e-30)).sqrt()
        between = (1 + distance + 5 * square / 3) * torch.exp(-distance)
        first, second = x1[..., 0].long(), x2[..., 0].long()
        return between[..., first, second] if diag else between[..., first.unsqueeze(-1), second.unsqueeze(-2)]


class TaskMean(Mean):
    """A constant a task, N(0, 1); the task's number is in column ``task_feature`` of the inputs."""

    constant = _Parameter()

    def __init__(self, num_tasks: int, task_feature: int):
        super().__init__()
        self.task_feature = task_feature
        type(self).constant.add(self, (num_tasks,), NormalPrior(0.0, 1.0), positive=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.constant[..., x[..., self.task_feature].long()]
