"""Sampling methods: small frozen option sets that enter :func:`torchgpmc.sample`."""

from torchgpmc.methods.adaptive_metropolis import AdaptiveMH
from torchgpmc.methods.amis import AMIS
from torchgpmc.methods.auxiliary_gradient import AuxiliaryGradient
from torchgpmc.methods.chees import ChEES
from torchgpmc.methods.coordinate_slice import Slice
from torchgpmc.methods.crank_nicolson import PCN
from torchgpmc.methods.hamiltonian import HMC
from torchgpmc.methods.latent_slice import EllipticalSlice
from torchgpmc.methods.mamis import MAMIS
from torchgpmc.methods.marginal_chains import PseudoMarginal
from torchgpmc.methods.marginal_slices import PseudoMarginalSlice
from torchgpmc.methods.no_u_turn import NUTS
from torchgpmc.methods.orthant_gpc import OrthantGPC
from torchgpmc.runs.base import Method, Run, Settings

__all__ = [
    "AMIS",
    "HMC",
    "MAMIS",
    "NUTS",
    "PCN",
    "AdaptiveMH",
    "AuxiliaryGradient",
    "ChEES",
    "EllipticalSlice",
    "Method",
    "OrthantGPC",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "Run",
    "Settings",
    "Slice",
]
