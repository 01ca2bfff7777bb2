"""Gaussian sites for coordinates in which the joint posterior is easy to sample: an approximation's, at one theta."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation, Laplace
from torchgpmc.approximations.gaussian_form import check_approximation, check_model
from torchgpmc.approximations.sparse_laplace import InducingLaplace, inducing_laplace
from torchgpmc.checks import warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.starts import posterior_modes

_NUM_STARTS = 2
_SEED = 0
# Of a sparse model's theta, a rough search: draws around the best so far, at half the spread each round.
_ROUNDS, _DRAWS_A_ROUND = 6, 32
_CHUNK_ELEMENTS = 2_000_000  # of projections


def posterior_sites(model: GPModel, approximation: Approximation) -> GaussianSites:
    """The sites of ``approximation`` at the mode of its posterior of theta; of several data sets, at the prior's median.

    The search draws from a generator of its own: a run that is resumed finds the same sites. Where the approximation fails, the
    sites are empty, and coordinates are white under the prior.

    Raises:
        ValueError: a model that cannot be approximated so.
        TypeError: something that is not an approximation.
    """
    check_approximation("whitening", approximation)
    count = model.targets.num_data_sets
    with torch.no_grad():
        if not model.has_latents_at_data:
            _check_sparse(model, approximation)
            at = model.at_data(model.layout.raw_values(_sparse_theta(model).expand(count, -1)))
            prior = at.prior
            at_mode = inducing_laplace(model, at, model.targets)
            precision, shift, converged = at_mode.precision, at_mode.shift, at_mode.converged
        else:
            check_model(model, f"whitening={type(approximation).__name__}()")
            prior = model.prior(_full_theta(model, approximation).expand(count, -1))
            found = approximation.evidence(model, prior)
            precision, shift, converged = found.precision, found.alpha + found.precision * found.mean, found.converged
    ok = converged & prior.ok & torch.isfinite(shift).all(-1) & torch.isfinite(precision).all(-1)
    if not bool(ok.all()):
        warn(
            f"{type(approximation).__name__} did not converge at the hyperparameters it was to give sites for: the chains sample "
            f"[theta, v] as without whitening. Try the other of Laplace() and EP()."
        )
    sites = GaussianSites(torch.where(ok[:, None], precision, 0.0), torch.where(ok[:, None], shift, 0.0))
    return sites if model.targets.one_a_chain else GaussianSites(*(part.squeeze(0) for part in sites))


def _check_sparse(model: GPModel, approximation: Approximation) -> None:
    if model.num_latents != 1 or not model.factorises:
        raise ValueError(
            f"whitening needs a likelihood with one latent function that factorises over data, and has "
            f"{type(model.likelihood).__name__}. Expected whitening=None."
        )
    if not isinstance(approximation, Laplace):
        raise ValueError(
            f"whitening is {approximation!r}, whose sites need f at the data, which {type(model).__name__} does not have among its "
            f"latents. Expected whitening=torchgpmc.Laplace()."
        )


def _median(model: GPModel) -> Tensor:
    """Of the prior of theta, ``(1, P)``."""
    if not model.layout.size:
        return model.train_x.new_zeros(1, 0)
    return normal_scale(model.layout).theta(model.train_x.new_zeros(1, model.layout.size))[0]


def _full_theta(model: GPModel, approximation: Approximation) -> Tensor:
    """A theta near the posterior's mode ``(1, P)``."""
    if not model.layout.size or model.targets.one_a_chain:
        return _median(model)
    generator = make_generator(_SEED, model.train_x.device)
    with torch.enable_grad():
        modes = posterior_modes(ApproximateMarginal(model, approximation), _NUM_STARTS, generator)
    return modes[0].position[None] if modes else _median(model)


def _sparse_theta(model: GPModel) -> Tensor:
    """The best of some draws, on the scale on which the prior is standard normal: roughly the posterior's mode ``(1, P)``."""
    if not model.layout.size or model.targets.one_a_chain:
        return _median(model)
    scale, generator = normal_scale(model.layout), make_generator(_SEED, model.train_x.device)
    best = model.train_x.new_zeros(1, model.layout.size)
    chunk = max(1, _CHUNK_ELEMENTS // (model.latent_size * len(model.train_x)))
    for round_ in range(_ROUNDS):
        noise = normal_like(best.expand(_DRAWS_A_ROUND, -1), generator)
        z = torch.cat([best, best + 0.5**round_ * noise])
        value = torch.cat([_sparse_evidence(model, scale.theta(part)[0]) for part in z.split(chunk)]) - 0.5 * z.square().sum(-1)
        best = z[value.argmax()][None]
    return scale.theta(best)[0]


def _sparse_evidence(model: GPModel, theta: Tensor) -> Tensor:
    at = model.at_data(model.layout.raw_values(theta))
    found: InducingLaplace = inducing_laplace(model, at, model.targets)
    return torch.where(found.converged & at.prior.ok, found.log_evidence, -torch.inf)
