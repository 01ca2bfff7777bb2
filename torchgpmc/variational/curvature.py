"""How theta is spread, and how q(v) moves with it, near the best theta: by differences of the bound's gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.variational.bound import VariationalMarginal

_STEP = 1e-2
_WIDEST = 3.0  # deviation of a direction in which the bound is flat, or not at its top
_MOST = 64  # hyperparameters for which this is worked out
_UNKNOWN = 0.1  # deviation where it is not
_CHUNK_ELEMENTS = 4_000_000  # of projections, and of precisions


class NearMode(NamedTuple):
    """A normal approximation of theta, with the derivative of q(v)'s mean."""

    covariance: Tensor  # (P, P)
    slope: Tensor  # (V, P)


def near_mode(marginal: VariationalMarginal, theta: Tensor) -> NearMode:
    """At theta ``(P,)``: the inverse of minus the bound's Hessian, flat directions cut, and d mean / d theta.

    Beyond 64 hyperparameters a small multiple of the identity stands in, and no slope.
    """
    size, latent_size = len(theta), marginal.model.latent_size
    unit = identity_matrix(size, theta)
    unknown = NearMode(_UNKNOWN**2 * unit, theta.new_zeros(latent_size, size))
    if size > _MOST or not size:
        return unknown
    rows = theta + _STEP * torch.cat([unit, -unit])
    chunk = max(1, _CHUNK_ELEMENTS // (latent_size * max(latent_size, len(marginal.model.train_x))))
    parts = [marginal.value_grad_and_optimum(part) for part in rows.split(chunk)]
    gradient = torch.cat([part[1] for part in parts]).view(2, size, size)
    mean = torch.cat([part[2].latents.mean.flatten(1) for part in parts]).view(2, size, latent_size)
    if not bool(torch.isfinite(torch.cat([part[0] for part in parts])).all() & torch.isfinite(mean).all()):
        return unknown
    difference = (gradient[1] - gradient[0]) / (2 * _STEP)
    values, vectors = torch.linalg.eigh(0.5 * (difference + difference.mT))
    covariance = (vectors / values.clamp_min(_WIDEST**-2)) @ vectors.mT
    return NearMode(covariance, ((mean[0] - mean[1]) / (2 * _STEP)).mT)
