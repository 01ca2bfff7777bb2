"""What GP and SparseGP share: checked data, gpytorch modules, the layout of theta, and the joint density on [theta, v]."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from torch import Tensor, nn

from torchgpmc.covariance import CovarianceFunction, covariance_function
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures
from torchgpmc.functional import PureModule
from torchgpmc.likelihoods.conversion import as_likelihood, check_forward, convert_likelihood, count_latents
from torchgpmc.linalg import cholesky, solve_lower
from torchgpmc.mean_function import MeanFunction
from torchgpmc.models.validation import check_devices, check_inputs, check_targets
from torchgpmc.models.whitening import GaussianSites, undo_whitening
from torchgpmc.parameters import Hyperparameters, Layout, build_layout

_DERIVED = ("layout", "covariance", "mean_function", "_pure_likelihood", "_bound")
_LOG_2PI = math.log(2 * math.pi)


class LatentPrior(NamedTuple):
    """p(f | theta) at C settings, with everything in it that depends on theta alone."""

    values: dict[str, dict[str, Tensor]]  # module -> raw parameter name -> constrained (C, *shape)
    mean: Tensor  # (C, N), prior mean at the data
    covariance: Tensor  # (C, N, N) or (C, M, M), K(X, X) or K(Z, Z), jitter included; derivatives in theta flow through it
    factor: Tensor  # its lower Cholesky factor, a constant to autograd
    projection: Tensor | None  # (C, M, N), factor^-1 K(Z, X); None for the full GP
    variance: Tensor | None  # (C, N), of f given u; None for the full GP
    ok: Tensor  # (C,), whether the factorisation succeeded


class LatentGaussian(NamedTuple):
    """Marginals of f at T test points given theta and v: mean and variance ``(C, K, T)``."""

    mean: Tensor
    variance: Tensor


class GPModel(nn.Module):
    """Base of the latent Gaussian models; see :class:`GP` and :class:`SparseGP`.

    Holds copies of data, kernel, mean and likelihood in one dtype. What is derived from them (the layout, private evaluation
    copies, distances) is rebuilt after ``.to()``, ``deepcopy`` and unpickling, and never saved.
    """

    train_x: Tensor
    train_y: Tensor
    layout: Layout
    covariance: CovarianceFunction
    mean_function: MeanFunction

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
        extra_inputs: dict[str, Tensor] | None = None,
    ):
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel is {kernel!r}. Expected a gpytorch kernel, for instance ScaleKernel(RBFKernel()).")
        if mean is not None and not isinstance(mean, Mean):
            raise TypeError(f"mean is {mean!r}. Expected a gpytorch mean, for instance gpytorch.means.ConstantMean(), or None.")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}. Expected torch.float64 (recommended) or torch.float32.")
        if not (isinstance(jitter, int | float) and 0 <= jitter < math.inf):
            raise ValueError(f"jitter is {jitter!r}. Expected a variance of at least 0, for instance 1e-6.")
        likelihood = convert_likelihood(likelihood)
        check_devices(train_x=train_x, train_y=train_y, kernel=kernel, mean=mean, likelihood=likelihood, **(extra_inputs or {}))
        x = check_inputs("train_x", train_x, dtype)
        self.jitter = float(jitter)
        self.register_buffer("train_x", x)
        self.register_buffer("train_y", check_targets(train_y, x, as_likelihood(likelihood), dtype))
        for name, value in (extra_inputs or {}).items():
            self.register_buffer(name, check_inputs(name, value, dtype, x.shape[1]))
        self.kernel = copy.deepcopy(kernel).to(dtype)
        self.mean = (ZeroMean() if mean is None else copy.deepcopy(mean)).to(dtype)
        self.likelihood = likelihood.to(dtype)
        check_forward(self.likelihood)
        self.refresh()

    def refresh(self) -> None:
        """Works out again what depends on the modules and data: after fixing a parameter or changing a prior in place.

        :func:`torchgpmc.sample` does this first, so only those who call densities themselves need to.
        """
        x = self.train_x
        self.layout = build_layout({"kernel": self.kernel, "mean": self.mean, "likelihood": self.likelihood}, x.dtype, x.device)
        self.covariance = covariance_function(self.kernel, x)
        self.mean_function = MeanFunction(self.mean, x)
        self._pure_likelihood = PureModule(self.likelihood)
        self._bound = self._bind()

    def _bind(self) -> Any:
        """Covariances at the model's own inputs, ready for theta."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> GPModel:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's; distances between the new data are worked out again."""
        result = super().load_state_dict(*args, **kwargs)
        self.refresh()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()  # also when this model is a part of a larger module

    @property
    def num_latents(self) -> int:
        """K, the number of latent functions, which the likelihood decides."""
        return count_latents(self.likelihood)

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(K, N) or (K, M): the whitened latents v are ``(C, K * N)`` or ``(C, K * M)``."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    @property
    def latent_size(self) -> int:
        """V, the number of whitened latents."""
        return math.prod(self.latent_shape)

    def prior(self, theta: Tensor) -> LatentPrior:
        """p(f | theta) at C settings: all work that depends on theta ``(C, P)`` alone."""
        return self.prior_at(self.layout.raw_values(theta))

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        """:meth:`prior` from constrained values; ``inputs`` ``(N, D)``, if given, stand in for the model's own."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def _factorised(self, covariance: Tensor, jitter: Tensor | None, num_settings: int) -> tuple[Tensor, Tensor, Tensor]:
        """Covariances with jitter ``(C, N, N)``, unless they have it, their factors, and whether each succeeded."""
        covariance = (covariance if jitter is None else covariance + jitter).expand(num_settings, -1, -1)
        factor, ok = cholesky(covariance.detach())
        return covariance, factor, ok

    def _jitter_matrix(self, size: int) -> Tensor:
        return self.jitter * torch.eye(size, dtype=self.train_x.dtype, device=self.train_x.device)

    def log_likelihood(self, prior: LatentPrior, v: Tensor, targets: Tensor | None = None) -> Tensor:
        """Log of p(y | theta, v) ``(C,)`` (for the sparse model its expectation); nothing is factorised here.

        Args:
            prior: of ``theta``, C settings.
            v: whitened latents ``(C, V)``.
            targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the training targets by default.
        """
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Tensor, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The joint log density ``(C,)`` and its gradient ``(C, P + V)``, if the model knows a way faster than autograd."""
        return None

    def latents(self, prior: LatentPrior, v: Tensor) -> Tensor:
        """Function values at the data (full GP) or the inducing points: ``(C, N)``, ``(C, N, K)`` for several latents."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def predict(self, prior: LatentPrior, v: Tensor, x: Tensor) -> LatentGaussian:
        """Marginals of f at test inputs ``(T, D)`` given theta and v."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def _whitened(self, v: Tensor) -> Tensor:
        return v.view(len(v), *self.latent_shape)

    def _at_boundary(self, f: Tensor) -> Tensor:
        """(C, K, N) to what likelihoods take: ``(C, N)``, or ``(C, N, K)``."""
        return f.squeeze(1) if self.num_latents == 1 else f.mT

    def with_targets(self, targets: Tensor) -> GPModel:
        """A copy of the model with other targets: ``(N,)``, or ``(C, N)`` for one data set a chain (calibration tests)."""
        model = copy.deepcopy(self)
        model.train_y = check_targets(targets, model.train_x, as_likelihood(model.likelihood), model.train_x.dtype)
        return model

    def likelihood_function(self, values: dict[str, Tensor], function: Any) -> Any:
        """``function(likelihood)`` with the likelihood's parameters at C settings; see :class:`Factorised` for its methods."""
        return self._pure_likelihood(values, lambda module: function(as_likelihood(module)))


class JointLogDensity(AutogradDensity):
    r"""The posterior density of position = [theta, v], up to a constant: what HMC and its kin sample.

    .. math:: \log p(\theta) + \log |dx / d\theta| + \log N(v | 0, I) + \log p(y | f(\theta, v))

    For the sparse model the last term is its expectation under p(f | u), so the density is that of the optimal q(v, theta)
    (Hensman et al. 2015, eq. 7). With ``sites``, of position = [theta, w], w being white under the posterior that they give:
    log \|dv / dw\| more; see :mod:`torchgpmc.models.whitening`.

    Args:
        model: a GP or SparseGP.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.
        fixed: p(f) of a model whose hyperparameters are all fixed, if it is at hand; else worked out here, once for all positions.
        sites: Gaussian sites at the data, constants; for one latent function.
    """

    def __init__(
        self,
        model: GPModel,
        targets: Tensor | None = None,
        fixed: LatentPrior | None = None,
        sites: GaussianSites | None = None,
    ):
        self.model = model
        self.targets = model.train_y if targets is None else targets
        self.fixed = fixed
        self.sites = sites
        if fixed is None and not model.layout.size:
            with torch.no_grad():
                self.fixed = model.prior(model.train_x.new_zeros(1, 0))
        super().__init__(self._evaluate)
        keep_freed_memory()

    def _prior(self, theta: Tensor) -> tuple[LatentPrior, Tensor]:
        if self.fixed is not None:
            return self.fixed, theta.new_zeros(len(theta))
        hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
        return self.model.prior_at(hyperparameters), log_prior

    def _v_and_volume(self, prior: LatentPrior, white: Tensor) -> tuple[Tensor, Tensor | float]:
        """v and log |dv / dw|."""
        if self.sites is None:
            return white, 0.0
        if prior.projection is not None:
            return undo_whitening(prior.projection.mT, prior.mean, self.sites, white)
        factor = torch.linalg.cholesky_ex(prior.covariance)[0] if prior.covariance.requires_grad else prior.factor
        return undo_whitening(factor, prior.mean, self.sites, white)

    def whitened(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` at ``position``, and log |dv / dw| ``(C,)``: without sites its latent part, and zeros."""
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        with torch.no_grad():
            v, log_volume = (white, 0.0) if self.sites is None else self._v_and_volume(self._prior(theta)[0], white)
        return v, white.new_zeros(len(white)) + log_volume

    def _evaluate(self, position: Tensor) -> Tensor:
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        prior, log_prior = self._prior(theta)
        v, log_volume = self._v_and_volume(prior, white)
        log_normal = -0.5 * ((v * v).sum(-1) + _LOG_2PI * v.shape[-1])
        value = log_prior + log_normal + log_volume + self.model.log_likelihood(prior, v, self.targets)
        return torch.where(prior.ok, value, torch.nan)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        if self.fixed is None and type(self)._evaluate is JointLogDensity._evaluate:  # not a subclass's density
            theta, white = position.detach().split([self.model.layout.size, self.model.latent_size], -1)
            found = self.model.value_and_grad(theta, white, self.targets, self.sites)
            if found is not None:
                return mask_failures(*found)
        return super().value_and_grad(position)

    def select(self, rows: Tensor) -> JointLogDensity:
        if self.targets.dim() == 1:
            return self
        return JointLogDensity(self.model, self.targets[rows], self.fixed, None if self.sites is None else self.sites.select(rows))


def likelihood_parameters(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The likelihood's parameters at C settings, at least ``(C, 1)`` so that they broadcast against f."""
    return {name: value if value.dim() > 1 else value.unsqueeze(-1) for name, value in values.items()}


def likelihood_values(prior: LatentPrior) -> dict[str, Tensor]:
    """:func:`likelihood_parameters` of a prior."""
    return likelihood_parameters(prior.values["likelihood"])


def joint_log_density(model: GPModel, targets: Tensor | None = None) -> JointLogDensity:
    """The log density of [theta, v] given the data; see :class:`JointLogDensity`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> density = tg.joint_log_density(model)
        >>> value, gradient = density.value_and_grad(torch.zeros(3, 9).double())  # three chains; one hyperparameter, eight latents
        >>> value.shape, gradient.shape
        (torch.Size([3]), torch.Size([3, 9]))
    """
    return JointLogDensity(model, targets)


def predictive_marginals(mean: Tensor, covariance: Tensor, diagonal: Tensor, factor: Tensor, v: Tensor) -> LatentGaussian:
    """Marginals of f* given whitened v: mean + A'v and k** - |A|^2 columnwise, A = factor^-1 K(., x*).

    Args:
        mean: prior mean at the test points ``(C, T)``.
        covariance: K(X or Z, x*) ``(C, V, T)``.
        diagonal: k(x*, x*) ``(C, T)``.
        factor: lower Cholesky factor ``(C, V, V)``.
        v: whitened latents ``(C, K, V)``.
    """
    projection = solve_lower(factor, covariance)
    variance = conditional_variance(diagonal, projection.square().sum(-2))
    latent_mean = mean.unsqueeze(1) + v @ projection
    return LatentGaussian(latent_mean, variance.unsqueeze(1).expand_as(latent_mean))


def conditional_variance(diagonal: Tensor, explained: Tensor) -> Tensor:
    """Prior variance less what is explained, kept above rounding error: it is a variance, and its root is taken."""
    return torch.maximum(diagonal - explained, torch.finfo(diagonal.dtype).eps * diagonal.detach())
