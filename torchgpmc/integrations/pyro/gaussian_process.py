"""A Gaussian process inside a Pyro model: sites for hyperparameters and whitened latents, for MCMC, guides and ``Predictive``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from numpy.typing import ArrayLike
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from torchgpmc.adapter.covariance import covariance_function
from torchgpmc.adapter.mean_function import MeanFunction
from torchgpmc.arrays import as_tensor
from torchgpmc.checks import described
from torchgpmc.models.validation import check_devices, check_inputs
from torchgpmc.numerics.linalg import apply_factor, cholesky, factor_with_gradient, whiten
from torchgpmc.numerics.random import make_generator
from torchgpmc.parameters.bijections import Interval
from torchgpmc.parameters.entries import Entry
from torchgpmc.parameters.layout import build_layout

# Tensors with chains first, (C, ...), to tensors with chains first.
OfChains = Callable[..., tuple[Tensor, ...]]


class _AsOneChain(torch.autograd.Function):
    """A function of tensors with chains first, called for one chain; under ``vmap`` its dimension becomes that of the chains.

    So kernels and factorisations without batching rules are evaluated for all chains at once, by their own batch mode. Called for
    one chain it is evaluated again where derivatives are wanted, with a graph.
    """

    @staticmethod
    def forward(function: OfChains, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.squeeze(0) for output in function(*(value.unsqueeze(0) for value in inputs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [value.detach().requires_grad_(True) for value in ctx.saved_tensors]
            outputs = ctx.function(*(value.unsqueeze(0) for value in inputs))
            found = [(output.squeeze(0), slope) for output, slope in zip(outputs, slopes, strict=True) if output.requires_grad]
            gradients = torch.autograd.grad([o for o, _ in found], inputs, [s for _, s in found], allow_unused=True)
        return None, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: OfChains, *inputs: Tensor) -> tuple[Any, Any]:
        chains = [
            value.expand(info.batch_size, *value.shape) if place is None else value.movedim(place, 0)
            for value, place in zip(inputs, in_dims[1:], strict=True)
        ]
        outputs = function(*chains)
        return outputs, (0,) * len(outputs)


def _constraint(interval: Interval) -> constraints.Constraint:
    """The interval as torch has it, whose map to the line is ours."""
    if math.isinf(interval.lower) and math.isinf(interval.upper):
        return constraints.real
    if math.isinf(interval.upper):
        return constraints.greater_than(interval.lower)
    return constraints.less_than(interval.upper) if math.isinf(interval.lower) else constraints.interval(*interval[:2])


class _SitePrior(TorchDistribution):  # type: ignore[misc]  # Pyro's classes are untyped
    """A hyperparameter's prior on its interval, the whole parameter being one event."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # as torch declares it
    has_rsample = False

    def __init__(self, name: str, entry: Entry):
        super().__init__(torch.Size(), entry.shape, validate_args=False)
        self._name = name
        self._entry = entry

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(_constraint(self._entry.interval), len(self._entry.shape))

    def log_prob(self, value: Tensor) -> Tensor:
        _check_shape(self._name, value, self.event_shape)
        return self._entry.prior.log_prob(value.unsqueeze(0)).squeeze(0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        generator = make_generator(int(torch.randint(2**62, ())))  # Pyro's randomness is the global generator's
        return self._entry.prior.sample(shape.numel(), generator).view(shape + self.event_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _SitePrior:
        if torch.Size(batch_shape) != self.batch_shape:
            raise ValueError(_not_in_a_plate(self._name, f"would be drawn {tuple(batch_shape)} times"))
        return self


def _not_in_a_plate(site: str, found: str) -> str:
    return (
        f"site '{site}' {found}. Expected one Gaussian process: call it outside of plates, one GP a name; with Predictive use "
        f"parallel=False, with Trace_ELBO vectorize_particles=False."
    )


def _check_shape(site: str, value: Tensor, shape: torch.Size) -> None:
    if value.shape == shape:
        return
    found = f"has shape {tuple(value.shape)}, not {tuple(shape)}"
    if value.shape[value.dim() - len(shape) :] == shape:  # and more in front: of a plate, or of parallel draws
        raise ValueError(_not_in_a_plate(site, found))
    raise ValueError(f"site '{site}' {found}. Expected a value of that shape, where one is given: value.expand{tuple(shape)}, say.")


class _Drawn(NamedTuple):
    """What the last call drew."""

    values: list[Tensor]  # constrained, in the order of the layout
    v: Tensor  # (N,)


class GP:
    r"""A Gaussian process as a part of a Pyro model: hyperparameters from their priors, and f = m + L v at its inputs.

    .. math:: K + jitter\, I = L L^T, \qquad v \sim N(0, I)

    Calling it makes the sites ``name.kernel.lengthscale`` and so on, one for each parameter with a prior (constrained values),
    ``name.v`` and the deterministic ``name``, and returns f ``(N,)``. Make it outside of the model if the inputs do not change:
    then :class:`MCMC` evaluates all chains at once, whatever the kernel. Made inside, RBF, Matern and rational quadratic kernels
    are too, at some milliseconds more; others take the loop over chains.

    After that, in the same run of the model, ``site(x_new)`` is the distribution of f at other inputs ``(T, D)`` given f here and
    the hyperparameters, jitter included: ``pyro.sample("f_new", site(x_new))``, for ``Predictive``.

    Args:
        name: of the site.
        x: inputs ``(N, D)``, or ``(N,)``; constants, in whose dtype all sites are. Covariances are factorised in float64.
        kernel: a gpytorch kernel with priors; parameters with ``requires_grad_(False)`` stay fixed. Copied.
        mean: a gpytorch mean, zero by default. Copied.
        jitter: variance added to the diagonal of every covariance of f.

    Raises:
        TypeError: ``kernel`` or ``mean`` is of the wrong kind.
        ValueError: parameters without priors; inputs that a kernel cannot take, or that depend on something that is sampled or
            learned; a call within a plate.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> from torchgpmc.integrations.pyro import GP
        >>> x = torch.linspace(0, 1, 10, dtype=torch.float64)
        >>> site = GP("f", x, RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)))
        >>> def model(y=None, x_new=None):
        ...     f = site()
        ...     with pyro.plate("data", len(f)):
        ...         pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        ...     if x_new is not None:
        ...         pyro.sample("f_new", site(x_new))
        >>> sites = pyro.poutine.trace(model).get_trace(None, x[:3]).nodes
        >>> {name: tuple(sites[name]["value"].shape) for name in ("f.kernel.lengthscale", "f.v", "f", "y", "f_new")}
        {'f.kernel.lengthscale': (1, 1), 'f.v': (10,), 'f': (10,), 'y': (10,), 'f_new': (3,)}
    """

    def __init__(
        self,
        name: str,
        x: Tensor | ArrayLike,
        kernel: Kernel,
        mean: Mean | None = None,
        jitter: float = 1e-6,
    ):
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel is {described(kernel)}. Expected a gpytorch kernel, for instance ScaleKernel(RBFKernel()).")
        if mean is not None and not isinstance(mean, Mean):
            raise TypeError(f"mean is {described(mean)}. Expected a gpytorch mean, for instance ConstantMean(), or None.")
        if not (isinstance(jitter, int | float) and 0 <= jitter < math.inf):
            raise ValueError(f"jitter is {jitter!r}. Expected a variance of at least 0, for instance 1e-6.")
        inputs = as_tensor("x", x, next((parameter.device for parameter in kernel.parameters()), None))
        if inputs.requires_grad:
            raise ValueError(
                f"the inputs of GP '{name}' depend on something that is sampled or learned, which its derivatives would leave out. "
                f"Expected constant inputs; detach() them."
            )
        check_devices(x=inputs, kernel=kernel, mean=mean)
        dtype = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        self.name = name
        self.x = check_inputs("x", inputs, dtype)
        self.jitter = float(jitter)
        parts = {"kernel": kernel, "mean": ZeroMean() if mean is None else mean}
        modules = {part: copy.deepcopy(module).to(dtype) for part, module in parts.items()}
        self._layout = build_layout(modules, dtype, self.x.device)
        # Pyro's float32 factorises no covariance of smooth functions, at any jitter that does not show.
        modules, self._x = {part: copy.deepcopy(module).double() for part, module in modules.items()}, self.x.double()
        self._covariance = covariance_function(modules["kernel"], self._x)
        self._mean = MeanFunction(modules["mean"], self._x)
        self._own_covariance = self._covariance.bind(self._x, self._x)
        self._drawn: _Drawn | None = None

    def __call__(self, x_new: Tensor | ArrayLike | None = None) -> Any:
        """f ``(N,)`` at the inputs; or, of ``x_new`` ``(T, D)``, the normal distribution of f there given what was drawn.

        Raises:
            ValueError: a call within a plate; ``x_new`` before a call without.
        """
        if x_new is not None:
            return self._conditional(x_new)
        values = []
        for entry in self._layout.entries:
            site = f"{self.name}.{entry.name}"
            values.append(pyro.sample(site, _SitePrior(site, entry)))
            _check_shape(site, values[-1], entry.shape)
        v = pyro.sample(f"{self.name}.v", dist.Normal(self.x.new_zeros(len(self.x)), 1.0).to_event(1))
        _check_shape(f"{self.name}.v", v, self.x.shape[:1])
        self._drawn = _Drawn(values, v)
        (f,) = _AsOneChain.apply(self._latents, *self._drawn.values, v)
        return pyro.deterministic(self.name, f, event_dim=1)

    def _conditional(self, x_new: Tensor | ArrayLike) -> dist.MultivariateNormal:
        if self._drawn is None:
            raise ValueError(f"GP '{self.name}' has drawn nothing yet. Expected site() before site(x_new), in the same model.")
        inputs = as_tensor("x_new", x_new, self.x.device)
        inputs = check_inputs("x_new", inputs, self._x.dtype, self.x.shape[1])

        def moments(*chains: Tensor) -> tuple[Tensor, ...]:
            return self._moments_at(inputs, *chains)

        mean, factor = _AsOneChain.apply(moments, *self._drawn.values, self._drawn.v)
        return dist.MultivariateNormal(mean, scale_tril=factor)

    def _prior(self, values: tuple[Tensor, ...], count: int) -> tuple[dict[str, dict[str, Tensor]], Tensor, Tensor]:
        """Parameters by module and raw name, and the covariance of f here with its factor ``(C, N, N)``, NaN where that failed."""
        parameters: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in self._layout.prefixes}
        for entry, value in zip(self._layout.entries, values, strict=True):
            prefix, _, raw = entry.raw_name.partition(".")
            parameters[prefix][raw] = value
        for fixed in self._layout.fixed:
            prefix, _, raw = fixed.raw_name.partition(".")
            parameters[prefix][raw] = fixed.value().double().expand(count, *fixed.value().shape)
        covariance = self._jittered(self._own_covariance(parameters["kernel"]), count)
        factor, ok = cholesky(covariance.detach())
        return parameters, covariance, torch.where(ok[:, None, None], factor, torch.nan)

    def _jittered(self, covariance: Tensor, count: int) -> Tensor:
        unit = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        return (covariance + self.jitter * unit).expand(count, -1, -1)

    def _latents(self, *chains: Tensor) -> tuple[Tensor]:
        """f ``(C, N)`` from constrained values ``(C, *shape)`` and, last, v ``(C, N)``."""
        *values, v = (chain.double() for chain in chains)
        parameters, covariance, factor = self._prior(tuple(values), len(v))
        deviation = apply_factor(covariance, factor, v.unsqueeze(1)).squeeze(1)
        return ((self._mean(parameters["mean"], self._x, len(v)) + deviation).to(self.x.dtype),)

    def _moments_at(self, inputs: Tensor, *chains: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``(C, T)`` and factor of the covariance ``(C, T, T)`` of f at ``inputs`` given f here."""
        *values, v = (chain.double() for chain in chains)
        parameters, covariance, factor = self._prior(tuple(values), len(v))
        cross = self._covariance.bind(self._x, inputs)(parameters["kernel"]).expand(len(v), -1, -1)
        projection, _ = whiten(covariance, factor, cross)
        mean = self._mean(parameters["mean"], inputs, len(v)) + (v.unsqueeze(1) @ projection).squeeze(1)
        own = self._covariance.bind(inputs, inputs)(parameters["kernel"])
        left = self._jittered(own, len(v)) - projection.mT @ projection
        left_factor, ok = cholesky(left.detach())
        factor = factor_with_gradient(left, torch.where(ok[:, None, None], left_factor, torch.nan))
        return mean.to(self.x.dtype), factor.to(self.x.dtype)
