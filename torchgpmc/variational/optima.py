"""Optima of the bound beside the one that a fit has found, as far as they may hold some of the posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.models.gp_model import GPModel
from torchgpmc.trees import concatenate, take
from torchgpmc.variational.bound import VariationalMarginal, inducing_positions
from torchgpmc.variational.searches import SMALL_GAIN, Found, moved_together, search, values_at
from torchgpmc.variational.start import Start, fitted

_MOST = 64  # hyperparameters, of more of which a fit has no covariance to tell optima apart by
_FAR_BELOW = 12.0  # nats of the bound: so much lower an optimum is given up
_RISES = 4.0  # times what the last round gained, the most that a search is taken to gain yet
_ENDED = 0.05  # nats that a round gained, by less of which a search can be compared


class Ended(NamedTuple):
    """A search that was carried to its end, as a fit."""

    fit: Start
    found: Found


class Elsewhere(NamedTuple):
    """Searches carried on as far as comparing them with a fit takes."""

    ends: list[Found]  # of those in reach that ended elsewhere, the highest first
    is_there_more: bool  # whether any ended elsewhere, or was out of reach


def with_others(
    ended: Ended, ends: Sequence[Found], further: Sequence[Found], keeps: bool, max_iterations: int, bar: tqdm
) -> Ended:
    """The highest optimum that searches lead to, with the others that may hold some of the posterior.

    Short searches are carried on until they meet the fit, end elsewhere or are out of reach. Where not all meet, ``further``
    beginnings are searched from too: that there is more than one optimum is the reason to look for more.

    Args:
        ended: the search that was carried to its end; its model has the final inducing points.
        ends: of the other short searches.
        further: beginnings of more.
        keeps: whether ``ended`` stays the fit even if another search ends higher, as where inducing points have moved for it.
        max_iterations: rounds of a search.
        bar: counts rounds.
    """
    model, size = ended.fit.model, len(ended.fit.theta)
    if not 0 < size <= _MOST or not math.isfinite(ended.found.value):
        return ended
    elsewhere = _carried_on(model, ended, ends, max_iterations, bar)
    found = elsewhere.ends
    if elsewhere.is_there_more and further:
        found = found + _carried_on(model, ended, further, max_iterations, bar).ends
        found.sort(key=lambda end: -end.value)
    rivals = [fitted_at(model, end) for end in _distinct(ended, found)]
    highest = max(rivals, key=lambda one: one.found.value, default=ended)
    if not keeps and highest.found.value > ended.found.value + SMALL_GAIN:
        begin, still = highest.found, inducing_positions(model, False)
        last = search(model, still, begin.position, begin.sites, max_iterations, bar)
        rivals = [ended, *(one for one in rivals if one is not highest)]
        ended = fitted_at(model, last)
    # What was apart by one fit's deviations may not be by another's.
    others = [one.fit for one in rivals if not _meets(one.fit.theta, ended.fit)]
    return Ended(replace(ended.fit, others=tuple(sorted(others, key=lambda fit: -fit.log_mass))), ended.found)


def fitted_at(model: GPModel, found: Found) -> Ended:
    """The fit at the theta where a search ended, and how it ended."""
    theta = found.position[: model.layout.size]
    model = model.with_theta(theta)
    marginal = VariationalMarginal(model)
    marginal.sites = found.sites
    latents = marginal.optimum(theta[None])
    marginal.sites = latents.sites
    value = float(latents.log_evidence + model.layout.log_prior(theta[None]).detach())
    rise = found.rise + value - found.value
    fit = fitted(model, latents.latents, converged=rise <= SMALL_GAIN, marginal=marginal)
    return Ended(fit, Found(theta, latents.sites, value, rise))


def _carried_on(model: GPModel, ended: Ended, ends: Sequence[Found], max_iterations: int, bar: tqdm) -> Elsewhere:
    """In rounds, all searches side by side."""
    theta = torch.stack([end.position for end in ends])
    given = [end.sites for end in ends if end.sites is not None]
    sites = concatenate(given) if len(given) == len(ends) else None
    before = torch.full_like(theta[:, 0], -math.inf)
    found: list[Found] = []
    is_there_more = False
    for number in range(max_iterations + 1):
        value, sites = values_at(model, theta, sites)
        bar.update()
        left = []
        for row in range(len(theta)):
            rise = float(value[row] - before[row])
            end = Found(theta[row], take(sites, slice(row, row + 1)), float(value[row]), rise)
            if not math.isfinite(end.value) or _meets(theta[row], ended.fit):
                continue
            if number and end.value + _RISES * rise < ended.found.value - _FAR_BELOW:
                is_there_more = True
            elif rise <= _ENDED or number == max_iterations:
                found.append(end)
            else:
                left.append(row)
        if not left:
            break
        sites, before = take(sites, torch.tensor(left, device=theta.device)), value[left]
        theta = moved_together(model, theta[left], sites)
    in_reach = [end for end in found if end.value > ended.found.value - _FAR_BELOW]
    return Elsewhere(sorted(in_reach, key=lambda end: -end.value), is_there_more or bool(found))


def _meets(theta: Tensor, fit: Start) -> bool:
    """Whether theta is as near as draws around the fit are: P in squared deviations."""
    gap = theta - fit.theta
    return float(gap @ torch.linalg.solve(fit.theta_covariance, gap)) < len(theta)


def _distinct(ended: Ended, ends: Sequence[Found]) -> list[Found]:
    """Of ends at one optimum the first."""
    kept: list[Found] = []
    for end in ends:
        if not any(_meets(end.position, replace(ended.fit, theta=other.position)) for other in kept):
            kept.append(end)
    return kept
