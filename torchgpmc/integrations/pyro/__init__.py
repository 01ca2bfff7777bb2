"""Pyro: its models under our samplers (``MCMC``, ``NUTS``, ``HMC``), and our Gaussian process inside its models (``GP``)."""

from torchgpmc.integrations.pyro.gaussian_process import GP
from torchgpmc.integrations.pyro.mcmc import MCMC
from torchgpmc.integrations.pyro.transitions import HMC, NUTS

__all__ = ["GP", "HMC", "MCMC", "NUTS"]
