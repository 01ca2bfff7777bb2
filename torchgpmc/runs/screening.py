"""Candidates for weighted draws that an approximation refuses before their evidence is estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchgpmc.approximations import EP, Approximation
from torchgpmc.approximations.gaussian_form import check_approximation, check_model
from torchgpmc.checks import check_count
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.quick_evidence import QuickEvidence


@dataclass(frozen=True)
class Screen:
    """Estimate the evidence of few candidates, as an approximation weighs them: ``tg.AMIS(screen=tg.Screen())``.

    For proposals of which most draws weigh next to nothing, where an approximate evidence is near, and cheaper than an estimate.
    Of each batch of candidates some are estimated, each with a probability by its approximate weight, and count for one over that:
    weights are as exact as without. What the approximation holds for impossible is estimated now and then; if it is not, few such
    draws weigh much, which k-hat shows. So does an estimate that chance has put far too high, the more the less probable it was to
    be made: estimates should vary little. ``num_samples``, and sizes of batches, are of draws, so of estimates.

    Args:
        candidates: for each estimate, at least 2.
        approximation: whose evidence says what candidates weigh.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(screen=tg.Screen(candidates=4)), num_samples=500, progress=False)
        >>> posterior.num_draws, int(posterior.stats["n_candidates"].sum())
        (500, 2000)
    """

    candidates: int = 8
    approximation: Approximation = EP(max_iterations=10)  # noqa: RUF009  (frozen, so it may be shared)

    def on_model(self, model: GPModel) -> Screening:
        """What it is on a model.

        Raises:
            TypeError: ``approximation`` is none.
            ValueError: options out of range, or a model whose evidence is exact, or that the approximation does not serve.
        """
        check_count("candidates", self.candidates, 2)
        check_approximation("approximation", self.approximation)
        if model.collapses or model.is_conjugate:
            raise ValueError("the model's evidence is exact, and nothing is quicker. Expected screen=None.")
        check_model(model, "Screen", self.approximation)
        return Screening(self.candidates, QuickEvidence(model, self.approximation))


class Screening(NamedTuple):
    """A :class:`Screen` on a model."""

    candidates: int
    log_evidence: QuickEvidence
