"""The sparse variational Gaussian process whose optimal, free-form q(v, theta) is sampled."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.adapter.closed_form import ClosedForm
from torchgpmc.adapter.covariance import Covariance, covariance_function
from torchgpmc.checks import check_count
from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.models.collapsed import CollapsedDensity
from torchgpmc.models.inducing import InducingModel
from torchgpmc.models.latents import Cross, LatentPrior, LatentsAt, likelihood_values
from torchgpmc.models.sparse_gradient import DataBindings, SparseDensity, automatic_chunk
from torchgpmc.models.targets import Targets
from torchgpmc.models.validation import check_inducing_points
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.overriding import keeps_methods, methods_of
from torchgpmc.parameters.layout import Hyperparameters


class _Bindings(NamedTuple):
    """Those of every model, and others for the inducing points and the data."""

    among_latents: Covariance
    jitter: Tensor
    from_inducing: Covariance | None  # K(Z, [Z; X]), where data have the precision of all else
    in_chunks: DataBindings


class SparseGP(InducingModel):
    r"""A Gaussian process seen through M inducing points (Hensman, Matthews, Filippone & Ghahramani 2015).

    With :math:`u = L v`, :math:`L L^T = K(Z, Z) + jitter \cdot I` and p(f | u) the exact conditional, the samplers draw from

    .. math:: \log q(v, \theta) = E_{p(f | u = L v, \theta)} \log p(y | f) + \log N(v | 0, I) + \log p(\theta) + const

    which is the best approximation to the posterior of (u, theta) that has this conditional (their eq. 7), and costs
    O(N M^2) an evaluation.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)``.
        train_y: targets ``(N,)``, as the likelihood has them.
        kernel: a gpytorch kernel without batch dimensions.
        likelihood: one that factorises over data, of any number of latent functions; see :class:`GP`.
        inducing_points: Z ``(M, D)``; :func:`torchgpmc.kmeans_inducing_points` makes good ones. Fixed while sampling.
        mean: a gpytorch mean; zero by default.
        jitter: variance added to the diagonal of K(Z, Z); by default as for :class:`GP`.
        dtype: floating type of all computation.
        data_chunk: data at once in the joint density and its gradient, whose memory is a few times C M ``data_chunk`` numbers; the
            density is the same for any, to a relative 1e-10, or as far as rounding goes (to robust-max's gradient, where u all but
            determines f at the data, the last digit of theta is worth 1e-8); of likelihoods without a rule of their own, to 1e-6.
            ``None`` takes as many as fit the processor's cache.
        data_dtype: floating type of the products with the data; ``dtype`` by default. With torch.float32, factorisation and
            likelihood stay in ``dtype``, as do kernels without a closed form, and what is worked out of data that u all but
            determines (less than a hundredth of the prior variance is left). Measured beside double precision (the page of results
            on the sparse gradient), the gradient has relative errors from 3e-6 to 7e-4, greatest where K(Z, Z) is nearly
            singular, and the value is off by 1e-5 to 6e-3 nats. Time is saved where columns or inducing points are many (a fifth
            at 784 columns and M = 500); of few it takes more.

    Raises:
        ValueError: as :class:`GP`; no inducing points, more than data, or of the wrong width; a likelihood without expectations; a
            ``data_chunk`` that is not a whole number above 0.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> import torchgpmc as tg
        >>> x, kernel = torch.rand(50, 2), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> tg.SparseGP(x, x[:, 0], kernel, tg.likelihoods.Poisson(), inducing_points=x[:7])
        Traceback (most recent call last):
            ...
        ValueError: the targets hold [...]. Expected counts 0, 1, 2, .... Poisson models whole numbers; for real data use ...
    """

    has_latents_at_data = settles_f_at_data = False
    refines_data = True  # whether what u all but determines of the data is worked out in ``dtype``, whatever ``data_dtype``

    def __init__(
        self,
        train_x: Tensor | ArrayLike,
        train_y: Tensor | ArrayLike,
        kernel: Kernel,
        likelihood: Any,
        *,
        inducing_points: Tensor | ArrayLike,
        mean: Mean | None = None,
        jitter: float | None = None,
        dtype: torch.dtype = torch.float64,
        data_chunk: int | None = None,
        data_dtype: torch.dtype | None = None,
    ):
        if data_chunk is not None:
            check_count("data_chunk", data_chunk, example=", or None for as many data as fit the cache")
        if data_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"data_dtype is {data_dtype!r}. Expected torch.float32, or None for the model's dtype.")
        self.data_chunk = data_chunk
        self.data_dtype = data_dtype
        super().__init__(
            train_x, train_y, kernel, likelihood, inducing_points=inducing_points, mean=mean, jitter=jitter, dtype=dtype
        )
        check_inducing_points(self.inducing_points, len(self.train_x))
        if not hasattr(self.likelihood, "forward") or (
            hasattr(self.likelihood, "log_prob") and not hasattr(self.likelihood, "expected_log_likelihood")
        ):
            raise ValueError(
                f"{type(self.likelihood).__name__} does not factorise over data. Expected a likelihood with "
                f"expected_log_likelihood for SparseGP; use GP, or subclass torchgpmc.likelihoods.Factorised."
            )

    def _bind(self) -> _Bindings:
        z, x = self.inducing_points, self.train_x
        inner, jitter = super()._bind()
        dtype = x.dtype if self.data_dtype is None else self.data_dtype
        both = torch.cat([z, x])
        joint = self.covariance.bind(both, z)
        if dtype == x.dtype:
            return _Bindings(inner, jitter, self.covariance.bind(z, both), DataBindings(inner, jitter, joint, dtype, None))
        rounded = joint
        if isinstance(self.covariance, ClosedForm):
            # It is stationary, and places lose the fewest digits about zero. Of other kernels values are rounded, and no inputs.
            covariance, centre = covariance_function(copy.deepcopy(self.kernel).to(dtype), x.to(dtype)), z.mean(0)
            rounded = covariance.bind((both - centre).to(dtype), (z - centre).to(dtype))
        return _Bindings(inner, jitter, None, DataBindings(inner, jitter, rounded, dtype, joint, self.refines_data))

    @property
    def latent_inputs(self) -> Tensor:
        """Z, where u = f, ``(M, D)``."""
        return self.inducing_points

    def at_data(self, hyperparameters: Hyperparameters) -> LatentsAt:
        values, count = hyperparameters
        jitter, from_inducing = self.bindings.jitter, self.bindings.from_inducing
        mean = self.mean_function(values["mean"], self.train_x, count)
        variance = self.covariance.diagonal(values["kernel"], self.train_x)
        if from_inducing is None:
            data, first = self.bindings.in_chunks, len(jitter)
            covariance = data.joint.rows(slice(first, first + len(self.train_x)))(data.parameters(values["kernel"]))
            outer = covariance.expand(count, -1, -1).mT.to(jitter.dtype)
            return self._projected(self.prior_at(hyperparameters), Cross(mean, outer, variance))
        # One evaluation of K(Z, [Z; X]): at these sizes the calls cost as much as the arithmetic.
        joint = from_inducing(values["kernel"]).expand(count, -1, -1)
        inner, outer = joint.split([len(jitter), len(self.train_x)], -1)
        prior = self._factorised(values, self.mean_function(values["mean"], self.inducing_points, count), inner + jitter)
        return self._projected(prior, Cross(mean, outer, variance))

    def cross(self, prior: LatentPrior, inputs: Tensor) -> Cross:
        if inputs is not self.train_x or self.bindings.from_inducing is None:
            return super().cross(prior, inputs)
        # Which rows are equal, and how far apart, is bound already: of 5000 data it took a tenth of an estimate.
        kernel, count, first = prior.values["kernel"], len(prior.ok), len(self.inducing_points)
        outer = self.bindings.in_chunks.joint.rows(slice(first, None))(kernel).expand(count, -1, -1).mT
        mean = self.mean_function(prior.values["mean"], inputs, count)
        return Cross(mean, outer, self.covariance.diagonal(kernel, inputs).expand(count, -1))

    def log_likelihood(self, at: LatentsAt, v: Tensor, targets: Targets | None = None) -> Tensor:
        y = self.targets if targets is None else targets
        mean, variance = (self._at_boundary(moment) for moment in self.marginals(at, v))
        return self.likelihood_function(
            likelihood_values(at.prior), lambda likelihood: likelihood.expected_log_likelihood(mean, variance, y.values).sum(-1)
        )

    @torch.no_grad()
    def value(self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None) -> Tensor | None:
        if sites is not None or not self._is_written_out():
            return None
        return self._density(theta, white, targets, with_slopes=False).value()

    @torch.no_grad()
    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if sites is not None or not self._is_written_out():
            return None
        return self._density(theta, white, targets, with_slopes=True).value_and_grad()

    def _density(self, theta: Tensor, white: Tensor, targets: Targets, *, with_slopes: bool) -> SparseDensity:
        chunk = self.data_chunk or automatic_chunk(len(theta) * len(self.inducing_points), theta.device)
        return SparseDensity(self, self.bindings.in_chunks, chunk, theta, white, targets, with_slopes=with_slopes)

    @property
    def takes_expectations(self) -> bool:  # type: ignore[override]
        return self._is_written_out()

    @property
    def collapses(self) -> bool:
        return type(self.likelihood) is Gaussian and self._is_written_out()

    def collapsed(self, theta: Tensor, targets: Targets, *, with_slopes: bool) -> CollapsedDensity:
        """The evidence with v integrated out, at C settings; of a model that ``collapses``."""
        chunk = self.data_chunk or automatic_chunk(len(theta) * len(self.inducing_points), theta.device)
        return CollapsedDensity(self, self.bindings.in_chunks, chunk, theta, targets, with_slopes=with_slopes)

    def _is_written_out(self) -> bool:
        """Whether the density is the one of this class, not a subclass's own."""
        return keeps_methods(self, _WRITTEN_OUT)


# Methods that the density by chunks is written out for.
_WRITTEN_OUT = methods_of(SparseGP, ("prior_at", "at_data", "cross", "marginals", "log_likelihood", "likelihood_function"))
