"""Sampling methods: small frozen option sets that enter :func:`torchgpmc.sample`."""

from torchgpmc.methods.adaptive_metropolis import AdaptiveMH
from torchgpmc.methods.amis import AMIS
from torchgpmc.methods.class_gibbs import ClassGibbs
from torchgpmc.methods.control_values import ControlVariables
from torchgpmc.methods.coordinate_slice import Slice
from torchgpmc.methods.crank_nicolson import PCN
from torchgpmc.methods.emulated_hmc import EmulatedHMC
from torchgpmc.methods.ensemble_hamiltonian import ChEES
from torchgpmc.methods.gibbs import Gibbs
from torchgpmc.methods.gradient_moves import AuxiliaryGradient
from torchgpmc.methods.hamiltonian import HMC
from torchgpmc.methods.latent_slice import EllipticalSlice
from torchgpmc.methods.local_regions import LocalRegions
from torchgpmc.methods.mamis import MAMIS
from torchgpmc.methods.marginal_chains import PseudoMarginal
from torchgpmc.methods.marginal_slices import PseudoMarginalSlice
from torchgpmc.methods.no_u_turn import NUTS
from torchgpmc.methods.orthant_gpc import OrthantGPC
from torchgpmc.methods.single_sites import GibbsLike
from torchgpmc.methods.stochastic_gradients import StochasticGradientHMC
from torchgpmc.runs.run import Method, Run, Settings

__all__ = [
    "AMIS",
    "HMC",
    "MAMIS",
    "NUTS",
    "PCN",
    "AdaptiveMH",
    "AuxiliaryGradient",
    "ChEES",
    "ClassGibbs",
    "ControlVariables",
    "EllipticalSlice",
    "EmulatedHMC",
    "Gibbs",
    "GibbsLike",
    "LocalRegions",
    "Method",
    "OrthantGPC",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "Run",
    "Settings",
    "Slice",
    "StochasticGradientHMC",
]
