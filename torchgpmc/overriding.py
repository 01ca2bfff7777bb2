"""Whether what is written out for a class still serves a subclass, which may have redefined what it is written out for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def keeps_methods(kind: type, base: type, names: tuple[str, ...]) -> bool:
    """Whether a class has the methods ``names`` as its ``base`` has them.

    Example:
        >>> class Rounded(float):
        ...     def __abs__(self):
        ...         return round(super().__abs__())
        >>> keeps_methods(Rounded, float, ("hex",)), keeps_methods(Rounded, float, ("hex", "__abs__"))
        (True, False)
    """
    return all(getattr(kind, name) is getattr(base, name) for name in names)


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
