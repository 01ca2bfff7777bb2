"""An engine of the default call: what it may spend, when it has its turn, what came of that, and how it is put in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torchgpmc.diagnostics import MAX_ESTIMATE_VARIANCE, estimate_noise
from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.posterior import Posterior
from torchgpmc.runs.run import MethodOptions
from torchgpmc.variational import Start

WANTED = 400  # effective draws (Vehtari et al. 2021, section 4)
SECOND_BATCH = 0.2  # share of its draws with which AMIS has two batches
# Relative variance of estimates from where on better ones are worth their time, orthants' twice as long: of 19 ones among 450
# labels 64 draws say 0.17 after 880 thetas, then at one hit what they had missed: by 1456 Kish's size is down from 297 to 12.
NOISE_BEFORE_BETTER = 0.1
# Of 500 data where 64 draws an estimate say 0.08, 0.17, 0.48 and 0.76, 256 serve the first two.
_NOISE_BY_FAR = 0.35
# Relative variance by weight of 64 draws an estimate: 0.0004 to 0.0008 of labels that say next to nothing, of which emulators
# follow nothing however they are taught, and 0.09 of a run whose heaviest of 320 draws was an estimate three nats too high.
_QUIET = 0.003
_FEWEST_JUDGED = 50  # draws a chain
# Effective draws, of hundreds and more: of 500 x 19 under next to no noise 1890 worth 8.6 taught an emulator all, which gave 457.
_NOTHING = 5
# Of their number that weights are worth: of 200 labels that say next to nothing of eleven hyperparameters, all that an emulator may
# learn from left 160 draws worth 5 to 61, ten seeds; of thirteen tables none took so many, and 160 were worth 58 to 148.
_EVEN = 0.5


class Limits(NamedTuple):
    """What ends a run whose draws are not good.

    Args:
        every: draws a chain between two looks at what they are worth.
        most: draws a chain, at most.
        budget: evaluations, at most.
        patience: share of ``most`` before uneven weights end it, :data:`SECOND_BATCH` or more.
        heading: share of the draws wanted, more or less than one, that uneven weights must head for by ``most``, lest they end it.
        by_worst: whether that is by the worst quantity, of draws that no better ones will come after.
        most_noise: relative variance of estimates that ends it; less than is reliable where the next engine has better ones.
        chains_judged_from: share of what they may spend from which chains end that do not head for ``heading`` of the draws wanted.
        learning: evaluations before the first draw after which uneven weights end it, of an engine that learns until they are even.
    """

    every: int
    most: int
    budget: float
    patience: float = SECOND_BATCH
    heading: float = 1 / 3
    by_worst: bool = False
    most_noise: float = MAX_ESTIMATE_VARIANCE
    chains_judged_from: float = math.inf
    learning: float = math.inf

    @property
    def better_follow(self) -> bool:
        """Whether the next engine has better estimates."""
        return self.most_noise < MAX_ESTIMATE_VARIANCE

    @property
    def noise_judged_from(self) -> float:
        """Share of ``most`` from which noise may end a run: the first batch, unless weights are known to be uneven in that."""
        return 0.0 if self.better_follow and self.patience <= SECOND_BATCH else SECOND_BATCH

    def lead_nowhere(self, posterior: Posterior, size: float, num_evaluations: float, wanted: int) -> bool:
        """Whether chains have spent the share from which they are judged, and their effective ``size`` heads for too little."""
        spent = max(num_evaluations / self.budget, posterior.num_draws / self.most)
        # 25 draws a chain of 5000 x 4 levels, the first, had an R-hat of 1.4 and a size of 12: too few to tell.
        if posterior.log_weights is not None or spent < self.chains_judged_from or posterior.num_draws < _FEWEST_JUDGED:
            return False
        return size < self.heading * min(1.0, spent) * wanted

    def have_taught_too_little(self, posterior: Posterior) -> bool:
        """Whether an engine has learned from as much as it may, and the weights of its draws are uneven all the same."""
        weights = posterior.log_weights
        if weights is None or posterior.info["num_evaluations"] - weights.numel() < self.learning:
            return False
        return kish_effective_size(weights) < _EVEN * weights.numel()


def anything(before: Trial | None) -> bool:
    """Whatever came of the engine before."""
    return True


def some_use(before: Trial | None) -> bool:
    """Not after one that came to nothing: of an engine that is the same with more draws an estimate, or begun further off."""
    return before is None or not before.came_to_nothing


def noise_or_some_use(before: Trial | None) -> bool:
    """Not after one whose estimates did well and whose draws came to nothing: of an engine that is the same with better ones."""
    return some_use(before) or (before is not None and before.was_too_noisy)


def not_taught_in_vain(before: Trial | None) -> bool:
    """Not after one without draws, or that had learned all it may by quiet estimates: of one that learns by better ones.

    An estimate that is nats too high keeps learning from its end, and leaves draws worth little.
    """
    if before is None or before.posterior is None:
        return before is None
    return before.noise >= _QUIET or not before.candidate.limits.have_taught_too_little(before.posterior)


def noisy(before: Trial | None) -> bool:
    """After one whose estimates vary too much, and not by far: of an engine that is the same with more draws of each."""
    return before is not None and before.was_too_noisy and before.noise < _NOISE_BY_FAR


def not_noisy_by_far(before: Trial | None) -> bool:
    """Not after one whose estimates vary by far too much: of an engine whose estimates do then, too."""
    return before is None or before.noise < _NOISE_BY_FAR


def uneven(before: Trial | None) -> bool:
    """After one whose draws are of some use and whose estimates did well: what failed is what they were drawn from."""
    return some_use(before) and not (before is not None and before.was_too_noisy)


def no_start(**limits: Any) -> None:
    """Chains begin around no fit."""


class Candidate(NamedTuple):
    """An engine with what it may spend, for a default call.

    Args:
        method: the engine.
        why: it is tried at this place, in words.
        num_chains: ``None`` where it has none.
        warmup_steps: ``None`` where it has none.
        limits: what ends it.
        seconds: works out about how long a run that goes well takes here.
        start: makes what the chains begin around; with limits of :func:`torchgpmc.initialize`, roughly.
        given: what must have come of the engine before, for this one to be tried.
        goes_on: whether its chains, or its first proposal, begin at the draws of the engine before, if these are of any use.
        only_begins: whether it seldom has draws enough to return, and is there for the next engine to begin at those.
        roughly: works out about what ``seconds`` does in a tenth of the time, where that takes long.
    """

    method: MethodOptions
    why: str
    num_chains: int | None
    warmup_steps: int | None
    limits: Limits
    seconds: Callable[[], float]
    start: Callable[..., Start | None] = no_start
    given: Callable[[Trial | None], bool] = anything
    goes_on: bool = False
    only_begins: bool = False
    roughly: Callable[[], float] | None = None

    def with_chains(self, num_chains: int | None, warmup_steps: int | None) -> Candidate:
        """The same with the user's numbers, where there are any."""
        return self._replace(
            num_chains=self.num_chains if num_chains is None else num_chains,
            warmup_steps=self.warmup_steps if warmup_steps is None else warmup_steps,
        )

    def with_limits(self, **limits: Any) -> Candidate:
        """The same but for some of its :class:`Limits`."""
        return self._replace(limits=self.limits._replace(**limits))


class Trial(NamedTuple):
    """One engine's turn."""

    candidate: Candidate
    posterior: Posterior | None  # the engine's own draws
    seconds: float
    verdict: str
    heard: list[warnings.WarningMessage]  # while it ran
    pool: Posterior | None = None  # those and the draws of engines before

    @property
    def offered(self) -> Posterior | None:
        """The draws that the call may return."""
        return self.posterior if self.pool is None else self.pool

    @property
    def was_too_noisy(self) -> bool:
        """Whether there are draws that rest on noisier estimates than its engine's may be."""
        return self.noise > self.candidate.limits.most_noise

    @property
    def noise(self) -> float:
        """Relative variance of the estimates that the draws rest on; zero without draws."""
        return 0.0 if self.posterior is None else estimate_noise(self.posterior.stats, self.posterior.log_weights)

    @property
    def came_to_nothing(self) -> bool:
        """Whether there is no draw, or all hang on a few, or there was nothing more to learn that would have made them good."""
        if self.posterior is None or self.candidate.limits.have_taught_too_little(self.posterior):
            return True
        return self.posterior.effective_size() < _NOTHING

    def described(self) -> dict[str, Any]:
        """Plain words and numbers, for ``posterior.info["tried"]``."""
        return {
            "engine": described(self.candidate),
            "seconds": self.seconds,
            "evaluations": 0.0 if self.posterior is None else self.posterior.info["num_evaluations"],
            "verdict": self.verdict,
        }


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
