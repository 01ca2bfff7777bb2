"""Gaussian variational approximations: rivals of the exact posterior, and where its chains start."""

from torchgpmc.variational.initialize import initialize
from torchgpmc.variational.refine import refine_inducing_points
from torchgpmc.variational.start import Start

__all__ = ["Start", "initialize", "refine_inducing_points"]
