"""What the methods on a log density share: they sample [theta, v] as one position, or theta alone, or any density's position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.approximations.gaussian_form import check_approximation, what_approximates
from torchgpmc.checks import check_count, check_flag
from torchgpmc.evidence import Evidence
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, joint_target, marginal_target
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.parameterizations import Parameterization
from torchgpmc.runs.run import MethodOptions, Settings, chain_settings, check_mass_matrix
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.types import LogDensity, Sampler, WarmUp


def refuse_in_a_sweep(method: Any, moved: str, defaults: dict[str, Any]) -> None:
    """Raises a ``ValueError`` for options not at their ``defaults``, which a block that moves ``moved`` has no use for."""
    for option, default in defaults.items():
        value = getattr(method, option, default)
        if value != default:
            raise ValueError(
                f"{option} is {value!r} in {type(method).__name__}(), which here moves {moved}. "
                f"Expected {default}: that option belongs to a run of its own."
            )


def _or_marginal(model: GPModel) -> str:
    """The marginal that would do, in words, where there is one."""
    found = what_approximates(model) if model.layout.size else None
    return "" if found is None else f", or marginal={found}"


class Scope(NamedTuple):
    """What a warm-up asks of a :class:`ChainTarget`, for a block of a sweep, whose density changes from sweep to sweep."""

    num_hyperparameters: int
    dimension: int
    density: None = None
    is_guess: bool = False


@dataclass(frozen=True, kw_only=True)
class DensityOptions(MethodOptions):
    """Options of every method on [theta, v]; each method's docstring explains them.

    A method on them has a ``_kernel`` and a ``_warm_up``, and ``check_options`` where it has options of its own.
    """

    mass_matrix: MassMatrix = MassMatrix.BLOCK
    thinning: int = 1
    marginal: Approximation | None = None
    importance_weights: int | Evidence = 0
    from_mode: bool = False
    normal_scale: bool = False

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v], or on theta alone."""
        self.check_options()
        return self.run_on(self._target(model, settings), settings)

    def prepare_density(self, target: ChainTarget, settings: Settings) -> ChainRun:
        """A run on a density that is no model's.

        Raises:
            ValueError: an option out of range, or one that has a meaning for models alone.
        """
        self.check_options()
        for option in (
            "marginal",
            "whitening",
            "noise_variances",
            "importance_weights",
            "from_mode",
            "normal_scale",
            "rough_trajectories",
        ):
            if value := getattr(self, option, None):
                raise ValueError(f"{option} is {value!r}, and a density has no latents to treat so. Expected a method without it.")
        return self.run_on(target, settings)

    def check_options(self) -> None:
        """Raises a ``ValueError`` or ``TypeError`` for options that suit no target."""
        check_count("thinning", self.thinning)
        check_mass_matrix(self.mass_matrix)
        check_flag("normal_scale", self.normal_scale)
        if self.normal_scale and self.from_mode:
            raise ValueError("from_mode=True begins at a mode in theta, and normal_scale=True moves in z. Expected one of them.")

    def run_on(self, target: ChainTarget, settings: Settings) -> ChainRun:
        """Chains on ``target``, with options that have been checked."""
        warmup, _ = chain_settings(settings)
        kernel = partial(self._kernel, target.density)
        return ChainRun(target, kernel, self._warm_up(target, warmup), warmup, settings.num_samples, self.thinning)

    def hyper_move(self, num_hyperparameters: int, warmup_steps: int) -> Move:
        """This sampler as a block of theta alone, given the rest.

        Raises:
            ValueError: options out of range, or that only a run of its own has.
            TypeError: an option of the wrong kind.
        """
        self._check_block("theta alone, given the latents")
        return Move(self._kernel, self._warm_up(Scope(num_hyperparameters, num_hyperparameters), warmup_steps))

    def _check_block(self, moved: str) -> None:
        """Raises for options out of range, or that only a run of its own has."""
        self.check_options()
        of_a_run = {"marginal": None, "whitening": None, "noise_variances": False, "importance_weights": 0, "from_mode": False}
        refuse_in_a_sweep(self, moved, {**of_a_run, "normal_scale": False, "thinning": 1})

    def hyper_parts(self, parameterization: Parameterization, model: GPModel) -> tuple[Parameterization, ...]:
        """What theta is moved given, in a sweep's parts: as the parameterisation has it."""
        return parameterization.parts(model)

    def _kernel(self, density: Any, tuning: Any) -> Sampler:
        """The sampler of a density."""
        raise NotImplementedError(f"{type(self).__name__} must define _kernel(density, tuning)")

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        """Its warm-up."""
        raise NotImplementedError(f"{type(self).__name__} must define _warm_up(target, steps)")

    def _windows(
        self,
        target: ChainTarget | Scope,
        steps: int,
        *,
        step_size: float | None,
        target_acceptance: float | None,
        search_on: LogDensity | None = None,
    ) -> WindowedAdaptation:
        """The warm-up of most: adapted in windows towards ``target_acceptance``."""
        dense_size = self.mass_matrix.dense_size(target.num_hyperparameters, target.dimension)
        warm_up = WindowedAdaptation(steps, self.mass_matrix, dense_size, step_size, target_acceptance, search_on)
        return warm_up._replace(relearns=target.is_guess)

    def _target(self, model: GPModel, settings: Settings) -> ChainTarget:
        """What these options sample: [theta, v], or theta under a marginal.

        Raises:
            ValueError: options at odds with one another or the model.
            TypeError: an option of the wrong kind.
        """
        if self.marginal is not None:
            check_approximation("marginal", self.marginal)
            return marginal_target(model, settings, self.marginal, self.importance_weights, self.from_mode, self.normal_scale)
        if self.importance_weights:
            raise ValueError(
                f"importance_weights is {self.importance_weights!r} without a marginal: draws of [theta, v] are exact and need "
                f"no weights. Expected importance_weights=0{_or_marginal(model)}."
            )
        if model.is_conjugate:
            return marginal_target(model, settings, Conjugate(), 0, self.from_mode, self.normal_scale)
        if self.from_mode and not getattr(self, "noise_variances", False):
            raise ValueError(
                f"from_mode=True looks for the mode of theta, and this samples [theta, v], whose joint mode is far from where "
                f"the posterior lies. Expected from_mode=False, or a GPRegression{_or_marginal(model)}."
            )
        if self.normal_scale:
            raise ValueError(
                f"normal_scale=True is for chains on theta alone, and this samples [theta, v]. Expected normal_scale=False, or a "
                f"GPRegression{_or_marginal(model)}."
            )
        return self._joint_target(model, settings)

    def _joint_target(self, model: GPModel, settings: Settings) -> ChainTarget:
        return joint_target(model, settings)
