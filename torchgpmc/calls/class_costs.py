"""About how many seconds sweeps of several classes take on this machine."""

from __future__ import annotations

from functools import partial

import torch

from torchgpmc.approximations.class_variational import fitted_class_sites
from torchgpmc.calls.timing import seconds_of
from torchgpmc.methods import ClassGibbs
from torchgpmc.models import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.class_chains import ClassChains, ClassTuning
from torchgpmc.samplers.adaptation import start_moments

_SEARCHED, _MORE_A_HYPERPARAMETER = 600, 250  # sweeps for sites of a theta, before chains begin and at the ends of windows
_ROUGH_DATA = 200
_SWEEPS_FOR_SITES = 2
_DEVIATION = 0.3  # of theta, in the prior's


def seconds_of_class_sweeps(model: GPModel, num_chains: int, sweeps: float) -> float:
    """Of the search for where to begin, whose work is sites at many thetas, and of sweeps around the prior's median."""
    generator, size = make_generator(0, model.train_x.device), model.layout.size
    scale = normal_scale(model.layout)
    z = normal_like(model.train_x.new_empty(num_chains, size), generator)
    sites = partial(fitted_class_sites, model, scale.theta(_DEVIATION * z)[0], _SWEEPS_FOR_SITES)
    searched = seconds_of(sites) / (num_chains * _SWEEPS_FOR_SITES) * (_SEARCHED + _MORE_A_HYPERPARAMETER * size)
    searched *= min(1.0, (_ROUGH_DATA / len(model.train_x)) ** 2)
    chains = ClassChains(JointLogDensity(model), ClassGibbs().num_steps, None)
    centre = scale.theta(0 * z[:1])[0][0]
    flat = model.train_x.new_zeros(size + 1, model.num_latents, len(model.train_x))
    log_precision = flat[:, 0].clone()
    log_precision[0] = -torch.tensor(float(model.num_latents)).log()
    step_size = model.train_x.new_tensor(1.5 / model.latent_size**0.25)
    moments = start_moments(size, size, centre)
    tuning = ClassTuning(step_size, centre, _DEVIATION * identity_matrix(size, centre), log_precision, flat, moments)
    kernel = chains.kernel(tuning)
    state = kernel.init(chains.starts(tuning, num_chains, generator), generator)
    return searched + sweeps * seconds_of(partial(kernel.step, state, generator))
