"""The device beside the CPU that these tests are about: a pretended one, or the GPU that ``--device`` names.

A real one draws its random numbers on the CPU, so that its runs may be held against the CPU's draw by draw; waits are counted by
what CUDA says of itself.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.device import pretended

DEVICE = pretended.DEVICE
# What torch.distributions calls.
_BY_THE_GLOBAL_GENERATOR = ("normal", "rand", "randn", "bernoulli", "poisson", "_standard_gamma", "_sample_dirichlet")
_OF_ANY_SIGN = ("linalg_eigh", "linalg_qr")  # vectors, along which some methods draw
_SYNCHRONISES = "called a synchronizing CUDA operation"


def use(name: str) -> None:
    """Before tests are collected, which take :data:`DEVICE` when they are imported."""
    global DEVICE
    if name != "cpu":
        DEVICE = torch.empty(0, device=name).device  # with its index, as tensors have it


def is_real() -> bool:
    return DEVICE.type != pretended.DEVICE.type


def other_device() -> AbstractContextManager[Any]:
    """Within this :data:`DEVICE` may be used; yields how often the host waited, with ``clear()`` and ``total()``."""
    return _real_device() if is_real() else pretended.pretended_device()


class _OnTheCPU(TorchFunctionMode):
    """Random numbers, and signs of vectors, are the CPU's wherever they are asked for; moving them is no wait of the package's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, generator = getattr(function, "__name__", ""), kwargs.get("generator")
        if name in _OF_ANY_SIGN:
            return self._there(function, args, kwargs, args[0].device)
        ours = isinstance(generator, pretended.Generator)
        if not ours and (generator is not None or name not in _BY_THE_GLOBAL_GENERATOR):
            return function(*args, **kwargs)
        first = next((argument for argument in args if isinstance(argument, Tensor)), None)
        target = torch.empty(0, device=kwargs.get("device") or ("cpu" if first is None else first.device)).device
        if ours and generator.device != target:
            raise RuntimeError(f"{name}: a generator on {generator.device} was asked for numbers on {target}")
        found = self._there(function, args, {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs, target)
        return args[0].copy_(found) if name.endswith("_") else found

    def _there(self, function, args, kwargs, target):
        """Worked out on the CPU, its results on the target."""
        if target.type == "cpu":
            return function(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("default")
        here = [argument.cpu() if isinstance(argument, Tensor) else argument for argument in args]
        found = function(*here, **kwargs)
        found = found.to(target) if isinstance(found, Tensor) else type(found)(part.to(target) for part in found)
        torch.cuda.set_sync_debug_mode("warn")
        return found


class _Waits(Counter[str]):
    """Synchronisations of CUDA, as it warns of them."""

    def warned(self, message: Any, *_: Any, **__: Any) -> None:
        if _SYNCHRONISES in str(message):
            self["synchronisation"] += 1


@contextmanager
def _real_device() -> Iterator[_Waits]:
    waits = _Waits()
    with warnings.catch_warnings(), mock.patch.object(torch, "Generator", pretended.Generator), _OnTheCPU():
        warnings.filterwarnings("always", message=_SYNCHRONISES)
        warnings.showwarning = waits.warned
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
