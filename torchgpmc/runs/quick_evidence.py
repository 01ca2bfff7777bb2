"""An approximate evidence that costs a fraction of an estimate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation
from torchgpmc.approximations.gaussian_form import matrix_size
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.threads import even_slices, side_by_side

_CHUNK_ELEMENTS = 1_300_000  # of covariance matrices


class QuickEvidence(NamedTuple):
    """Of a model, by an approximation that serves it.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> theta = torch.zeros(1, 1).double()
        >>> exact = tg.approximations.expectation_propagation(model, theta).log_evidence
        >>> bool((QuickEvidence(model, tg.EP())(theta) - exact).abs() < 0.5)
        True
    """

    model: GPModel
    approximation: Approximation

    def __call__(self, theta: Tensor) -> Tensor:
        """Log evidence at thetas ``(S, P)``: ``(S,)``; NaN where it failed."""

        def part(rows: slice) -> Tensor:
            return self.approximation.quick_evidence(self.model, theta[rows])

        parts = even_slices(len(theta), max(1, _CHUNK_ELEMENTS // matrix_size(self.model)), theta.device)
        with torch.no_grad():
            return torch.cat(side_by_side(part, parts, theta.device))
