"""A constant mean that is normal a priori as a part of the kernel: one hyperparameter fewer, of the same functions."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import NormalPrior
from torch import Tensor

from torchgpmc.adapter.covariance import plus_constant
from torchgpmc.adapter.functional import constraint_of
from torchgpmc.models.full import GP
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.replicates import AtUniqueInputs
from torchgpmc.models.restored import Restored
from torchgpmc.numerics.linalg import solve_lower
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import log_standard_normal

_MEAN = "mean.constant"
_ROUNDING = 1e-4  # of the jitter, beside which what a wide prior leaves of K in K + s^2 must be nothing


class MeanInKernel(GP):
    r"""A GP whose constant mean :math:`c \sim N(m_0, s^2)` is integrated out.

    .. math:: f = c 1 + L v, \; c \sim N(m_0, s^2) \quad \Longleftrightarrow \quad f \sim N(m_0 1, \; K + s^2 1 1^T)

    c and the outputscale are a funnel where data are many: the wider f may stray from c, the less they say of it. Without c there
    is none. Made by :func:`without_mean`; :func:`with_mean` draws c and v given theta and f.

    Source: Rasmussen & Williams 2006, section 2.7.
    """

    mean_variance: Tensor  # s^2

    def refresh(self) -> None:
        """The kernel's covariances, and the variance that all values share."""
        super().refresh()
        self.covariance = plus_constant(self.covariance, float(self.mean_variance))
        self._bindings = self._bind()


def without_mean(model: GPModel) -> MeanInKernel | None:
    """The same functions with the mean in the kernel; ``None`` where the mean is no constant that is normal a priori.

    Nor where its prior is so wide that K would be lost in the sum: from a deviation of some hundreds on.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.means import ConstantMean, Mean
        >>> from gpytorch.priors import GammaPrior, NormalPrior
        >>> x, kernel = torch.linspace(0, 1, 5), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> mean = ConstantMean(constant_prior=NormalPrior(1.0, 2.0))
        >>> model = tg.GP(x, [3, 1, 4, 1, 5], kernel, tg.likelihoods.Poisson(), mean=mean)
        >>> other = without_mean(model)
        >>> model.layout.names, other.layout.names
        (['kernel.lengthscale', 'mean.constant'], ['kernel.lengthscale'])
        >>> prior = other.prior(torch.zeros(1, 1).double())
        >>> prior.mean[0, 0], prior.covariance[0, 0, 0].round(decimals=3)  # 1 and 1 + 2^2
        (tensor(1., dtype=torch.float64), tensor(5., dtype=torch.float64))
    """
    prior = _normal_prior(model.mean)
    if type(model) not in (GP, AtUniqueInputs) or prior is None or _MEAN not in model.layout.names or model.layout.size < 2:
        return None
    if float(prior.scale) ** 2 * torch.finfo(model.train_x.dtype).eps > _ROUNDING * model.jitter:
        return None
    other = object.__new__(MeanInKernel)
    other.__dict__.update(model.__dict__)
    other._modules, other._buffers = copy.deepcopy(model._modules), dict(model._buffers)
    other.mean = ConstantMean().to(model.train_x).requires_grad_(False)
    other.mean.initialize(constant=prior.loc.reshape(()).to(model.train_x))
    other.register_buffer("mean_variance", prior.scale.square().reshape(()).to(model.train_x))
    other.refresh()
    return other


def _normal_prior(mean: Mean) -> Any:
    """Of a mean that is one number, anywhere on the line."""
    if type(mean) is not ConstantMean or constraint_of(mean, "raw_constant") is not None:
        return None
    prior: Any = next((prior for _, _, prior, *_ in mean.named_priors()), None)
    return prior if type(prior) is NormalPrior and prior.loc.numel() == 1 else None


def with_mean(model: GP, other: MeanInKernel, theta: Tensor, v: Tensor, generator: torch.Generator) -> Restored:
    r"""Draws of c and v given theta and f, of draws ``(S, P - 1)`` and ``(S, N)`` of the model without its mean.

    .. math:: c | f \sim N(m_0 + \sigma^2 1^T K^{-1} (f - m_0), \sigma^2), \quad \sigma^{-2} = s^{-2} + 1^T K^{-1} 1, \quad
        v = L^{-1} (f - c)
    """
    (place,) = model.layout.columns("mean")
    noise = normal_like(v[:, 0], generator)
    variance = other.mean_variance
    with torch.no_grad():
        centre = other.mean.constant.expand(len(theta), 1)
        widened = torch.cat([theta[:, :place], centre, theta[:, place:]], 1)
        prior = model.prior(widened)
        one = solve_lower(prior.factor, torch.ones_like(v).unsqueeze(-1)).squeeze(-1)
    deviation = _under_constant(one, variance, v)
    precision = 1 / variance + one.square().sum(-1)
    shift = (deviation * one).sum(-1) / precision + noise * precision.rsqrt()
    found = deviation - shift.unsqueeze(-1) * one
    # Where there is no factor a draw weighs nothing, and has any mean; NaN times that would be NaN.
    possible = torch.isfinite(found).all(-1) & torch.isfinite(shift)
    shift, found = torch.where(possible, shift, 0.0), torch.where(possible.unsqueeze(-1), found, v)
    widened[:, place] += shift
    log_prior = -0.5 * shift.square() / variance - 0.5 * math.log(2 * math.pi) - 0.5 * variance.log()
    change = log_prior + log_standard_normal(found) - log_standard_normal(v)
    return Restored(widened, found, change, torch.zeros_like(change))


def _under_constant(one: Tensor, variance: Tensor, v: Tensor) -> Tensor:
    r"""``L^-1 L_c v`` for L L' = K and L_c L_c' = K + s^2 1 1', of ``L^-1 1`` and v ``(S, N)``, in N operations.

    L^-1 L_c is the factor of I + s^2 a a', a = L^-1 1, which has the rows

    .. math:: C_{jj} = \sqrt{t_j / t_{j - 1}}, \quad C_{ij} = a_i s^2 a_j / \sqrt{t_{j - 1} t_j}, \quad
        t_j = 1 + s^2 \sum_{k \le j} a_k^2.

    Source: Gill, Golub, Murray & Saunders 1974, "Methods for modifying matrix factorizations".
    """
    after = 1 + variance * one.square().cumsum(-1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], -1)
    part = variance * one * v / (before * after).sqrt()
    return (after / before).sqrt() * v + one * (part.cumsum(-1) - part)
