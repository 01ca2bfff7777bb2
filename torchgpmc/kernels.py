"""Kernels that gpytorch has not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from gpytorch.priors import GammaPrior, HalfCauchyPrior, Prior
from torch import Tensor

from torchgpmc.checks import check_count, check_positive
from torchgpmc.priors import register_prior_of


class SAAS(Kernel):
    r"""A Matern-5/2 kernel whose prior lets few of many input columns matter: sparse axis-aligned subspaces.

    .. math:: k(x, x') = s (1 + \sqrt 5 r + \tfrac53 r^2) e^{-\sqrt 5 r}, \quad r^2 = \tau^2 \sum_d \lambda_d (x_d - x'_d)^2

    The priors, all on parameters of their own: the variance s (``outputscale``) is Gamma(2, 0.15), the shrinkage tau^2 of all
    columns (``tausq``) HalfCauchy(0.1), and the relevance lambda_d of each (``relevance``, ``(1, D)``) HalfCauchy(1). The
    lengthscales (tau^2 lambda_d)^-1/2 follow from them (Eriksson & Jankowiak 2021, section 3). For inputs in the unit cube and
    standardised targets.

    Args:
        num_dims: D, the number of input columns.
        options: as every gpytorch kernel takes them: ``active_dims``, ``batch_shape``.

    Raises:
        ValueError: ``num_dims`` is not a positive integer.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
        >>> model = tg.GPRegression(x, x[:, 0].sin(), tg.kernels.SAAS(6), GaussianLikelihood(noise_prior=GammaPrior(0.9, 10.0)))
        >>> model.layout.names
        ['kernel.outputscale', 'kernel.tausq', 'kernel.relevance', 'likelihood.noise_covar.noise']
    """

    is_stationary = True

    def __init__(self, num_dims: int, **options: Any):
        check_count("num_dims", num_dims)
        super().__init__(**options)
        self.num_dims = num_dims
        self._register("outputscale", self.batch_shape, GammaPrior(2.0, 0.15), 1.0)
        self._register("tausq", self.batch_shape, HalfCauchyPrior(0.1), 0.1)
        self._register("relevance", torch.Size([*self.batch_shape, 1, num_dims]), HalfCauchyPrior(1.0), 1.0)

    def _register(self, name: str, shape: torch.Size, prior: Prior, value: float) -> None:
        self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(shape)))
        self.register_constraint(f"raw_{name}", Positive())
        register_prior_of(self, name, prior)
        self._set(name, torch.full(shape, value))

    def _value(self, name: str) -> Tensor:
        return getattr(self, f"raw_{name}_constraint").transform(getattr(self, f"raw_{name}"))

    def _set(self, name: str, value: Any) -> None:
        raw = getattr(self, f"raw_{name}")
        constrained = torch.as_tensor(value).to(raw).expand(raw.shape)
        self.initialize(**{f"raw_{name}": getattr(self, f"raw_{name}_constraint").inverse_transform(constrained)})

    @property
    def outputscale(self) -> Tensor:
        """The variance s, ``(*batch_shape)``."""
        return self._value("outputscale")

    @outputscale.setter
    def outputscale(self, value: Any) -> None:
        self._set("outputscale", value)

    @property
    def tausq(self) -> Tensor:
        """The shrinkage of all columns, ``(*batch_shape)``."""
        return self._value("tausq")

    @tausq.setter
    def tausq(self, value: Any) -> None:
        self._set("tausq", value)

    @property
    def relevance(self) -> Tensor:
        """Of each column, ``(*batch_shape, 1, D)``."""
        return self._value("relevance")

    @relevance.setter
    def relevance(self, value: Any) -> None:
        self._set("relevance", value)

    @property
    def lengthscale(self) -> Tensor:
        """(tausq relevance)^-1/2, ``(*batch_shape, 1, D)``."""
        return saas_lengthscale(self.tausq, self.relevance)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Covariances ``(..., N1, N2)``, or variances ``(..., N)``."""
        centre = x1.mean(-2, keepdim=True)
        first, second = ((x - centre) / self.lengthscale for x in (x1, x2))
        distance = math.sqrt(5) * self.covar_dist(first, second, diag=diag, **params)
        correlation = (1 + distance + distance.square() / 3) * torch.exp(-distance)
        return self.outputscale[(..., *[None] * (1 if diag else 2))] * correlation


class White(Kernel):
    r"""Noise in the function itself: k(x, x') = variance where x = x', 0 elsewhere; added to another kernel, a nugget.

    With a nugget a :class:`torchgpmc.likelihoods.RobustMax` is soft as a probit is: f at a datum keeps at least this variance,
    whatever the latents at inducing points are (Hensman et al. 2015, section 5.3). Predictions hold the noise too.

    Args:
        variance: of the noise, above 0; fixed unless a prior is given.
        variance_prior: a gpytorch prior, to sample it.
        options: as every gpytorch kernel takes them: ``active_dims``, ``batch_shape``.

    Raises:
        ValueError: ``variance`` is not above 0.

    Example:
        >>> import torch, torchgpmc as tg
        >>> tg.kernels.White(0.5)(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])).to_dense()
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """

    def __init__(self, variance: float = 1e-3, *, variance_prior: Prior | None = None, **options: Any):
        super().__init__(**options)
        check_positive("variance", variance)
        self.register_parameter("raw_variance", torch.nn.Parameter(torch.zeros(self.batch_shape)))
        self.register_constraint("raw_variance", Positive())
        self.variance = variance
        if variance_prior is None:
            self.raw_variance.requires_grad_(False)
        else:
            register_prior_of(self, "variance", variance_prior)

    @property
    def variance(self) -> Tensor:
        """Of the noise, ``(*batch_shape)``."""
        return self.raw_variance_constraint.transform(self.raw_variance)

    @variance.setter
    def variance(self, value: Any) -> None:
        value = torch.as_tensor(value).to(self.raw_variance).expand(self.raw_variance.shape)
        self.initialize(raw_variance=self.raw_variance_constraint.inverse_transform(value))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Covariances ``(..., N1, N2)``, or variances ``(..., N)``."""
        same = (x1 == x2 if diag else x1.unsqueeze(-2) == x2.unsqueeze(-3)).all(-1)
        return self.variance[(..., *[None] * (1 if diag else 2))] * same.to(x1.dtype)


def saas_lengthscale(tausq: Tensor, relevance: Tensor) -> Tensor:
    """Lengthscales (tausq relevance)^-1/2, ``(..., 1, D)``, of shrinkages ``tausq`` ``(...)`` and ``relevance`` ``(..., 1, D)``.

    Example:
        >>> saas_lengthscale(torch.tensor(0.25), torch.tensor([[4.0, 1.0]]))
        tensor([[1., 2.]])
    """
    return (tausq[..., None, None] * relevance).rsqrt()


def saas_slopes(values: Mapping[str, Tensor], lengthscale: Tensor, slope: Tensor) -> dict[str, Tensor]:
    """Derivatives in shrinkage and relevance, given those in the lengthscale ``(C, 1, D)``.

    Args:
        values: ``raw_tausq`` ``(C,)`` and ``raw_relevance`` ``(C, 1, D)``, constrained.
        lengthscale: that follows from them ``(C, 1, D)``.
        slope: in it, of the same shape.

    Example:
        >>> one = torch.ones(1, 1, 2)  # d (t r)^-1/2 = -1/2 where both are one, and t is shared
        >>> saas_slopes({"raw_tausq": torch.ones(1), "raw_relevance": one}, one, one)
        {'raw_tausq': tensor([-1.]), 'raw_relevance': tensor([[[-0.5000, -0.5000]]])}
    """
    in_logs = -0.5 * slope * lengthscale
    return {"raw_tausq": in_logs.sum((1, 2)) / values["raw_tausq"], "raw_relevance": in_logs / values["raw_relevance"]}
