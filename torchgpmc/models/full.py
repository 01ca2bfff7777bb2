"""The full Gaussian process: one whitened latent value a datum."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torchgpmc.linalg import cholesky
from torchgpmc.models.base import GPModel, LatentGaussian, LatentPrior, predictive_marginals


class GP(GPModel):
    r"""A Gaussian process with any likelihood, its latent function and hyperparameters to be sampled together.

    .. math:: f = m(X) + L v, \quad L L^T = K_\theta(X, X) + jitter \cdot I, \quad v \sim N(0, I), \quad y \sim p(y | f)

    Data, kernel, mean and likelihood are copied into ``dtype``; the caller's objects are never written to. Every parameter with a
    gpytorch prior is sampled; one with ``requires_grad=False`` is fixed; one with neither is an error.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension.
        train_y: targets ``(N,)``: labels 0/1 (or -1/+1), classes 0..K-1, counts or reals, as the likelihood has it.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: from :mod:`torchgpmc.likelihoods`, or any gpytorch likelihood with a factorised ``forward``.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(X, X); part of the model, never grown.
        dtype: floating type of all computation.

    Raises:
        ValueError: what cannot be right about the data, the kernel or the priors, with the remedy.
        TypeError: a thing of the wrong kind.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> import torchgpmc as tg
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), tg.likelihoods.Bernoulli())
        >>> model.layout.names, model.latent_shape
        (['kernel.lengthscale'], (1, 5))
    """

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        kernel: Kernel,
        likelihood: Any,
        *,
        mean: Mean | None = None,
        jitter: float = 1e-6,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype)

    def _bind(self) -> Any:
        return self.covariance.bind(self.train_x, self.train_x)

    @property
    def latent_shape(self) -> tuple[int, int]:
        return self.num_latents, len(self.train_x)

    def prior(self, theta: Tensor) -> LatentPrior:
        kernel_values, mean_values, likelihood_values = self._prior_values(theta)
        covariance = self._bound(kernel_values)
        jitter = self.jitter * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        factor, ok = cholesky((covariance + jitter).expand(len(theta), -1, -1))
        mean = self.mean_function(mean_values, self.train_x, len(theta))
        return LatentPrior(kernel_values, mean_values, likelihood_values, mean, factor, None, None, ok)

    def latents(self, prior: LatentPrior, v: Tensor) -> Tensor:
        return self._at_boundary(prior.mean.unsqueeze(1) + self._whitened(v) @ prior.factor.mT)

    def log_likelihood(self, prior: LatentPrior, v: Tensor, targets: Tensor | None = None) -> Tensor:
        f = self.latents(prior, v)
        y = self.train_y if targets is None else targets
        return self.likelihood_function(prior.likelihood_values, lambda likelihood: likelihood.log_prob(f, y))

    def predict(self, prior: LatentPrior, v: Tensor, x: Tensor) -> LatentGaussian:
        covariance = self.covariance.bind(self.train_x, x)(prior.kernel_values)
        diagonal = self.covariance.diagonal(prior.kernel_values, x)
        mean = self.mean_function(prior.mean_values, x, len(v))
        return predictive_marginals(mean, covariance, diagonal, prior.factor, self._whitened(v))
