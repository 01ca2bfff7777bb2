"""What an earlier run's draws of theta know: where chains and proposals begin, and how they scale."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.importance import truncated_log_weights
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.random import normal_like
from torchgpmc.posterior import Posterior
from torchgpmc.storage.fingerprint import differences, model_fingerprint
from torchgpmc.types import LogDensity

_OVERDISPERSION = 1.5  # of the starts, in deviations of the draws
_ENOUGH = 5.0  # draws a hyperparameter, by Kish's size, for their covariance to serve as it is


class DrawnStart(NamedTuple):
    """Draws of theta, by weight, that chains begin around and take their mass matrix from.

    Weights are cut at their mean times the root of their number, so that one heavy draw is not where all chains begin.

    Example:
        >>> import torch
        >>> theta = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
        >>> start = DrawnStart(theta, torch.zeros(4))
        >>> start.effective_size, start.is_guess
        (4.0, True)
        >>> positions, covariance = start.positions(lambda theta: theta.sum(-1), 3, torch.Generator().manual_seed(0))
        >>> positions.shape, covariance.diagonal()
        (torch.Size([3, 2]), tensor([1.3333, 1.3333]))
    """

    theta: Tensor  # (S, P), those that weigh something
    log_weights: Tensor  # (S,), cut
    log_evidence: Tensor | None = None  # (S,), of p(y | theta) as the run that drew them has it, where it has any

    def __repr__(self) -> str:
        content = b"".join(part.detach().cpu().contiguous().numpy().tobytes() for part in self if part is not None)
        return f"{len(self.theta)} draws of theta ({hashlib.sha256(content).hexdigest()[:16]})"

    @property
    def effective_size(self) -> float:
        """Kish's."""
        return kish_effective_size(self.log_weights)

    @property
    def is_guess(self) -> bool:
        """Whether the draws are too few for a mass matrix, so that it is only where learning begins."""
        return self.effective_size < _ENOUGH * self.theta.shape[1]

    def covariance(self) -> Tensor:
        """Of the draws ``(P, P)``, its correlations shrunk as if P draws more had none."""
        weights = torch.softmax(self.log_weights, 0)
        centred = self.theta - weights @ self.theta
        size, columns = self.effective_size, self.theta.shape[1]
        found = (centred * weights.unsqueeze(-1)).mT @ centred * (size / (size - 1))
        return torch.lerp(found.diagonal().diag(), found, size / (size + columns))

    def positions(self, density: LogDensity, num_chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Starts ``(C, P)`` and the covariance ``(P, P)``.

        A chain begins at a draw, chosen by weight, to which noise is added that makes the starts one and a half times as wide as
        the draws: R-hat is to see what these missed. Where that is impossible it begins at the draw itself.
        """
        weights = torch.softmax(self.log_weights, 0)
        # Evenly spaced in the sum of weights, as a lobe is to have its share of few chains.
        offset = torch.rand((), dtype=weights.dtype, generator=generator, device=generator.device).to(weights)
        places = (torch.arange(num_chains, device=weights.device) + offset) / num_chains
        draws = self.theta[torch.searchsorted(weights.cumsum(0), places).clamp_max(len(weights) - 1)]
        covariance = self.covariance()
        noise = normal_like(draws, generator) @ cholesky((_OVERDISPERSION**2 - 1) * covariance).factor.mT
        possible = torch.isfinite(density(draws + noise)).unsqueeze(-1)
        return torch.where(possible, draws + noise, draws), covariance


def drawn_start(posterior: Posterior, model: GPModel) -> DrawnStart:
    """The draws of a run on ``model``.

    Raises:
        ValueError: of another model, of one data set a chain, or too few to have a covariance.
    """
    changed = differences(model_fingerprint(posterior.model), model_fingerprint(model))
    if changed:
        raise ValueError(
            f"start is a posterior of another model than the one to be sampled: {changed}. Expected draws of this model; "
            f"sample(posterior.model, ..., start=posterior) goes on with theirs."
        )
    if model.targets.one_a_chain:
        raise ValueError("start is a posterior, and the model has several data sets, each with its own. Expected start=None.")
    theta = posterior.theta.flatten(0, 1).to(model.train_x)
    log_weights = torch.zeros_like(theta[:, 0]) if posterior.log_weights is None else posterior.log_weights.flatten().to(theta)
    weighing = torch.isfinite(log_weights) & torch.isfinite(theta).all(-1)
    size = theta.shape[1]
    log_evidence = posterior.stats.get("log_evidence")
    if log_evidence is not None:
        log_evidence = log_evidence.flatten().to(theta)[weighing]
    found = DrawnStart(theta[weighing], truncated_log_weights(log_weights[weighing]), log_evidence)
    distinct = len(found.theta.unique(dim=0))
    if distinct <= size or found.effective_size < 2:
        worth = f", worth {found.effective_size:.1f} even ones" if distinct > size else ""
        raise ValueError(
            f"start has {distinct} different draws of {size} hyperparameters{worth}, too few to say how these vary together. "
            f"Expected more than {size}; draw more, or begin from the prior with start=None."
        )
    return found
