"""Whether what is written out for a class still serves a subclass, which may have redefined what it is written out for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

Methods = Mapping[str, Callable[..., Any]]


def methods_of(kind: type, names: tuple[str, ...]) -> Methods:
    """What the methods ``names`` of a class are now, by name; taken where the class is defined."""
    return {name: getattr(kind, name) for name in names}


def keeps_methods(owner: Any, methods: Methods) -> bool:
    """Whether a class or an object has these methods still, none redefined by a subclass or set on the object or the class.

    Example:
        >>> class Rounded(float):
        ...     def __abs__(self):
        ...         return round(super().__abs__())
        >>> keeps_methods(Rounded, methods_of(float, ("hex",))), keeps_methods(Rounded, methods_of(float, ("hex", "__abs__")))
        (True, False)
    """
    found = {name: getattr(owner, name) for name in methods}
    return all(getattr(found[name], "__func__", found[name]) is method for name, method in methods.items())


@lru_cache(maxsize=64)
def is_newest(kind: Any, closed_form: str, definitions: tuple[str, ...]) -> bool:
    """Whether no class below the one that has the ``closed_form`` has redefined one of the ``definitions`` it is a form of.

    Example:
        >>> class Density:
        ...     def value(self): ...
        ...     def slope(self): ...
        >>> class Another(Density):
        ...     def value(self): ...
        >>> is_newest(Density, "slope", ("value",)), is_newest(Another, "slope", ("value",))
        (True, False)
    """
    owner = _defining_class(kind, closed_form)
    defined = [found for name in definitions if (found := _defining_class(kind, name)) is not None]
    return owner is not None and all(issubclass(owner, definition) for definition in defined)


def _defining_class(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in vars(base)), None)
