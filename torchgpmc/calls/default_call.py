"""What ``sample`` does without a method: engines in turn, each until its draws are good or what it may spend is spent."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from torchgpmc.calls.candidate import Candidate, Limits, Trial, as_typed, described
from torchgpmc.calls.pooling import can_be_joined, can_be_pooled, joined, pooled
from torchgpmc.checks import warn
from torchgpmc.diagnostics import estimate_noise
from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.importance import truncated_log_weights
from torchgpmc.posterior import Posterior
from torchgpmc.storage.checkpoint import CheckpointError

# Nats, and as many more as hyperparameters, between the highest draws of two engines that sampled the same: of a run of hundreds
# of draws the highest are about half as many below the mode as there are hyperparameters, and estimates are off by one or two.
_MISSED = 10.0


class Rule(NamedTuple):
    """Whether a run may end: its draws are good, its budget is spent, or its weights have collapsed.

    A function of the draws and of counts alone, never of the clock: a seed gives the same draws on any machine, and a run that is
    resumed ends where it would have ended.

    Args:
        wanted: effective draws of the quantity that has fewest.
        limits: of the engine.
        before: weighted draws of other engines, the latest first, which the run's may join.
        as_returned: what the caller is to be given for a posterior, if it is another; that of chains has to be good, too.
    """

    wanted: int
    limits: Limits
    before: Sequence[Posterior] = ()
    as_returned: Callable[[Posterior], Posterior] | None = None

    def __call__(self, num_kept: int, num_evaluations: float, so_far: Callable[[], Posterior]) -> bool:
        """Whether to end after ``num_kept`` draws a chain; ``so_far`` makes a posterior of them."""
        if num_evaluations >= self.limits.budget:
            return True
        if not num_kept or num_kept % self.limits.every:
            return False
        posterior = so_far()
        size = posterior.effective_size()  # once: of 61 hyperparameters that takes as long as ten estimates
        if self._is_good(posterior, size) or self._is_hopeless(posterior, size, num_evaluations):
            return True
        together = with_those_before(posterior, self.before)
        return together is not None and self._is_good(together, together.effective_size())

    def _is_good(self, posterior: Posterior, size: float) -> bool:
        if size < self.wanted or posterior.complaints():
            return False
        # R-hat of what is drawn afterwards may be the one that is too large.
        judged = None if self.as_returned is None or posterior.num_chains == 1 else self.as_returned(posterior)
        return judged is None or is_good(judged, self.wanted)

    def _is_hopeless(self, posterior: Posterior, worst: float, num_evaluations: float) -> bool:
        """More draws will hardly do: chains head for too few, or weights are uneven.

        A single draw far out may weigh as much as all others, and the next proposals reach there: it is cut. Noise of estimates is
        not learned away.
        """
        weights, share = posterior.log_weights, posterior.num_draws / self.limits.most
        if self.limits.lead_nowhere(posterior, worst, num_evaluations, self.wanted):
            return True
        if self.limits.have_taught_too_little(posterior):
            return True
        if weights is None or share < self.limits.noise_judged_from:
            return False
        if estimate_noise(posterior.stats, weights) > self.limits.most_noise:
            return True
        size = worst if self.limits.by_worst else kish_effective_size(truncated_log_weights(weights))
        return share >= self.limits.patience and size < self.limits.heading * share * self.wanted


def is_good(posterior: Posterior, wanted: int) -> bool:
    """Whether nothing speaks against the draws, and they are worth ``wanted``."""
    return posterior.effective_size() >= wanted and not posterior.complaints()


def with_those_before(posterior: Posterior, before: Sequence[Posterior]) -> Posterior | None:
    """Weighted draws and those of the latest engine before whose draws they go with; ``None`` without any."""
    for other in before:
        if can_be_pooled(other) and can_be_pooled(posterior):
            return pooled([other, posterior])
        if can_be_joined(other, posterior) and not _are_far_apart(other, posterior):
            return joined([other, posterior])
    return None


def _are_far_apart(one: Posterior, other: Posterior) -> bool:
    """Whether one has come upon a density so high that the other must have missed a part.

    A run of which one draw weighs most is worth little and has large errors: joined, that part would count for next to nothing.
    """
    height, other_height = _height(one), _height(other)
    return height is not None and other_height is not None and abs(height - other_height) > _MISSED + one.theta.shape[-1]


def _is_half_done(posterior: Posterior, wanted: int) -> bool:
    """Whether as many weighted draws again will do: then another engine, from its start, costs more."""
    return can_be_pooled(posterior) and not posterior.complaints() and 2 * posterior.effective_size() >= wanted


def sample_by_default(
    engines: Sequence[Candidate], wanted: int, run: Callable[[int, Candidate, Rule, Posterior | None], Posterior]
) -> Posterior:
    """The posterior of the first engine whose draws are good, or of the one that came nearest, after a warning.

    Args:
        engines: in order.
        wanted: effective draws.
        run: engine number, engine, rule and draws to begin at, if any, to its posterior.

    Raises:
        ValueError: no engine gave any draws.
        KeyboardInterrupt: interrupted before there were any.
    """
    trials: list[Trial] = []
    before: list[Posterior] = []
    engines = list(engines)
    for number, engine in enumerate(engines):
        previous = trials[-1] if trials else None
        if not engine.given(previous):
            continue
        rule = Rule(wanted, engine.limits, tuple(before))
        begin = _latest_of_use(trials) if engine.goes_on else None
        try:
            trials.append(_tried(engine, rule, partial(run, number, engine, rule, begin)))
        except KeyboardInterrupt:
            if not any(trial.posterior for trial in trials):
                raise
            warn(f"interrupted: {described(engine)} had no draws yet; those of an engine tried before are returned.")
            return _result(trials, _best(trials), interrupted=True)
        _note_what_was_missed(trials)
        last = trials[-1].offered
        if last is not None and (is_good(last, wanted) or last.info["interrupted"]):
            return _result(trials, trials[-1])
        # Of too noisy estimates those that hit what the others miss are to come: such draws join none.
        if last is not None and last.log_weights is not None and not trials[-1].was_too_noisy:
            before.insert(0, last)
            # Once an engine: draws that are too few again have not grown as they should.
            if _is_half_done(last, wanted) and engine not in engines[:number]:
                engines.insert(number + 1, engine)
    best = _best(trials)
    warn(_what_was_tried(trials, best, wanted))
    return _result(trials, best)


def _latest_of_use(trials: Sequence[Trial]) -> Posterior | None:
    """Draws for an engine to begin at: not those of the one before if that came to nothing.

    Begun at none, chains of 500 x 11 found a lobe 51 nats lower, agreed, and would have been trusted.
    """
    return next((trial.posterior for trial in reversed(trials) if not trial.came_to_nothing), None)


def _note_what_was_missed(trials: Sequence[Trial]) -> None:
    """A complaint about draws none of which is nearly as high as one of an engine before, in the density of theta: none sees it."""
    posterior = trials[-1].posterior
    own = _height(posterior)
    above = [(height, trial) for trial in trials[:-1] if (height := _height(trial.posterior)) is not None]
    if posterior is None or own is None or not above:
        return
    highest, trial = max(above, key=lambda pair: pair[0])
    if highest - own > _MISSED + posterior.theta.shape[-1]:
        engine = as_typed(trial.candidate.method)
        posterior.info["missed"] = (
            f"{engine}, tried before, came upon hyperparameters {highest - own:.0f} nats above the highest of these draws: most of "
            f"the mass may be there, and none of these is. Expected draws there, too; begin at that engine's, as "
            f"sample(model, method, start=sample(model, {engine}))."
        )


def _height(posterior: Posterior | None) -> float | None:
    """Of p(theta, y) the highest log among the draws, of engines that estimate it."""
    if posterior is None or "log_evidence" not in posterior.stats:
        return None
    layout = posterior.model.layout
    log_prior = layout.log_prior(posterior.theta.flatten(0, 1).to(layout.device)).detach().cpu()
    height = log_prior + posterior.stats["log_evidence"].flatten()
    return float(torch.nan_to_num(height, nan=-torch.inf).max())


def _tried(engine: Candidate, rule: Rule, run: Callable[[], Posterior]) -> Trial:
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
    pool = None if is_good(posterior, rule.wanted) else with_those_before(posterior, rule.before)
    verdict = _verdict(posterior, rule.wanted)
    if pool is not None:
        verdict = f"{verdict.rstrip('.')}. Pooled with those before: {_verdict(pool, rule.wanted)}"
    return Trial(engine, posterior, seconds, verdict, heard, pool)


def _verdict(posterior: Posterior, wanted: int) -> str:
    if not posterior.complaints() and posterior.effective_size() < wanted:
        return f"Too few: {posterior.effective_size():.0f} effective draws, and {wanted} were wanted."
    return posterior.verdict()


def _best(trials: Sequence[Trial]) -> Trial:
    """The one with the most effective draws.

    Raises:
        ValueError: none has draws.
    """
    worth = [-1.0 if trial.offered is None else trial.offered.effective_size() for trial in trials]
    if max(worth) < 0:
        raise ValueError(f"no draws could be had. {_list_of(trials)} Expected some of one; {_how_to_go_on(trials[-1])}")
    return trials[worth.index(max(worth))]


def _result(trials: Sequence[Trial], chosen: Trial, *, interrupted: bool = False) -> Posterior:
    """The posterior of one trial, with what was tried; what was said while it ran is said now, at the caller's line."""
    for message in chosen.heard:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
    posterior = chosen.offered
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
    """The call that runs an engine four times as long, and about how long that takes; longer, where its warm-up was not done."""
    engine = trial.candidate
    draws = engine.limits.most if trial.posterior is None else trial.posterior.num_draws
    options = f"num_samples={4 * draws}"
    if engine.num_chains is not None:
        options += f", warmup_steps={4 * (engine.warmup_steps or 0)}, num_chains={engine.num_chains}"
    about = "some" if trial.posterior is not None else "more than"
    return f"to go on, call sample(model, {as_typed(engine.method)}, {options}), {about} {4 * trial.seconds:.0f} seconds here."
