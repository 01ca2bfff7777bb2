r"""The joint log density estimated from some of the data, with control variates at a fixed position.

With g_n the slope of datum n's log likelihood, and B a minibatch of n of the N data,

.. math:: \nabla \log p(x) + \sum_n g_n(x^*) + \frac{N}{|B|} \sum_{n \in B} (g_n(x) - g_n(x^*))

is an unbiased estimate of the joint density's gradient, whose variance vanishes as x nears x* (Baker, Fearnhead, Fox & Nemeth 2019,
eq. 6). Here x = [theta, v], and x* is where a fit has its mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import mask_failures
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.special import log_standard_normal


class FixedPoint(NamedTuple):
    """A position with what all data say there."""

    position: Tensor  # (1, P + V)
    value: Tensor  # (1,), log likelihood
    gradient: Tensor  # (1, P + V), of the log likelihood

    def moved(self, factor: float, there: FixedPoint) -> FixedPoint:
        """``factor`` times what some data say here, taken from what all say ``there``."""
        return FixedPoint(self.position, there.value - factor * self.value, there.gradient - factor * self.gradient)


def fixed_point(model: GPModel, position: Tensor) -> FixedPoint:
    """What the data of ``model`` say at ``position`` ``(1, P + V)``."""
    return FixedPoint(position, *_likelihood_alone(model, position, *JointLogDensity(model).value_and_grad(position)))


def _log_prior(model: GPModel, position: Tensor) -> tuple[Tensor, Tensor]:
    """Of [theta, v]: ``(C,)`` and its gradient ``(C, P + V)``."""
    theta, v = position.tensor_split([model.layout.size], -1)
    at = model.layout.evaluate(theta)
    return at.log_prior + log_standard_normal(v), torch.cat([at.log_prior_slope, -v], -1)


def _likelihood_alone(model: GPModel, position: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    log_prior, slope = _log_prior(model, position)
    return value - log_prior, gradient - slope


class EstimatedJointLogDensity(JointLogDensity):
    """An unbiased estimate of the joint log density of [theta, v], and of its gradient, from some of the data.

    Args:
        model: whose likelihood factorises over data, which are no latents of it.
        fixed: where the estimate is exact, with what all data say there.
        rows: indices of some data ``(n,)``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        >>> there = torch.zeros(1, 4).double()
        >>> estimate = EstimatedJointLogDensity(model, fixed_point(model, there), torch.tensor([0, 5]))
        >>> torch.allclose(estimate(there), tg.joint_log_density(model)(there))
        True
    """

    def __init__(self, model: GPModel, fixed: FixedPoint, rows: Tensor):
        super().__init__(model.on_rows(rows))
        self.factor = len(model.train_x) / len(rows)
        self.rest = fixed_point(self.model, fixed.position).moved(self.factor, fixed)

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = super().value_and_grad(position)
        log_prior, slope = _log_prior(self.model, position)
        value = log_prior + self.rest.value + self.factor * (value - log_prior)
        gradient = slope + self.rest.gradient + self.factor * (gradient - slope)
        return mask_failures(value, gradient)

    def select(self, rows: Tensor | slice) -> EstimatedJointLogDensity:
        return self
