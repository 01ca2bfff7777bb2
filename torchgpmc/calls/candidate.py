"""An engine of the default call with what it may spend, and how it is put in words."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torchgpmc.diagnostics import MAX_ESTIMATE_VARIANCE
from torchgpmc.runs.run import MethodOptions
from torchgpmc.variational import Start


def no_start(**limits: Any) -> None:
    """Chains begin around no fit."""


class Candidate(NamedTuple):
    """An engine with what it may spend, for a default call.

    Args:
        method: the engine.
        why: it is tried at this place, in words.
        num_chains: ``None`` where it has none.
        warmup_steps: ``None`` where it has none.
        every: draws a chain between two looks at what they are worth.
        most: draws a chain, at most.
        budget: evaluations, at most.
        seconds: works out about how long a run that goes well takes here.
        start: makes what the chains begin around; with limits of :func:`torchgpmc.initialize`, roughly.
        patience: share of its draws before uneven weights end it; by default it has the second batch of :class:`AMIS`.
        is_dearer: whether it is the one before with more draws an estimate, or begun further off: not tried if that came to none.
        most_noise: relative variance of evidence estimates, at most, less where one that follows has better ones.
        is_for_noise: whether it is the one before with better estimates: not tried unless that one's were too noisy.
        goes_on: whether its chains, or its first proposal, begin at the draws of the engine before, if these are of any use.
    """

    method: MethodOptions
    why: str
    num_chains: int | None
    warmup_steps: int | None
    every: int
    most: int
    budget: float
    seconds: Callable[[], float]
    start: Callable[..., Start | None] = no_start
    patience: float = 0.2
    is_dearer: bool = False
    most_noise: float = MAX_ESTIMATE_VARIANCE
    is_for_noise: bool = False
    goes_on: bool = False

    def with_chains(self, num_chains: int | None, warmup_steps: int | None) -> Candidate:
        """The same with the user's numbers, where there are any."""
        return self._replace(
            num_chains=self.num_chains if num_chains is None else num_chains,
            warmup_steps=self.warmup_steps if warmup_steps is None else warmup_steps,
        )


def described(candidate: Candidate) -> str:
    """The method as one would type it, and its chains."""
    chains = "" if candidate.num_chains is None else f" with {candidate.num_chains} chains"
    return f"{as_typed(candidate.method)}{chains}"


def as_typed(method: Any) -> str:
    """``NUTS(whitening=Laplace())``: a frozen dataclass with the options that are not its defaults.

    Example:
        >>> from torchgpmc import NUTS, Laplace
        >>> as_typed(NUTS(whitening=Laplace(), max_tree_depth=10))
        'NUTS(whitening=Laplace())'
    """
    fields: dict[str, Any] = getattr(method, "__dataclass_fields__", {})
    given = {name: getattr(method, name) for name, field in fields.items() if getattr(method, name) != field.default}
    options = (f"{name}={_value_as_typed(value)}" for name, value in given.items())
    return f"{type(method).__name__}({', '.join(options)})"


def _value_as_typed(value: Any) -> str:
    if hasattr(value, "__dataclass_fields__"):
        return as_typed(value)
    return str(value) if isinstance(value, Enum) else repr(value)
