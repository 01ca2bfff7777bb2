"""The mass of priors within their intervals, where they have no distribution function: a constant that the evidence needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.priors import HorseshoePrior
from torch import Tensor
from torch.distributions import MultivariateNormal

from torchgpmc.numerics.random import make_generator
from torchgpmc.orthant import log_probability
from torchgpmc.parameters.entries import Entry
from torchgpmc.parameters.layout import Layout

_DRAWS = 200_000


class LogMass(NamedTuple):
    """Log of a probability, with its standard error; NaN where it cannot be known."""

    value: float
    error: float


def log_prior_mass(layout: Layout) -> LogMass:
    r"""What :meth:`Layout.log_prior` integrates to, in logarithms: 0 but for restricted priors without a distribution function.

    .. math:: \log \int p(\theta) d\theta = \sum_j \log P(x_j \in I_j)

    A normal prior's is a Gaussian box probability (:func:`torchgpmc.orthant.log_probability`), a horseshoe's a closed form, whose
    log density gpytorch has but for its scale, another's the share of its draws that lie inside. NaN for a prior that cannot draw,
    or whose ``log_prob`` transforms its argument.

    Args:
        layout: of a model.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import MultivariateNormalPrior
        >>> prior = MultivariateNormalPrior(torch.zeros(2), covariance_matrix=torch.eye(2))
        >>> kernel = RBFKernel(ard_num_dims=2, lengthscale_prior=prior)
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> round(math.exp(log_prior_mass(model.layout).value), 4)  # both lengthscales are positive
        0.25
    """
    masses = [_mass(entry, layout) for entry in layout.entries if not entry.prior.is_normalised]
    return LogMass(math.fsum(mass.value for mass in masses), math.hypot(*(mass.error for mass in masses)))


def _mass(entry: Entry, layout: Layout) -> LogMass:
    prior, interval = entry.prior.prior, entry.interval
    if entry.prior.has_transform:
        return LogMass(math.nan, math.nan)
    if isinstance(prior, MultivariateNormal):
        covariance, mean = prior.covariance_matrix.double(), prior.loc.double()
        found = log_probability(covariance, mean=mean, lower=interval.lower, upper=interval.upper)
        copies = entry.size / mean.numel()  # one prior for each row of a larger parameter
        return LogMass(copies * float(found.value.sum()), copies * float(found.variance.sum().sqrt()))
    if isinstance(prior, HorseshoePrior):
        mass = _below(prior.scale, interval.upper) - _below(prior.scale, interval.lower)
        return LogMass(float(mass.log().expand(entry.shape or torch.Size([1])).sum()), 0.0)
    try:
        share = entry.prior.share_inside(_DRAWS, make_generator(0, layout.device))
    except NotImplementedError:
        share = 0.0
    if share == 0:
        return LogMass(math.nan, math.nan)
    return LogMass(math.log(share), math.sqrt((1 - share) / (share * _DRAWS)))


def _below(scale: Tensor, end: float) -> Tensor:
    r"""The integral from 0 to ``end`` of what gpytorch has for a horseshoe's density, elementwise in ``scale``.

    That is the mean of its bounds, :math:`\tfrac{K}{2} (\tfrac{1}{2} \log(1 + 4 s^2 / x^2) + \log(1 + 2 s^2 / x^2))` with
    :math:`K = (2 \pi^3)^{-1/2}` (Carvalho, Polson & Scott 2010, theorem 1), without their factor 1 / s.
    """

    def integral(a: Tensor) -> Tensor:  # of log(1 + a^2 / x^2)
        if math.isinf(end):
            return math.copysign(math.pi, end) * a
        return end * torch.log1p((a / end).square()) + 2 * a * torch.atan(end / a) if end else torch.zeros_like(a)

    scale = scale.double()
    return 0.5 * (2 * math.pi**3) ** -0.5 * (0.5 * integral(2 * scale) + integral(math.sqrt(2) * scale))
