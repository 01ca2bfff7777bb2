"""A pretended second device, for machines without one: its tensors refuse to meet the CPU's, as CUDA's do.

Values are worked out on the CPU, so that what depends on data runs as it would. The device calls itself "meta", the only type
beside "cpu" that every build of torch lets autograd run on. What would make CUDA wait for the host, or the host for it, is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
CPU = torch.device("cpu")

# What CUDA takes from the CPU beside its own tensors: sources of copies, indices, and single numbers of the operations below.
_ANY_FROM_CPU = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_NUMBERS_FROM_CPU = ("aten::fill_", "aten::fill", "aten::masked_fill", "aten::masked_fill_", "aten::_local_scalar_dense")
# Operations whose result's size, or error, the host must know.
_WAITS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    *("repeat_interleave", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_lstsq", "is_nonzero"),
)


class Pretended(torch.Tensor):
    """A tensor that says it is elsewhere; ``inner`` holds its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @property
    def data(self) -> Pretended:
        return Pretended(self.inner)

    @data.setter
    def data(self, other: Pretended) -> None:
        assert other.shape == self.shape and other.dtype == self.dtype
        self.inner = other.inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)  # files are read with map_location="cpu"

    def __repr__(self) -> str:
        return f"Pretended({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise RuntimeError(f"{operation} outside `with pretended_device()`")


class Generator(torch.Generator):
    """A generator of the CPU's that remembers the device it was asked for."""

    def __new__(cls, device: Any = CPU) -> Generator:
        made = super().__new__(cls)
        made.where = torch.device(device)
        return made

    def __init__(self, device: Any = CPU):
        super().__init__()

    @property
    def device(self) -> torch.device:
        return self.where


class _Facts(NamedTuple):
    """What the schema of an operation says."""

    name: str
    written: tuple[tuple[int, str], ...]  # places and names of arguments that are written to
    any_from_cpu: bool
    numbers_from_cpu: bool


@lru_cache(None)
def _facts(operation: Any) -> _Facts:
    schema = operation._schema
    name = schema.name
    written = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    pointwise = torch.Tag.pointwise in operation.tags
    return _Facts(name.removeprefix("aten::"), written, name in _ANY_FROM_CPU, pointwise or name in _NUMBERS_FROM_CPU)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_mapped(function, part) for part in value) if isinstance(value, list | tuple) else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Dispatch(TorchDispatchMode):
    """Carries out every operation on the tensors inside, once it is one that CUDA would carry out."""

    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        facts = _facts(operation)
        tensors = list(_tensors((*args, *kwargs.values())))
        here = any(isinstance(tensor, Pretended) for tensor in tensors)
        asked = kwargs.get("device")
        target = (DEVICE if here else CPU) if asked is None else torch.device(asked)
        self._count(facts, tensors, here, target)
        if here:
            _refuse_strangers(operation, facts, args, tensors)
        if asked is not None:
            kwargs = {**kwargs, "device": CPU}
        out = operation(*(_mapped(_inner, a) for a in args), **{name: _mapped(_inner, a) for name, a in kwargs.items()})
        if facts.written:
            if here and torch.Tag.inplace_view in operation.tags:
                with no_dispatch():
                    operation(*args, **kwargs)  # another shape for the wrapper too
            written = [args[place] if place < len(args) else kwargs[name] for place, name in facts.written]
            return written[0] if len(written) == 1 else (type(out)(written) if isinstance(out, tuple) else out)
        return _mapped(Pretended, out) if target == DEVICE and facts.name != "_local_scalar_dense" else out

    def _count(self, facts: _Facts, tensors: list[torch.Tensor], here: bool, target: torch.device) -> None:
        copied = facts.name in ("_to_copy", "copy_") and len(tensors) > 0
        crosses = copied and (here != (target == DEVICE) or len({type(tensor) for tensor in tensors}) > 1)
        if crosses or (here and (facts.name in _WAITS or _by_mask(facts.name, tensors))):
            self.waits[facts.name] += 1


def _by_mask(name: str, tensors: list[torch.Tensor]) -> bool:
    """Whether an index is a mask, whose rows must be counted; one number is put by mask without counting."""
    if name == "index":
        return any(tensor.dtype == torch.bool for tensor in tensors[1:])
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        return tensors[-1].numel() != 1 and any(tensor.dtype == torch.bool for tensor in tensors[1:-1])
    return False


def _refuse_strangers(operation: Any, facts: _Facts, args: Any, tensors: list[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Pretended):
            continue
        if facts.any_from_cpu and (index > 0 or facts.name in ("copy_", "_to_copy")):
            continue
        if tensor.dim() == 0 and facts.numbers_from_cpu:
            continue
        raise RuntimeError(f"{operation}: a CPU tensor of shape {tuple(tensor.shape)} meets tensors of the pretended device")


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Pretended) else tensor


class _Functions(TorchFunctionMode):
    """What torch decides before it dispatches: tensors from Python's numbers, generators, ``.data``, ``.numpy()``."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and "device" in kwargs:
            device = kwargs["device"]
            made = function(*args, **{**kwargs, "device": None})
            return made if device is None else made.to(device)
        if function in (torch.Tensor.new_tensor,):
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **kwargs}).to(args[0].device)
        if function is torch.Tensor.numpy and isinstance(args[0], Pretended):
            raise TypeError("can't convert a tensor of the pretended device to numpy. Use .cpu() first")
        if function is torch.Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].detach().cpu().tolist()
        out = function(*args, **kwargs)
        generator = kwargs.get("generator")
        if isinstance(generator, Generator) and isinstance(out, torch.Tensor) and out.device != generator.device:
            raise RuntimeError(f"{function.__name__}: a generator on {generator.device} was asked for numbers on {out.device}")
        return out


@contextmanager
def pretended_device() -> Iterator[Counter[str]]:
    """Within this :data:`DEVICE` may be used as a CUDA device would be; yields how often the host waited, by operation."""
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # how modules take up tensors of another class
    waits: Counter[str] = Counter()
    try:
        with mock.patch.object(torch, "Generator", Generator), _Functions(), _Dispatch(waits):
            yield waits
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
