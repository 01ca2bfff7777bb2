"""The posterior density of hyperparameters and whitened latents together: what HMC and its kin sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures, mask_value
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentsAt
from torchgpmc.models.remedies import checked_model
from torchgpmc.models.targets import Targets
from torchgpmc.models.whitening import GaussianSites, undo_whitening
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.overriding import keeps_methods, methods_of


class JointLogDensity(AutogradDensity):
    r"""The posterior density of position = [theta, v], up to a constant: what HMC and its kin sample.

    .. math:: \log p(\theta) + \log |dx / d\theta| + \log N(v | 0, I) + \log p(y | f(\theta, v))

    For the sparse model the last term is its expectation under p(f | u), so the density is that of the optimal q(v, theta)
    (Hensman et al. 2015, eq. 7). With ``sites``, of position = [theta, w], w being white under the posterior that they give:
    log \|dv / dw\| more; see :mod:`torchgpmc.models.whitening`.

    Args:
        model: a GP or SparseGP.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.
        fixed: f at the data for a model whose hyperparameters are all fixed, if it is at hand; else worked out here, once for all
            positions.
        sites: Gaussian sites at the data, constants; for one latent function.

    Example:
        >>> import math, torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 3), torch.tensor([0, 1, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> density = tg.joint_log_density(model)  # of v alone, since no hyperparameter is sampled
        >>> at_zero = 3 * (math.log(0.5) - 0.5 * math.log(2 * math.pi))  # labels of probability one half, v at the mode of N(0, I)
        >>> torch.allclose(density(torch.zeros(1, 3)), torch.tensor([at_zero]).double())
        True
    """

    def __init__(
        self,
        model: GPModel,
        targets: Tensor | Targets | None = None,
        fixed: LatentsAt | None = None,
        sites: GaussianSites | None = None,
    ):
        self.model = model
        self.targets = model.as_targets(targets)
        self.fixed = fixed
        self.sites = sites
        if fixed is None and not model.layout.size:
            with torch.no_grad():
                self.fixed = model.at_data(model.layout.raw_values(model.train_x.new_zeros(1, 0)))
        super().__init__(self._evaluate)
        keep_freed_memory()

    def _at(self, theta: Tensor) -> tuple[LatentsAt, Tensor]:
        if self.fixed is not None:
            return self.fixed, theta.new_zeros(len(theta))
        hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
        return self.model.at_data(hyperparameters), log_prior

    def _v_and_volume(self, at: LatentsAt, white: Tensor) -> tuple[Tensor, Tensor | float]:
        r"""v and :math:`\log |dv / dw|`."""
        if self.sites is None:
            return white, 0.0
        return undo_whitening(at.projection.mT, at.mean, self.sites, white)

    def whitened(self, position: Tensor) -> tuple[Tensor, Tensor]:
        r"""v ``(C, V)`` at ``position``, and :math:`\log |dv / dw|` ``(C,)``: without sites its latent part, and zeros."""
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        with torch.no_grad():
            v, log_volume = (white, 0.0) if self.sites is None else self._v_and_volume(self._at(theta)[0], white)
        return v, white.new_zeros(len(white)) + log_volume

    def _evaluate(self, position: Tensor) -> Tensor:
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        at, log_prior = self._at(theta)
        v, log_volume = self._v_and_volume(at, white)
        value = log_prior + log_standard_normal(v) + log_volume + self.model.log_likelihood(at, v, self.targets)
        return torch.where(at.prior.ok, value, torch.nan)

    def _is_written_out(self) -> bool:
        """Whether the model's own ways lead to this density, not to a subclass's or to one at fixed hyperparameters."""
        return self.fixed is None and keeps_methods(self, _WRITTEN_OUT)

    def _checked(self, position: Any) -> Tensor:
        size, latent_size = self.model.layout.size, self.model.latent_size
        position = as_tensor("position", position, self.model.train_x.device)
        if position.dim() != 2 or position.shape[1] != size + latent_size:
            raise ValueError(
                f"position has shape {tuple(position.shape)}. Expected (C, {size + latent_size}): in each row {size} "
                f"hyperparameters, unconstrained, then {latent_size} whitened latents; of one position position[None]."
            )
        return position.to(self.model.train_x.dtype)

    def __call__(self, position: Tensor) -> Tensor:
        position = self._checked(position)
        if self._is_written_out() and not (position.requires_grad and torch.is_grad_enabled()):
            theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
            value = self.model.value(theta, white, self.targets, self.sites)
            if value is not None:
                return mask_value(value)
        return super().__call__(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        position = self._checked(position)
        if self._is_written_out():
            theta, white = position.detach().split([self.model.layout.size, self.model.latent_size], -1)
            found = self.model.value_and_grad(theta, white, self.targets, self.sites)
            if found is not None:
                return mask_failures(*found)
        return super().value_and_grad(position)

    def select(self, rows: Tensor | slice) -> JointLogDensity:
        if not self.targets.one_a_chain:
            return self
        sites = None if self.sites is None else self.sites.select(rows)
        return JointLogDensity(self.model, self.targets.select(rows), self.fixed, sites)


def joint_log_density(model: GPModel, targets: Tensor | Targets | None = None) -> JointLogDensity:
    """The log density of [theta, v] given the data, differentiable once in its argument; see :class:`JointLogDensity`.

    Args:
        model: a GP or SparseGP.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.

    Raises:
        TypeError: something that is not a model.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> density = tg.joint_log_density(model)
        >>> value, gradient = density.value_and_grad(torch.zeros(3, 9).double())  # three chains; one hyperparameter, eight latents
        >>> value.shape, gradient.shape
        (torch.Size([3]), torch.Size([3, 9]))
    """
    return JointLogDensity(checked_model(model), targets)


_WRITTEN_OUT = methods_of(JointLogDensity, ("_evaluate",))
