"""About how many seconds parts of runs on theta alone take here: searches for modes, and estimates of p(y | theta)."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from torchgpmc.calls.timing import TIMING, caught_up, seconds_of
from torchgpmc.evidence import latents_kept
from torchgpmc.methods import AMIS, EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import OnNormalScale, normal_scale
from torchgpmc.runs.beginnings import AtModes
from torchgpmc.runs.chain_targets import estimator_for, suited_approximation
from torchgpmc.runs.on_normal_scale import searched_marginal

_FEW, _MOST = 4, 100  # thetas timed at once
_SCREENED = 32
_NEAR = 0.3  # of one another, in deviations of the prior
# Of searches, as 16 data sets took them: gradients each, candidates, tethers along each hyperparameter and gradients of one.
_GRADIENTS, _MORE_A_HYPERPARAMETER = 10, 6
_CANDIDATES, _QUIET = 8, 2
_TETHERS, _GRADIENTS_A_TETHER = 6, 5


def seconds_of_search(model: GPModel, begin: AtModes) -> float:
    """Of the gradients that searches for modes, and along the tails if these are searched, usually take.

    Searches come by thetas far from where they end, which take as long as draws from the prior do on average.
    """
    size, starts = model.layout.size, begin.count + (_QUIET if model.is_conjugate or model.collapses else 0)
    density = OnNormalScale(searched_marginal(model, suited_approximation(model, begin.approximation)), normal_scale(model.layout))
    z = _draws(model, _FEW)
    single = seconds_of(lambda: tuple(density.value_and_grad(row[None]) for row in z)) / len(z)
    together = seconds_of(partial(density.value_and_grad, z)) / len(z)
    along = _TETHERS * _GRADIENTS_A_TETHER * size + size**2 if begin.search_tails else 0
    alone = starts * (_GRADIENTS + _MORE_A_HYPERPARAMETER * size)
    return alone * single + (_CANDIDATES * starts + 2 * size + 1 + along) * together


def seconds_an_estimate(model: GPModel, method: AMIS | EmulatedHMC) -> float:
    """Of a theta of a batch near the best of a few draws from the prior, begun at what that one has found."""
    generator, scale = make_generator(0, model.train_x.device), normal_scale(model.layout)
    approximation = suited_approximation(model, method.approximation)
    estimator = estimator_for(model, approximation, method.num_importance, None, method.evidence)
    draw = partial(estimator.draw, generator=generator, num_latents=latents_kept(model))
    z = _draws(model, _FEW)
    began = time.perf_counter()
    value = draw(scale.theta(z)[0]).value
    caught_up(value)
    spent = time.perf_counter() - began
    best = z[torch.nan_to_num(value, nan=-torch.inf).argmax()][None]
    count = max(_FEW, min(_MOST, int(_FEW * TIMING / max(spent, 1e-9))))
    theta = scale.theta(best + _NEAR * _draws(model, count))[0]
    start = torch.nan_to_num(estimator.start_at(scale.theta(best)[0])).repeat_interleave(count, 0)
    return seconds_of(partial(draw, theta, start=start)) / count


def seconds_a_candidate(model: GPModel, method: AMIS) -> float:
    """Of a draw, or where candidates are screened of one of those, with its share of a draw."""
    estimate = seconds_an_estimate(model, method)
    if method.screen is None:
        return estimate
    screening = method.screen.on_model(model)
    theta = normal_scale(model.layout).theta(_draws(model, _SCREENED))[0]
    return estimate / screening.candidates + seconds_of(lambda: screening.log_evidence(theta)) / _SCREENED


def _draws(model: GPModel, count: int) -> Tensor:
    """From the prior, on its normal scale ``(count, P)``."""
    return normal_like(model.train_x.new_empty(count, model.layout.size), make_generator(1, model.train_x.device))
