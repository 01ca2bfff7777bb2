"""The evidence of a model that collapses, without error, as the engines on hyperparameters take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgpmc.approximations.collapsed_marginal import CollapsedMarginal
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.numerics.random import normal_like


@dataclass(frozen=True, eq=False)
class CollapsedEstimator:
    """Exact values of p(y | theta), and draws of v from p(v | y, theta): a :class:`LatentEstimator`.

    Args:
        marginal: of a model that ``collapses``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> kernel, likelihood = RBFKernel().requires_grad_(False), GaussianLikelihood().requires_grad_(False)
        >>> x = torch.linspace(0, 1, 8)
        >>> model = tg.SparseGP(x, x.sin(), kernel, likelihood, inducing_points=x[::2])
        >>> estimator = CollapsedEstimator(tg.approximations.CollapsedMarginal(model))
        >>> found = estimator.draw(torch.zeros(2, 0).double(), torch.Generator().manual_seed(0))  # twice the same setting
        >>> bool(found.value[0] == found.value[1]), found.variance  # exact
        (True, tensor([0., 0.], dtype=torch.float64))
        >>> found.whitened.shape
        torch.Size([2, 4])
    """

    marginal: CollapsedMarginal

    @property
    def auxiliary_size(self) -> int:
        """Standard normals a draw of v takes."""
        return self.marginal.model.latent_size

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Values, with fresh draws of v; ``start`` is not needed."""
        theta = self.marginal.model.layout.checked(theta)
        return self.evaluate(theta, normal_like(theta.new_empty(len(theta), num_latents * self.auxiliary_size), generator))

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> LatentEstimate:
        """Values, with draws of v as a function of standard normals ``(C, J * auxiliary_size)``, ``auxiliary_size`` a draw."""
        size = self.auxiliary_size
        with torch.no_grad():
            found = [part.posterior() for part in self.marginal.parts(theta, with_slopes=False)]
            normals = auxiliary.view(len(theta), -1, size).split([len(part.mean) for part in found])
            drawn = [[part.draw(each) for each in noise.unbind(1)] for part, noise in zip(found, normals, strict=True)]
        value = torch.cat([part.log_evidence for part in found])
        (v, log_likelihood), *others = (
            [torch.cat(column) for column in zip(*parts, strict=True)] for parts in zip(*drawn, strict=True)
        )
        ok = torch.isfinite(value)
        value = torch.where(ok, value, -torch.inf)
        more = stacked_latents([other for other, _ in others], value, size)
        work = torch.full_like(value, 2.0)
        return LatentEstimate(value, torch.zeros_like(value), v, more, log_likelihood, work, torch.ones_like(ok))

    def given(self, theta: Tensor, whitened: Tensor, generator: torch.Generator) -> LatentEstimate:
        """Values, with ``whitened`` ``(C, V)`` for the kept draw of each: exact, they do not depend on it."""
        model, targets = self.marginal.model, self.marginal.targets
        with torch.no_grad():
            log_likelihood = model.log_likelihood(model.at(model.prior(theta)), whitened, targets)
        return self.draw(theta, generator)._replace(whitened=whitened, log_likelihood=log_likelihood)

    def start_at(self, theta: Tensor) -> Tensor:
        """Nothing is iterated."""
        return theta.new_zeros(len(theta), 1)

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Fresh draws of v: they are independent given theta."""
        return self.draw(theta, generator)

    def select(self, rows: Tensor) -> CollapsedEstimator:
        """The same for some of the chains."""
        return CollapsedEstimator(self.marginal.select(rows))
