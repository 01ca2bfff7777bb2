"""Sampling methods: small frozen option sets that enter :func:`torchgpmc.sample`."""

from torchgpmc.methods.importance import AMIS, MAMIS
from torchgpmc.methods.joint import HMC, NUTS, AdaptiveMH, Slice
from torchgpmc.methods.latent import EllipticalSlice
from torchgpmc.methods.orthant import OrthantGPC
from torchgpmc.methods.pseudo_marginal import PseudoMarginal, PseudoMarginalSlice
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
