"""Draws of whitened latents from a normal density that may be too narrow, with wider ones beside it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchgpmc.evidence.latent_estimates import spread_levels
from torchgpmc.numerics.linalg import cholesky, identity_matrix, triangular_log_determinant

# Of the draws: with a quarter of the information, and from the prior.
_WIDE, _WIDE_SHARE, _PRIOR_SHARE = 0.25, 0.2, 0.1
LEAST_DRAWS = 10  # each part then has one and more


def defended_draws(centre: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draws of w ``(C, draws, V)`` from three normal densities, and the log of their mixture's density over N(w | 0, I).

    Most are from N(centre, precision^-1), some from that with a quarter of what its precision has above the prior's, and a tenth
    from the prior, N(0, I): no density is below a tenth of the prior's. As many from each as its share says: means weighted by the
    mixture are unbiased as they are for draws from it, and vary less (the balance heuristic of Veach & Guibas 1995).

    Args:
        centre: ``(C, V)``.
        precision: ``(C, V, V)``, at least I; where centre or precision is not finite, or has no factor, the prior stands in.
        noise: standard normals ``(C, draws, V)``, at least 10 draws.
    """
    identity = identity_matrix(centre.shape[-1], centre)
    root, ok = cholesky(precision)
    sound = (ok & torch.isfinite(centre.sum(-1) + root.sum((-2, -1)))).unsqueeze(-1)
    middle = torch.where(sound, centre, 0.0).unsqueeze(1)
    sound = sound.unsqueeze(-1)
    flatter = cholesky(torch.where(sound, torch.lerp(identity, precision, _WIDE), identity)).factor
    roots = torch.where(sound, root, identity), flatter
    draws = noise.shape[1]
    wide, flat = math.ceil(_WIDE_SHARE * draws), math.ceil(_PRIOR_SHARE * draws)
    *around, last = noise.split([draws - wide - flat, wide, flat], 1)
    moved = [torch.linalg.solve_triangular(root.mT, part.mT, upper=True).mT for root, part in zip(roots, around, strict=True)]
    white = torch.cat([middle + part for part in moved] + [last], 1)
    log_prior, gap = -0.5 * white.square().sum(-1), white - middle
    ratios = [
        math.log(part.shape[1] / draws) + triangular_log_determinant(of)[:, None] - 0.5 * (gap @ of).square().sum(-1) - log_prior
        for of, part in zip(roots, around, strict=True)
    ]
    ratios.append(torch.full_like(log_prior, math.log(flat / draws)))
    return white, torch.logsumexp(torch.stack(ratios), 0)


def mean_weight(log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the mean of weights ``(C, draws)``, and its relative variance as of independent draws: too large, if anything."""
    draws = log_weight.shape[1]
    value = torch.logsumexp(log_weight, -1) - math.log(draws)
    return value, (log_weight - value.unsqueeze(-1)).exp().var(-1) / draws


def chosen_draws(log_weight: Tensor, normal: Tensor, count: int) -> Tensor:
    """Indices ``(C, count)``, each drawn in proportion to the weights, from a standard normal ``(C,)``."""
    share = torch.softmax(torch.nan_to_num(log_weight, neginf=-1e300), -1).cumsum(-1)
    levels = spread_levels(torch.special.ndtr(normal), count) * share[:, -1:] * (1 - 1e-12)
    return torch.searchsorted(share, levels, right=True).clamp_max(log_weight.shape[1] - 1)
