"""The real data sets of papers A and E, standardised, and paper A's isotropic probit model."""

import gzip
import pathlib

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg

OUTPUT = pathlib.Path(__file__).parent.parent / "docs" / "results"
FILES = {"breast": "wbc"}


def table(folder, name, kind=float):
    """Columns of a data set, the response last, as numbers or as words."""
    with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
        return np.loadtxt(file, kind, delimiter=",", skiprows=1)


def standardised(values):
    return (values - values.mean(0)) / values.std(0)


def classification_set(folder, name):
    """Inputs with mean zero and standard deviation one, and labels 0 and 1."""
    if name == "usps":
        digits = np.load(folder / "usps.npz")
        chosen = np.isin(digits["y"], (3, 5))
        x, y = digits["x"][chosen] / 1000.0, digits["y"][chosen] == 3
    else:
        columns = table(folder, FILES.get(name, name))
        if name == "abalone":
            columns = columns[columns[:, -1] < 2]
        x, y = columns[:, :-1], columns[:, -1] == 1
    return standardised(x[:, x.std(0) > 0]), y.astype(float)


def isotropic_probit(x, y):
    """Priors of section 4.4: lengthscale Gamma(1, 1 / sqrt(d)), outputscale (a variance) Gamma(1.1, 0.1)."""
    base = RBFKernel(lengthscale_prior=GammaPrior(1.0, 1 / x.shape[1] ** 0.5))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 0.1))
    return tg.GP(torch.as_tensor(x), torch.as_tensor(y), kernel, tg.likelihoods.Bernoulli())
