"""Sampling methods: small frozen option sets that enter :func:`torchgpmc.sample`."""

from torchgpmc.methods.adaptive_metropolis import AdaptiveMH
from torchgpmc.methods.coordinate_slice import Slice
from torchgpmc.methods.hamiltonian import HMC
from torchgpmc.methods.importance import AMIS, MAMIS
from torchgpmc.methods.latent_slice import EllipticalSlice
from torchgpmc.methods.marginal_chains import PseudoMarginal
from torchgpmc.methods.marginal_slices import PseudoMarginalSlice
from torchgpmc.methods.no_u_turn import NUTS
from torchgpmc.methods.orthant import OrthantGPC
from torchgpmc.runs.base import Method, Run, Settings

__all__ = [
    "AMIS",
    "HMC",
    "MAMIS",
    "NUTS",
    "AdaptiveMH",
    "EllipticalSlice",
    "Method",
    "OrthantGPC",
    "PseudoMarginal",
    "PseudoMarginalSlice",
    "Run",
    "Settings",
    "Slice",
]
