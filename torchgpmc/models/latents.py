"""What models say of the latents at C settings: their prior, f at inputs given them, and what of it engines ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.covariance import Covariance


class Bindings(NamedTuple):
    """Covariances at a model's own inputs, ready to be evaluated at thetas; models that need others have more fields."""

    among_latents: Covariance  # of the latent inputs
    jitter: Tensor  # (M, M), which is added to it


class LatentPrior(NamedTuple):
    """p(u | theta) at C settings, u being f at the model's M latent inputs: everything that depends on theta alone.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.tensor([0.0, 100.0]), torch.tensor([0, 1]), kernel, tg.likelihoods.Bernoulli(), jitter=1.0)
        >>> prior = model.prior(torch.zeros(1, 0))  # of one setting, all hyperparameters fixed
        >>> prior.covariance.round()  # of points so far apart that they know nothing of one another
        tensor([[[2., 0.],
                 [0., 2.]]], dtype=torch.float64)
        >>> (prior.factor @ prior.factor.mT).round(), prior.ok
        (tensor([[[2., 0.],
                  [0., 2.]]], dtype=torch.float64), tensor([True]))
    """

    values: dict[str, dict[str, Tensor]]  # module -> raw parameter name -> constrained (C, *shape)
    mean: Tensor  # (C, M)
    covariance: Tensor  # (C, M, M), jitter included; derivatives in theta flow through it
    factor: Tensor  # its lower Cholesky factor L, a constant to autograd; u = mean + L v
    ok: Tensor  # (C,), whether the factorisation succeeded


class Cross(NamedTuple):
    """How f at N inputs varies together with the latents u, a priori."""

    mean: Tensor  # (C, N), of f
    covariance: Tensor  # (C, M, N), of u and f
    variance: Tensor  # (C, N), of f


class LatentsAt(NamedTuple):
    """f at N inputs given the whitened latents: N(mean + projection' v, variance), inputs independent of one another.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.tensor([0.0, 100.0]), torch.tensor([0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> prior = model.prior(torch.zeros(1, 0))
        >>> model.at(prior, torch.tensor([[0.0], [50.0]])).variance.round(decimals=4)  # at a datum, where v says all; far away
        tensor([[0., 1.]], dtype=torch.float64)
    """

    prior: LatentPrior
    mean: Tensor  # (C, N)
    projection: Tensor  # (C, M, N), L^-1 cov(u, f)
    variance: Tensor  # (C, N); zero where f is a function of v


class LatentGaussian(NamedTuple):
    """Marginals of f at N inputs given theta and v: mean and variance ``(C, K, N)``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.tensor([0.0, 100.0]), torch.tensor([0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> at, v = model.at(model.prior(torch.zeros(1, 0)), torch.tensor([[100.0], [50.0]])), torch.tensor([[0.0, 2.0]]).double()
        >>> model.marginals(at, v).mean.round(decimals=4)  # v of the second datum, there and far away
        tensor([[[2., 0.]]], dtype=torch.float64)
    """

    mean: Tensor
    variance: Tensor


class JointGaussian(NamedTuple):
    """f at T inputs together, given theta and v: K latents of means of their own and one covariance."""

    mean: Tensor  # (C, K, T)
    covariance: Tensor  # (C, T, T), jitter included


def likelihood_parameters(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The likelihood's parameters at C settings, at least ``(C, 1)`` so that they broadcast against f."""
    return {name: value if value.dim() > 1 else value.unsqueeze(-1) for name, value in values.items()}


def likelihood_values(prior: LatentPrior) -> dict[str, Tensor]:
    """:func:`likelihood_parameters` of a prior."""
    return likelihood_parameters(prior.values["likelihood"])


def conditional_variance(diagonal: Tensor, explained: Tensor) -> Tensor:
    """Prior variance less what is explained, kept above rounding error: it is a variance, and its root is taken."""
    return torch.maximum(diagonal - explained, torch.finfo(diagonal.dtype).eps * diagonal.detach())
