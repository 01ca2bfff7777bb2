"""About how long engines take on this machine, before they begin."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torchgpmc.calls.candidate import Candidate, described
from torchgpmc.calls.chain_engines import CHAINS_MAY_TAKE_LONG
from torchgpmc.calls.engines import candidates
from torchgpmc.calls.stand_ins import sampled_in_place_of
from torchgpmc.calls.units import warn_of_unit
from torchgpmc.calls.weighted_engines import operations_of_estimate
from torchgpmc.checks import warn
from torchgpmc.models import GPModel, checked_model

_MAY_TAKE_LONG = 2e8  # operations an estimate: below, a run is soon done, and not timed before it begins
_LONG = 60.0  # seconds
_SHARE_OF_TIMING, _SHORT = 0.02, 40.0  # of a call, after which no engine is timed; seconds of a call that counts for as much


def explain(model: GPModel) -> str:
    """Which engines ``sample(model)`` tries, in which order and why, and about how long each takes here.

    Seconds are those of a few gradients and estimates, timed now, times as many as the searches, the warm-up and the draws of a run
    that goes well take; of chains in white coordinates that come first those of their first transitions. Engines after the one that
    is likely to serve are timed while all of it takes about two seconds, or a twentieth of the call.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> print(tg.explain(model))  # doctest: +ELLIPSIS
        1. AMIS(...): the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up. About ... seconds.
        2. ...
        sample(model) takes the first whose draws pass their own checks: about ...
    """
    warn_of_unit(checked_model(model))
    engines = candidates(sampled_in_place_of(model))
    forecasts = foretold(engines)
    told = (f"{described(engine)}: {engine.why} {forecast.words}" for engine, forecast in zip(engines, forecasts, strict=True))
    lines = [f"{number}. {line}" for number, line in enumerate(told, 1)]
    return "\n".join([*lines, f"sample(model) takes the first whose draws pass their own checks: {_of_call(engines, forecasts)}."])


class Forecast(NamedTuple):
    """About how long an engine takes, in numbers and words."""

    seconds: float | None  # None where it was not timed
    words: str


def foretold(engines: Sequence[Candidate]) -> list[Forecast]:
    """Of each, those after the one that is likely to serve while there is time."""
    began = time.perf_counter()
    first = _forecast(engines[0], is_first=True)
    known = {_kind(engines[0]): first}
    most = _SHARE_OF_TIMING * max(_SHORT, first.seconds or 0.0)
    for number, engine in enumerate(engines):
        if _kind(engine) not in known:
            is_late = time.perf_counter() - began > most and not all(before.only_begins for before in engines[:number])
            known[_kind(engine)] = Forecast(None, "Not timed.") if is_late else _forecast(engine, is_first=False)
    return [known[_kind(engine)] for engine in engines]


def _kind(engine: Candidate) -> Hashable:
    """The same for engines that differ in their random numbers, or in what may have come before."""
    return described(engine), engine.warmup_steps, engine.start


def _forecast(engine: Candidate, *, is_first: bool) -> Forecast:
    try:
        seconds = engine.seconds() if is_first or engine.roughly is None else engine.roughly()
    except ValueError as error:
        return Forecast(0.0, f"It fails here: {error}")
    return Forecast(seconds, f"About {_duration(seconds)}.")


def _of_call(engines: Sequence[Candidate], forecasts: Sequence[Forecast]) -> str:
    """From the engine that most likely serves to all of them."""
    told = enumerate(zip(engines, forecasts, strict=True), 1)
    serves = next((number for number, (engine, forecast) in told if forecast.seconds and not engine.only_begins), None)
    if serves is None:
        return "how long that takes is not known"
    least, most = (sum(forecast.seconds or 0.0 for forecast in forecasts[:number]) for number in (serves, len(engines)))
    if serves == len(engines):
        return f"about {_duration(least)}"
    all_timed = all(forecast.seconds is not None for forecast in forecasts)
    others = f"up to {_duration(most)} if all are needed" if all_timed else "longer if others are needed"
    return f"about {_duration(least)} if that is engine {serves}, {others}"


def warn_of_time(model: GPModel, candidate: Candidate) -> None:
    """Says what an engine will cost before it begins, where that may be minutes."""
    if operations_of_estimate(model) < (_MAY_TAKE_LONG if candidate.num_chains is None else CHAINS_MAY_TAKE_LONG):
        return
    try:
        seconds = candidate.seconds()
    except ValueError:  # it has its turn to say so
        return
    if seconds > _LONG:
        warn(
            f"{described(candidate)} will take about {_duration(seconds)} here, if it goes well (hyperparameters: "
            f"{model.layout.size}, latent functions: {model.num_latents}, points: {len(model.latent_inputs)}). A SparseGP with "
            f"fewer inducing points, or fewer rows, takes less."
        )


def _duration(seconds: float) -> str:
    """To two digits, in minutes from two of them on.

    Example:
        >>> _duration(0.4711), _duration(99.6), _duration(254.0)
        ('0.47 seconds', '100 seconds', '4.2 minutes')
    """
    number, unit = (seconds, "seconds") if seconds < 120 else (seconds / 60, "minutes")
    return f"{number:.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"
