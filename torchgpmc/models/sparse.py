"""The sparse variational Gaussian process whose optimal, free-form q(v, theta) is sampled."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torchgpmc.linalg import apply_factor, whiten
from torchgpmc.models.base import (
    GPModel,
    LatentGaussian,
    LatentPrior,
    conditional_variance,
    likelihood_values,
    predictive_marginals,
)
from torchgpmc.parameters import Hyperparameters


class SparseGP(GPModel):
    r"""A Gaussian process seen through M inducing points (Hensman, Matthews, Filippone & Ghahramani 2015).

    With :math:`u = L v`, :math:`L L^T = K(Z, Z) + jitter \cdot I` and p(f | u) the exact conditional, the samplers draw from

    .. math:: \log q(v, \theta) = E_{p(f | u = L v, \theta)} \log p(y | f) + \log N(v | 0, I) + \log p(\theta) + const

    which is the best approximation to the posterior of (u, theta) that has this conditional (their eq. 7), and costs
    O(N M^2) an evaluation.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)``.
        train_y: targets ``(N,)``, as the likelihood has them.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: with one latent function; see :class:`GP`.
        inducing_points: Z ``(M, D)``; :func:`torchgpmc.kmeans_inducing_points` makes good ones. Fixed while sampling.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(Z, Z).
        dtype: floating type of all computation.

    Raises:
        ValueError: as :class:`GP`; no inducing points, or of the wrong width; a likelihood without expectations.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> import torchgpmc as tg
        >>> x, kernel = torch.rand(50, 2), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> tg.SparseGP(x, x[:, 0], kernel, tg.likelihoods.Poisson(), inducing_points=x[:7])
        Traceback (most recent call last):
            ...
        ValueError: train_y holds [...]. Expected counts 0, 1, 2, .... Poisson models whole numbers; for real data use ...
    """

    inducing_points: Tensor

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        kernel: Kernel,
        likelihood: Any,
        *,
        inducing_points: Tensor,
        mean: Mean | None = None,
        jitter: float = 1e-6,
        dtype: torch.dtype = torch.float64,
    ):
        extra_inputs = {"inducing_points": inducing_points}
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype, extra_inputs=extra_inputs)
        if not hasattr(self.likelihood, "forward") or (
            hasattr(self.likelihood, "log_prob") and not hasattr(self.likelihood, "expected_log_likelihood")
        ):
            raise ValueError(
                f"{type(self.likelihood).__name__} does not factorise over data. Expected a likelihood with "
                f"expected_log_likelihood for SparseGP; use GP, or subclass torchgpmc.likelihoods.Factorised."
            )

    def _bind(self) -> Any:
        z = self.inducing_points
        # One evaluation of K(Z, [Z, X]): at these sizes the calls cost as much as the arithmetic.
        return self.covariance.bind(z, torch.cat([z, self.train_x])), self._jitter_matrix(len(z))

    @property
    def latent_shape(self) -> tuple[int, int]:
        return self.num_latents, len(self.inducing_points)

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        values, count = hyperparameters
        covariance_at, jitter = self._bound
        x = self.train_x if inputs is None else inputs
        if inputs is not None:
            covariance_at = self.covariance.bind(self.inducing_points, torch.cat([self.inducing_points, inputs]))
        inner, cross = covariance_at(values["kernel"]).expand(count, -1, -1).split([len(jitter), len(x)], -1)
        covariance, factor, ok = self._factorised(inner, jitter, count)
        projection, explained = whiten(covariance, factor, cross)
        variance = conditional_variance(self.covariance.diagonal(values["kernel"], x), explained)
        mean = self.mean_function(values["mean"], x, count)
        return LatentPrior(values, mean, covariance, factor, projection, variance, ok)

    def latents(self, prior: LatentPrior, v: Tensor) -> Tensor:
        mean = self.mean_function(prior.values["mean"], self.inducing_points, len(v))
        return self._at_boundary(mean.unsqueeze(1) + apply_factor(prior.covariance, prior.factor, self._whitened(v)))

    def log_likelihood(self, prior: LatentPrior, v: Tensor, targets: Tensor | None = None) -> Tensor:
        assert prior.projection is not None and prior.variance is not None  # made by this class's prior()
        mean = self._at_boundary(prior.mean.unsqueeze(1) + self._whitened(v) @ prior.projection)
        variance = prior.variance if self.num_latents == 1 else prior.variance.unsqueeze(-1).expand_as(mean)
        y = self.train_y if targets is None else targets
        return self.likelihood_function(
            likelihood_values(prior), lambda likelihood: likelihood.expected_log_likelihood(mean, variance, y).sum(-1)
        )

    def predict(self, prior: LatentPrior, v: Tensor, x: Tensor) -> LatentGaussian:
        covariance = self.covariance.bind(self.inducing_points, x)(prior.values["kernel"])
        diagonal = self.covariance.diagonal(prior.values["kernel"], x)
        mean = self.mean_function(prior.values["mean"], x, len(v))
        return predictive_marginals(mean, covariance, diagonal, prior.factor, self._whitened(v))
