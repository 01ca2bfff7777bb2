"""The fully independent training conditional: a prior of low rank plus an independent remainder a point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.covariance import Covariance
from torchgpmc.models.exact_evidence import LowRank
from torchgpmc.models.inducing import InducingModel
from torchgpmc.models.latents import Cross, LatentPrior, conditional_variance
from torchgpmc.numerics.linalg import cholesky, identity_matrix, whiten
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.parameters.layout import Hyperparameters


class _Bindings(NamedTuple):
    """Covariances at the model's own inputs, ready to be evaluated at thetas."""

    from_inducing: Covariance  # K(Z, [Z; X])
    jitter: Tensor  # (M, M), which is added to K(Z, Z)


class FITC(InducingModel):
    r"""A Gaussian process whose values are independent of one another given those at M inducing points Z.

    .. math:: f \sim N(m, \; Q + \mathrm{diag}(K - Q) + jitter \cdot I), \quad Q = K_{fu} K_{uu}^{-1} K_{uf}

    A new value is independent of all others given those at Z, too: its variance is the kernel's, and Q its covariance with f.
    At Z = X this is the full GP.

    The latents are f at the data, u being integrated out, so that whatever samples or approximates a :class:`GP` does so here, and
    at a GP's cost: an N x N factorisation a theta. For models whose cost grows with M alone there are :class:`ProjectedProcess`,
    and :class:`SparseGP`, which keeps the full GP's prior.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension.
        train_y: targets, as the likelihood has them.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: as :class:`GP` takes them.
        inducing_points: Z ``(M, D)``; :func:`torchgpmc.kmeans_inducing_points` makes good ones. Fixed while sampling.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonals of K(Z, Z) and of f's covariance; by default as for :class:`GP`.
        dtype: floating type of all computation.

    Raises:
        ValueError: as :class:`GP`; no inducing points, or of the wrong width.
        TypeError: a thing of the wrong kind.

    Source: Snelson & Ghahramani 2006; Quinonero-Candela & Rasmussen 2005, section 6; paper C, section 1.8.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.FITC(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> model.latent_shape
        (1, 8)
    """

    def _bind(self) -> _Bindings:
        z = self.inducing_points
        return _Bindings(self.covariance.bind(z, torch.cat([z, self.train_x])), self.jitter * identity_matrix(len(z), z))

    def _root(self, kernel: dict[str, Tensor], inputs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """R ``(C, M, N)`` with Q = R'R, the diagonal of Q ``(C, N)``, and whether K(Z, Z) was factorised ``(C,)``."""
        z = self.inducing_points
        covariance_at = self.bindings.from_inducing if inputs is None else self.covariance.bind(z, torch.cat([z, inputs]))
        inner, outer = covariance_at(kernel).tensor_split([len(z)], -1)
        inner = inner + self.bindings.jitter
        factor, ok = cholesky(inner.detach())
        return *whiten(inner, factor, outer), ok

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        values, count = hyperparameters
        mean, root, rest, ok = self._parts(hyperparameters, inputs)
        covariance = root.mT @ root + torch.diag_embed(rest)
        prior = self._factorised(values, mean, covariance.expand(count, -1, -1))
        return prior._replace(ok=prior.ok & ok)

    def low_rank(self, hyperparameters: Hyperparameters) -> LowRank | None:
        """The covariance of f at the data in parts; ``None`` for a subclass with another."""
        return self._parts(hyperparameters) if keeps_methods(self, _WRITTEN_OUT) else None

    def _parts(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LowRank:
        values, count = hyperparameters
        x = self.train_x if inputs is None else inputs
        root, explained, ok = self._root(values["kernel"], inputs)
        rest = conditional_variance(self.covariance.diagonal(values["kernel"], x), explained) + self.jitter
        return LowRank(self.mean_function(values["mean"], x, count), root, rest, ok)

    def cross(self, prior: LatentPrior, inputs: Tensor) -> Cross:
        kernel, count = prior.values["kernel"], len(prior.ok)
        covariance = self._root(kernel)[0].mT @ self._root(kernel, inputs)[0]
        mean = self.mean_function(prior.values["mean"], inputs, count)
        return Cross(mean, covariance.expand(count, -1, -1), self.covariance.diagonal(kernel, inputs).expand(count, -1))

    def prior_covariance(self, prior: LatentPrior, inputs: Tensor) -> Tensor:
        root, explained, _ = self._root(prior.values["kernel"], inputs)
        rest = conditional_variance(self.covariance.diagonal(prior.values["kernel"], inputs), explained)
        return (root.mT @ root + torch.diag_embed(rest)).expand(len(prior.ok), -1, -1)


_WRITTEN_OUT = methods_of(FITC, ("prior_at",))
