"""gpytorch modules as pure functions of their constrained parameters, at C settings at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from gpytorch.constraints import Interval
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.func import functional_call

from torchgpmc.checks import warn

_MAX_NESTING = 8


def public_name(raw_name: str) -> str:
    """The user's name of a gpytorch parameter: the dotted path without ``raw_``.

    Example:
        >>> public_name("base_kernel.raw_lengthscale")
        'base_kernel.lengthscale'
    """
    path, _, leaf = raw_name.rpartition(".")
    leaf = leaf.removeprefix("raw_")
    return f"{path}.{leaf}" if path else leaf


def constraint_of(module: nn.Module, leaf: str) -> Interval | None:
    """The gpytorch constraint of parameter ``leaf`` of ``module``, if any."""
    finder = getattr(module, "constraint_for_parameter_name", None)
    return finder(leaf) if finder is not None else None


def parameters_with_owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Dotted raw name, owning module and attribute name of every parameter below ``module``, each once."""
    for name, _ in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        yield name, module.get_submodule(path), leaf


def perturbed_values(module: nn.Module, count: int) -> dict[str, Tensor]:
    """Different settings of every parameter, constrained; the first and the last are the same for any ``count`` from 2.

    They lie far apart, so that a module shows whether it looks at all settings before it does something of each.
    """
    values = {}
    for name, owner, leaf in parameters_with_owners(module):
        raw = getattr(owner, leaf).detach()
        shifts = torch.linspace(1.4, -1.6, count).to(raw).view(-1, *[1] * raw.dim())
        constraint = constraint_of(owner, leaf)
        values[name] = raw + shifts if constraint is None else constraint.transform(raw + shifts)
    return values


def probing_counts(x: Tensor) -> set[int]:
    """Numbers of settings to try a module at: as many as rows, or as columns, are where a lost batch dimension broadcasts."""
    return {2, *x.shape, max(x.shape) + 1} - {1}


class _Call(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[Any], Any], seen: Any) -> Any:
        return function(seen)


class PureModule:
    """A private copy of a gpytorch module that is evaluated at given *constrained* parameter values.

    The copy's constraints pass values through unchanged, so a value is what ``module.lengthscale`` returns while
    ``function`` runs; the user's module is never written to.

    Args:
        module: a kernel, mean or likelihood; copied.
        seen_as: what functions are given in place of the copy, made from it once.
    """

    def __init__(self, module: nn.Module, seen_as: Callable[[nn.Module], Any] | None = None):
        evaluated = copy.deepcopy(module)
        for part in evaluated.modules():
            if isinstance(part, Interval):
                part._transform = None  # gpytorch: a constraint without transform is not enforced
        for parameter in evaluated.parameters():
            parameter.requires_grad_(False)
        self._call = _Call(evaluated)
        # Looking for parameters that submodules share takes as long as a small likelihood itself.
        names, all_names = (len(list(evaluated.named_parameters(remove_duplicate=unique))) for unique in (True, False))
        self._is_tied = names < all_names
        self._seen = evaluated if seen_as is None else seen_as(evaluated)
        self._lock = threading.RLock()

    def __call__(self, values: Mapping[str, Tensor], function: Callable[[Any], Any]) -> Any:
        """``function(module)`` with the parameters in ``values`` (dotted raw name -> constrained value) put in place."""
        if not values:
            return function(self._seen)
        with self._lock:  # for as long as the call lasts the values stand in the one module that all threads see
            placed = {f"module.{name}": value for name, value in values.items()}
            return functional_call(self._call, placed, (function, self._seen), tie_weights=self._is_tied)


def check_same_at_own_values(name: str, module: nn.Module, function: Callable[[Any], Tensor]) -> None:
    """Checks that a module says the same whether it holds its parameters or these are put in place, constrained, as chains do.

    Args:
        name: of the module, for the message.
        module: any of gpytorch's, or a user's own; copied.
        function: what is asked of it.

    Raises:
        ValueError: it reads raw parameters, or answers otherwise each time.
    """
    values = {}
    for raw, owner, leaf in parameters_with_owners(module):
        constraint = constraint_of(owner, leaf)
        value = getattr(owner, leaf).detach()
        values[raw] = value if constraint is None else constraint.transform(value)
    pure = PureModule(module)
    with torch.no_grad():
        pure({name: value[0] for name, value in perturbed_values(module, 2).items()}, function)  # something to remember
        own, placed = function(copy.deepcopy(module)).detach(), pure(values, function).detach()
    size = own[torch.isfinite(own)].abs().max() if bool(torch.isfinite(own).any()) else 0.0
    if own.shape != placed.shape or not torch.allclose(own, placed, rtol=1e-4, atol=1e-5 * float(size), equal_nan=True):
        raise ValueError(
            f"{name} answers in two ways at the values that its parameters have. Expected one answer a value: read parameters "
            f"through their constraint, self.raw_x_constraint.transform(self.raw_x), not by a softplus or exp of your own; draw no "
            f"random numbers (dropout, weights drawn at the first call), and keep nothing between calls."
        )


def warn_unseen(name: str, parameters: list[str]) -> None:
    """Says that autograd does not see parameters: a gradient of zero ends fits where they begin, and slows chains down."""
    warn(
        f"{name} has no derivative in {', '.join(parameters)}. Expected torch operations throughout, without numpy, .detach() or "
        f"no_grad(); as it is, fits stay where they begin, and Slice() or AdaptiveMH() serve better than methods on gradients.",
        UserWarning,
    )


def convert_distribution(distribution: Distribution, dtype: torch.dtype, device: torch.device) -> Any:
    """A copy of a distribution, or gpytorch prior, whose every number lives in ``dtype`` on ``device``.

    ``Module.to`` is not enough: the base distributions inside ``HalfCauchyPrior`` or ``LogNormalPrior`` and the limits of
    ``UniformPrior`` are plain attributes and would stay float32. Argument checks are switched off in the copy, because a draw
    that underflows to the edge of its support has log density -inf rather than being an error.

    Args:
        distribution: copied, not changed.
        dtype: floating type of the answer of ``log_prob``.
        device: where it lives.
    """
    converted = copy.deepcopy(distribution)
    _convert_attributes(converted, dtype, device, 0)
    return converted


def _convert_attributes(owner: Any, dtype: torch.dtype, device: torch.device, depth: int) -> None:
    if depth > _MAX_NESTING:
        return
    stores = [vars(owner)]
    if isinstance(owner, nn.Module):
        stores += [owner._buffers, owner._modules]
    for store in stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                store[name] = value.detach().to(device=device, dtype=dtype)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Distribution | Transform):
                    _convert_attributes(part, dtype, device, depth + 1)
    if isinstance(owner, Distribution):
        vars(owner)["_validate_args"] = False
