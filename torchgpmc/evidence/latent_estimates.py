"""What the engines on hyperparameters alone take: an unbiased estimate of p(y | theta), with a latent draw to go with it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets

LATENTS_KEPT = 4  # given theta they vary far more than their mean does with theta


def latents_kept(model: GPModel) -> int:
    """Latent vectors of a theta that a run keeps: one where predictions would not use more, dear as they are or exact without.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> binary = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> regression = tg.GPRegression(x, x.sin(), kernel, GaussianLikelihood().requires_grad_(False))  # f is integrated out
        >>> latents_kept(binary), latents_kept(regression)
        (4, 1)
    """
    likelihood = as_likelihood(model.likelihood)
    several = likelihood.predicts_quickly or likelihood.has_moments_by_formula
    return LATENTS_KEPT if several and not model.is_conjugate else 1


class LatentEstimate(NamedTuple):
    """Estimates at C thetas, with one of the latent vectors each was made from, chosen by its weight.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> found = tg.evidence.Orthant().estimator(model).draw(theta, generator, num_latents=2)
        >>> found.value.shape, found.whitened.shape, found.further_whitened.shape
        (torch.Size([1]), torch.Size([1, 8]), torch.Size([1, 1, 8]))
        >>> torch.allclose(found.log_likelihood, model.log_likelihood(model.at(model.prior(theta)), found.whitened))
        True
    """

    value: Tensor  # (C,), log of the unbiased estimate of p(y | theta); -inf where K could not be factorised
    variance: Tensor  # (C,), relative variance of the estimate
    whitened: Tensor  # (C, V), the kept draw
    further_whitened: Tensor  # (C, J - 1, V), chosen as the kept one was, of J that were asked for
    log_likelihood: Tensor  # (C,), log p(y | f) of the kept draw
    num_factorizations: Tensor  # (C,)
    converged: Tensor  # (C,), whether the density it was drawn from is as good as it can be


class LatentEstimator(Protocol):
    """An unbiased estimator with latent draws; what it returns has at least the fields of :class:`LatentEstimate`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> estimator = tg.evidence.Orthant().estimator(model)
        >>> auxiliary = torch.randn(1, estimator.auxiliary_size, generator=generator, dtype=torch.float64)
        >>> first, again = (estimator.evaluate(theta, auxiliary) for _ in range(2))  # a function of them
        >>> bool(first.value == again.value), bool(first.value == estimator.draw(theta, generator).value)
        (True, False)
    """

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate."""
        ...

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> Any:
        """Estimates at ``theta`` ``(C, P)`` from fresh random numbers, with J latent vectors each; ``start`` may save work."""
        ...

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None) -> Any:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``."""
        ...

    def start_at(self, theta: Tensor) -> Tensor:
        """What estimates near ``theta`` may start from ``(C, ...)``."""
        ...

    def move(self, theta: Tensor, estimate: Any, num_steps: int, generator: torch.Generator) -> Any:
        """Moves the kept draws, leaving the extended target of a pseudo-marginal chain invariant."""
        ...

    def select(self, rows: Any) -> LatentEstimator:
        """The same for some of the chains."""
        ...


class Evidence(Protocol):
    """Options of one kind of unbiased estimate, in place of an engine's own importance sampling.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> def value_of(evidence):
        ...     return evidence.estimator(model).draw(theta, generator).value
        >>> (value_of(tg.evidence.Orthant(1000)) - value_of(tg.evidence.SmoothProbit(num_importance=1000))).abs() < 0.1
        tensor([True])
    """

    def estimator(self, model: GPModel, targets: Targets | None = None) -> LatentEstimator:
        """The estimator for a model; its own targets by default.

        Raises:
            ValueError: a model that cannot be served.
        """
        ...


def spread_levels(uniform: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1 ``(C, count)``, evenly spaced from ``uniform`` ``(C,)`` on and each uniform, to choose draws by.

    Systematic resampling (Carpenter, Clifford & Fearnhead 1999): of draws in mirrored pairs whose weights hardly differ, two levels
    that are a half apart choose the two of a pair.

    Example:
        >>> spread_levels(torch.tensor([0.75]), 2)
        tensor([[0.7500, 0.2500]])
    """
    return (uniform.unsqueeze(-1) + torch.arange(count, dtype=uniform.dtype, device=uniform.device) / count) % 1.0


def stacked_latents(parts: list[Tensor], like: Tensor, latent_size: int) -> Tensor:
    """Latent vectors ``(C, V)`` as ``(C, J, V)``, J possibly 0; ``like`` ``(C, ...)`` gives C, dtype and device."""
    return torch.stack(parts, 1) if parts else like.new_zeros(len(like), 0, latent_size)
