"""Near a fit: how theta is spread, how q(v) moves with it, and how latent functions hang together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.nearest_normal import precisions_of
from torchgpmc.approximations.normal_latents import GaussianLatents, data_precision, scale_of_precision
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.variational.bound import VariationalMarginal

_STEP = 1e-2
_WIDEST = 3.0  # deviation of a direction in which the bound is flat, or not at its top
_MOST = 64  # hyperparameters for which this is worked out
_UNKNOWN = 0.1  # deviation where it is not
_CHUNK_ELEMENTS = 4_000_000  # of projections, and of precisions
_MOST_JOINT = 6000  # V up to which a root of all latents' covariance is made: a factorisation of V^3, and V^2 numbers to move by
_PAIR_ELEMENTS = 20_000_000  # of projections weighted by the precisions of every two functions


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


def joint_scale_by_chunks(model: GPModel, theta: Tensor, latents: GaussianLatents) -> Tensor | None:
    """A lower root ``(V, V)`` of the covariance of all latents together at theta ``(P,)``, from the curvature of the data under q.

    For a q that no sites come with. The data are taken in chunks, so that memory is a few times V^2.

    Args:
        model: with a factorised likelihood and one data set.
        theta: where q is the best one, or near it.
        latents: q, of one theta.

    Returns:
        The root; ``None`` of one latent function, of a latent for every datum, and above V = 6000.
    """
    count, size = model.latent_shape
    if count == 1 or model.has_latents_at_data or model.latent_size > _MOST_JOINT:
        return None
    chunk = max(1, _PAIR_ELEMENTS // (count * (count + 1) // 2 * size))
    with torch.no_grad():
        hyperparameters = model.layout.raw_values(theta[None])
        precision = identity_matrix(model.latent_size, theta)[None].clone()
        for rows in torch.arange(len(model.train_x), device=theta.device).split(chunk):
            part = model.on_rows(rows)
            at = part.at_data(hyperparameters)
            precision += data_precision(at, precisions_of(part, at, latents))
        return scale_of_precision(precision)[0]
