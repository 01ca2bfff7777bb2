"""The full Gaussian process: one whitened latent value a datum."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torchgpmc.covariance import BoundClosedForm
from torchgpmc.linalg import apply_factor
from torchgpmc.models.base import GPModel, LatentGaussian, LatentPrior, likelihood_values, predictive_marginals
from torchgpmc.models.reverse import value_and_grad_by_parts
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.parameters import Hyperparameters


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
        dtype: floating type of all computation. Choose float64: covariances of smooth kernels can be so nearly singular that
            float32 leaves a density rough from rounding, on which NUTS took a ninth of the step and four times the gradients (ten
            data).

    Raises:
        ValueError: what cannot be right about the data, the kernel or the priors, with the remedy.
        TypeError: a thing of the wrong kind.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> import torchgpmc as tg
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
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
        return self.covariance.bind(self.train_x, self.train_x), self._jitter_matrix(len(self.train_x))

    @property
    def latent_shape(self) -> tuple[int, int]:
        return self.num_latents, len(self.train_x)

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        values, count = hyperparameters
        covariance_at, jitter = self._bound
        x = self.train_x if inputs is None else inputs
        if inputs is not None:
            covariance_at = self.covariance.bind(inputs, inputs)
        covariance = covariance_at(values["kernel"])
        if isinstance(covariance_at, BoundClosedForm) and not covariance.requires_grad:
            # New memory, which nothing else holds, unlike what kernels by others may return.
            covariance.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
            jitter = None
        covariance, factor, ok = self._factorised(covariance, jitter, count)
        mean = self.mean_function(values["mean"], x, count)
        return LatentPrior(values, mean, covariance, factor, None, None, ok)

    def latents(self, prior: LatentPrior, v: Tensor) -> Tensor:
        return self._at_boundary(prior.mean.unsqueeze(1) + apply_factor(prior.covariance, prior.factor, self._whitened(v)))

    def log_likelihood(self, prior: LatentPrior, v: Tensor, targets: Tensor | None = None) -> Tensor:
        f = self.latents(prior, v)
        y = self.train_y if targets is None else targets
        return self.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.log_prob(f, y))

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Tensor, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        kind = type(self)
        if (kind.prior_at, kind.latents, kind.log_likelihood) != _WRITTEN_OUT:
            return None  # a subclass's own density
        covariance_at, jitter = self._bound
        return value_and_grad_by_parts(self, covariance_at, jitter, theta, white, targets, sites)

    def predict(self, prior: LatentPrior, v: Tensor, x: Tensor) -> LatentGaussian:
        covariance = self.covariance.bind(self.train_x, x)(prior.values["kernel"])
        diagonal = self.covariance.diagonal(prior.values["kernel"], x)
        mean = self.mean_function(prior.values["mean"], x, len(v))
        return predictive_marginals(mean, covariance, diagonal, prior.factor, self._whitened(v))


# What the gradient by parts is the gradient of.
_WRITTEN_OUT = GP.prior_at, GP.latents, GP.log_likelihood
