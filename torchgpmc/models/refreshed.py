"""Modules that hold more than is saved of them: what follows from their parts is made anew wherever these may have changed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from typing_extensions import Self


class RefreshedModule(nn.Module):
    """A module some of whose attributes follow from its parts: made by :meth:`refresh`, and never saved.

    They are made anew after ``.to()`` and its kin, copying, unpickling and loading, of a larger module that this is a part of too.
    """

    derived: ClassVar[tuple[str, ...]] = ()  # names of the attributes that refresh makes

    def refresh(self) -> None:
        """Makes what is derived from what the module now holds."""
        raise NotImplementedError(f"{type(self).__name__} must define refresh()")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's."""
        result = super().load_state_dict(*args, **kwargs)
        self.refresh()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()  # a larger module loads its parts by this alone
