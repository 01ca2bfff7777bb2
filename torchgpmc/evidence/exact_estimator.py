"""The exact evidence under Gaussian noise of a model whose latents are f at the data, as the engines on hyperparameters take it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import matrix_size
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky_in_place, solve_lower, times_blocks, triangular_log_determinant
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.numerics.threads import even_slices, side_by_side

_CHUNK_ELEMENTS = {"cpu": 600_000}  # of the covariances handled at once, which should stay in a core's cache
_MANY_ELEMENTS = 200_000_000
_WORTH_A_THREAD = 100_000
_FEW_DIGITS = 0.01  # rounding of a draw, in deviations of the noise


@dataclass(frozen=True, eq=False)
class ExactEstimator:
    r"""Exact values of p(y | theta), and draws of v from p(v | y, theta): a :class:`LatentEstimator`.

    .. math:: v = z + L^T A^{-1} (y - m - L z - S^{1/2} e), \quad A = L L^T + S, \quad z, e \sim N(0, I)

    (Matheron's rule, S being the noise): two factorisations a theta, no other operation of their order.

    Args:
        model: with Gaussian noise, f at the data its latents.
        targets: its own, or one data set a chain.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> kernel, likelihood = RBFKernel().requires_grad_(False), GaussianLikelihood().requires_grad_(False)
        >>> likelihood.noise = 1.0
        >>> model = tg.GPRegression([0.0, 100.0], [2.0, -4.0], kernel, likelihood)
        >>> found = ExactEstimator(model, model.targets).draw(torch.zeros(4000, 0).double(), torch.Generator().manual_seed(0))
        >>> y = torch.distributions.Normal(0.0, 2.0**0.5)
        >>> bool((found.value - y.log_prob(model.train_y).sum()).abs().max() < 1e-4), float(found.variance.max())
        (True, 0.0)
        >>> found.whitened.mean(0).round(decimals=1), found.whitened.var(0).round(decimals=1)  # of as much noise as signal
        (tensor([ 1., -2.], dtype=torch.float64), tensor([0.5000, 0.5000], dtype=torch.float64))
    """

    model: GPModel
    targets: Targets

    @property
    def auxiliary_size(self) -> int:
        """Standard normals a draw of v takes."""
        return 2 * self.model.latent_size

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Values, with fresh draws of v; ``start`` is not needed."""
        theta = self.model.layout.checked(theta)
        return self.evaluate(theta, normal_like(theta.new_empty(len(theta), num_latents * self.auxiliary_size), generator))

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> LatentEstimate:
        """Values, with draws of v as a function of standard normals ``(C, J * auxiliary_size)``, ``auxiliary_size`` a draw."""
        normals = auxiliary.view(len(theta), -1, 2, self.model.latent_size)

        def estimate(rows: slice) -> LatentEstimate:
            return self.select(rows)._estimates(self.model.prior(theta[rows]), *normals[rows].unbind(2))

        with torch.no_grad():
            parts = side_by_side(estimate, self._chunks(theta), theta.device)
        return LatentEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def given(self, theta: Tensor, whitened: Tensor, generator: torch.Generator) -> LatentEstimate:
        """Values, with ``whitened`` ``(C, V)`` for the kept draw of each: exact, they do not depend on it."""
        with torch.no_grad():
            log_likelihood = self.model.log_likelihood(self.model.at(self.model.prior(theta)), whitened, self.targets)
        return self.draw(theta, generator)._replace(whitened=whitened, log_likelihood=log_likelihood)

    def start_at(self, theta: Tensor) -> Tensor:
        """Nothing is iterated."""
        return theta.new_zeros(len(theta), 1)

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Fresh draws of v: they are independent given theta."""
        return self.draw(theta, generator)

    def select(self, rows: Tensor | slice) -> ExactEstimator:
        """The same for some of the chains."""
        return replace(self, targets=self.targets.select(rows)) if self.targets.one_a_chain else self

    def _chunks(self, theta: Tensor) -> list[slice]:
        size = matrix_size(self.model)
        largest = max(1, _CHUNK_ELEMENTS.get(theta.device.type, _MANY_ELEMENTS) // size)
        return even_slices(len(theta), largest, theta.device, max(1, _WORTH_A_THREAD // size))

    def _estimates(self, prior: LatentPrior, z: Tensor, e: Tensor) -> LatentEstimate:
        """From standard normals ``(C, J, V)`` each."""
        noise = self.model.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.noise)
        noise = noise.expand_as(prior.mean)
        total = prior.covariance.clone(memory_format=torch.contiguous_format)
        total.diagonal(dim1=-2, dim2=-1).add_(noise)
        factor, ok = cholesky_in_place(total)
        residual = (self.targets.values - prior.mean).expand_as(prior.mean).unsqueeze(1)
        deviation = noise.sqrt().unsqueeze(1)
        needed = residual - times_blocks(z, prior.factor.mT) - deviation * e
        half = solve_lower(factor, torch.cat([residual, needed], 1).mT)
        value = log_standard_normal(half[..., 0]) - triangular_log_determinant(factor)
        weights = torch.linalg.solve_triangular(factor.mT, half[..., 1:], upper=True).mT
        v = z + times_blocks(weights, prior.factor)
        # What f leaves of y, in deviations of the noise, without a difference of numbers that are a deviation of the prior large.
        left = e + deviation * weights
        # Where no digit of it is left in v, the factor's are gone as well.
        rounding = (residual - times_blocks(v, prior.factor.mT)) / deviation - left
        ok = ok & prior.ok & (rounding.abs().flatten(1).amax(-1) < _FEW_DIGITS)
        value = torch.where(ok, value, -torch.inf)
        log_likelihood = log_standard_normal(left[:, 0]) - 0.5 * noise.log().sum(-1)
        further = stacked_latents(list(v[:, 1:].unbind(1)), v, v.shape[-1])
        work = torch.full_like(value, 2.0)
        return LatentEstimate(value, torch.zeros_like(value), v[:, 0], further, log_likelihood, work, torch.ones_like(ok))
