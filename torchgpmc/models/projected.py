"""The projected process: f at the data as a function of its values at a few inducing points."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.adapter.covariance import Covariance
from torchgpmc.models.inducing import InducingModel
from torchgpmc.models.latents import Cross, LatentPrior, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets


class _Bindings(NamedTuple):
    """Those of every model, and others for the inducing points and the data."""

    among_latents: Covariance
    jitter: Tensor
    latents_and_data: Covariance  # K(Z, X)


class ProjectedProcess(InducingModel):
    r"""A Gaussian process whose values at the data are those interpolated from M inducing points Z.

    .. math:: f = m(X) + K_{fu} K_{uu}^{-1} (u - m(Z)), \quad u = m(Z) + L v, \quad L L^T = K(Z, Z) + jitter \cdot I

    so that f at the data has the covariance Q = K_fu K_uu^-1 K_uf, of rank M; at test inputs it varies about the interpolation as
    the full GP does. At Z = X this is the full GP.

    The latents are u, at O(N M^2) a theta. Any likelihood will do, also one that does not factorise over data. Methods that
    integrate out f at the data refuse it.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension.
        train_y: targets, as the likelihood has them.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: as :class:`GP` takes them.
        inducing_points: Z ``(M, D)``; :func:`torchgpmc.kmeans_inducing_points` makes good ones. Fixed while sampling.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(Z, Z); by default as for :class:`GP`.
        dtype: floating type of all computation.

    Raises:
        ValueError: as :class:`GP`; no inducing points, or of the wrong width.
        TypeError: a thing of the wrong kind.

    Source: Csato & Opper 2002; Seeger, Williams & Lawrence 2003; paper C, eq. 1.25.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.ProjectedProcess(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> model.latent_shape
        (1, 3)
    """

    has_latents_at_data = False

    def _bind(self) -> _Bindings:
        plain = super()._bind()
        return _Bindings(plain.among_latents, plain.jitter, self.covariance.bind(self.inducing_points, self.train_x))

    @property
    def latent_inputs(self) -> Tensor:
        """Z, where the latents u are ``(M, D)``."""
        return self.inducing_points

    @property
    def is_smooth(self) -> bool:
        """Whether the likelihood is: f at the data is a function of v, and no expectation is taken."""
        return as_likelihood(self.likelihood).is_smooth

    def at(self, prior: LatentPrior, inputs: Tensor | None = None) -> LatentsAt:
        if inputs is not None:
            return super().at(prior, inputs)
        kernel, count = prior.values["kernel"], len(prior.ok)
        outer = self.bindings.latents_and_data(kernel).expand(count, -1, -1)
        mean = self.mean_function(prior.values["mean"], self.train_x, count)
        variance = self.covariance.diagonal(kernel, self.train_x).expand(count, -1)
        at = self._projected(prior, Cross(mean, outer, variance))
        # None but for rounding: Laplace's sites are by derivatives of expectations, which need a variance to be of.
        return at._replace(variance=torch.finfo(mean.dtype).eps * variance)

    def log_likelihood(self, at: LatentsAt, v: Tensor, targets: Targets | None = None) -> Tensor:
        y = self.targets if targets is None else targets
        f = self._at_boundary(self.marginals(at, v).mean)
        return self.likelihood_function(likelihood_values(at.prior), lambda likelihood: likelihood.log_prob(f, y.values))
