"""Exact draws from a truncated multivariate normal: acceptance and rejection under the minimax tilt (Botev 2016)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.random import open_uniform, uniform
from torchgpmc.orthant.problem import Problem, select
from torchgpmc.orthant.separation import draw, separate, tilted
from torchgpmc.orthant.tilting import minimax_tilt

LEAST_ACCEPTANCE = 1e-4
_PROPOSALS_AT_ONCE = 2**20  # numbers
_FIRST_ROUND = 1000  # proposals from which the rate of acceptance is first judged


class TruncatedDraws(NamedTuple):
    """Draws from B truncated normals, and whether they are exact.

    Example:
        >>> import math, torch, torchgpmc as tg
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = tg.orthant.truncated_normal_draws(torch.eye(1).double(), lower=0.0, num_samples=10_000, generator=generator)
        >>> mean = (2 / math.pi) ** 0.5
        >>> bool(found.exact), bool((found.log_weight == 0).all()), bool((found.samples.mean() - mean).abs() < 0.03)
        (True, True, True)
    """

    samples: Tensor  # (B, S, N), within the limits
    log_weight: Tensor  # (B, S), zero for exact draws
    acceptance_rate: Tensor  # (B,), share of proposals that were, or would have been, accepted
    exact: Tensor  # (B,), False where acceptance was below 1e-4 and the draws are weighted proposals


def truncated_draws(problem: Problem, num_samples: int, generator: torch.Generator) -> TruncatedDraws:
    """Draws x ~ N(0, covariance) given its limits, one problem after another."""
    with torch.no_grad():
        parts = [_of_one(select(problem, slice(b, b + 1)), num_samples, generator) for b in range(len(problem.lower))]
        return TruncatedDraws(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _of_one(problem: Problem, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tilt = minimax_tilt(separate(problem))
    proposal = tilted(problem, tilt.shift)
    size = problem.lower.shape[-1]
    tried, total = 0, problem.lower.new_zeros(())
    kept: list[Tensor] = []
    wanted = num_samples
    while wanted > 0:
        rate = float(total) / tried if tried else 1.0
        count = max(_FIRST_ROUND, min(math.ceil(1.2 * wanted / max(rate, LEAST_ACCEPTANCE)), _PROPOSALS_AT_ONCE // size))
        proposed = open_uniform((1, size, count), problem.lower, generator)
        log_weight, points = draw(proposal, proposed)
        excess = log_weight[0] - tilt.log_bound
        if bool(tilt.converged) and float(excess.max()) > 1e-6:
            raise RuntimeError(
                f"a log weight exceeds its bound by {float(excess.max()):.2g}, so draws would not be exact: the tilt is not at its "
                f"saddle point. The covariance may be too nearly singular; add a small variance to its diagonal."
            )
        tried, total = tried + count, total + excess.exp().sum()
        if not bool(tilt.converged) or float(total) / tried < LEAST_ACCEPTANCE:
            if count < num_samples:
                proposed = open_uniform((1, size, num_samples), problem.lower, generator)
                log_weight, points = draw(proposal, proposed)
            samples = _within(problem, proposal.variables(points[:, :, :num_samples]))
            return samples, log_weight[0, :num_samples], total / tried, torch.tensor(False, device=samples.device)
        accepted = uniform((count,), problem.lower, generator).log() <= excess
        kept.append(points[0][:, accepted][:, :wanted])
        wanted -= kept[-1].shape[-1]
    samples = _within(problem, proposal.variables(torch.cat(kept, -1).unsqueeze(0)))
    return samples, samples.new_zeros(num_samples), total / tried, torch.tensor(True, device=samples.device)


def _within(problem: Problem, x: Tensor) -> Tensor:
    """``(S, N)`` from ``(1, N, S)``, rounding kept within the limits."""
    return x[0].T.clamp(problem.lower[0], problem.upper[0])
