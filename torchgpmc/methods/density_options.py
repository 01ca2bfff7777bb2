"""What the methods on a log density share: they sample [theta, v] as one position, or theta alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.approximations.base import check_approximation
from torchgpmc.checks import check_count
from torchgpmc.models.base import GPModel
from torchgpmc.runs.base import Settings, chain_settings, check_mass_matrix
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, joint_target, marginal_target
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.types import LogDensity, Sampler


@dataclass(frozen=True, kw_only=True)
class DensityOptions:
    """Options of every method on [theta, v]; each method's docstring explains them."""

    mass_matrix: MassMatrix = MassMatrix.BLOCK
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int = 0
    from_mode: bool = False

    def _target(self, model: GPModel, settings: Settings, whitening: Approximation | None = None) -> ChainTarget:
        """What these options sample: [theta, v], or theta under a marginal.

        Raises:
            ValueError: options at odds with one another or the model.
            TypeError: an option of the wrong kind.
        """
        check_count("thinning", self.thinning)
        check_mass_matrix(self.mass_matrix)
        for option, approximation in (("marginal", self.marginal), ("whitening", whitening)):
            if approximation is not None:
                check_approximation(option, approximation)
        if whitening is not None and (self.marginal is not None or model.is_conjugate):
            raise ValueError(
                f"whitening is {whitening!r}, and this samples theta alone, which has no latents to whiten. Expected "
                f"whitening=None, or a GP without marginal."
            )
        if self.marginal is None:
            if self.importance_weights:
                raise ValueError(
                    f"importance_weights is {self.importance_weights} without a marginal: draws of [theta, v] are exact and need "
                    f"no weights. Expected 0, or marginal=torchgpmc.Laplace()."
                )
            if model.is_conjugate:
                return marginal_target(model, settings, Conjugate(), 0, self.from_mode)
            if self.from_mode:
                raise ValueError(
                    "from_mode=True looks for the mode of theta, and this samples [theta, v], whose joint mode is far from where "
                    "the posterior lies. Expected from_mode=False, a GPRegression, or marginal=torchgpmc.Laplace()."
                )
            return joint_target(model, settings, None if whitening is None else posterior_sites(model, whitening))
        return marginal_target(model, settings, self.marginal, self.importance_weights, self.from_mode)

    def _run(self, target: ChainTarget, settings: Settings, search_on: LogDensity | None = None) -> ChainRun:
        """The run of chains on all of the target's coordinates at once."""
        warmup, _ = chain_settings(settings)
        warm_up = self._adaptation(warmup, target.num_hyperparameters, target.dimension, search_on)
        return ChainRun(target, partial(self._kernel, target.density), warm_up, warmup, settings.num_samples, self.thinning)

    def _kernel(self, density: Any, tuning: Tuning) -> Sampler:
        """The sampler of a density."""
        raise NotImplementedError(f"{type(self).__name__} must define _kernel(density, tuning)")

    def _adaptation(
        self, warmup: int, num_hyperparameters: int, dimension: int, search_on: LogDensity | None = None
    ) -> WindowedAdaptation:
        """Its warm-up."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _adaptation(warmup, num_hyperparameters, dimension, search_on)"
        )

    def _check(self) -> None:
        """Raises for options of its own that are out of range."""
        raise NotImplementedError(f"{type(self).__name__} must define _check()")

    def hyper_move(self, num_hyperparameters: int, warmup_steps: int) -> Move:
        """This sampler as a block of theta alone, given the rest.

        Raises:
            ValueError: options out of range, or that only a run of its own has.
            TypeError: an option of the wrong kind.
        """
        self._check()
        check_mass_matrix(self.mass_matrix)
        of_a_run = {"marginal": None, "whitening": None, "importance_weights": 0, "from_mode": False, "thinning": 1}
        for option, default in of_a_run.items():
            value = getattr(self, option, default)
            if value != default:
                raise ValueError(
                    f"{option} is {value!r} in {type(self).__name__}(), which here moves theta alone, given the latents. "
                    f"Expected {default}: that option belongs to a run of its own."
                )
        return Move(self._kernel, self._adaptation(warmup_steps, num_hyperparameters, num_hyperparameters))
