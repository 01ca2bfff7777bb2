"""What all models share: checked data, gpytorch modules, the layout of theta, the prior of the latents and f given them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from numpy.typing import ArrayLike
from torch import Tensor
from typing_extensions import Self

from torchgpmc.adapter.closed_form import BoundClosedForm
from torchgpmc.adapter.conversion import as_likelihood, check_forward, convert_likelihood, count_latents
from torchgpmc.adapter.covariance import CovarianceFunction, covariance_function
from torchgpmc.adapter.functional import PureModule, constraint_of, parameters_with_owners
from torchgpmc.adapter.kernel_checks import warn_without_slopes
from torchgpmc.adapter.mean_function import MeanFunction
from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.models.latents import (
    Bindings,
    Cross,
    JointGaussian,
    LatentGaussian,
    LatentPrior,
    LatentsAt,
    conditional_variance,
    likelihood_values,
)
from torchgpmc.models.refreshed import RefreshedModule
from torchgpmc.models.targets import Targets
from torchgpmc.models.validation import (
    as_tensors,
    check_dtype,
    check_inputs,
    check_modules,
    check_targets,
    names_of,
    private_copy,
    unit_and_jitter,
    warn_of_data,
)
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.numerics.linalg import apply_factor, cholesky, factor_with_gradient, identity_matrix, whiten
from torchgpmc.parameters.layout import Hyperparameters, Layout, build_layout


class GPModel(RefreshedModule):
    """Base of the latent Gaussian models; see :class:`GP` and :class:`SparseGP`.

    Holds copies of data, kernel, mean and likelihood in one dtype, and what is derived from them: the layout, private copies that
    are evaluated, distances between inputs.

    A model with another prior on f overrides :meth:`prior_at`, :meth:`cross` and :meth:`prior_covariance`; engines ask for what it
    can do (``has_latents_at_data``, ``is_conjugate``, ``is_smooth``, ``num_latents``), never for its class.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> prior = model.prior(torch.zeros(2, 1).double())  # two settings of theta, the log of the one lengthscale
        >>> v = torch.zeros(2, model.latent_size).double()
        >>> model.latents(prior, v).abs().max()  # f is the mean function, zero, where v is
        tensor(0., dtype=torch.float64)
        >>> torch.equal(model.whiten(prior, model.latents(prior, v)), v)  # and back
        True
        >>> model.log_likelihood(model.at(prior), v)  # eight labels of probability one half
        tensor([-5.5452, -5.5452], dtype=torch.float64)
        >>> new = torch.tensor([[0.5], [9.0]]).double()
        >>> model.marginals(model.at(prior, new), v).variance[0, 0] < 0.5  # of f at an input among the data, and far from them
        tensor([ True, False])
        >>> model.predict_jointly(prior, v, new).covariance.shape
        torch.Size([2, 2, 2])
    """

    train_x: Tensor
    train_y: Tensor
    replicates: Tensor | None  # (M,), how many data share each latent; see models/replicates.py
    layout: Layout
    covariance: CovarianceFunction
    mean_function: MeanFunction

    derived = ("layout", "covariance", "mean_function", "_pure_likelihood", "_num_latents", "_bindings")

    has_latents_at_data = settles_f_at_data = True  # whether f at the data is u; whether it is a function of v at all
    takes_expectations = False  # whether the likelihood of v is exp E log p(y | f), f being normal given theta and v
    is_conjugate = False  # whether u given y and theta is normal, so that every method integrates it out
    data_dtype: torch.dtype | None = None  # of products with the data; the dtype of the rest if none

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
        extra_inputs: Mapping[str, Tensor | ArrayLike] | None = None,
    ):
        super().__init__()
        check_modules(kernel, mean, likelihood)
        with torch.inference_mode(False):  # else autograd could follow no copy made here
            likelihood = convert_likelihood(likelihood)
            arrays = as_tensors({"train_x": train_x, "train_y": train_y, **(extra_inputs or {})}, kernel, mean, likelihood)
            self.columns = names_of(train_x)
            x = check_inputs("train_x", arrays.pop("train_x"), dtype, columns=self.columns)
            self.register_buffer("train_x", x)
            y = check_targets(arrays.pop("train_y"), x, as_likelihood(likelihood), dtype).values
            self.register_buffer("train_y", y)
            self.register_buffer("replicates", None)
            warn_of_data(x, y, mean, as_likelihood(likelihood), self.columns)
            self.unit, self.jitter = unit_and_jitter(jitter, y, as_likelihood(likelihood))
            for name, value in arrays.items():
                self.register_buffer(name, check_inputs(name, value, dtype, x.shape[1]))
            self.kernel = private_copy("kernel", kernel).to(dtype)
            self.mean = private_copy("mean", ZeroMean() if mean is None else mean).to(dtype)
            self.likelihood = private_copy("likelihood", likelihood).to(dtype)
            check_forward(self.likelihood, self.train_y)
            self.refresh()
            warn_without_slopes(self.covariance.bind, self.kernel, x)

    def refresh(self) -> None:
        """Works out again what depends on the modules and data: after fixing a parameter or changing a prior in place.

        :func:`torchgpmc.sample` does this first, so only those who call densities themselves need to.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> _ = model.kernel.requires_grad_(False)  # from now on fixed
            >>> model.refresh()
            >>> model.layout.names
            []
        """
        x = self.train_x
        check_dtype("the model's dtype", x.dtype)
        check_dtype("data_dtype", self.data_dtype or x.dtype)
        self.layout = build_layout({"kernel": self.kernel, "mean": self.mean, "likelihood": self.likelihood}, x.dtype, x.device)
        self.covariance = covariance_function(self.kernel, x)
        self.mean_function = MeanFunction(self.mean, x)
        self._pure_likelihood: Callable[..., Any] = PureModule(self.likelihood, as_likelihood)
        self._num_latents = count_latents(self.likelihood)
        self._bindings = self._bind()

    @property
    def bindings(self) -> Any:
        """What of the covariances depends on the model's own inputs alone: :class:`Bindings`, or what a subclass has for it."""
        return self._bindings

    def _bind(self) -> Any:
        u = self.latent_inputs
        return Bindings(self.covariance.bind(u, u), self.latent_jitter * identity_matrix(len(u), u))

    @property
    def latent_jitter(self) -> float | Tensor:
        """What the jitter adds to the variances of u, ``(M,)`` where they are means of several data's values."""
        return self.jitter if self.replicates is None else self.jitter / self.replicates

    @property
    def latent_inputs(self) -> Tensor:
        """Where u = f, ``(M, D)``: the data, or inducing points."""
        return self.train_x

    @property
    def num_latents(self) -> int:
        """K, the number of latent functions, which the likelihood decides."""
        return self._num_latents

    @property
    def factorises(self) -> bool:
        """Whether the likelihood is a product over data: p(y | f) = prod_n p(y_n | f_n)."""
        return isinstance(as_likelihood(self.likelihood), Factorised)

    @property
    def collapses(self) -> bool:
        """Whether :meth:`collapsed` is to be had: v integrated out exactly, for methods on theta alone, from sums over the data."""
        return False

    def collapsed(self, theta: Tensor, targets: Targets, *, with_slopes: bool) -> Any:
        """The evidence with v integrated out at C settings, a :class:`torchgpmc.models.collapsed.CollapsedDensity`."""
        raise NotImplementedError(f"{type(self).__name__} does not collapse")

    @property
    def is_smooth(self) -> bool:
        """Whether the density of [theta, v] can be climbed: expectations over f always can, steps in f cannot."""
        return not self.has_latents_at_data or as_likelihood(self.likelihood).is_smooth

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(K, M): the whitened latents v are ``(C, K * M)``."""
        return self.num_latents, len(self.latent_inputs)

    @property
    def latent_size(self) -> int:
        """V, the number of whitened latents."""
        return math.prod(self.latent_shape)

    @property
    def operations(self) -> float:
        """Floating-point operations of a gradient of the log density at one setting, roughly."""
        inner, takes = len(self.latent_inputs), self.takes_expectations and self.factorises
        expected: float = as_likelihood(self.likelihood).expectation_operations if takes else 0.0
        return inner**3 + (0 if self.has_latents_at_data else len(self.train_x) * (5 * inner**2 + expected))

    @property
    def targets(self) -> Targets:
        """The training targets."""
        return self.as_targets(self.train_y)

    def as_targets(self, targets: Tensor | Targets | None) -> Targets:
        """Targets as they are, from a tensor of the likelihood's shape (or with chains first), or the model's own for ``None``."""
        if targets is None:
            return self.targets
        if isinstance(targets, Targets):
            return targets
        return Targets(targets, targets.dim() > len(as_likelihood(self.likelihood).target_shape(len(self.train_x))))

    def with_targets(self, targets: Tensor) -> GPModel:
        """A copy of the model with other targets: ``(N,)``, or ``(C, N)`` for one data set a chain (calibration tests).

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> model = tg.GP([0.0, 1.0], [0, 1], RBFKernel().requires_grad_(False), tg.likelihoods.Bernoulli())
            >>> model.with_targets(torch.tensor([1, 1])).train_y, model.train_y
            (tensor([1., 1.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
        """
        model = copy.deepcopy(self)
        model.train_y = check_targets(targets, model.train_x, as_likelihood(model.likelihood), model.train_x.dtype).values
        return model

    def with_theta(self, theta: Tensor) -> Self:
        """A copy whose modules hold the hyperparameters ``theta`` ``(P,)`` as their present values.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> round(model.with_theta(torch.tensor([2.0]).log()).kernel.lengthscale.item(), 6)
            2.0
        """
        # A copy of all would work out what follows from the data twice, a gigabyte each time of 60000 rows of 784 columns.
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        model._modules, model._buffers = copy.deepcopy(self._modules), copy.deepcopy(self._buffers)
        values = self.layout.raw_values(theta[None]).by_module
        for prefix in self.layout.prefixes:
            sampled = self.layout.sampled_names(prefix)
            for raw, owner, leaf in parameters_with_owners(getattr(model, prefix)):
                if raw in sampled:
                    constraint = constraint_of(owner, leaf)
                    value = values[prefix][raw][0].detach()
                    getattr(owner, leaf).data = value if constraint is None else constraint.inverse_transform(value)
        model.refresh()
        return model

    def with_buffers(self, **buffers: Tensor) -> Self:
        """The model with other data or inducing points: everything else is shared with this one, and nothing copied or checked.

        Differentiable in what it is given.
        """
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        model._buffers = {**self._buffers, **buffers}
        model._bindings = model._bind()
        return model

    def on_rows(self, rows: Tensor) -> Self:
        """The model of some of its data, those with the indices ``rows`` ``(n,)``: everything else is shared, nothing checked."""
        of_each = {name: part[rows] for name in ("train_x", "train_y", "replicates") if (part := getattr(self, name)) is not None}
        model = self.with_buffers(**of_each)
        model._pure_likelihood = lambda values, function: self._pure_likelihood(values, lambda part: function(part.for_data(rows)))
        return model

    def prior(self, theta: Tensor) -> LatentPrior:
        """p(u | theta) at C settings ``(C, P)``: the one factorisation, and all work that depends on theta alone."""
        return self.prior_at(self.layout.raw_values(self.layout.checked(theta)))

    def prior_at(self, hyperparameters: Hyperparameters, inputs: Tensor | None = None) -> LatentPrior:
        """:meth:`prior` from constrained values; ``inputs`` ``(M, D)``, if given, stand in for the latent inputs."""
        values, count = hyperparameters
        u = self.latent_inputs if inputs is None else inputs
        covariance_at = self.bindings.among_latents if inputs is None else self.covariance.bind(inputs, inputs)
        covariance = covariance_at(values["kernel"])
        if isinstance(covariance_at, BoundClosedForm) and not covariance.requires_grad:
            # New memory, which nothing else holds, unlike what kernels by others may return.
            covariance.diagonal(dim1=-2, dim2=-1).add_(self.latent_jitter)
        else:
            covariance = covariance + self.bindings.jitter
        return self._factorised(values, self.mean_function(values["mean"], u, count), covariance.expand(count, -1, -1))

    def _factorised(self, values: dict[str, dict[str, Tensor]], mean: Tensor, covariance: Tensor) -> LatentPrior:
        """The prior with a covariance ``(C, M, M)`` that holds the jitter already."""
        factor, ok = cholesky(covariance.detach())
        return LatentPrior(values, mean, covariance, factor, ok)

    def cross(self, prior: LatentPrior, inputs: Tensor) -> Cross:
        """What the prior says of f at ``inputs`` ``(N, D)`` together with u; nothing is factorised."""
        kernel = prior.values["kernel"]
        count = len(prior.ok)
        covariance = self.covariance.bind(self.latent_inputs, inputs)(kernel).expand(count, -1, -1)
        mean = self.mean_function(prior.values["mean"], inputs, count)
        return Cross(mean, covariance, self.covariance.diagonal(kernel, inputs).expand(count, -1))

    def at(self, prior: LatentPrior, inputs: Tensor | None = None) -> LatentsAt:
        """f at ``inputs`` ``(N, D)``, or at the data, given v: nothing is factorised, and the cost is that of N alone."""
        if inputs is None and self.has_latents_at_data:
            projection = factor_with_gradient(prior.covariance, prior.factor).mT  # u is f, and L^-1 K = L'
            return LatentsAt(prior, prior.mean, projection, torch.zeros_like(prior.mean))
        return self._projected(prior, self.cross(prior, self.train_x if inputs is None else inputs))

    def _projected(self, prior: LatentPrior, cross: Cross) -> LatentsAt:
        projection, explained = whiten(prior.covariance, prior.factor, cross.covariance)
        return LatentsAt(prior, cross.mean, projection, conditional_variance(cross.variance, explained))

    def at_data(self, hyperparameters: Hyperparameters) -> LatentsAt:
        """:meth:`at` the data from constrained values, prior included."""
        return self.at(self.prior_at(hyperparameters))

    def whiten(self, prior: LatentPrior, u: Tensor) -> Tensor:
        """v = L^-1 (u - m) ``(C, V)`` of latents as :meth:`latents` gives them; nothing is factorised."""
        centred = (u.unsqueeze(1) if self.num_latents == 1 else u.mT) - prior.mean.unsqueeze(1)
        return whiten(prior.covariance, prior.factor, centred.mT)[0].mT.flatten(1)

    def latents(self, prior: LatentPrior, v: Tensor) -> Tensor:
        """u, function values at the latent inputs: ``(C, M)``, ``(C, M, K)`` for several latents."""
        return self.about_mean(prior, apply_factor(prior.covariance, prior.factor, self._whitened(v)))

    def about_mean(self, prior: LatentPrior, deviation: Tensor) -> Tensor:
        """:meth:`latents` from u - m, ``(C, K, M)``."""
        return self._at_boundary(prior.mean.unsqueeze(1) + deviation)

    def log_likelihood(self, at: LatentsAt, v: Tensor, targets: Targets | None = None) -> Tensor:
        """Log of p(y | theta, v) ``(C,)``, for the sparse model its expectation; nothing is factorised here.

        Args:
            at: f at the data, of C settings.
            v: whitened latents ``(C, V)``.
            targets: the training targets by default.
        """
        return self.log_likelihood_of_f(at.prior, self.latents(at.prior, v), self.targets if targets is None else targets)

    def log_likelihood_of_f(self, prior: LatentPrior, f: Tensor, targets: Targets) -> Tensor:
        """Log of p(y | f) ``(C,)``, f as :meth:`latents` gives it; the likelihood's parameters are those of ``prior``."""
        return self.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.log_prob(f, targets.values))

    def value(self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None) -> Tensor | None:
        """The joint log density ``(C,)`` without a graph, if the model knows a way with less memory than :meth:`at_data` takes."""
        return None

    def value_and_grad(
        self, theta: Tensor, white: Tensor, targets: Targets, sites: GaussianSites | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The joint log density ``(C,)`` and its gradient ``(C, P + V)``, if the model knows a way faster than autograd."""
        return None

    def given_data(self, at: LatentsAt) -> LatentGaussian:
        """Marginals of f given theta and the data, of a model that ``is_conjugate``."""
        raise NotImplementedError(f"{type(self).__name__} has latents that are not normal given the data")

    def predict_jointly(self, prior: LatentPrior, v: Tensor, x: Tensor) -> JointGaussian:
        """f at test inputs ``(T, D)`` together given theta and v; the jitter is added to each variance, as at the data."""
        at = self.at(prior, x)
        left = self.prior_covariance(prior, x) - at.projection.mT @ at.projection
        left.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
        return JointGaussian(self.marginals(at, v).mean, left)

    def prior_covariance(self, prior: LatentPrior, inputs: Tensor) -> Tensor:
        """What the prior says of f at ``inputs`` ``(T, D)`` together: covariances ``(C, T, T)``, without jitter."""
        return self.covariance.bind(inputs, inputs)(prior.values["kernel"]).expand(len(prior.ok), -1, -1)

    def marginals(self, at: LatentsAt, v: Tensor) -> LatentGaussian:
        """Marginals of f given theta and v ``(C, V)``."""
        mean = at.mean.unsqueeze(1) + self._whitened(v) @ at.projection
        return LatentGaussian(mean, at.variance.unsqueeze(1).expand_as(mean))

    def _whitened(self, v: Tensor) -> Tensor:
        return v.view(len(v), *self.latent_shape)

    def _at_boundary(self, f: Tensor) -> Tensor:
        """(C, K, N) to what likelihoods take: ``(C, N)``, or ``(C, N, K)``."""
        return f.squeeze(1) if self.num_latents == 1 else f.mT

    def likelihood_function(self, values: dict[str, Tensor], function: Any) -> Any:
        """``function(likelihood)`` with the likelihood's parameters at C settings; see :class:`Factorised` for its methods."""
        return self._pure_likelihood(values, function)
