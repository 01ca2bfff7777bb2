"""Markov kernels on C chains at once. They know log densities, not Gaussian processes."""

from torchgpmc.samplers.auxiliary_gradient import auxiliary_gradient
from torchgpmc.samplers.chees import chees
from torchgpmc.samplers.control_variables import control_variables
from torchgpmc.samplers.elliptical_slice import elliptical_slice
from torchgpmc.samplers.gibbs_like import gibbs_like
from torchgpmc.samplers.hmc import hmc
from torchgpmc.samplers.metropolis import IndependentProposal, metropolis
from torchgpmc.samplers.nuts import nuts
from torchgpmc.samplers.pcn import pcn
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner
from torchgpmc.samplers.pseudo_marginal import (
    correlated_pseudo_marginal,
    delayed_acceptance,
    pseudo_marginal,
    pseudo_marginal_slice,
)
from torchgpmc.samplers.regions import local_regions
from torchgpmc.samplers.slice import slice_sampler
from torchgpmc.samplers.stochastic_gradient_hmc import stochastic_gradient_hmc
from torchgpmc.samplers.sweep import Block, Conditional, given_the_rest, sweep

__all__ = [
    "Block",
    "Conditional",
    "IndependentProposal",
    "MassMatrix",
    "Preconditioner",
    "auxiliary_gradient",
    "chees",
    "control_variables",
    "correlated_pseudo_marginal",
    "delayed_acceptance",
    "elliptical_slice",
    "gibbs_like",
    "given_the_rest",
    "hmc",
    "local_regions",
    "metropolis",
    "nuts",
    "pcn",
    "pseudo_marginal",
    "pseudo_marginal_slice",
    "slice_sampler",
    "stochastic_gradient_hmc",
    "sweep",
]
