"""Gaussian process regression with the latent function integrated out."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.adapter.conversion import convert_likelihood
from torchgpmc.likelihoods.fixed_noise import FixedNoiseGaussian
from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.models.full import GP
from torchgpmc.models.latents import LatentGaussian, LatentsAt, conditional_variance, likelihood_values
from torchgpmc.numerics.linalg import cholesky, solve_lower


class GPRegression(GP):
    r"""A Gaussian process with Gaussian noise, whose latents every method integrates out exactly.

    .. math:: y \sim N(m(X), K_\theta(X, X) + jitter \cdot I + noise \cdot I)

    Methods act on theta alone; latents are drawn from p(f | y, theta) for kept draws. Predictions are those of a :class:`GP` with
    the same likelihood, exact given theta.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension.
        train_y: real targets ``(N,)``.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: gpytorch's ``GaussianLikelihood`` or ours, whose ``noise`` is a variance, or ``FixedNoiseGaussianLikelihood``
            with one a datum.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(X, X); by default 1e-6 of the targets' variance.
        dtype: floating type of all computation.

    Raises:
        ValueError: what cannot be right about the data, the kernel or the priors, with the remedy.
        TypeError: another likelihood, or a thing of the wrong kind.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
        >>> x = torch.linspace(0, 1, 8)
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GPRegression(x, x.sin(), kernel, GaussianLikelihood(noise_prior=HalfNormalPrior(1.0)))
        >>> model.layout.names
        ['kernel.lengthscale', 'likelihood.noise_covar.noise']
    """

    is_conjugate = True

    def __init__(
        self,
        train_x: Tensor | ArrayLike,
        train_y: Tensor | ArrayLike,
        kernel: Kernel,
        likelihood: Any,
        *,
        mean: Mean | None = None,
        jitter: float | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        if not isinstance(convert_likelihood(likelihood), Gaussian | FixedNoiseGaussian):
            raise TypeError(
                f"likelihood is {type(likelihood).__name__}. Expected gpytorch.likelihoods.GaussianLikelihood, or "
                f"FixedNoiseGaussianLikelihood, whose latents integrate out exactly; use torchgpmc.GP for others."
            )
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype)

    def given_data(self, at: LatentsAt) -> LatentGaussian:
        r"""Marginals of f given theta and the data, the latents integrated out, at the inputs that ``at`` is of.

        .. math:: m_* + k_*^T A^{-1} (y - m), \quad k_{**} - k_*^T A^{-1} k_*, \quad A = K + jitter \cdot I + noise \cdot I

        (Rasmussen & Williams 2006, eqs 2.25 and 2.26.)

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.likelihoods import GaussianLikelihood
            >>> likelihood = GaussianLikelihood().requires_grad_(False)
            >>> likelihood.noise = 1.0
            >>> model = tg.GPRegression([0.0, 100.0], [2.0, -4.0], RBFKernel().requires_grad_(False), likelihood)
            >>> found = model.given_data(model.at(model.prior(torch.zeros(1, 0))))
            >>> found.mean.round(decimals=3), found.variance.round(decimals=3)  # of as much noise as signal: half of each datum
            (tensor([[[ 1., -2.]]], dtype=torch.float64), tensor([[[0.5000, 0.5000]]], dtype=torch.float64))
        """
        prior = at.prior
        noise = self.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.noise)
        factor = cholesky(prior.covariance + torch.diag_embed(noise.expand_as(prior.mean))).factor
        white = solve_lower(factor, (self.targets.values - prior.mean).unsqueeze(-1))
        explained = solve_lower(factor, prior.factor @ at.projection)
        mean = at.mean + (white.mT @ explained).squeeze(-2)
        whole = at.variance + at.projection.square().sum(-2)
        variance = conditional_variance(whole, explained.square().sum(-2))
        return LatentGaussian(mean.unsqueeze(1), variance.unsqueeze(1))
