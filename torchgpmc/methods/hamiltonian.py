"""Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.checks import check_count, check_flag, check_positive
from torchgpmc.density import FollowedDensity
from torchgpmc.methods.density_options import Scope, refuse_in_a_sweep
from torchgpmc.methods.gradient_options import GradientOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.rough import has_long_expectations, with_rough_gradients
from torchgpmc.runs.chain_targets import ChainTarget
from torchgpmc.runs.run import Settings
from torchgpmc.runs.variances_target import variances_target, with_rough_slopes
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.hmc import hmc
from torchgpmc.types import LogDensity, Sampler, WarmUp

_SMALLEST_STEP = 1e-9  # that lengths are divided by


@dataclass(frozen=True)
class HMC(GradientOptions):
    """Hamiltonian Monte Carlo on [theta, v] (see :func:`torchgpmc.samplers.hmc`).

    Args:
        num_steps: leapfrog steps a trajectory.
        random_length: draw the number of steps uniformly from ``least_steps`` to ``num_steps`` at each transition.
        least_steps: of those; where scales are alike, lengths near a quarter of the period make nearly independent draws.
        trajectory_length: the most that steps may add up to, step size times their number; ``num_steps`` is the most whatever the
            step size. In coordinates of unit scale, at pi / 2 what is linear in them is new, at pi what is quadratic is as it was:
            lengths from a quarter of pi to three quarters draw both. ``None``: no such limit.
        rough_trajectories: where expectations of the likelihood are long integrals (a :class:`SparseGP` with ``Softmax`` of three
            classes and more), follow means over 16 points, a fifth to a tenth of the work, and test ends by the integrals; with
            ``noise_variances``, follow slopes in single precision, three fifths of the work of 500 data. Draws are exact all the
            same. Elsewhere it changes nothing.
        given_variances: with ``noise_variances``, move theta alone, given variances that are drawn anew after each transition: a
            Gibbs sampler by trajectories of two to five steps, where [theta, w] takes nine. A likelihood of one's own has to say
            how they are drawn (``white_given_noise``), else this is a ``ValueError``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GPRegression(x, torch.sin(6 * x), kernel, GaussianLikelihood().requires_grad_(False))
        >>> method = tg.HMC(num_steps=3, from_mode=True)  # on theta alone, since p(y | theta) is known
        >>> posterior = tg.sample(model, method, num_samples=500, warmup_steps=100, num_chains=8, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape
        (torch.Size([8, 500, 1, 1]), torch.Size([8, 500, 8]))
    """

    num_steps: int = 16
    random_length: bool = True
    least_steps: int = 1
    trajectory_length: float | None = None
    rough_trajectories: bool = False
    given_variances: bool = False

    def check_options(self) -> None:
        super().check_options()
        check_count("num_steps", self.num_steps)
        check_count("least_steps", self.least_steps)
        if self.trajectory_length is not None:
            check_positive("trajectory_length", self.trajectory_length)
        check_flag("rough_trajectories", self.rough_trajectories)
        check_flag("given_variances", self.given_variances)
        if self.given_variances and not self.noise_variances:
            raise ValueError(
                "given_variances=True moves theta given variances of the noise. Expected noise_variances=True with it."
            )
        if self.least_steps > self.num_steps:
            raise ValueError(
                f"least_steps is {self.least_steps} with num_steps={self.num_steps}. Expected at most as many, for instance 1."
            )

    def _check_block(self, moved: str) -> None:
        super()._check_block(moved)
        refuse_in_a_sweep(self, moved, {"rough_trajectories": False, "given_variances": False})

    def _joint_target(self, model: GPModel, settings: Settings) -> ChainTarget:
        target = super()._joint_target(model, settings)
        if self.rough_trajectories and self.noise_variances:
            return with_rough_slopes(target, model, settings)
        if not (self.rough_trajectories and model.takes_expectations and has_long_expectations(model)):
            return target
        followed = super()._joint_target(with_rough_gradients(model), settings)
        return target._replace(density=FollowedDensity(target.density, followed.density))

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        warm_up = self._windows_on_gradients(target, steps)
        if not self.given_variances:
            return warm_up
        # From the curvature at a mode to a covariance that is learned step sizes hardly change: all steps tell of them.
        return warm_up._replace(num_moving=target.dimension, averages_anew=False)

    def _variances_target(self, model: GPModel, settings: Settings) -> ChainTarget:
        return variances_target(model, settings, from_mode=self.from_mode, given_variances=self.given_variances)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        num_steps = self.num_steps
        if self.trajectory_length is not None:
            longest = round(self.trajectory_length / max(float(tuning.step_size), _SMALLEST_STEP))
            num_steps = max(self.least_steps, min(num_steps, longest))
        exact, followed = density if isinstance(density, FollowedDensity) else (density, None)
        return hmc(
            exact,
            step_size=tuning.step_size,
            preconditioner=tuning.preconditioner,
            num_steps=num_steps,
            random_length=self.random_length,
            least_steps=self.least_steps,
            followed=followed,
        )
