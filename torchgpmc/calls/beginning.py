"""What a run begins around: a variational fit, or the draws of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchgpmc.models.gp_model import GPModel
from torchgpmc.posterior import Posterior
from torchgpmc.runs.drawn_start import DrawnStart, drawn_start
from torchgpmc.runs.run import Method, MethodOptions, Settings
from torchgpmc.variational import Start


def begun_at(start: Any, model: GPModel, method: Method, settings: Settings) -> Settings:
    """``settings`` with a start.

    Args:
        start: a :class:`Start`, or a posterior of ``model``.
        model: to be sampled.
        method: that is to begin there.
        settings: of the run.

    Raises:
        TypeError: neither.
        ValueError: of another model, or of no use to the method.
    """
    if not isinstance(start, Start | Posterior):
        raise TypeError(
            f"start is {type(start).__name__}. Expected what torchgpmc.initialize(model) returns, a posterior of this model, or "
            f"None."
        )
    name = type(method).__name__
    if isinstance(start, Start):
        if not (isinstance(method, MethodOptions) and method.takes_start):
            raise ValueError(
                f"{name} cannot begin at a start. Expected torchgpmc.NUTS(), HMC(), ChEES() or Gibbs(), or start=None."
            )
        start.check(model)
        return settings._replace(start=start)
    if not (isinstance(method, MethodOptions) and method.takes_draws):
        raise ValueError(
            f"{name} cannot begin at a posterior's draws. Expected torchgpmc.NUTS(), HMC() or ChEES() on theta alone, or AMIS(); "
            f"or start=torchgpmc.initialize(model)."
        )
    return settings._replace(draws=drawn_start(start, model))


def draws_for_engines(start: Posterior, model: GPModel, methods: Sequence[MethodOptions]) -> DrawnStart:
    """Where engines of a default call begin, those of them that can.

    Raises:
        ValueError: none can, or the posterior is of another model, or of too few draws.
    """
    if all(method.at_draws(model) is None for method in methods):
        raise ValueError(
            f"start= is a posterior, whose draws of theta runs on theta alone begin at, and the default call samples this model by "
            f"{' or '.join(type(method).__name__ for method in methods)} of [theta, v]. Expected start=None, or "
            f"start=torchgpmc.initialize(model)."
        )
    return drawn_start(start, model)
