"""Data sets with a model each, for benchmarks/default_call.py."""

import numpy as np
import sklearn.datasets
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior
from real_data import classification_set, standardised, table

import torchgpmc as tg

_CHANGED = [
    "thyroid",
    "haberman",
    "crabs",
    "ripley",
    "ionosphere",
    "pima",
    "glass",
    "ida_breast_cancer",
    "banana",
    "wbc",
    "australian",
]  # of which labels are flipped and rows repeated, too
BINARY = [*_CHANGED, "pima532", "image", "twonorm", "waveform", "splice", "abalone"]
COUNTS = ["coal", "redwood", "japanesepines", "pines", "airline"]
REGRESSION = ["mcycle", "yacht", "housing", "concrete", "energy", "machine_cpu", "auto_mpg", "ord_diabetes", "stocks", "kin8nm"]
REGRESSION += ["power", "parkinsons", "wine_red", "abalone_rings", "wisconsin_prognostic", "pyrimidines", "triazines"]
LEVELS = ["wine_quality"]
BUNDLED = ["iris", "wine", "digits"]  # with scikit-learn
NOISE = "noise_type"  # three classes that inputs say nothing of, under a half-Cauchy outputscale
CLASSES = ["thyroid_type", "glass_type", "segment", *BUNDLED, NOISE]
_LARGE = [
    "banana",
    "image",
    "twonorm",
    "waveform",
    "splice",
    "abalone",
    "kin8nm",
    "power",
    "parkinsons",
    "wine_red",
    "abalone_rings",
]
_FILES = {"thyroid_type": "thyroid", "wine_quality": "wine_red", "abalone_rings": "abalone"}
_MOST, _MOST_FULL, _INDUCING = 7000, 500, 100


def default_cases():
    """Data sets as they are, with a lengthscale a column, labels flipped, rows twice, and all their rows."""
    several = [name for name in BINARY + REGRESSION + LEVELS + CLASSES if name not in ("mcycle",)]
    noisy = [f"{name}+{change}" for name in _CHANGED for change in ("noise", "twice", "noise+ard")]
    large = [f"{name}+all" for name in [*_LARGE, "wine_quality", "segment", "digits", "kin8nm+ard", "power+ard", "banana+ard"]]
    return [*BINARY, *COUNTS, *REGRESSION, *LEVELS, *CLASSES, *(f"{name}+ard" for name in several), *noisy, *large]


def has_probabilities(name):
    """Whether predictions of a case are probabilities of classes."""
    return name.split("+")[0] in BINARY + CLASSES


def _kernel(name, num_columns, ard):
    prior = GammaPrior(2.0, 2.0 / num_columns**0.5)
    base = RBFKernel(ard_num_dims=num_columns if ard else None, lengthscale_prior=prior)
    return ScaleKernel(base, outputscale_prior=HalfCauchyPrior(5.0) if name == NOISE else GammaPrior(2.0, 0.5))


def _counts(folder, name):
    """Cells and their counts: of the columns of events, or as tabled."""
    columns = table(folder, name)
    if name == "airline":
        return columns[:, :-1], columns[:, -1]
    if name == "coal":
        counts, edges = np.histogram(columns, 50)
        return (edges[:-1, None] + edges[1:, None]) / 2, counts.astype(float)
    counts, *edges = np.histogram2d(columns[:, 0], columns[:, 1], 10)
    middles = [(edge[:-1] + edge[1:]) / 2 for edge in edges]
    return np.stack(np.meshgrid(*middles, indexing="ij"), -1).reshape(-1, 2), counts.reshape(-1)


def _inputs_and_response(folder, name):
    """Columns of a table, classes by their names."""
    columns = table(folder, _FILES.get(name, name), str if name in CLASSES else float)
    if name == "parkinsons":
        return columns[:, 1:-2], columns[:, -1]  # without who was measured, and another score
    if name == "abalone_rings":
        return columns[:, :-2], columns[:, -2]  # without sex
    return columns[:, :-1].astype(float), columns[:, -1]


def _data(folder, name):
    if name == NOISE:
        random = np.random.default_rng(0)
        return random.standard_normal((60, 3)), random.integers(0, 3, 60).astype(float)
    if name in BUNDLED:
        x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
        return standardised(x[:, x.std(0) > 0]), y.astype(float)
    if name in BINARY:
        return classification_set(folder, name)
    if name in COUNTS:
        x, y = _counts(folder, name)
        return standardised(x), y
    x, y = _inputs_and_response(folder, name)
    x = standardised(x[:, x.std(0) > 0])
    return x, standardised(y) if name in REGRESSION else np.unique(y, return_inverse=True)[1].astype(float)


def _likelihood(name, labels):
    if name in BINARY:
        return tg.likelihoods.Bernoulli()
    if name in COUNTS:
        return tg.likelihoods.Poisson(exposure=max(1.0, float(labels.mean())))
    if name in LEVELS:
        return tg.likelihoods.Ordinal(num_levels=int(labels.max()) + 1)
    if name in CLASSES:
        return tg.likelihoods.Softmax(num_classes=int(labels.max()) + 1, mixing_weights=False)
    return GaussianLikelihood(noise_prior=HalfNormalPrior(0.5))


def case(folder, name, size):
    """The model on ``size`` rows, at most six sevenths of all, test inputs and test targets.

    Args:
        folder: of the data.
        name: of the set, then ``+ard``, ``+noise`` (a tenth of the labels flipped), ``+twice`` (a fifth of the rows twice) and
            ``+all``.
        size: rows to train on, but for ``+all``.
    """
    name, *changes = name.split("+")
    random = np.random.default_rng(0)
    x, y = _data(folder, name)
    size = min(_MOST if "all" in changes else size, 6 * len(x) // 7)
    order = random.permutation(len(x))
    train, test = order[:size], order[size : size + min(size // 2, 1000)]
    if "twice" in changes:
        train = np.concatenate([train[: size - size // 5], train[: size // 5]])
    labels = y[train]
    if "noise" in changes:
        labels = np.where(random.random(len(labels)) < 0.1, 1 - labels, labels)
    kernel, likelihood = _kernel(name, x.shape[1], "ard" in changes), _likelihood(name, y)
    if size > _MOST_FULL:
        z = tg.kmeans_inducing_points(x[train], _INDUCING)
        model = tg.SparseGP(x[train], labels, kernel, likelihood, inducing_points=z)
    else:
        model = (tg.GPRegression if name in REGRESSION else tg.GP)(x[train], labels, kernel, likelihood)
    return model, x[test], torch.as_tensor(y[test])
