"""The default call of a model whose constant mean is normal a priori: sampled without it, which is drawn given the functions."""

from __future__ import annotations

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.checks import warn
from torchgpmc.models import GP, GPModel
from torchgpmc.models.mean_in_kernel import MeanInKernel, with_mean, without_mean
from torchgpmc.numerics.random import derived_seed, make_generator
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws
from torchgpmc.trees import concatenate

_STREAM = 999  # of random numbers, which no engine of a call has
_CHUNK_ELEMENTS = 4_000_000  # of covariance matrices
_MEAN, _WORDS = "mean.constant", "integrated out with the functions, and drawn given them"  # of ``posterior.info``


def sampled_in_place_of(model: GPModel) -> GPModel:
    """What engines are to sample: the model without its mean where that is to be had, else the model.

    With c 500 counts of 1 to 5 were worth 159 of 4000 draws: where the functions' variance is small, c is known to hundredths, and
    where it is not, to one. Of likelihoods whose p(f | y, theta) has one mode, which estimates and chains take as well without c.
    """
    likelihood = as_likelihood(model.likelihood)
    if model.targets.one_a_chain or not (model.factorises and model.num_latents == 1 and likelihood.is_log_concave):
        return model
    return without_mean(model) or model


def in_terms_of(model: GPModel, posterior: Posterior, seed: int) -> Posterior:
    """The posterior of :func:`sampled_in_place_of` as one of ``model``: every draw with a mean, given its functions."""
    other = posterior.model
    if not (isinstance(other, MeanInKernel) and isinstance(model, GP)) or isinstance(model, MeanInKernel):
        return posterior
    device, rows = model.train_x.device, max(1, _CHUNK_ELEMENTS // model.latent_size**2)
    generator = make_generator(derived_seed(seed, _STREAM), device)
    pairs = zip(posterior.theta.flatten(0, 1).split(rows), posterior.whitened.flatten(0, 1).split(rows), strict=True)
    parts = concatenate([with_mean(model, other, theta.to(device), v.to(device), generator) for theta, v in pairs])
    theta, v, change = (part.cpu().unflatten(0, posterior.theta.shape[:2]) for part in parts)
    stats = {name: value for name, value in posterior.stats.items() if name != "log_evidence"}  # which is not of the mean
    stats["lp"] = stats["lp"] + change
    draws = Draws(theta, v, posterior.log_weights)
    return Posterior(model, draws, stats, {**posterior.info, _MEAN: _WORDS})


def returned(model: GPModel, posterior: Posterior, seed: int) -> Posterior:
    """:func:`in_terms_of`, with a warning where the means are what is not to be trusted; of the others all has been said."""
    found = in_terms_of(model, posterior, seed)
    if found is not posterior:
        known = posterior.complaints()
        for complaint in found.complaints():
            if complaint not in known:
                warn(complaint)
    return found
