"""Any gpytorch kernel at C hyperparameter settings at once.

Three routes, chosen once when a kernel is seen: closed forms for (scaled) RBF, Matern and rational quadratic kernels; the kernel's
own batch mode; and one setting at a time. A route other than the last is used only if it reproduced the last at two settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgpmc.functional import PureModule, constraint_of, parameters_with_owners

# Exponentials of less than this are denormal or close to it; arithmetic on denormal numbers costs a hundredfold. What is
# left out is below 1e-152 (float64) and 1e-17 (float32), nothing beside any jitter.
_LOWEST_EXPONENT = {torch.float64: -350.0, torch.float32: -40.0}

Values = Mapping[str, Tensor]


class Covariance(Protocol):
    """K(x1, x2) for fixed inputs, as a function of the kernel's parameters."""

    def __call__(self, values: Values) -> Tensor:
        """Raw parameter name -> constrained value ``(C, *shape)``, to covariances ``(C, N1, N2)``."""
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
        _check_input_width(kernel, x)
        return closed
    one_by_one = OneByOne(kernel)
    probe = x[:3]
    settings = _perturbed_values(kernel)
    try:
        expected = one_by_one.bind(probe, probe[:2])(settings), one_by_one.diagonal(settings, probe)
    except Exception as error:  # whatever a user's kernel may raise
        raise ValueError(
            f"the kernel could not be evaluated at inputs of shape {tuple(probe.shape)}: {error}. "
            f"Expected a kernel for {x.shape[-1]} input dimensions; check active_dims, ard_num_dims and num_dims."
        ) from error
    try:
        batched = BatchMode(kernel)
        found = batched.bind(probe, probe[:2])(settings), batched.diagonal(settings, probe)
        agree = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))
    except Exception:  # the kernel has no usable batch mode, for whatever reason: take the route that always works
        agree = False
    return batched if agree else one_by_one


def _check_input_width(kernel: Kernel, x: Tensor) -> None:
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.ard_num_dims is not None:
            width = x.shape[-1] if part.active_dims is None else len(part.active_dims)
            if part.ard_num_dims not in (1, width):
                raise ValueError(
                    f"{type(part).__name__} has ard_num_dims={part.ard_num_dims} but its inputs have {width} columns. "
                    f"Expected ard_num_dims={width}."
                )
        if isinstance(part, Kernel) and part.active_dims is not None and int(part.active_dims.max()) >= x.shape[-1]:
            raise ValueError(
                f"{type(part).__name__} has active_dims={part.active_dims.tolist()} but the inputs have {x.shape[-1]} columns. "
                f"Expected indices below {x.shape[-1]}."
            )


def _perturbed_values(kernel: Kernel) -> dict[str, Tensor]:
    """Two different settings of every parameter, constrained."""
    values = {}
    for name, owner, leaf in parameters_with_owners(kernel):
        raw = getattr(owner, leaf).detach()
        raw = torch.stack([raw + 0.1, raw - 0.2])
        constraint = constraint_of(owner, leaf)
        values[name] = raw if constraint is None else constraint.transform(raw)
    return values


# --- closed forms -----------------------------------------------------------------------------------------------------


class _ScaledRBF(torch.autograd.Function):
    """exp(log_scale - 0.5 sum_d w_d (x1_d - x2_d)^2), the exponent by one matrix product, the gradient by one more."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, log_scale: Tensor, x1: Tensor, x2: Tensor, minus_half_square1: Tensor, minus_half_square2: Tensor
    ) -> Tensor:
        chains, (n1, dims) = len(weights), x1.shape
        row = torch.addmm(log_scale[:, None], weights, minus_half_square1.T)
        column = weights @ minus_half_square2.T
        exponent = ((x1 * weights[:, None, :]).view(chains * n1, dims) @ x2.T).view(chains, n1, -1)
        exponent.add_(row[:, :, None]).add_(column[:, None, :])
        covariance = exponent.clamp_min_(_LOWEST_EXPONENT[x1.dtype]).exp_()
        ctx.save_for_backward(covariance, x1, x2, minus_half_square1, minus_half_square2)
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        covariance, x1, x2, minus_half_square1, minus_half_square2 = ctx.saved_tensors
        product = gradient * covariance
        chains, n1, n2 = product.shape
        row, column = product.sum(2), product.sum(1)
        cross = ((product.reshape(chains * n1, n2) @ x2).view(chains, n1, -1) * x1).sum(1)
        weights = cross.addmm_(row, minus_half_square1).addmm_(column, minus_half_square2)
        return weights, row.sum(1), None, None, None, None


class _IsotropicRBF(torch.autograd.Function):
    """exp(log_scale - 0.5 w square) for given squared distances, in three passes over memory and two back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, log_scale: Tensor, square: Tensor) -> Tensor:
        exponent = torch.add(log_scale[:, None, None], square * (-0.5 * weight)[:, None, None])
        covariance = exponent.clamp_min_(_LOWEST_EXPONENT[square.dtype]).exp_()
        ctx.save_for_backward(covariance, square)
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        covariance, square = ctx.saved_tensors
        product = (gradient * covariance).flatten(1)
        return product @ square.flatten() * -0.5, product.sum(1), None


class _Inputs(NamedTuple):
    """Two sets of inputs, with their squared distances when one lengthscale serves all dimensions."""

    x1: Tensor
    x2: Tensor
    is_prefix: bool  # whether x2 begins with x1, so that the leading diagonal holds distances of zero
    minus_half_square1: Tensor  # (N1, D), -x1^2 / 2
    minus_half_square2: Tensor
    squared_distance: Tensor | None  # (N1, N2)


def _prepare(x1: Tensor, x2: Tensor, isotropic: bool) -> _Inputs:
    is_prefix = torch.equal(x1, x2[: len(x1)])
    # Centred inputs lose the fewest digits in |a|^2 + |b|^2 - 2 ab.
    center = x1.mean(0) if len(x1) else 0.0
    x1, x2 = x1 - center, x2 - center
    keep = isotropic and not (x1.requires_grad or x2.requires_grad)
    squares = -0.5 * x1.square(), -0.5 * x2.square()
    return _Inputs(x1, x2, is_prefix, *squares, _pairwise_square(x1, x2) if keep else None)


def _pairwise_square(x1: Tensor, x2: Tensor) -> Tensor:
    """Sum of squared differences, without cancellation: ``(N1, N2)``."""
    total = x1.new_zeros(len(x1), len(x2))
    for left, right in zip(x1.unbind(-1), x2.unbind(-1), strict=True):
        total = total + (left[:, None] - right[None, :]).square()
    return total


def _scaled_square(inputs: _Inputs, lengthscale: Tensor) -> Tensor:
    """Squared distances in units of ``lengthscale`` ``(C, 1, L)``: ``(C, N1, N2)``."""
    if inputs.squared_distance is not None:
        return inputs.squared_distance * lengthscale.reciprocal().square()
    a, b = inputs.x1 / lengthscale, inputs.x2 / lengthscale
    square = a.square().sum(-1)[:, :, None] + b.square().sum(-1)[:, None, :] - 2 * a @ b.mT
    if inputs.is_prefix:
        square = square * (1 - torch.eye(*square.shape[-2:], dtype=square.dtype, device=square.device))
    return square.clamp_min(0.0)


def _exp(exponent: Tensor) -> Tensor:
    return torch.exp(exponent.clamp_min(_LOWEST_EXPONENT[exponent.dtype]))


def _matern_half(square: Tensor, values: Values, base: str) -> Tensor:
    return _exp(-_root(square))


def _matern_three_halves(square: Tensor, values: Values, base: str) -> Tensor:
    distance = math.sqrt(3) * _root(square)
    return (1 + distance) * _exp(-distance)


def _matern_five_halves(square: Tensor, values: Values, base: str) -> Tensor:
    distance = math.sqrt(5) * _root(square)
    return (1 + distance + (5 / 3) * square) * _exp(-distance)


def _root(square: Tensor) -> Tensor:
    # The square root of zero has an infinite derivative; of 1e-36 it has a finite one, times a zero.
    return torch.sqrt(square + 1e-36)


def _rbf(square: Tensor, values: Values, base: str) -> Tensor:
    return _exp(-0.5 * square)


def _rational_quadratic(square: Tensor, values: Values, base: str) -> Tensor:
    alpha = values[base + "raw_alpha"].unsqueeze(-1)
    return _exp(-alpha * torch.log1p(square / (2 * alpha)))


_MATERN = {0.5: _matern_half, 1.5: _matern_three_halves, 2.5: _matern_five_halves}


class ClosedForm:
    """Covariances of a stationary kernel, optionally scaled, by its formula.

    Args:
        profile: correlation from squared scaled distances.
        base: prefix of the base kernel's parameters, e.g. ``"base_kernel."``.
        scale: name of the output scale (a variance), or ``None`` for unit variance.
        isotropic: one lengthscale for all input dimensions.
        columns: active input dimensions, or ``None`` for all.
    """

    def __init__(
        self,
        profile: Callable[[Tensor, Values, str], Tensor],
        base: str,
        scale: str | None,
        isotropic: bool,
        columns: Tensor | None,
    ):
        self.profile = profile
        self.base = base
        self.scale = scale
        self.isotropic = isotropic
        self.columns = columns

    def _active(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x[..., self.columns]

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        second = self._active(x2)
        first = second if x1 is x2 else self._active(x1)
        return BoundClosedForm(self, _prepare(first, second, self.isotropic))

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        if self.scale is not None:
            return values[self.scale][:, None].expand(-1, len(x))
        return torch.ones(len(values[self.base + "raw_lengthscale"]), len(x), dtype=x.dtype, device=x.device)


class BoundClosedForm(NamedTuple):
    """A closed form at fixed inputs."""

    form: ClosedForm
    inputs: _Inputs

    def __call__(self, values: Values) -> Tensor:
        form, inputs = self.form, self.inputs
        lengthscale = values[form.base + "raw_lengthscale"]
        needs_input_gradient = inputs.x1.requires_grad or inputs.x2.requires_grad
        if form.profile is _rbf and not needs_input_gradient:
            weights = lengthscale[:, 0].reciprocal().square()
            log_scale = torch.zeros_like(weights[:, 0]) if form.scale is None else values[form.scale].log()
            if inputs.squared_distance is not None:
                return _IsotropicRBF.apply(weights[:, 0], log_scale, inputs.squared_distance)
            squares = inputs.minus_half_square1, inputs.minus_half_square2
            return _ScaledRBF.apply(weights, log_scale, inputs.x1, inputs.x2, *squares)
        correlation = form.profile(_scaled_square(inputs, lengthscale), values, form.base)
        return correlation if form.scale is None else values[form.scale][:, None, None] * correlation


def closed_form(kernel: Kernel) -> ClosedForm | None:
    """The closed form of an RBF, Matern or rational quadratic kernel, plain or scaled; ``None`` for any other kernel."""
    scale, base, prefix = None, kernel, ""
    if type(kernel) is ScaleKernel:
        scale, base, prefix = "raw_outputscale", kernel.base_kernel, "base_kernel."
    if type(base) is RBFKernel:
        profile: Callable[[Tensor, Values, str], Tensor] = _rbf
    elif type(base) is MaternKernel:
        profile = _MATERN[base.nu]
    elif type(base) is RQKernel:
        profile = _rational_quadratic
    else:
        return None
    # A ScaleKernel takes over its base kernel's active_dims and calls its formula directly.
    return ClosedForm(profile, prefix, scale, base.lengthscale.shape[-1] == 1, kernel.active_dims)


# --- any kernel -------------------------------------------------------------------------------------------------------


def _dense(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.to_dense()


class OneByOne:
    """Any kernel, one setting after another: the route that always works, and the reference for the others."""

    def __init__(self, kernel: Kernel):
        self.pure = PureModule(kernel)

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        return BoundKernel(self._evaluate, x1, x2)

    def _evaluate(self, values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        return self._stack(values, lambda kernel: _dense(kernel(x1, x2)), x1)

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        return self._stack(values, lambda kernel: kernel(x, x, diag=True), x)

    def _stack(self, values: Values, function: Callable[[Any], Tensor], x: Tensor) -> Tensor:
        if not values:
            return self.pure({}, function).unsqueeze(0)
        count = len(next(iter(values.values())))
        return torch.stack([self.pure({name: value[row] for name, value in values.items()}, function) for row in range(count)])


class BatchMode:
    """Any kernel whose own batch mode is sound: its batch shape is set to C while its parameters are replaced by C values."""

    def __init__(self, kernel: Kernel):
        self.pure = PureModule(kernel)

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        return BoundKernel(self._evaluate, x1, x2)

    def _evaluate(self, values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        return self._batched(values, lambda kernel: _dense(kernel(x1, x2)))

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        return self._batched(values, lambda kernel: kernel(x, x, diag=True))

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
