"""Theta moved with the latents following it along a fit, as if these were integrated out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import LatentsAt
from torchgpmc.runs.blocks import JointWithPrior
from torchgpmc.runs.parameterizations import Moved, Recoordinated
from torchgpmc.types import WarmUp
from torchgpmc.variational import Start


@dataclass(frozen=True)
class Regressed(Recoordinated):
    r"""Theta given what its regression leaves open of the whitened latents: v follows theta along the slope of a Gaussian fit.

    .. math:: c = v - A \theta, \quad A = dE_q(v | \theta) / d\theta

    As far as the fit is right theta moves as if the latents were integrated out, and what it moves is all of theta, the parameters
    of a likelihood's parts too. Any A is exact: volumes stay, so that the density is the joint one. One factorisation for each
    theta that is tried, and gradients are the joint density's: theta goes well by :class:`HMC`, whose mass matrix the fit gives.

    Args:
        start: the fit of the model that is sampled, from :func:`torchgpmc.initialize`; where chains begin is
            ``tg.sample(..., start=)``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> start = tg.initialize(tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli()), progress=False)
        >>> method = tg.Gibbs(hyper=tg.HMC(num_steps=4), parameterization=tg.Regressed(start))
        >>> method.latent, method.parameterization.start is start  # for tg.sample(start.model, method, start=start)
        (AuxiliaryGradient(target_accept_prob=0.55, thinning=1), True)
    """

    start: Start

    @property
    def moves_everything(self) -> bool:
        """Yes: they hang together through f."""
        return True

    def check(self, model: GPModel) -> None:
        """The one that was fitted."""
        if not isinstance(self.start, Start):
            raise TypeError(f"start is {type(self.start).__name__}. Expected what torchgpmc.initialize(model) returns.")
        self.start.check(model)

    def warm_up(self, own: WarmUp) -> WarmUp:
        """With the fit's covariance of theta, kept: in many dimensions a short warm-up would learn a worse one."""
        return _FromFit(own, self.start.theta_covariance)

    def given(
        self, joint: JointLogDensity, theta: Tensor, at: LatentsAt, v: Tensor, generator: torch.Generator
    ) -> tuple[Any, Tensor]:
        slope = self.start.slope.to(v)
        return _AlongSlope(joint, slope, v - theta @ slope.mT), theta.new_zeros(len(theta))


class _AlongSlope:
    """The joint log density at [theta, c + A theta] as a function of theta ``(C, P)``."""

    def __init__(self, joint: JointLogDensity, slope: Tensor, held: Tensor):
        self.joint, self.slope, self.held = joint, slope, held

    def _position(self, theta: Tensor) -> Tensor:
        return torch.cat([theta, self.held + theta @ self.slope.mT], -1)

    def draw(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, Moved]:
        position = self._position(theta)
        value, kept = JointWithPrior(self.joint).draw(position, generator)
        return value, Moved(kept, position[:, theta.shape[-1] :], value)

    def __call__(self, theta: Tensor) -> Tensor:
        return self.joint(self._position(theta))

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.joint.value_and_grad(self._position(theta))
        of_theta, of_latents = gradient.tensor_split([theta.shape[-1]], -1)
        return value, of_theta + of_latents @ self.slope

    def select(self, rows: Tensor) -> _AlongSlope:
        return _AlongSlope(self.joint.select(rows), self.slope, self.held[rows])


class _FromFit(NamedTuple):
    """A warm-up of theta that begins from a known covariance ``(P, P)``."""

    inner: WarmUp
    covariance: Tensor

    @property
    def steps(self) -> int:
        """The inner one's."""
        return self.inner.steps

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Any:
        """At the covariance."""
        return self.inner.start(position, self.covariance.to(position), generator)

    def update(self, tuning: Any, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Any:
        """The inner one's."""
        return self.inner.update(tuning, iteration, state, info, generator)

    def restarts(self, iteration: int) -> bool:
        """The inner one's."""
        return self.inner.restarts(iteration)

    def statistics(self, tuning: Any) -> dict[str, Tensor]:
        """The inner one's."""
        return self.inner.statistics(tuning)
