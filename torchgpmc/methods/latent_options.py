"""What the methods on the latents alone share: the run of a move by itself."""

from __future__ import annotations

from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.latent_moves import Move, latent_run
from torchgpmc.runs.run import MethodOptions, Settings
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix


class LatentOptions(MethodOptions):
    """A :class:`torchgpmc.runs.latent_moves.LatentMove` that is a method too, for models whose hyperparameters are all fixed."""

    thinning: int

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on v; K(X, X) is factorised once.

        Raises:
            ValueError: free hyperparameters, options out of range, or a model that the move cannot serve.
        """
        return latent_run(self, model, settings, self.thinning)

    def check(self, model: GPModel) -> None:
        """Every model will do."""

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The kernel, tuned in ``warmup_steps`` iterations."""
        raise NotImplementedError(f"{type(self).__name__} must define move(model, warmup_steps)")


def step_size_alone(steps: int, target_acceptance: float) -> WindowedAdaptation:
    """The warm-up of a move that knows the latents' prior, and has a step size to learn and no covariance."""
    return WindowedAdaptation(steps, MassMatrix.IDENTITY, 0, step_size=0.1, target_acceptance=target_acceptance)
