"""About how many seconds sweeps of several classes take on this machine."""

from __future__ import annotations

import math
from functools import partial

from torchgpmc.approximations.class_variational import fitted_class_sites
from torchgpmc.calls.timing import seconds_of
from torchgpmc.methods import ClassGibbs
from torchgpmc.models import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.class_chains import ClassChains
from torchgpmc.runs.class_tuning import FollowingSites

# Rounds of sites for one theta: of the search, which looks at so many data at most, and of the fits before chains and in warm-up.
_SEARCHED, _MORE_A_HYPERPARAMETER, _ROUGH_DATA = 600, 250, 200
_ROUNDS = 2
_DEVIATION = 0.3  # of theta, in the prior's
_THETA_STEP, _GIVEN_WHITE = 0.35, 0.3  # of trajectories of many hyperparameters, and theta's deviation given w


def seconds_of_class_sweeps(model: GPModel, num_chains: int, sweeps: float) -> float:
    """Of the search for where to begin, whose work is sites at many thetas, and of sweeps around the prior's median."""
    size, num_data, num_functions = model.layout.size, len(model.train_x), model.num_latents
    generator, scale = make_generator(0, model.train_x.device), normal_scale(model.layout)
    z = normal_like(model.train_x.new_empty(num_chains, size), generator)
    sites = partial(fitted_class_sites, model, scale.theta(_DEVIATION * z)[0], _ROUNDS)
    rounds = (_SEARCHED + _MORE_A_HYPERPARAMETER * size) * min(1.0, (_ROUGH_DATA / num_data) ** 2)
    centre = scale.theta(0 * z[:1])[0][0]
    level = model.train_x.new_zeros(4 * size + 1, num_data)
    level[0] = -math.log(num_functions)
    shift = model.train_x.new_zeros(4 * size + 1, num_functions, num_data)
    step_sizes = model.train_x.new_tensor(model.latent_size**-0.25), model.train_x.new_tensor(_THETA_STEP)
    root = _DEVIATION * identity_matrix(size, centre)
    as_sites_say = model.train_x.new_ones(model.latent_size)
    chains = ClassChains(JointLogDensity(model), ClassGibbs().num_steps, None)
    given_white = _GIVEN_WHITE * identity_matrix(size, centre)
    tuning = chains.tuned(centre, root, given_white, FollowingSites(level, shift), as_sites_say, step_sizes)
    kernel = chains.kernel(tuning)
    state = kernel.init(chains.starts(tuning, num_chains, generator), generator)
    return rounds * seconds_of(sites) / (num_chains * _ROUNDS) + sweeps * seconds_of(partial(kernel.step, state, generator))
