"""The classification data of paper A's sections 4.4 and 5, standardised, and its isotropic probit model."""

import gzip
import pathlib

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg

OUTPUT = pathlib.Path(__file__).parent.parent / "docs" / "results"
FILES = {"breast": "wbc", "pima": "pima", "thyroid": "thyroid", "ionosphere": "ionosphere", "glass": "glass"}
WITHOUT = {"ionosphere": 1}  # a column that is constant


def classification_set(folder, name):
    """Inputs with mean zero and standard deviation one, and labels 0 and 1."""
    if name == "usps":
        digits = np.load(folder / "usps.npz")
        x, y = digits["x"][np.isin(digits["y"], (3, 5))] / 1000.0, digits["y"][np.isin(digits["y"], (3, 5))]
        x, y = x[:, x.std(0) > 0], y == 3
    elif name == "abalone":
        with gzip.open(folder / "abalone.csv.gz", "rt") as file:
            columns = np.loadtxt(file, delimiter=",", skiprows=1)
        columns = columns[columns[:, -1] < 2]
        x, y = columns[:, :-1], columns[:, -1] == 1
    else:
        with gzip.open(folder / f"{FILES[name]}.csv.gz", "rt") as file:
            columns = np.loadtxt(file, delimiter=",", skiprows=1)
        x, y = columns[:, :-1], columns[:, -1] == 1
        if name in WITHOUT:
            x = np.delete(x, WITHOUT[name], axis=1)
    return (x - x.mean(0)) / x.std(0), y.astype(float)


def isotropic_probit(x, y):
    """Priors of section 4.4: lengthscale Gamma(1, 1 / sqrt(d)), outputscale (a variance) Gamma(1.1, 0.1)."""
    base = RBFKernel(lengthscale_prior=GammaPrior(1.0, 1 / x.shape[1] ** 0.5))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 0.1))
    return tg.GP(torch.as_tensor(x), torch.as_tensor(y), kernel, tg.likelihoods.Bernoulli())
