"""What the methods on a log density share: they sample [theta, v] as one position, or theta alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torchgpmc.approximations import Approximation, Conjugate
from torchgpmc.approximations.base import check_approximation
from torchgpmc.checks import check_count
from torchgpmc.models.base import GPModel
from torchgpmc.runs.base import Settings, chain_settings, check_mass_matrix
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, joint_target, marginal_target
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.types import LogDensity, Sampler


@dataclass(frozen=True, kw_only=True)
class DensityOptions:
    """Options of every method on [theta, v]; each method's docstring explains them."""

    takes_start: ClassVar[bool] = False  # whether ``tg.sample(..., start=)`` has a meaning

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
        if settings.start is not None:
            self._check_start(model, whitening)
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

    def _check_start(self, model: GPModel, whitening: Approximation | None) -> None:
        if self.marginal is not None or model.is_conjugate:
            raise ValueError(
                "start= begins chains of [theta, v], and this samples theta alone. Expected a GP or SparseGP without marginal, or "
                "start=None."
            )
        if whitening is not None:
            raise ValueError(
                f"whitening is {whitening!r} and a start is given, which brings white coordinates of its own. Expected one of them."
            )

    def _run(
        self,
        target: ChainTarget,
        settings: Settings,
        kernel: Callable[[Any], Sampler],
        *,
        step_size: float | None,
        target_acceptance: float | None,
        search_on: LogDensity | None = None,
    ) -> ChainRun:
        """The run of chains with ``kernel``, adapted in windows towards ``target_acceptance``."""
        warmup, _ = chain_settings(settings)
        dense_size = self.mass_matrix.dense_size(target.num_hyperparameters, target.dimension)
        warm_up = WindowedAdaptation(warmup, self.mass_matrix, dense_size, step_size, target_acceptance, search_on)
        warm_up = warm_up._replace(relearns=settings.start is not None)
        return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, self.thinning)
