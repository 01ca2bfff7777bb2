"""Any gpytorch kernel at C hyperparameter settings at once.

Three routes, chosen once when a kernel is seen: closed forms for (scaled) RBF, Matern and rational quadratic kernels; the kernel's
own batch mode; and one setting at a time. A route other than the last is used only if it reproduced the last at two settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor

from torchgpmc.adapter import stationary
from torchgpmc.adapter.functional import PureModule, check_same_at_own_values, perturbed_values, probing_counts
from torchgpmc.adapter.kernel_checks import check_consistent, check_input_width
from torchgpmc.kernels import SAAS, saas_lengthscale, saas_slopes

Values = Mapping[str, Tensor]

_PROBED_ROWS = 5


class Covariance(Protocol):
    """K(x1, x2) for fixed inputs, as a function of the kernel's parameters."""

    def __call__(self, values: Values) -> Tensor:
        """Raw parameter name -> constrained value ``(C, *shape)``, to covariances ``(C, N1, N2)``."""
        ...

    def rows(self, rows: slice | Tensor) -> Covariance:
        """The same for some of the first inputs; nothing is copied of a slice."""
        ...


class CovarianceFunction(Protocol):
    """A kernel ready to be evaluated at C settings at once."""

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        """K(x1, x2) with all work that depends on the inputs alone done here; ``(N1, D)``, ``(N2, D)``."""
        ...

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        """The variances k(x, x), ``(C, N)``."""
        ...


def covariance_function(kernel: Kernel, x: Tensor) -> CovarianceFunction:
    """The fastest route that gives this kernel's covariances.

    Args:
        kernel: a gpytorch kernel without batch dimensions; copied.
        x: some inputs ``(N, D)`` of the kind the kernel will see, N at least 1.

    Raises:
        ValueError: the kernel cannot be evaluated at ``x`` (for instance ``ard_num_dims`` of the wrong size).
    """
    if len(kernel.batch_shape):
        raise ValueError(
            f"the kernel has batch_shape {tuple(kernel.batch_shape)}. Expected a kernel without batch dimensions; "
            f"torchgpmc adds the chain dimension itself."
        )
    closed = closed_form(kernel)
    if closed is not None:
        check_input_width(kernel, x)
        return closed
    one_by_one, batched = OneByOne(kernel), BatchMode(kernel)
    probe = x[:_PROBED_ROWS]
    outputs = kernel.num_outputs_per_input(probe, probe)
    if outputs != 1:
        raise ValueError(
            f"{type(kernel).__name__} gives {outputs} values an input (of several tasks, or a function and its derivatives), and "
            f"train_y has one. Expected a kernel of one function's values, for instance RBFKernel(); for several tasks put the "
            f"task among the columns of train_x, as IndexKernel(active_dims=...) times a kernel of the others."
        )
    try:
        expected = _probed(one_by_one, perturbed_values(kernel, 2), probe)
    except Exception as error:  # whatever a user's kernel may raise
        raise ValueError(
            f"the kernel could not be evaluated at inputs of shape {tuple(probe.shape)}: {error}. "
            f"Expected a kernel for {x.shape[-1]} input dimensions; check active_dims, ard_num_dims and num_dims."
        ) from error
    name = f"the kernel ({type(kernel).__name__})"
    check_consistent(name, *expected)
    check_same_at_own_values(name, _plain_kernel(kernel), lambda part: _dense(part(probe, probe)))
    try:
        agree = all(
            _agree(_probed(batched, perturbed_values(kernel, count), probe), expected, count) for count in probing_counts(probe)
        )
    except Exception:  # the kernel has no usable batch mode, for whatever reason: take the route that always works
        agree = False
    return batched if agree else one_by_one


def _probed(route: CovarianceFunction, settings: Values, x: Tensor) -> tuple[Tensor, ...]:
    """All that models ask of a kernel: of inputs with themselves, with others, and variances."""
    return route.bind(x, x)(settings), route.bind(x, x[:2])(settings), route.diagonal(settings, x)


def _agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], count: int) -> bool:
    """Whether covariances at ``count`` settings are, at the first and the last of them, those expected at these two."""
    return all(
        a.shape == (count, *b.shape[1:]) and torch.allclose(a[[0, -1]], b, rtol=1e-5) for a, b in zip(found, expected, strict=True)
    )


# --- closed forms -----------------------------------------------------------------------------------------------------


class ClosedForm:
    """Covariances of a stationary kernel, optionally scaled, by its formula.

    Args:
        profile: correlation from squared scaled distances.
        base: prefix of the base kernel's parameters, e.g. ``"base_kernel."``.
        smoothness: of a Matern kernel, whose derivatives are written out as the Gaussian's are; else ``None``.
        scale: name of the output scale (a variance), or ``None`` for unit variance.
        isotropic: one lengthscale for all input dimensions.
        columns: active input dimensions, or ``None`` for all.
        is_saas: whether the lengthscales are those of a :class:`torchgpmc.kernels.SAAS`, derived from its own parameters.
    """

    def __init__(
        self,
        profile: Callable[[Tensor, Values, str], Tensor],
        smoothness: float | None,
        base: str,
        scale: str | None,
        isotropic: bool,
        columns: Tensor | None,
        is_saas: bool = False,
    ):
        self.profile = profile
        self.smoothness = smoothness
        self.base = base
        self.scale = scale
        self.isotropic = isotropic
        self.columns = columns
        self.is_saas = is_saas

    def lengthscale(self, values: Values) -> Tensor:
        """``(C, 1, L)``."""
        if self.is_saas:
            return saas_lengthscale(values["raw_tausq"], values["raw_relevance"])
        return values[self.base + "raw_lengthscale"]

    def lengthscale_slopes(self, values: Values, lengthscale: Tensor, slope: Tensor) -> dict[str, Tensor]:
        """Derivatives in the parameters behind the lengthscale, given those in itself ``(C, 1, L)``."""
        return saas_slopes(values, lengthscale, slope) if self.is_saas else {self.base + "raw_lengthscale": slope}

    def _active(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x[..., self.columns]

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        second = self._active(x2)
        first = second if x1 is x2 else self._active(x1)
        return BoundClosedForm(self, stationary.prepare(first, second, self.isotropic))

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        if self.scale is not None:
            return values[self.scale][:, None].expand(-1, len(x))
        return torch.ones(len(self.lengthscale(values)), len(x), dtype=x.dtype, device=x.device)


class BoundClosedForm(NamedTuple):
    """A closed form at fixed inputs."""

    form: ClosedForm
    inputs: stationary.Inputs

    def __call__(self, values: Values) -> Tensor:
        form, inputs = self.form, self.inputs
        lengthscale = form.lengthscale(values)
        if form.profile is stationary.rbf and not self._follows_inputs():
            return stationary.scaled_rbf(*self._weights(values, lengthscale), inputs)
        correlation = form.profile(stationary.scaled_square(inputs, lengthscale), values, form.base)
        return correlation if form.scale is None else values[form.scale][:, None, None] * correlation

    def rows(self, rows: slice | Tensor) -> BoundClosedForm:
        return BoundClosedForm(self.form, stationary.rows_of(self.inputs, rows))

    def has_slopes(self) -> bool:
        """Whether :meth:`with_slopes` knows the derivatives."""
        return (self.form.profile is stationary.rbf or self.form.smoothness is not None) and not self._follows_inputs()

    def _follows_inputs(self) -> bool:
        return self.inputs.x1.requires_grad or self.inputs.x2.requires_grad

    def _weights(self, values: Values, lengthscale: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse squared lengthscales ``(C, L)`` and the log of the scale ``(C,)``."""
        weights = lengthscale[:, 0].pow(-2)
        return weights, torch.zeros_like(weights[:, 0]) if self.form.scale is None else values[self.form.scale].log()

    def with_slopes(self, values: Values) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
        """K at ``values``, and the derivatives of sum(gradient * K) in the parameters as a function of that gradient; no graph.

        The function takes over the gradient's memory.
        """
        form = self.form
        lengthscale = form.lengthscale(values)
        weights, log_scale = self._weights(values, lengthscale)
        care = stationary.precautions(weights, self.inputs)
        if form.smoothness is None:
            covariance = response = stationary.scaled_rbf_value(weights, log_scale, self.inputs, care)
        else:
            correlation, response = stationary.matern_decay(form.smoothness, stationary.scaled_square(self.inputs, lengthscale))
            covariance = correlation
            if form.scale is not None:
                scale = values[form.scale][:, None, None]
                covariance, response = scale * correlation, scale * response

        def slopes(gradient: Tensor) -> dict[str, Tensor]:
            total = None if response is covariance else (gradient * covariance).sum((1, 2))
            found = stationary.scaled_rbf_slopes(gradient.mul_(response), self.inputs, care)
            slope = (found[0].mul_(weights).unsqueeze(1) / lengthscale).mul_(-2)
            result = form.lengthscale_slopes(values, lengthscale, slope)
            if form.scale is not None:
                result[form.scale] = (found[1] if total is None else total) / values[form.scale]
            return result

        return covariance, slopes


def closed_form(kernel: Kernel) -> ClosedForm | None:
    """The closed form of an RBF, Matern or rational quadratic kernel, plain or scaled, or SAAS; ``None`` for any other kernel."""
    if type(kernel) is SAAS:
        matern = stationary.MATERN[2.5]
        return ClosedForm(matern, 2.5, "", "raw_outputscale", kernel.num_dims == 1, kernel.active_dims, is_saas=True)
    scale, base, prefix, smoothness = None, kernel, "", None
    if type(kernel) is ScaleKernel:
        scale, base, prefix = "raw_outputscale", kernel.base_kernel, "base_kernel."
    if type(base) is RBFKernel:
        profile: Callable[[Tensor, Values, str], Tensor] = stationary.rbf
    elif type(base) is MaternKernel:
        profile, smoothness = stationary.MATERN[base.nu], base.nu
    elif type(base) is RQKernel:
        profile = stationary.rational_quadratic
    else:
        return None
    # A ScaleKernel takes over its base kernel's active_dims and calls its formula directly.
    return ClosedForm(profile, smoothness, prefix, scale, base.lengthscale.shape[-1] == 1, kernel.active_dims)


# --- any kernel -------------------------------------------------------------------------------------------------------


def _dense(result: Any) -> Any:
    return result.to_dense() if hasattr(result, "to_dense") else result


def _plain_kernel(kernel: Kernel) -> Kernel:
    """A copy of a kernel, every part of which gives plain matrices, and keeps none of them, of distances that are zero or not.

    Sums and products of linear_operator's own would factorise one of their terms first: with jitter where that fails, so that
    RBFKernel() + LinearKernel() was another kernel at long lengthscales, or for a batch not at all. In evaluation mode kernels on
    grids keep the matrix of the first parameters that they see.
    """
    plain = copy.deepcopy(kernel)
    for part in plain.modules():
        if isinstance(part, Kernel):
            part.forward = _Plain(part.forward)
            part.covar_dist = _Distance(part.covar_dist)
            part.training = True
    return plain


class _Plain(NamedTuple):
    """A kernel's ``forward`` that returns a tensor; copied together with its kernel."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _dense(self.forward(*args, **options))


class _Distance(NamedTuple):
    """A kernel's distances, which are zero where inputs are equal; copied together with its kernel."""

    of: Callable[..., Tensor]

    def __call__(self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **options: Any) -> Tensor:
        distance = self.of(x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **options)
        if diag or last_dim_is_batch:
            return distance
        equal = stationary.equal_rows(*(x.reshape(-1, *x.shape[-2:])[0] for x in (x1, x2)))
        return distance if equal is None else distance.masked_fill(equal, 0.0)


def _diagonal(kernel: Any, x: Tensor, num_settings: int) -> Tensor:
    """The variances k(x, x), ``(..., N)``.

    gpytorch takes diagonals ``(R, N)`` for a matrix whose diagonal is still to be taken where R = N, R being settings or, of
    kernels that are sums over input columns, columns: rows are added until they are neither.
    """
    rows = max(len(x), x.shape[-1] + 1)
    rows += rows == num_settings
    longer = torch.cat([x, x[-1:].expand(rows - len(x), -1)])
    return kernel(longer, longer, diag=True)[..., : len(x)]


class OneByOne:
    """Any kernel, one setting after another: the route that always works, and the reference for the others."""

    def __init__(self, kernel: Kernel):
        self.pure = PureModule(_plain_kernel(kernel))

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        return BoundKernel(self._evaluate, x1, x2)

    def _evaluate(self, values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        return self._stack(values, lambda kernel: _dense(kernel(x1, x2)), x1)

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        return self._stack(values, lambda kernel: _diagonal(kernel, x, 1), x)

    def _stack(self, values: Values, function: Callable[[Any], Tensor], x: Tensor) -> Tensor:
        if not values:
            return self.pure({}, function).unsqueeze(0)
        count = len(next(iter(values.values())))
        return torch.stack([self.pure({name: value[row] for name, value in values.items()}, function) for row in range(count)])


class BatchMode:
    """Any kernel whose own batch mode is sound: its batch shape is set to C while its parameters are replaced by C values."""

    def __init__(self, kernel: Kernel):
        self.pure = PureModule(_plain_kernel(kernel))

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        return BoundKernel(self._evaluate, x1, x2)

    def _evaluate(self, values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        return self._batched(values, lambda kernel: _dense(kernel(x1, x2)))

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        return self._batched(values, lambda kernel: _diagonal(kernel, x, len(next(iter(values.values())))))

    def _batched(self, values: Values, function: Callable[[Any], Tensor]) -> Tensor:
        count = len(next(iter(values.values())))

        def evaluate(kernel: Kernel) -> Tensor:
            originals = [(part, part._batch_shape) for part in kernel.modules() if isinstance(part, Kernel)]
            try:
                for part, _ in originals:
                    part._batch_shape = torch.Size([count])
                return function(kernel)
            finally:
                for part, shape in originals:
                    part._batch_shape = shape

        return self.pure(values, evaluate)


class BoundKernel(NamedTuple):
    """A kernel evaluator at fixed inputs."""

    evaluate: Callable[[Values, Tensor, Tensor], Tensor]
    x1: Tensor
    x2: Tensor

    def __call__(self, values: Values) -> Tensor:
        return self.evaluate(values, self.x1, self.x2)

    def rows(self, rows: slice | Tensor) -> BoundKernel:
        return BoundKernel(self.evaluate, self.x1[rows], self.x2)
