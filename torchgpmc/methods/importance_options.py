"""What the importance methods share: proposals, batches, and the run that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchgpmc.approximations import Approximation, Laplace
from torchgpmc.approximations.gaussian_form import check_approximation, check_model
from torchgpmc.checks import check_count, check_flag, check_positive, is_number
from torchgpmc.evidence import Evidence
from torchgpmc.importance import Adaptation
from torchgpmc.models.gp_model import GPModel
from torchgpmc.parameters.normal_scale import linear_scale, normal_scale
from torchgpmc.runs.beginnings import AtModes, AtPrior
from torchgpmc.runs.chain_targets import check_has_hyperparameters, estimator_for, suited_approximation
from torchgpmc.runs.on_normal_scale import searched_marginal
from torchgpmc.runs.run import MethodOptions, Settings, refuse_chain_options
from torchgpmc.runs.screening import Screen
from torchgpmc.runs.starts import Marginal
from torchgpmc.runs.weighted import ImportanceRun

_STRENGTH = 2.0  # draws a hyperparameter
_KEPT_SHARE = 0.3  # of the draws, of components in the tails


def _growing_sizes(num_samples: int, batch_size: int, growth: float) -> list[int]:
    """Batch sizes that grow geometrically and sum to ``num_samples``.

    Example:
        >>> _growing_sizes(1000, 100, 1.5)
        [100, 150, 225, 337, 188]
    """
    sizes: list[int] = []
    left = num_samples
    while left > 0:
        size = min(left, round(batch_size * growth ** len(sizes) - 0.001))
        sizes.append(size)
        left -= size
    return sizes


def _given_sizes(num_samples: int, batch_sizes: Sequence[int]) -> list[int]:
    """The given sizes, the last of them as often as it takes to come to ``num_samples``.

    Example:
        >>> _given_sizes(1000, (100, 400))
        [100, 400, 400, 100]
    """
    sizes: list[int] = []
    left = num_samples
    while left > 0:
        size = min(left, batch_sizes[min(len(sizes), len(batch_sizes) - 1)])
        sizes.append(size)
        left -= size
    return sizes


@dataclass(frozen=True)
class ImportanceOptions(MethodOptions):
    """Options that :class:`AMIS` and :class:`MAMIS` share; their docstrings explain them."""

    takes_draws: ClassVar[bool] = True

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    degrees_of_freedom: int | None = 5
    normal_scale: bool = True
    diagonal: bool = False
    batch_size: int | None = None
    growth: float = 1.5
    batch_sizes: tuple[int, ...] | None = None
    num_streams: int = 4
    prior_strength: float | None = None
    defensive_share: float = 0.2
    begin: AtModes | AtPrior = AtModes()  # noqa: RUF009  (frozen, so it may be shared)
    effective_size: float | None = None
    smooth: bool = False
    evidence: Evidence | None = None
    screen: Screen | None = None

    def at_draws(self, model: GPModel) -> ImportanceOptions:
        """Itself: its first proposal is fitted to them."""
        return self

    def _check_latents(self, model: GPModel) -> None:
        """Raises unless the latents can be integrated out."""
        check_approximation("approximation", self.approximation)
        if model.collapses:
            return
        # Another evidence checks for itself what it serves.
        needed = [] if self.evidence is not None and isinstance(self.begin, AtPrior) else [self.approximation]
        if isinstance(self.begin, AtModes):
            needed.append(self.begin.approximation)
        for approximation in needed:
            check_model(model, type(self).__name__, suited_approximation(model, approximation))

    def _searched(self, model: GPModel) -> Marginal | None:
        """Where modes are looked for, if they are."""
        if not isinstance(self.begin, AtModes):
            return None
        return searched_marginal(model, suited_approximation(model, self.begin.approximation))

    def _check_begin(self) -> None:
        if not isinstance(self.begin, AtModes | AtPrior):
            raise TypeError(f"begin is {self.begin!r}. Expected torchgpmc.AtModes() or torchgpmc.AtPrior().")
        self.begin.check()
        if isinstance(self.begin, AtModes) and self.begin.leave_for is not None and not self.defensive_share:
            raise ValueError(
                "leave_for compares modes with the prior, which defensive_share=0 leaves out. Expected a defensive_share above 0, "
                "or leave_for=None."
            )

    def _check_numbers(self) -> None:
        check_positive("growth", self.growth, 0.999)
        if self.degrees_of_freedom is not None:
            check_count("degrees_of_freedom", self.degrees_of_freedom, 3)
        if self.effective_size is not None:
            check_positive("effective_size", self.effective_size)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if self.batch_sizes is not None:
            for given in self.batch_sizes or (0,):
                check_count("each of batch_sizes", given)
        if self.prior_strength is not None:
            check_positive("prior_strength", self.prior_strength)
        check_count("num_streams", self.num_streams)
        check_flag("normal_scale", self.normal_scale)
        if not (is_number(self.defensive_share) and 0 <= self.defensive_share < 1):
            raise ValueError(f"defensive_share is {self.defensive_share!r}. Expected a number of at least 0 and below 1.")

    def _schedule(self, num_samples: int, num_hyperparameters: int) -> list[int]:
        """Sizes of batches."""
        if self.batch_sizes is not None:
            return _given_sizes(num_samples, self.batch_sizes)
        candidates = 1 if self.screen is None else self.screen.candidates
        usual = max(10 * num_hyperparameters, 20, self._usual_batch(num_samples * candidates)) / candidates
        return _growing_sizes(num_samples, math.ceil(usual) if self.batch_size is None else self.batch_size, self.growth)

    def _usual_batch(self, num_samples: int) -> int:
        """Where hyperparameters are few."""
        return math.ceil(num_samples / 10)

    def _plan(self, num_hyperparameters: int, modified: bool, begin: AtModes | AtPrior) -> Adaptation:
        """How proposals learn that began so."""
        strength = _STRENGTH * num_hyperparameters if self.prior_strength is None else self.prior_strength
        kept_share = _KEPT_SHARE if isinstance(begin, AtModes) and begin.search_tails else 0.0
        return Adaptation(modified, self.diagonal, strength, float(self.defensive_share), kept_share)

    def _prepared(self, model: GPModel, settings: Settings, *, modified: bool, switch_after: int | None) -> ImportanceRun:
        """A run that learns from all draws, or, ``modified``, from the last batch alone; the latter from a batch on."""
        name = type(self).__name__
        check_has_hyperparameters(model, name)
        self._check_begin()
        self._check_latents(model)
        if self.screen is not None and not isinstance(self.screen, Screen):
            raise TypeError(f"screen is {self.screen!r}. Expected torchgpmc.Screen(), or None to estimate every candidate.")
        refuse_chain_options(name, settings)
        if model.targets.one_a_chain:
            raise ValueError(f"the model has several data sets and {name} samples one posterior. Expected train_y of shape (N,).")
        self._check_numbers()
        if switch_after is not None:
            check_count("switch_to_modified_after", switch_after)
        approximation = suited_approximation(model, self.approximation)
        estimator = estimator_for(model, approximation, self.num_importance, self.antithetic, self.evidence)
        return ImportanceRun(
            model,
            estimator,
            self._searched(model),
            scale=(normal_scale if self.normal_scale else linear_scale)(model.layout),
            plan=self._plan(model.layout.size, modified, self.begin),
            plan_at_prior=self._plan(model.layout.size, modified, self.begin.at_prior),
            schedule=self._schedule(settings.num_samples, model.layout.size),
            degrees_of_freedom=math.inf if self.degrees_of_freedom is None else float(self.degrees_of_freedom),
            begin=self.begin,
            switch_after=switch_after,
            effective_size=self.effective_size,
            smooth=self.smooth,
            num_streams=self.num_streams,
            screen=None if self.screen is None else self.screen.on_model(model),
            drawn=settings.draws,
        )
