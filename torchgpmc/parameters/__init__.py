"""Hyperparameters: how those with priors make up theta, their densities, and the scale on which each prior is standard normal."""
