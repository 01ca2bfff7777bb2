"""Near a fit: how theta is spread, how q(v) moves with it, and how latent functions hang together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.nearest_normal import precisions_of
from torchgpmc.approximations.normal_latents import GaussianLatents, data_precision, scale_of_precision
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator
from torchgpmc.variational.bound import VariationalMarginal

_STEP = 1e-2
_WIDEST = 3.0  # deviation of a direction in which the bound is flat, or not at its top
_MOST = 64  # hyperparameters for which this is worked out
_UNKNOWN = 0.1  # deviation where nothing else is known
_NUM_PROBES, _PROBE = 16, 0.03  # of the curvature of more hyperparameters, and their length
_ERRORS = 2.0  # standard errors of a mean over probes, less than which no curvature is taken to be
_CHUNK_ELEMENTS = 4_000_000  # of projections, and of precisions
_MOST_JOINT = 2000  # V up to which a root of all latents' covariance is made: at 5000 it cost minutes, and did not lengthen steps
_PAIR_ELEMENTS = 20_000_000  # of projections weighted by the precisions of every two functions


class NearMode(NamedTuple):
    """A normal approximation of theta, with the derivative of q(v)'s mean."""

    covariance: Tensor  # (P, P)
    slope: Tensor  # (V, P)


def near_mode(marginal: VariationalMarginal, theta: Tensor, latents: GaussianLatents) -> NearMode:
    """At theta ``(P,)``: the inverse of minus the bound's Hessian, flat directions cut, and d mean / d theta.

    Beyond 64 hyperparameters there are deviations alone, those of each given all else, and no slope.

    Args:
        marginal: the bound.
        theta: where it is highest.
        latents: q there.
    """
    size, latent_size = len(theta), marginal.model.latent_size
    unit = identity_matrix(size, theta)
    unknown = NearMode(_UNKNOWN**2 * unit, theta.new_zeros(latent_size, size))
    if size > _MOST:
        curvature = curvature_by_probes(marginal.model, theta, latents)
        return unknown if curvature is None else unknown._replace(covariance=curvature.reciprocal().diag())
    if not size:
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


def curvature_by_probes(model: GPModel, theta: Tensor, latents: GaussianLatents) -> Tensor | None:
    r"""Minus the diagonal of the joint log density's Hessian in theta ``(P,)``, the mean over q(v), from few gradients.

    .. math:: h = \frac{1}{R} \sum_r z_r \circ H(v_r) z_r, \quad v_r \sim q, \; z_r \in \{-1, 1\}^P

    whose expectation is the diagonal; the rest of H is noise of size :math:`(\sum_{j \ne i} H_{ij}^2 / R)^{1/2}`. No curvature is
    taken to be less than two standard errors, than the prior's own, which is without noise where parameters are independent a
    priori, or than that of a deviation of 3. Of hundreds of hyperparameters that data say nothing of, noise makes a few wider than
    the prior has them, and a chain that starts so far out is refused every step of the size that all others take.

    Args:
        model: whose density has gradients.
        theta: ``(P,)``.
        latents: q, of one theta.

    Returns:
        Curvatures above zero; ``None`` where the density has no slopes or is not finite.

    Source:
        Bekas, Kokiopoulou & Saad 2007, "An estimator for the diagonal of a matrix".
    """
    if not model.is_smooth:
        return None
    generator = make_generator(0, theta.device)
    density, size = JointLogDensity(model), len(theta)
    found, of_prior = [], []
    for _ in range(_NUM_PROBES):
        noise = torch.randn(latents.mean.shape, dtype=theta.dtype, device=theta.device, generator=generator)
        v = latents.mean + (latents.scale @ noise.unsqueeze(-1)).squeeze(-1)
        probe = torch.randn(size, dtype=theta.dtype, device=theta.device, generator=generator).sign()
        ends = theta + _PROBE * torch.stack([probe, -probe])
        gradient = density.value_and_grad(torch.cat([ends, v.flatten(1).expand(2, -1)], -1))[1][:, :size]
        slope = model.layout.evaluate(ends).log_prior_slope
        found.append(probe * (gradient[1] - gradient[0]) / (2 * _PROBE))
        of_prior.append(probe * (slope[1] - slope[0]) / (2 * _PROBE))
    curvatures = torch.stack(found)
    least = (_ERRORS * curvatures.std(0) / _NUM_PROBES**0.5).clamp_min(_WIDEST**-2)
    curvature = torch.stack([curvatures.mean(0), torch.stack(of_prior).mean(0), least]).amax(0)
    return curvature if bool(torch.isfinite(curvature).all()) else None


def joint_scale_by_chunks(model: GPModel, theta: Tensor, latents: GaussianLatents) -> Tensor | None:
    """A lower root ``(V, V)`` of the covariance of all latents together at theta ``(P,)``, from the curvature of the data under q.

    For a q that no sites come with. The data are taken in chunks, so that memory is a few times V^2.

    Args:
        model: with a factorised likelihood and one data set.
        theta: where q is the best one, or near it.
        latents: q, of one theta.

    Returns:
        The root; ``None`` of one latent function, of a latent for every datum, and above V = 2000.
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
