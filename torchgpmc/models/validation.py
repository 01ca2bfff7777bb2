"""Checks of what users pass to a model: expected, got, remedy, before anything is computed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.means import Mean, ZeroMean
from torch import Tensor, nn

from torchgpmc.arrays import as_tensor
from torchgpmc.checks import described, is_number, warn
from torchgpmc.models.targets import Targets
from torchgpmc.priors import with_named_closures

_JITTER = 1e-6  # of the unit
_OFFSET = 100  # of targets, in their standard deviations, from which on a zero mean hardly serves
_SQUARABLE = 1e-6  # of the root of the largest number: what a sum of squares, over jitter or lengthscales, may take
_SCALES = 1e3  # of columns, from which on one lengthscale, or one prior for several, hardly serves


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises a ``ValueError`` unless torch factorises matrices in ``dtype``, and multiplies them in it."""
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"{name} is {dtype}. Expected torch.float64 (recommended) or torch.float32.")
    if dtype == torch.float32 and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ValueError(
            f"{name} is torch.float32, whose products torch.autocast does in half precision. Expected to be outside of it: within "
            f"torch.autocast(device_type, enabled=False), or with float64, which it leaves alone."
        )


def check_inputs(name: str, x: Any, dtype: torch.dtype, num_columns: int | None = None, columns: list[str] | None = None) -> Tensor:
    """Inputs as an ``(N, D)`` copy in ``dtype``; 1-D inputs become ``(N, 1)``. Messages name ``columns``, if they have names.

    Raises:
        TypeError: not numbers.
        ValueError: wrong shape, no rows, NaN or infinite values, or such as ``dtype`` cannot square, not ``num_columns`` columns,
            or half precision asked for.
    """
    check_dtype("dtype", dtype)
    x = as_tensor(name, x)
    if x.dim() == 1:
        x = x.unsqueeze(-1)
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected (N, D), or (N,) for one input dimension.")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected at least one row and one column.")
    if num_columns is not None and x.shape[1] != num_columns:
        row = tuple(x.shape) == (num_columns, 1)
        raise ValueError(
            f"{name} has {x.shape[1]} columns but the model's train_x has {num_columns}. Expected {num_columns} columns"
            f"{f'; of one point a matrix of one row, (1, {num_columns})' if row else ''}."
        )
    _check_finite(name, x, columns)
    x = _converted(name, x, dtype).contiguous()
    check_squarable(name, x)
    return x


def check_squarable(name: str, values: Tensor) -> None:
    """Raises a ``ValueError`` where squares of ``values`` overflow, or would in a sum over lengthscales or jitter."""
    largest = float(values.abs().max())
    if not largest < _SQUARABLE * math.sqrt(torch.finfo(values.dtype).max):
        raise ValueError(
            f"{name} has numbers up to {largest:.3g}, whose squares {values.dtype} cannot hold. Expected smaller ones: divide them "
            f"by their largest, column by column."
        )


def _converted(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in ``dtype``, with a word where that cannot tell most values of a column apart: dates in nanoseconds, hashes.

    Raises:
        ValueError: values beyond what it holds.
    """
    converted = values.detach().to(dtype, copy=True)
    if not bool(torch.isfinite(converted).all()):
        raise ValueError(
            f"{name} has numbers up to {float(values.double().abs().max()):.3g}, and {dtype} ends at {torch.finfo(dtype).max:.2g}. "
            f"Expected smaller ones: rescale them, or take dtype=torch.float64."
        )
    if values.dim() and not torch.equal(converted.to(values.dtype), values):
        for index, (before, after) in enumerate(zip(_columns(values), _columns(converted), strict=True)):
            distinct, left = len(before.unique()), len(after.unique())
            if 2 * left < distinct:
                warn(
                    f"{name}: column {index} has {distinct} distinct values, of which {dtype} tells {left} apart. Expected numbers "
                    f"of moderate size: subtract the least, and rescale, before they are given.",
                    UserWarning,
                )
    return converted


def _columns(values: Tensor) -> tuple[Tensor, ...]:
    return values.unsqueeze(-1).flatten(1).unbind(1)


def check_modules(kernel: Any, mean: Any, likelihood: Any) -> None:
    """Checks the kinds of a model's kernel and mean, and that kernel, mean and likelihood share no parameter that is sampled.

    Raises:
        TypeError: no kernel, or no mean.
        ValueError: a parameter is in two of them, or the kernel has inducing points of its own.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel is {described(kernel)}. Expected a gpytorch kernel, for instance ScaleKernel(RBFKernel()).")
    if mean is not None and not isinstance(mean, Mean):
        raise TypeError(f"mean is {described(mean)}. Expected a gpytorch mean, for instance ConstantMean(), or None.")
    if any(isinstance(part, InducingPointKernel) for part in kernel.modules()):
        raise ValueError(
            "the kernel is an InducingPointKernel, an approximation of gpytorch's own. Expected its base_kernel, in "
            "torchgpmc.SparseGP(x, y, base_kernel, likelihood, inducing_points=z), or ProjectedProcess, of the same prior."
        )
    owners: dict[int, str] = {}
    for prefix, module in (("kernel", kernel), ("mean", mean), ("likelihood", likelihood)):
        parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        for name, parameter in parameters.items():
            other = owners.setdefault(id(parameter), f"{prefix}.{name}")
            if parameter.requires_grad and other != f"{prefix}.{name}":
                raise ValueError(
                    f"{other} and {prefix}.{name} are one parameter, and kernel, mean and likelihood are copied apart. Expected "
                    f"parameters of their own, or a fixed one: requires_grad_(False)."
                )


def private_copy(name: str, module: Any) -> Any:
    """A copy of a module, which can be pickled whatever priors gpytorch has set in it.

    Raises:
        ValueError: it holds what cannot be copied, as kernels on grids do after a prediction.
    """
    try:
        return with_named_closures(copy.deepcopy(module))
    except RuntimeError as error:  # torch's, of tensors that have a history
        raise ValueError(
            f"the {name} ({type(module).__name__}) cannot be copied, since it keeps results of earlier calls. Expected one that "
            f"keeps none: make it anew, and load_state_dict() the trained one's values."
        ) from error


def as_tensors(given: Mapping[str, Any], kernel: nn.Module, mean: nn.Module | None, likelihood: nn.Module) -> dict[str, Tensor]:
    """A model's arrays by name, ``train_x`` and ``train_y`` among them, on the device of its kernel.

    Raises:
        ValueError: rows in another order, or parts on different devices.
    """
    device = next((parameter.device for parameter in kernel.parameters()), None)
    check_same_order(given["train_x"], given["train_y"])
    arrays = {name: as_tensor(name, value, device) for name, value in given.items()}
    check_devices(**arrays, kernel=kernel, mean=mean, likelihood=likelihood)
    return arrays


def check_same_order(x: Any, y: Any) -> None:
    """Raises a ``ValueError`` where a frame and a series have the same row labels in another order: rows are taken as they come."""
    if not (hasattr(x, "iloc") and hasattr(y, "iloc")) or len(x) != len(y) or x.index.equals(y.index):
        return
    if set(x.index) == set(y.index):
        raise ValueError(
            "train_x and train_y have the same row labels in another order. Expected rows that belong together: "
            "train_y.loc[train_x.index], or arrays without labels, train_y.to_numpy()."
        )


def names_of(x: Any) -> list[str] | None:
    """Of a frame's columns; ``None`` where they have none."""
    names = list(getattr(x, "columns", ()))
    return names if names and all(isinstance(name, str) for name in names) else None


def check_test_inputs(x: Any, train_x: Tensor, columns: list[str] | None) -> Tensor:
    """Test inputs as a ``(T, D)`` copy that suits the training inputs, of a frame with ``columns`` if those have names.

    Raises:
        TypeError: not numbers.
        ValueError: wrong shape, NaN or infinite values, a gradient asked for, or a frame with other columns, or in another order.
    """
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        raise ValueError(
            "x requires a gradient, and predictions have none in their inputs. Expected x.detach(), or with torch.no_grad(); "
            "acquisition functions that are optimised over x can be had from torchgpmc.integrations.botorch."
        )
    names = names_of(x)
    if columns is not None and names is not None and names != columns:
        raise ValueError(f"x has columns {names} and train_x had {columns}. Expected those, in that order: x[{columns}].")
    return check_inputs("x", x, train_x.dtype, train_x.shape[1]).to(train_x.device)


def warn_of_data(x: Tensor, y: Tensor, mean: Mean | None, likelihood: Any, columns: list[str] | None) -> None:
    """Words on data that a model hardly serves: on the scales of inputs ``(N, D)``, and on targets far from a mean of zero."""
    _warn_of_scales(x, columns)
    _warn_of_offset(y, mean, likelihood)


def _named(columns: list[str] | None, index: Tensor) -> str:
    """Columns ``index`` by their names, or by number."""
    return ", ".join(str(number) if columns is None else repr(columns[number]) for number in index.flatten().tolist())


def _warn_of_scales(x: Tensor, columns: list[str] | None) -> None:
    """A word on columns of the training inputs ``(N, D)`` that say nothing, or whose scales differ by more than a thousand."""
    if len(x) < 2 or x.shape[1] < 2:
        return
    scale = x.std(0)
    flat = scale <= 1e-12 * x.abs().amax(0)
    if bool(flat.any()):
        warn(
            f"train_x: columns [{_named(columns, flat.nonzero())}] are constant and say nothing; lengthscales of their own would "
            f"follow their priors. Drop them."
        )
    scale = torch.where(flat, scale[~flat].median() if bool((~flat).any()) else 1.0, scale)
    if float(scale.max()) > _SCALES * float(scale.min()):
        warn(
            f"train_x: the standard deviation of column {_named(columns, scale.argmin())} is {float(scale.min()):.2g}, that of "
            f"column {_named(columns, scale.argmax())} {float(scale.max()):.2g}. Priors on lengthscales hardly suit both; "
            f"standardise the columns, for instance with sklearn.preprocessing.StandardScaler."
        )


def _warn_of_offset(y: Tensor, mean: Mean | None, likelihood: Any) -> None:
    """A word on targets ``(N,)`` that are f plus noise and far from zero, where f is zero on average a priori."""
    if not (likelihood.is_f_plus_noise and (mean is None or isinstance(mean, ZeroMean)) and y.dim() == 1 and len(y) > 1):
        return
    spread, centre = float(y.std()), float(y.mean())
    if 0 < _OFFSET * spread < abs(centre):
        warn(
            f"train_y: the mean is {centre:.3g} and the standard deviation {spread:.2g}, and f is zero on average a priori. "
            f"Expected targets about zero, (y - y.mean()) / y.std(), or a mean, gpytorch.means.ConstantMean(constant_prior=...)."
        )


def check_targets(y: Any, x: Tensor, likelihood: Any, dtype: torch.dtype) -> Targets:
    """A copy of the targets in ``dtype``: of the likelihood's shape, or with chains first, and values as it wants them.

    A column ``(N, 1)`` is taken for ``(N,)``.

    Raises:
        TypeError: not numbers.
        ValueError: wrong shape, NaN or infinite values, or values outside the set the likelihood describes.
    """
    y = as_tensor("train_y", y, x.device)
    likelihood.check_train_inputs(x)
    shape = tuple(likelihood.target_shape(len(x)))
    if tuple(y.shape) == (*shape, 1):  # of one datum (1, 1) is the same for one chain and for all
        y = y.squeeze(-1)
    one_a_chain = y.dim() == len(shape) + 1
    if tuple(y.shape[one_a_chain:]) != shape:
        raise ValueError(f"train_y has shape {tuple(y.shape)} but train_x has {len(x)} rows. Expected {shape}.")
    _check_finite("train_y", y)
    return Targets(likelihood.validate_targets(_converted("train_y", y, dtype)), one_a_chain)


def unit_and_jitter(jitter: Any, y: Tensor, likelihood: Any) -> tuple[float, float]:
    """The variance by which variances of f are large or small, and the jitter: as given, or a millionth of that.

    The unit is the variance of targets that are f plus noise, 1 where f is a logarithm or a score. With it and priors that go with
    the targets, answers do not depend on what these were measured in.

    Args:
        jitter: a variance, or ``None``.
        y: ``(N,)``, or ``(C, N)`` where every chain has a data set of its own.
        likelihood: says whether y is f plus noise.

    Raises:
        ValueError: a jitter that is no variance, or targets whose squares overflow.
    """
    if jitter is not None and not (is_number(jitter) and 0 <= jitter < math.inf):
        raise ValueError(f"jitter is {jitter!r}. Expected a variance of at least 0, for instance 1e-6, or None.")
    if not likelihood.is_f_plus_noise:
        return 1.0, _JITTER if jitter is None else float(jitter)
    check_squarable("train_y", y)
    unit = _unit_of(y)
    if jitter is None:
        return unit, _JITTER * unit
    lost = 0 < jitter < torch.finfo(y.dtype).eps * y.shape[-1] * unit
    if lost or jitter > unit:
        what = "rounding swallows it, and covariances may have no factor" if lost else "it covers what was measured"
        warn(
            f"jitter is {jitter:g} and the targets' variance {unit:.3g}: {what}. Expected a small part of that variance: "
            f"leave jitter out, which is 1e-6 of it then."
        )
    return unit, float(jitter)


def _unit_of(y: Tensor) -> float:
    """The variance of targets, of several data sets on average; of targets all alike their square, and one where they are zero.

    Sums are exact, so that machines agree to the last bit, as files of draws need.

    Example:
        >>> _unit_of(torch.tensor([1.0, 3.0])), _unit_of(torch.tensor([3.0, 3.0])), _unit_of(torch.zeros(2))
        (1.0, 9.0, 1.0)
    """
    sets = y.double().reshape(-1, y.shape[-1])
    variance, square = _mean([_variance(row) for row in sets.tolist()]), _mean(sets.flatten().square().tolist())
    return variance if variance > torch.finfo(sets.dtype).eps * square else square or 1.0


def _variance(numbers: list[float]) -> float:
    mean = _mean(numbers)
    return _mean([(number - mean) ** 2 for number in numbers])


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def check_inducing_points(inducing_points: Tensor, num_data: int) -> None:
    """Warns of inducing points ``(M, D)`` that coincide.

    Raises:
        ValueError: more of them than data.
    """
    count = len(inducing_points)
    if count > num_data:
        raise ValueError(
            f"inducing_points has {count} rows and train_x has {num_data}. Expected at most as many as data; take fewer, or "
            f"torchgpmc.GP, which is exact and no dearer then."
        )
    distinct = len(torch.unique(inducing_points, dim=0))
    if distinct < count:
        warn(
            f"{count - distinct} of {count} inducing points coincide with others: they add cost and no information, and jitter "
            f"alone keeps their covariance from being singular. torchgpmc.kmeans_inducing_points gives distinct ones.",
            UserWarning,
        )


def _check_finite(name: str, tensor: Tensor, columns: list[str] | None = None) -> None:
    if tensor.is_complex():
        raise ValueError(f"{name} is complex. Expected real numbers.")
    lost = ~torch.isfinite(tensor)
    if not bool(lost.any()):
        return
    first, remedy = lost.nonzero()[0], "drop or impute those rows"
    where = f"row {int(first[0])}"
    if len(first) == 2 and tensor.shape[1] > 1:
        where += f", column {_named(columns, first[1])}"
        empty = lost.all(0).nonzero()
        remedy += f", or the columns that hold nothing else ({_named(columns, empty)})" if len(empty) else ""
    raise ValueError(
        f"{name} has {int(lost.sum())} NaN or infinite values, the first in {where}. Expected finite numbers; {remedy}."
    )


def check_devices(**parts: Tensor | nn.Module | None) -> None:
    """Checks that tensors and the parameters of modules share one device.

    Raises:
        ValueError: they do not; the message lists who is where.
    """
    devices: dict[str, torch.device] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            devices[name] = part.device
        elif isinstance(part, nn.Module):
            devices.update({f"{name}.{leaf}": parameter.device for leaf, parameter in part.named_parameters()})
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"the model's parts are on different devices: {listing}. Expected one device; move them with .to(device).")
