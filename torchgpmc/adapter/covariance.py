"""Any gpytorch kernel at C hyperparameter settings at once.

Three routes, chosen once when a kernel is seen: closed forms for (scaled) RBF, Matern and rational quadratic kernels; the kernel's
own batch mode; and one setting at a time. A route other than the last is used only if it reproduced the last at two settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torchgpmc.adapter.closed_form import ClosedForm, Values, closed_form
from torchgpmc.adapter.functional import PureModule, check_same_at_own_values, perturbed_values, probing_counts
from torchgpmc.adapter.kernel_checks import check_consistent, check_input_width
from torchgpmc.adapter.stationary import equal_rows

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
        equal = equal_rows(*(x.reshape(-1, *x.shape[-2:])[0] for x in (x1, x2)))
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


class PlusConstant:
    """Any kernel with a variance more that all function values share."""

    def __init__(self, of: CovarianceFunction, constant: float):
        self.of, self.constant = of, constant

    def bind(self, x1: Tensor, x2: Tensor) -> Covariance:
        return BoundPlusConstant(self.of.bind(x1, x2), self.constant)

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        return self.of.diagonal(values, x) + self.constant


class BoundPlusConstant(NamedTuple):
    """The same at fixed inputs."""

    of: Covariance
    constant: float

    def __call__(self, values: Values) -> Tensor:
        return self.of(values) + self.constant

    def rows(self, rows: slice | Tensor) -> BoundPlusConstant:
        return BoundPlusConstant(self.of.rows(rows), self.constant)


def plus_constant(covariance: CovarianceFunction, constant: float) -> CovarianceFunction:
    """Covariances with a variance more that all function values share, by a closed form where there is one."""
    return covariance.plus(constant) if isinstance(covariance, ClosedForm) else PlusConstant(covariance, constant)


class BoundKernel(NamedTuple):
    """A kernel evaluator at fixed inputs."""

    evaluate: Callable[[Values, Tensor, Tensor], Tensor]
    x1: Tensor
    x2: Tensor

    def __call__(self, values: Values) -> Tensor:
        return self.evaluate(values, self.x1, self.x2)

    def rows(self, rows: slice | Tensor) -> BoundKernel:
        return BoundKernel(self.evaluate, self.x1[rows], self.x2)
