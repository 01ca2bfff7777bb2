"""The default call of models that another stands in for, of the same functions with less to sample: the rest is drawn after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.checks import warn
from torchgpmc.evidence import is_probit
from torchgpmc.models import GP, GPModel
from torchgpmc.models.mean_in_kernel import with_mean, without_mean
from torchgpmc.models.replicates import with_replicates, without_replicates
from torchgpmc.models.restored import Restored
from torchgpmc.models.variances_density import mixes_variances
from torchgpmc.numerics.random import derived_seed, make_generator
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws
from torchgpmc.trees import concatenate

# Inputs that differ, of those that there are, from which on the model of all data is as quick: probits have closed forms there.
_MOST_INPUTS, _MOST_OF_PROBITS = 0.8, 0.6
# The same of noise of mixed variances, which data at one input do not share, so that chains given these are of all data: 500 at 351
# inputs under Student-t noise had no answer in 220 CPU seconds.
_MOST_OF_MIXTURES = 0.5
_STREAM = 999  # of random numbers, which no engine of a call has
_CHUNK_ELEMENTS = 4_000_000  # of covariance matrices
_UNEVEN = 0.1  # deviation of log weights that chains cannot have
_MEAN, _MEAN_WORDS = "mean.constant", "integrated out with the functions, and drawn given them"  # of ``posterior.info``
_REPLICATES = "replicates"


class StandIn(NamedTuple):
    """A model to be sampled in place of another, whose draws :attr:`restore` makes of its own."""

    model: GP
    of: GP
    restore: Callable[..., Restored]
    noted: tuple[str, str]  # in ``posterior.info``


def stand_ins(model: GPModel) -> list[StandIn]:
    """Each in place of the one before, the first in place of ``model``; the last is what engines are to sample.

    Of 500 labels of passengers 11 differ in their inputs: 11 latents do, where a draw of 500 takes fifty times as long. With a
    constant mean among theta 500 counts of 1 to 5 were worth 159 of 4000 draws: where the functions' variance is small, the mean
    is known to hundredths, and where it is not, to one. It stays where p(f | y, theta) may have several modes.
    """
    if model.targets.one_a_chain or not (model.factorises and model.num_latents == 1):
        return []
    found: list[StandIn] = []
    other = without_replicates(model)
    if other is not None and other.latent_size <= _most_inputs(model) * model.latent_size:
        assert isinstance(model, GP)
        words = f"{model.latent_size} data at {other.latent_size} inputs, whose functions were sampled"
        found.append(StandIn(other, model, with_replicates, (_REPLICATES, words)))
        model = other
    lesser = without_mean(model) if as_likelihood(model.likelihood).is_log_concave else None
    if lesser is not None:
        assert isinstance(model, GP)
        found.append(StandIn(lesser, model, with_mean, (_MEAN, _MEAN_WORDS)))
    return found


def _most_inputs(model: GPModel) -> float:
    if mixes_variances(model):
        return _MOST_OF_MIXTURES
    return _MOST_OF_PROBITS if is_probit(model) else _MOST_INPUTS


def sampled_in_place_of(model: GPModel) -> GPModel:
    """The last of :func:`stand_ins`, or the model."""
    found = stand_ins(model)
    return found[-1].model if found else model


def in_terms_of_model(others: Sequence[StandIn], posterior: Posterior, seed: int) -> Posterior:
    """The posterior of the last of :func:`stand_ins` as one of the model that the first stands in for."""
    if not others:
        return posterior
    device, shape = posterior.model.train_x.device, posterior.theta.shape[:2]
    theta, v = posterior.theta.flatten(0, 1), posterior.whitened.flatten(0, 1)
    stats, log_weights, info = dict(posterior.stats), posterior.log_weights, dict(posterior.info)
    generator = make_generator(derived_seed(seed, _STREAM), device)
    for other, model, restore, noted in reversed(others):
        rows = max(1, _CHUNK_ELEMENTS // (model.latent_size * other.latent_size))
        pairs = zip(theta.split(rows), v.split(rows), strict=True)
        parts = [restore(model, other, some.to(device), values.to(device), generator) for some, values in pairs]
        theta, v, change, log_weight = (part.cpu() for part in concatenate(parts))
        stats["lp"] = stats["lp"] + change.view(shape)
        log_weights = _weighed(log_weights, log_weight.view(shape))
        if other.layout.size < model.layout.size:
            stats.pop("log_evidence", None)  # which is not of the mean
        info |= [noted]
    draws = Draws(theta.unflatten(0, shape), v.unflatten(0, shape), log_weights)
    return Posterior(others[0].of, draws, stats, info)


def _weighed(log_weights: torch.Tensor | None, further: torch.Tensor) -> torch.Tensor | None:
    if log_weights is not None:
        return log_weights + further
    if float(further.std()) > _UNEVEN:
        warn(
            f"the jitter matters: what data at one input say of it varies by {float(further.std()):.2g} nats between draws of "
            f"chains that were made without it. Expected next to nothing; make the jitter smaller, or call sample(model, NUTS())."
        )
    return None


def returned(others: Sequence[StandIn], posterior: Posterior, seed: int) -> Posterior:
    """:func:`in_terms_of_model`, with a warning where what is drawn last is not to be trusted; of the rest all has been said."""
    found = in_terms_of_model(others, posterior, seed)
    if found is not posterior:
        known = posterior.complaints()
        for complaint in found.complaints():
            if complaint not in known:
                warn(complaint)
    return found
