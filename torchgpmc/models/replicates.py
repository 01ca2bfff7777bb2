"""Data that share their inputs as several observations of one function value: fewer latents, of the same functions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.adapter.closed_form import ClosedForm
from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.likelihoods.replicated import Replicated, replicated
from torchgpmc.models.full import GP
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.restored import Restored
from torchgpmc.numerics.groups import sums_of_groups
from torchgpmc.numerics.linalg import cholesky, solve_lower
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import log_standard_normal

_LEAST = 16  # data at once
_SMALL_JITTER = 1e-5  # of the functions' unit: a larger one is noise of its own


class AtUniqueInputs(GP):
    """A GP of one value for all data that share their inputs, made by :func:`without_replicates`."""

    place: Tensor  # (N,), of each datum among the inputs
    replicates: Tensor


def without_replicates(model: GPModel) -> AtUniqueInputs | None:
    r"""The model of U function values, one for all data that share their inputs; ``None`` where all data differ.

    The jitter e gives each of N data its own value, f_n = g(x_n) + e_n. Their mean at an input with k data has jitter / k,

    .. math:: \bar f \sim N(m(X_U), \; K(X_U, X_U) + jitter \cdot diag(1 / k)),

    and what the data's own values are given it, :func:`with_replicates` draws. Of likelihoods of one latent a datum that are not
    normal; of kernels with a closed form, which tell equal inputs apart by nothing else.

    Source: Binois, Gramacy & Ludkovski 2018, "Practical heteroscedastic Gaussian process modeling for large simulation
    experiments", whose noise is normal.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = [0.0, 1.0, 0.0, 0.0], RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> other = without_replicates(tg.GP(x, [3, 1, 4, 1], kernel, tg.likelihoods.Poisson()))
        >>> other.train_x.flatten(), other.replicates
        (tensor([0., 1.], dtype=torch.float64), tensor([3., 1.], dtype=torch.float64))
    """
    if type(model) is not GP or model.targets.one_a_chain or not isinstance(model.covariance, ClosedForm):
        return None
    likelihood = model.likelihood
    if not isinstance(likelihood, Factorised) or likelihood.has_normal_sites or model.num_latents > 1:
        return None
    x, place, counts = torch.unique(model.train_x, dim=0, return_inverse=True, return_counts=True)
    if len(x) in (1, len(place)) or model.jitter > _SMALL_JITTER * model.unit:
        return None
    other = object.__new__(AtUniqueInputs)
    other.__dict__.update(model.__dict__)
    other._modules, other._buffers = dict(model._modules), dict(model._buffers)
    other.train_x, other.replicates = x, counts.to(x)
    other.register_buffer("place", place)
    # No one looks at these but those who count them.
    other.train_y = sums_of_groups(model.train_y, place, len(x)) / counts
    other.likelihood = _of_values(likelihood, model.train_y, place, len(x))
    other.refresh()
    return other


def _of_values(likelihood: Factorised, y: Tensor, place: Tensor, size: int) -> Replicated:
    """Observations that are alike are seen once, and counted."""
    order = torch.argsort(place, stable=True)
    if likelihood.for_data(order) is not likelihood:  # exposures, which differ
        return replicated(likelihood.for_data(order), y[order], torch.ones_like(y), place[order], size)
    pairs, times = torch.unique(torch.stack([place.to(y), y], 1), dim=0, return_counts=True)
    return replicated(likelihood, pairs[:, 1].contiguous(), times.to(y), pairs[:, 0].long(), size)


def with_replicates(model: GP, other: AtUniqueInputs, theta: Tensor, v: Tensor, generator: torch.Generator) -> Restored:
    r"""Draws of all data's values given their means at each input, of draws ``(S, P)`` and ``(S, U)`` without replicates.

    .. math:: f_n = \bar f + d_n, \quad d \sim N(jitter \cdot P g, \; jitter \cdot P), \quad g_n = d \log p(y_n | \bar f) / df

    P takes the mean at each input away. That is p(d | f mean, y) but for the likelihood's curvature within a jitter's deviation,
    which the weights make up for.
    """
    noise = normal_like(v.new_empty(len(v), len(other.place)), generator)
    jitter, place = model.jitter, other.place
    with torch.no_grad():
        prior = other.prior(theta)
        f = other.latents(prior, v)[:, place]
        values = likelihood_values(prior)
        before = model.likelihood_function(values, lambda part: part.derivatives(f, model.train_y))
        slope = _within(other, before.first)
        deviation = jitter**0.5 * _within(other, noise) + jitter * slope
        after = model.likelihood_function(values, lambda part: part.pointwise_log_prob(f + deviation, model.train_y))
        gained = (after - before.value).sum(-1)
        log_weight = gained - (deviation * slope).sum(-1) + 0.5 * jitter * slope.square().sum(-1)
        covariance = prior.covariance - torch.diag_embed(jitter / other.replicates)
        found, ok = _whitened(covariance, place, jitter, f + deviation - prior.mean[:, place])
    # Where there is no factor a draw weighs nothing, and has any values; NaN times that would be NaN.
    possible = ok & prior.ok & torch.isfinite(found).all(-1) & torch.isfinite(log_weight)
    found = torch.where(possible.unsqueeze(-1), found, 0.0)
    change = gained + log_standard_normal(found) - log_standard_normal(v)
    return Restored(theta, found, torch.where(possible, change, 0.0), torch.where(possible, log_weight, 0.0))


def _within(other: AtUniqueInputs, values: Tensor) -> Tensor:
    """What ``(S, N)`` are apart from their mean at each input."""
    return values - (sums_of_groups(values, other.place, len(other.train_x)) / other.replicates)[:, other.place]


def _whitened(covariance: Tensor, place: Tensor, jitter: float, centred: Tensor) -> tuple[Tensor, Tensor]:
    """``L^-1 centred`` ``(S, N)`` for L L' = covariance[place, place] + jitter I, and where there is an L.

    Some data after others, given which the U values have a normal density: some N U^2 operations, where L takes N^3 / 3.
    """
    size, number = covariance.shape[-1], len(place)
    at_once = max(_LEAST, size) if 3 * size <= number else number
    mean, found, ok = torch.zeros_like(covariance[:, 0]), [], torch.ones_like(covariance[:, 0, 0], dtype=torch.bool)
    for begin in range(0, number, at_once):
        some = place[begin : begin + at_once]
        cross, residual = covariance[:, some], (centred[:, begin : begin + at_once] - mean[:, some]).unsqueeze(-1)
        inner = cross[:, :, some]
        inner.diagonal(dim1=-2, dim2=-1).add_(jitter)
        factor, possible = cholesky(inner)
        ok = ok & possible
        if begin + at_once >= number:
            found.append(solve_lower(factor, residual))
            break
        white = solve_lower(factor, torch.cat([residual, cross], -1))
        found.append(white[..., :1])
        gain = white[..., 1:].mT
        mean = mean + (gain @ found[-1]).squeeze(-1)
        covariance = torch.baddbmm(covariance, gain, gain.mT, alpha=-1)
    return torch.cat(found, 1).squeeze(-1), ok
