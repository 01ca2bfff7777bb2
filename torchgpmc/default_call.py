"""What ``sample`` does without a method: engines in turn, each until its draws are good or what it may spend is spent."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchgpmc.checks import warn
from torchgpmc.diagnostics import MAX_ESTIMATE_VARIANCE, estimate_noise
from torchgpmc.importance import truncated_log_weights
from torchgpmc.posterior import Posterior
from torchgpmc.recommend import Candidate, as_typed, described
from torchgpmc.storage.checkpoint import CheckpointError
from torchgpmc.weights import kish_effective_size

# After a fifth of its draws (the second batch of AMIS), an engine that heads for less than a third of what is wanted.
_HOPELESS_SHARE, _HOPELESS = 0.2, 3.0


class Rule(NamedTuple):
    """Whether a run may end: its draws are good, its budget is spent, or its weights have collapsed.

    A function of the draws and of counts alone, never of the clock: a seed gives the same draws on any machine, and a run that is
    resumed ends where it would have ended.

    Args:
        wanted: effective draws of the quantity that has fewest.
        every: draws a chain between two looks.
        most: draws a chain that the run makes at most.
        budget: evaluations.
    """

    wanted: int
    every: int
    most: int
    budget: float

    def __call__(self, num_kept: int, num_evaluations: float, so_far: Callable[[], Posterior]) -> bool:
        """Whether to end after ``num_kept`` draws a chain; ``so_far`` makes a posterior of them."""
        if num_evaluations >= self.budget:
            return True
        if not num_kept or num_kept % self.every:
            return False
        posterior = so_far()
        return is_good(posterior, self.wanted) or self._is_hopeless(posterior)

    def _is_hopeless(self, posterior: Posterior) -> bool:
        """Of weighted draws: more of them will hardly do.

        A single draw far out may weigh as much as all others, and the next proposals reach there: it is cut. Noise of estimates is
        not learned away.
        """
        weights, share = posterior.log_weights, posterior.num_draws / self.most
        if weights is None or share < _HOPELESS_SHARE:
            return False
        size = kish_effective_size(truncated_log_weights(weights))
        return _HOPELESS * size < share * self.wanted or estimate_noise(posterior.stats, weights) > MAX_ESTIMATE_VARIANCE


def is_good(posterior: Posterior, wanted: int) -> bool:
    """Whether nothing speaks against the draws, and they are worth ``wanted``."""
    return posterior.effective_size() >= wanted and not posterior.complaints()


def _was_short(posterior: Posterior, wanted: int) -> bool:
    """Whether twice as many weighted draws will do: then another engine, from its start, costs more."""
    return posterior.log_weights is not None and not posterior.complaints() and 2 * posterior.effective_size() >= wanted


class Trial(NamedTuple):
    """One engine's turn."""

    candidate: Candidate
    posterior: Posterior | None
    seconds: float
    verdict: str
    heard: list[warnings.WarningMessage]  # while it ran

    def described(self) -> dict[str, Any]:
        """Plain words and numbers, for ``posterior.info["tried"]``."""
        evaluations = 0.0
        if self.posterior is not None:
            # Engines without trajectories make one estimate a draw.
            evaluations = self.posterior.info["num_evaluations"] or float(self.posterior.stats["lp"].numel())
        return {
            "engine": described(self.candidate),
            "seconds": self.seconds,
            "evaluations": evaluations,
            "verdict": self.verdict,
        }


def sample_by_default(engines: Sequence[Candidate], wanted: int, run: Callable[[int, Candidate, Rule], Posterior]) -> Posterior:
    """The posterior of the first engine whose draws are good, or of the one that came nearest, after a warning.

    Args:
        engines: in order.
        wanted: effective draws.
        run: engine number, engine and rule to its posterior.

    Raises:
        ValueError: no engine gave any draws.
        KeyboardInterrupt: interrupted before there were any.
    """
    trials: list[Trial] = []
    engines = list(engines)
    for number, engine in enumerate(engines):
        rule = Rule(wanted, engine.every, engine.most, engine.budget)
        try:
            trials.append(_tried(engine, wanted, partial(run, number, engine, rule)))
        except KeyboardInterrupt:
            if not any(trial.posterior for trial in trials):
                raise
            warn(f"interrupted: {described(engine)} had no draws yet; those of an engine tried before are returned.")
            return _result(trials, _best(trials), interrupted=True)
        last = trials[-1].posterior
        if last is not None and (is_good(last, wanted) or last.info["interrupted"]):
            return _result(trials, trials[-1])
        if last is not None and _was_short(last, wanted):
            engines.insert(number + 1, engine._replace(most=2 * engine.most))
    best = _best(trials)
    warn(_what_was_tried(trials, best, wanted))
    return _result(trials, best)


def _tried(engine: Candidate, wanted: int, run: Callable[[], Posterior]) -> Trial:
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            posterior = run()
        except CheckpointError:
            raise  # the call's fault, not the engine's
        except ValueError as error:
            return Trial(engine, None, time.perf_counter() - began, str(error), heard)
    seconds = max(time.perf_counter() - began, posterior.info["seconds"])  # one that was resumed has been at it before
    verdict = posterior.verdict()
    if not posterior.complaints() and posterior.effective_size() < wanted:
        verdict = f"Too few: {posterior.effective_size():.0f} effective draws, and {wanted} were wanted."
    return Trial(engine, posterior, seconds, verdict, heard)


def _best(trials: Sequence[Trial]) -> Trial:
    """The one with the most effective draws.

    Raises:
        ValueError: none has draws.
    """
    worth = [-1.0 if trial.posterior is None else trial.posterior.effective_size() for trial in trials]
    if max(worth) < 0:
        raise ValueError(f"no draws could be had. {_list_of(trials)} Expected draws from one of them; {_how_to_go_on(trials[-1])}")
    return trials[worth.index(max(worth))]


def _result(trials: Sequence[Trial], chosen: Trial, *, interrupted: bool = False) -> Posterior:
    """The posterior of one trial, with what was tried; what was said while it ran is said now, at the caller's line."""
    for message in chosen.heard:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
    posterior = chosen.posterior
    assert posterior is not None
    posterior.info["tried"] = [trial.described() for trial in trials]
    posterior.info["interrupted"] = interrupted or posterior.info["interrupted"]
    return posterior


def _list_of(trials: Sequence[Trial]) -> str:
    words = "; ".join(f"{described(trial.candidate)}, {trial.seconds:.0f} s: {trial.verdict.rstrip('.')}" for trial in trials)
    return f"Tried: {words}."


def _what_was_tried(trials: Sequence[Trial], best: Trial, wanted: int) -> str:
    return (
        f"no engine gave {wanted} effective draws to be trusted within its limits. {_list_of(trials)} Those of "
        f"{described(best.candidate)} are returned; {_how_to_go_on(trials[-1])}"
    )


def _how_to_go_on(trial: Trial) -> str:
    """The call that runs an engine four times as long, and about how long that takes."""
    engine = trial.candidate
    draws = engine.most if trial.posterior is None else trial.posterior.num_draws
    options = f"num_samples={4 * draws}"
    if engine.num_chains is not None:
        options += f", warmup_steps={4 * (engine.warmup_steps or 0)}, num_chains={engine.num_chains}"
    return f"to go on, call sample(model, {as_typed(engine.method)}, {options}), some {4 * trial.seconds:.0f} seconds here."
