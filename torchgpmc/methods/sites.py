"""Gaussian sites for coordinates in which the joint posterior is easy to sample: an approximation's, at one theta."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, Approximation
from torchgpmc.approximations.base import check_model
from torchgpmc.diagnostics import SamplingWarning
from torchgpmc.methods.modes import posterior_modes
from torchgpmc.models.base import GPModel
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.normal_scale import normal_scale
from torchgpmc.random import make_generator

_NUM_STARTS = 2
_SEED = 0


def posterior_sites(model: GPModel, approximation: Approximation) -> GaussianSites:
    """The sites of ``approximation`` at the mode of its posterior of theta; of several data sets, at the prior's median.

    The search draws from a generator of its own: a run that is resumed finds the same sites. Where the approximation fails, the
    sites are empty, and coordinates are white under the prior.

    Raises:
        ValueError: a model that cannot be approximated so.
        TypeError: something that is not an approximation.
    """
    if not hasattr(approximation, "evidence"):
        raise TypeError(f"whitening is {approximation!r}. Expected torchgpmc.Laplace(), torchgpmc.EP() or None.")
    check_model(model, f"whitening={type(approximation).__name__}()")
    theta = _representative_theta(model, approximation)
    with torch.no_grad():
        count = len(model.train_y) if model.train_y.dim() == 2 else 1
        prior = model.prior(theta.expand(count, -1))
        found = approximation.evidence(model, prior)
        shift = found.alpha + found.precision * found.mean
        ok = found.converged & prior.ok & torch.isfinite(shift).all(-1) & torch.isfinite(found.precision).all(-1)
    if not bool(ok.all()):
        warnings.warn(
            f"{type(approximation).__name__} did not converge at the hyperparameters it was to give sites for: the chains sample "
            f"[theta, v] as without whitening. Try the other of Laplace() and EP().",
            SamplingWarning,
            stacklevel=5,
        )
    sites = GaussianSites(torch.where(ok[:, None], found.precision, 0.0), torch.where(ok[:, None], shift, 0.0))
    return sites if model.train_y.dim() == 2 else GaussianSites(*(part.squeeze(0) for part in sites))


def _representative_theta(model: GPModel, approximation: Approximation) -> Tensor:
    """``(1, P)``."""
    if not model.layout.size:
        return model.train_x.new_zeros(1, 0)
    if model.train_y.dim() == 1:
        generator = make_generator(_SEED, model.train_x.device)
        modes = posterior_modes(ApproximateMarginal(model, approximation), _NUM_STARTS, generator)
        if modes:
            return modes[0].position[None]
    return normal_scale(model.layout).theta(model.train_x.new_zeros(1, model.layout.size))[0]
