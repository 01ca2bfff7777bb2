"""The posterior density of theta under Gaussian noise, the inducing values of a sparse model integrated out."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import Approximation
from torchgpmc.approximations.marginal import ApproximateMarginal
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures
from torchgpmc.models.collapsed import CollapsedDensity
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets

_CHUNK_ELEMENTS = 200_000  # of (C, M, M) matrices


class CollapsedMarginal(AutogradDensity):
    r"""The density :math:`p(\theta) |dx / d\theta| \int e^{E \log p(y | f)} N(v | 0, I) dv` of theta, up to no constant.

    Titsias's bound (2009) plus the log prior: the exact marginal of the density that a :class:`SparseGP` has of [theta, v].

    Args:
        model: one that ``collapses``.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpytorch.priors import GammaPrior, HalfNormalPrior
        >>> x, likelihood = torch.linspace(0, 1, 20), GaussianLikelihood(noise_prior=HalfNormalPrior(1.0))
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, x.sin(), kernel, likelihood, inducing_points=x[::5])
        >>> value, gradient = CollapsedMarginal(model).value_and_grad(torch.zeros(3, 2, dtype=torch.float64))
        >>> value.shape, gradient.shape
        (torch.Size([3]), torch.Size([3, 2]))
    """

    def __init__(self, model: GPModel, targets: Tensor | Targets | None = None):
        self.model = model
        self.targets = model.as_targets(targets)
        super().__init__(self._evaluate)
        keep_freed_memory()

    def roughly(self) -> CollapsedMarginal:
        """Itself: nothing is cheaper."""
        return self

    def select(self, rows: Tensor) -> CollapsedMarginal:
        return CollapsedMarginal(self.model, self.targets.select(rows)) if self.targets.one_a_chain else self

    def parts(self, theta: Tensor, *, with_slopes: bool) -> list[CollapsedDensity]:
        """Of a few thetas at once, what depends on theta alone."""
        rows = torch.arange(len(theta), device=theta.device).split(max(1, _CHUNK_ELEMENTS // self.model.latent_size**2))
        return [self.model.collapsed(theta[some], self.targets.select(some), with_slopes=with_slopes) for some in rows]

    def _evaluate(self, theta: Tensor) -> Tensor:
        parts = self.parts(theta, with_slopes=False)
        return torch.cat([part.evaluated.log_prior + part.posterior().log_evidence for part in parts])

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = [part.value_and_grad() for part in self.parts(position.detach(), with_slopes=True)]
        values, gradients = zip(*found, strict=True)
        return mask_failures(torch.cat(values), torch.cat(gradients))


def marginal_of(model: GPModel, approximation: Approximation) -> ApproximateMarginal | CollapsedMarginal:
    """The posterior density of theta, exact for a model that ``collapses``, up to no constant.

    Args:
        model: whose latents are integrated out.
        approximation: by which, where the model does not collapse.

    Raises:
        ValueError: a model whose latents can be integrated out in neither way.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> marginal_of(model, tg.Laplace())(torch.zeros(3, 1, dtype=torch.float64)).shape
        torch.Size([3])
    """
    return CollapsedMarginal(model) if model.collapses else ApproximateMarginal(model, approximation)
