"""The full Gaussian process: one whitened latent value a datum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.reverse import DENSITY, prior_part, value_and_grad_by_parts
from torchgpmc.models.targets import Targets
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.overriding import keeps_methods, methods_of


class GP(GPModel):
    r"""A Gaussian process with any likelihood, its latent function and hyperparameters to be sampled together.

    .. math:: f = m(X) + L v, \quad L L^T = K_\theta(X, X) + jitter \cdot I, \quad v \sim N(0, I), \quad y \sim p(y | f)

    Data, kernel, mean and likelihood are copied into ``dtype``; the caller's objects are never written to. Every parameter with a
    gpytorch prior is sampled; one with ``requires_grad=False`` is fixed; one with neither is an error.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension; a tensor, numpy array, numeric pandas frame or list.
        train_y: targets ``(N,)``: labels 0/1 (or -1/+1), classes 0..K-1, counts or reals, as the likelihood has it.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: from :mod:`torchgpmc.likelihoods`, or any gpytorch likelihood with a factorised ``forward``.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(X, X); part of the model, never grown. By default 1e-6 of the targets' variance
            where they are f plus noise (Gaussian, Student t, Laplace), so that nothing hangs on their unit, else 1e-6.
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
        train_x: Tensor | ArrayLike,
        train_y: Tensor | ArrayLike,
        kernel: Kernel,
        likelihood: Any,
        *,
        mean: Mean | None = None,
        jitter: float | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype)

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if not keeps_methods(self, _WRITTEN_OUT):
            return None  # a subclass's own density
        prior_at = partial(prior_part, self, self.bindings.among_latents, self.train_x)
        return value_and_grad_by_parts(self, prior_at, self.bindings.jitter, theta, white, targets, sites)


_WRITTEN_OUT = methods_of(GP, DENSITY)
