"""The sparse variational Gaussian process whose optimal, free-form q(v, theta) is sampled."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torchgpmc.models.base import Cross, GPModel, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.models.validation import check_inducing_points
from torchgpmc.parameters.layout import Hyperparameters


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
        ValueError: as :class:`GP`; no inducing points, more than data, or of the wrong width; a likelihood without expectations.

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
    has_latents_at_data = False

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
        check_inducing_points(self.inducing_points, len(self.train_x))
        if not hasattr(self.likelihood, "forward") or (
            hasattr(self.likelihood, "log_prob") and not hasattr(self.likelihood, "expected_log_likelihood")
        ):
            raise ValueError(
                f"{type(self.likelihood).__name__} does not factorise over data. Expected a likelihood with "
                f"expected_log_likelihood for SparseGP; use GP, or subclass torchgpmc.likelihoods.Factorised."
            )

    def _bind(self) -> Any:
        z = self.inducing_points
        return *super()._bind(), self.covariance.bind(z, torch.cat([z, self.train_x]))

    @property
    def latent_inputs(self) -> Tensor:
        """Z, where u = f, ``(M, D)``."""
        return self.inducing_points

    def at_data(self, hyperparameters: Hyperparameters) -> LatentsAt:
        values, count = hyperparameters
        _, jitter, covariance_at = self._bound
        # One evaluation of K(Z, [Z, X]): at these sizes the calls cost as much as the arithmetic.
        inner, outer = covariance_at(values["kernel"]).expand(count, -1, -1).split([len(jitter), len(self.train_x)], -1)
        prior = self._factorised(values, self.mean_function(values["mean"], self.inducing_points, count), inner + jitter)
        mean = self.mean_function(values["mean"], self.train_x, count)
        return self._projected(prior, Cross(mean, outer, self.covariance.diagonal(values["kernel"], self.train_x)))

    def log_likelihood(self, at: LatentsAt, v: Tensor, targets: Targets | None = None) -> Tensor:
        y = self.targets if targets is None else targets
        mean, variance = (self._at_boundary(moment) for moment in self.marginals(at, v))
        return self.likelihood_function(
            likelihood_values(at.prior), lambda likelihood: likelihood.expected_log_likelihood(mean, variance, y.values).sum(-1)
        )
