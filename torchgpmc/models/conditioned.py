"""The full Gaussian process given function values that are known without noise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torchgpmc.adapter.covariance import Covariance
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import Cross, LatentPrior, conditional_variance
from torchgpmc.models.reverse import DENSITY, PriorPart, prior_part, value_and_grad_by_parts
from torchgpmc.models.targets import Targets
from torchgpmc.models.validation import check_devices, check_inputs
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.parameters.layout import Hyperparameters


class _Given(NamedTuple):
    """What the known values say of f at N inputs."""

    mean: Tensor  # (C, N)
    root: Tensor  # R, (C, Q, N): R' R = K_xq K_qq^-1 K_qx is what is taken from the covariance
    ok: Tensor  # (C,)


class _Bindings(NamedTuple):
    """Those of every model, and others for the latent and the known inputs together."""

    among_latents: Covariance
    jitter: Tensor
    among_all: Covariance
    all_inputs: Tensor  # (M + Q, D)


class ConditionedGP(GPModel):
    r"""A Gaussian process with any likelihood, whose latent function is known at Q inputs: :class:`GP` with another prior of f.

    .. math:: f \mid f(X_q) = c \;\sim\; N\bigl(m + K_{xq} K_{qq}^{-1} (c - m_q), \; K - K_{xq} K_{qq}^{-1} K_{qx}\bigr)

    for every theta, with the jitter on the diagonals of :math:`K_{qq}` and of the covariance: values are known up to that variance.
    An observation with next to no noise says the same, but no sampler likes it, whereas here nothing narrow is left. The prior of
    theta stays as it is stated: it is the prior once c is known, from which nothing is learned about theta. Several latent
    functions all have the values c. After the log concentration that is -5 at the start in paper C's experiment on p53.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)`` for one dimension; known inputs may be among them.
        train_y: targets, as for :class:`GP`.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: as for :class:`GP`.
        known_inputs: ``(Q, D)``, or ``(Q,)`` for one dimension.
        known_values: f there ``(Q,)``.
        mean: a gpytorch mean, of the process before it is conditioned; zero by default.
        jitter: as for :class:`GP`.
        dtype: as for :class:`GP`.

    Raises:
        ValueError: what cannot be right about the data, the kernel or the priors, with the remedy.
        TypeError: a thing of the wrong kind.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> import torchgpmc as tg
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> known = {"known_inputs": torch.zeros(1), "known_values": torch.tensor([-5.0])}
        >>> model = tg.ConditionedGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), **known)
        >>> prior = model.prior(torch.zeros(1, 1).double())  # at one setting of the lengthscale
        >>> torch.allclose(prior.mean[0, 0], torch.tensor(-5.0).double(), atol=1e-5)
        True
    """

    known_inputs: Tensor
    known_values: Tensor

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        kernel: Kernel,
        likelihood: Any,
        *,
        known_inputs: Tensor,
        known_values: Tensor,
        mean: Mean | None = None,
        jitter: float | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        extra = {"known_inputs": known_inputs}
        super().__init__(train_x, train_y, kernel, likelihood, mean=mean, jitter=jitter, dtype=dtype, extra_inputs=extra)
        check_devices(train_x=train_x, known_values=known_values)
        values = check_inputs("known_values", known_values, dtype, 1).squeeze(-1)
        if len(values) != len(self.known_inputs):
            raise ValueError(
                f"known_values has shape {tuple(known_values.shape)} and known_inputs {tuple(known_inputs.shape)}. Expected a "
                f"value an input, ({len(self.known_inputs)},)."
            )
        self.register_buffer("known_values", values)

    def _given(self, values: dict[str, dict[str, Tensor]], count: int, inputs: Tensor) -> _Given:
        """At ``inputs`` ``(N, D)``."""
        known = self.known_inputs
        inner, between = (self.covariance.bind(known, others)(values["kernel"]) for others in (known, inputs))
        means = (self.mean_function(values["mean"], points, count) for points in (known, inputs))
        return self._pulled(inner, between, *means)

    def _pulled(self, inner: Tensor, between: Tensor, known_mean: Tensor, mean: Tensor) -> _Given:
        """From the known values' covariance ``(C, Q, Q)``, theirs with f ``(C, Q, N)``, and means before."""
        factor, ok = cholesky(inner + self.jitter * identity_matrix(len(self.known_inputs), inner))
        gap = (self.known_values - known_mean).unsqueeze(-1)
        columns = torch.cat([between.expand(len(gap), -1, -1), gap], -1)
        root, pull = solve_lower(factor.expand(len(gap), -1, -1), columns).split([between.shape[-1], 1], -1)
        return _Given(mean + (root.mT @ pull).squeeze(-1), root, ok)

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        values, count = hyperparameters
        covariance_at, everything = self.bindings.among_all, self.bindings.all_inputs
        if inputs is not None:
            everything = torch.cat([inputs, self.known_inputs])
            covariance_at = self.covariance.bind(everything, everything)
        size = len(everything) - len(self.known_inputs)
        covariance, mean = covariance_at(values["kernel"]), self.mean_function(values["mean"], everything, count)
        given = self._pulled(covariance[:, size:, size:], covariance[:, size:, :size], mean[:, size:], mean[:, :size])
        covariance = torch.baddbmm(covariance[:, :size, :size], given.root.mT, given.root, alpha=-1).add_(self.bindings.jitter)
        prior = self._factorised(values, given.mean, covariance)
        return prior._replace(ok=prior.ok & given.ok)

    def _bind(self) -> _Bindings:
        everything = torch.cat([self.latent_inputs, self.known_inputs])
        plain = super()._bind()
        return _Bindings(plain.among_latents, plain.jitter, self.covariance.bind(everything, everything), everything)

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if not keeps_methods(self, _WRITTEN_OUT):
            return None  # a subclass's own density
        return value_and_grad_by_parts(self, self._prior_part, self.bindings.jitter, theta, white, targets, sites)

    def _prior_part(self, values: dict[str, dict[str, Tensor]], count: int) -> PriorPart:
        """Mean and covariance given the known values, and what gradients in these are in those of all inputs' before.

        With A the known values' covariance, B theirs with f, W = A^-1 B and a = A^-1 (c - m_q) the mean is m + B'a and the
        covariance K - B'W.
        """
        size, known = len(self.latent_inputs), len(self.known_inputs)
        everything = self.bindings.all_inputs
        plain = prior_part(self, self.bindings.among_all, everything, values, count)
        inner = plain.covariance[:, size:, size:] + self.jitter * identity_matrix(known, everything)
        between = plain.covariance[:, size:, :size]
        factor, ok = cholesky(inner)
        factor = torch.where(ok[:, None, None], factor, torch.nan)
        gap = (self.known_values - plain.mean[:, size:]).unsqueeze(-1)
        weights, pull = torch.cholesky_solve(torch.cat([between.expand(len(gap), -1, -1), gap], -1), factor).split([size, 1], -1)

        def slopes(covariance: Tensor, mean: Tensor) -> dict[str, dict[str, Tensor]]:
            weighted, shift = weights @ covariance, mean.unsqueeze(-2)
            whole = covariance.new_zeros(len(mean), size + known, size + known)
            whole[:, :size, :size] = covariance
            whole[:, size:, :size] = pull @ shift - weighted - weights @ covariance.mT
            whole[:, size:, size:] = weighted @ weights.mT - weights @ shift.mT @ pull.mT
            return plain.slopes(whole, torch.cat([mean, -(shift @ weights.mT).squeeze(-2)], -1))

        mean = plain.mean[:, :size] + (between.mT @ pull).squeeze(-1)
        return PriorPart(mean, plain.covariance[:, :size, :size] - between.mT @ weights, slopes)

    def cross(self, prior: LatentPrior, inputs: Tensor) -> Cross:
        plain = super().cross(prior, inputs)
        count = len(prior.ok)
        there, at_latents = (self._given(prior.values, count, points) for points in (inputs, self.latent_inputs))
        variance = conditional_variance(plain.variance, there.root.square().sum(-2))
        return Cross(there.mean, plain.covariance - at_latents.root.mT @ there.root, variance)


_WRITTEN_OUT = methods_of(ConditionedGP, DENSITY)
