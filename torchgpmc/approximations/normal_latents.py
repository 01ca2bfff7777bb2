r"""A normal q(v) for every latent function, the posterior under Gaussian sites, and its lower bound of log p(y | theta).

With f = m + A'v + rest at the data (A = L^-1 K(Z, X); for the full GP A = L'), v ~ N(0, I) a priori and
q(v) = prod_k N(mean_k, S_k S_k'),

.. math:: ELBO = \sum_n E_{q(f_n)} \log p(y_n | f_n) - KL(q(v) | N(0, I)).

A site N(f_n | g_n, 1 / W_n) stands for a datum; under sites q has the precision I + A W A'.

Several latent functions meet in the likelihood. What softmax and robust max see is differences of functions, so a shift that all
share has the prior's curvature, 1, where each function's own is W: were means moved one function at a time, they would take W steps
to arrive. So sites hold the second derivatives between functions too, and means move by a Newton step of all together, under
the sites' full precision; covariances are a block a function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, normal_from_natural, triangular_log_determinant

_MOST_COUPLED = 2000  # numbers in q's mean up to which functions move together: beyond, that matrix costs more than steps


class GaussianLatents(NamedTuple):
    """q(v) = prod_k N(mean_k, scale_k scale_k') at C thetas."""

    mean: Tensor  # (C, K, M)
    scale: Tensor  # (C, K, M, M), lower triangular

    def marginals(self, at: LatentsAt) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at N inputs ``(C, K, N)``, differentiable in ``at``."""
        half = torch.bmm(self.scale.mT.flatten(1, 2), at.projection).view(*self.mean.shape, -1)
        mean = torch.baddbmm(at.mean.unsqueeze(1), self.mean, at.projection)
        return mean, at.variance.unsqueeze(1) + half.square().sum(-2)

    def divergence(self) -> Tensor:
        """KL(q(v) | N(0, I)) ``(C,)``."""
        log_volume = triangular_log_determinant(self.scale).sum(-1)
        size = self.mean[0].numel()
        return 0.5 * (self.mean.square().sum((-2, -1)) + self.scale.square().sum((-3, -2, -1)) - size) - log_volume


class LatentSites(NamedTuple):
    """Gaussian sites at the data: precisions W (of either sign), and precisions times the centres."""

    precision: Tensor  # (C, K, N)
    coupling: Tensor  # (C, K (K - 1) / 2, N), of pairs of latent functions, for q's mean alone; no pairs where they are left out
    shift: Tensor  # (C, K, N)

    @classmethod
    def from_stacked(cls, stacked: Tensor, num_latents: int) -> LatentSites:
        """From what :meth:`stacked` gave."""
        return cls(*stacked.split([num_latents, stacked.shape[1] - 2 * num_latents, num_latents], 1))

    def stacked(self) -> Tensor:
        """All numbers in one tensor ``(C, R, N)``."""
        return torch.cat(self, 1)

    def times(self, values: Tensor) -> Tensor:
        """Precisions times ``(C, K, N)``, or ``(C, 1, N)`` for all functions alike."""
        found = self.precision * values
        if self.coupling.shape[1]:
            values, (first, second) = values.expand_as(found), _pairs(found.shape[1], found.device)
            found = found.index_add(1, first, self.coupling * values[:, second])
            found = found.index_add(1, second, self.coupling * values[:, first])
        return found


def no_sites(at: LatentsAt, num_latents: int) -> LatentSites:
    """Sites that say nothing: q is the prior."""
    zeros = at.mean.new_zeros(len(at.prior.ok), num_latents, at.mean.shape[-1])
    pairs = num_latents * (num_latents - 1) // 2 if num_latents * at.projection.shape[-2] <= _MOST_COUPLED else 0
    return LatentSites(zeros, zeros.new_zeros(len(zeros), pairs, zeros.shape[-1]), zeros)


def under_sites(at: LatentsAt, sites: LatentSites) -> tuple[GaussianLatents, Tensor]:
    """q(v) with sites in place of the likelihood, differentiable in ``at``, and whether it is one ``(C,)``."""
    precision = _own_precision(at, sites)
    linear = torch.bmm(sites.shift - sites.times(at.mean.unsqueeze(1)), at.projection.mT)
    mean, scale, ok = normal_from_natural(precision, linear)
    ok = ok.all(-1)
    if sites.coupling.shape[1]:
        mean, joint_ok = _joint_mean(at, sites, precision, linear)
        ok = ok & joint_ok
    return GaussianLatents(mean, scale), ok


def _joint_mean(at: LatentsAt, sites: LatentSites, precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """The mean ``(C, K, M)`` under sites that hang together, and whether it is one ``(C,)``; differentiable once in ``at``.

    P is factorised without a graph. The mean P^-1 b, which leaves b - P m = 0, has the derivative of P^-1 (b - P m), P^-1 and m
    held: products with the data in place of a factorisation's adjoint, as large as all latents together.
    """
    with torch.no_grad():
        root, ok = cholesky(_joint_precision(at, sites, precision))
        mean = torch.cholesky_solve(linear.reshape(len(linear), -1, 1), root).view_as(linear)
    if not linear.requires_grad:
        return mean, ok
    explained = torch.bmm(sites.times(torch.bmm(mean, at.projection)), at.projection.mT)
    residual = (linear - mean - explained).reshape(len(linear), -1, 1)
    return mean + torch.cholesky_solve(residual, root).view_as(linear), ok


def joint_scale(at: LatentsAt, sites: LatentSites) -> Tensor:
    """A lower root of the covariance of all latents together ``(C, V, V)``, under sites with their coupling.

    No direction is wider than in the prior: where functions move alike W and the coupling cancel, but for the error of differences.
    """
    return scale_of_precision(_joint_precision(at, sites, _own_precision(at, sites)))


def data_precision(at: LatentsAt, sites: LatentSites) -> Tensor:
    """What these data add to the precision of all latents together ``(C, V, V)``, under sites with their coupling."""
    return _joint_precision(at, sites, _projected(at.projection, sites.precision))


def scale_of_precision(precision: Tensor) -> Tensor:
    """A lower root of the covariance ``(C, V, V)``, with no direction wider than in the prior."""
    values, vectors = _firm_parts(precision)
    return cholesky((vectors / values.unsqueeze(-2)) @ vectors.mT).factor


def joint_precision(at: LatentsAt, sites: LatentSites) -> Tensor:
    """The precision of all latents together ``(C, V, V)``, no less than the prior's in any direction; see :func:`joint_scale`."""
    values, vectors = _firm_parts(_joint_precision(at, sites, _own_precision(at, sites)))
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _firm_parts(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, at least 1, and vectors."""
    values, vectors = torch.linalg.eigh(torch.nan_to_num(precision))
    return values.clamp_min(1.0), vectors


def _own_precision(at: LatentsAt, sites: LatentSites) -> Tensor:
    """Of each latent function, ``(C, K, M, M)``."""
    precision = _projected(at.projection, sites.precision)
    precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return precision


def _projected(projection: Tensor, precision: Tensor) -> Tensor:
    """A W A' ``(C, R, M, M)`` for precisions ``(C, R, N)``."""
    weighted = projection.unsqueeze(1) * precision.unsqueeze(-2)
    return torch.bmm(weighted.flatten(1, 2), projection.mT).view(*weighted.shape[:3], projection.shape[-2])


def _joint_precision(at: LatentsAt, sites: LatentSites, precision: Tensor) -> Tensor:
    """Of all latents ``(C, V, V)``, each function's own ``(C, K, M, M)`` being at hand."""
    count, latents, size, _ = precision.shape
    own, (first, second) = torch.arange(latents, device=precision.device), _pairs(latents, precision.device)
    coupling = _projected(at.projection, sites.coupling)
    blocks = precision.new_zeros(count, latents, latents, size, size)
    blocks[:, own, own], blocks[:, first, second], blocks[:, second, first] = precision, coupling, coupling
    return blocks.transpose(2, 3).reshape(count, latents * size, latents * size)


def _pairs(latents: int, device: torch.device) -> Tensor:
    """First and second latent function of each pair, ``(2, K (K - 1) / 2)``."""
    return torch.triu_indices(latents, latents, 1, device=device)


def expected_log_likelihood(
    model: GPModel, at: LatentsAt, mean: Tensor, variance: Tensor, targets: Targets, rows: Tensor | None = None
) -> Tensor:
    """E log p(y_n | f_n) ``(C, N)`` under normal marginals ``(C, K, N)``, differentiable in all that it is given.

    ``rows``, if given, are those of all data that the targets are of.
    """
    moments = [at_boundary(part) for part in (mean, variance)]

    def expected(likelihood: Any) -> Tensor:
        part = likelihood if rows is None else likelihood.for_data(rows)
        return part.expected_log_likelihood(*moments, targets.values)

    return model.likelihood_function(likelihood_values(at.prior), expected)


def at_boundary(moment: Tensor) -> Tensor:
    """(C, K, N) to what likelihoods take: ``(C, N)``, or ``(C, N, K)``."""
    return moment.squeeze(1) if moment.shape[1] == 1 else moment.mT


def lower_bound(model: GPModel, at: LatentsAt, latents: GaussianLatents, targets: Targets) -> Tensor:
    """The ELBO of q(v) ``(C,)``, differentiable in ``at`` and q."""
    return expected_log_likelihood(model, at, *latents.marginals(at), targets).sum(-1) - latents.divergence()
