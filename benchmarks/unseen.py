"""Regressions as users have them, in raw units, and likelihoods of several functions: the default call beside a lattice.

    python benchmarks/unseen.py [concentrations tens_of_thousands prices diabetes fitc dates linnerud ...]

Quoted by docs/results/other_data.md, "Raw units", "Several functions, and inducing values", "A third set" (unseen_models.py),
"A fourth set" and "A fifth set" (newcomer_models.py).
Up to three hyperparameters stand beside a lattice.
"""

import argparse
import math
import time
import warnings

import gpytorch
import lattice
import numpy as np
import torch
from default_call import means
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from newcomer_models import NEWCOMERS
from sklearn.datasets import load_diabetes, load_linnerud
from unseen_models import MODELS

import torchgpmc as tg

_DRAWS = 600  # of a lattice


def _kernel(lengthscale, outputscale, num_columns=None):
    return ScaleKernel(RBFKernel(lengthscale_prior=lengthscale, ard_num_dims=num_columns), outputscale_prior=outputscale)


def _noise(prior):
    """gpytorch's own constraint keeps noise above 1e-4, which is a number in somebody's unit."""
    return GaussianLikelihood(noise_prior=prior, noise_constraint=gpytorch.constraints.Positive())


def concentrations():
    """Values near 1e-9."""
    random = np.random.default_rng(0)
    x = random.random((80, 2))
    y = 1e-9 * (3 + np.sin(5 * x[:, 0]) + 0.1 * random.normal(size=80))
    return tg.GPRegression(x, y, _kernel(GammaPrior(2.0, 2.0), LogNormalPrior(-41.0, 2.0)), _noise(LogNormalPrior(-45.0, 2.0)))


def tens_of_thousands():
    """250 x 5, columns of scales 1 to 100."""
    random = np.random.default_rng(0)
    x = random.normal(size=(250, 5)) * [1, 10, 100, 1, 5]
    y = 3e4 + 1e4 * np.sin(x[:, 0]) + 2e3 * random.normal(size=250)
    kernel = _kernel(LogNormalPrior(2.0, 2.0), LogNormalPrior(22.0, 3.0), 5)
    return tg.GPRegression(x, y, kernel, _noise(LogNormalPrior(15.0, 3.0)))


def prices():
    """Cents, in the millions, with a mean that is sampled."""
    random = np.random.default_rng(0)
    x = random.random((120, 3))
    y = 1e6 * (3 + np.sin(3 * x[:, 0]) + x[:, 1]) + 5e4 * random.normal(size=120)
    kernel, mean = _kernel(GammaPrior(2.0, 2.0), LogNormalPrior(27.0, 3.0), 3), ConstantMean(constant_prior=NormalPrior(0.0, 1e7))
    return tg.GPRegression(x, y, kernel, _noise(LogNormalPrior(22.0, 3.0)), mean=mean)


def diabetes():
    """scikit-learn's, 442 x 10, inputs and targets (25 to 346) in raw units."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return tg.GPRegression(
        x, y - y.mean(), _kernel(LogNormalPrior(4.0, 1.0), LogNormalPrior(8.0, 2.0)), _noise(LogNormalPrior(8.0, 2.0))
    )


def linnerud():
    """20 x 3, pounds."""
    x, y = load_linnerud(return_X_y=True)
    mean = ConstantMean(constant_prior=NormalPrior(180.0, 50.0))
    kernel = _kernel(LogNormalPrior(4.0, 1.0), LogNormalPrior(6.0, 2.0))
    return tg.GPRegression(x, y[:, 0], kernel, _noise(LogNormalPrior(4.0, 2.0)), mean=mean)


def dates():
    """200 weeks with dates as days since the year 0, a season and a trend."""
    random = np.random.default_rng(0)
    x = 738000.0 + 7.0 * np.arange(200)
    y = np.sin(2 * np.pi * x / 365.25) + 0.002 * (x - 738700) / 7 + 0.2 * random.normal(size=200)
    season = PeriodicKernel(period_length_prior=LogNormalPrior(math.log(365.0), 0.1), lengthscale_prior=LogNormalPrior(0.0, 1.0))
    kernel = ScaleKernel(season, outputscale_prior=GammaPrior(2.0, 1.0)) + _kernel(LogNormalPrior(6.0, 1.0), GammaPrior(2.0, 1.0))
    return tg.GPRegression(x, y, kernel, _noise(GammaPrior(1.1, 2.0)))


def fitc():
    """800 x 3 with 40 inducing points."""
    random = np.random.default_rng(0)
    x = random.random((800, 3))
    y = np.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * random.normal(size=800)
    z = tg.kmeans_inducing_points(x, 40)
    return tg.FITC(x, y, _kernel(GammaPrior(2.0, 2.0), GammaPrior(2.0, 1.0)), _noise(GammaPrior(1.1, 10.0)), inducing_points=z)


def _sines(num_data):
    """Inputs on a line, and a sine with noise that grows along it."""
    random = np.random.default_rng(0)
    x = random.uniform(-2, 2, (num_data, 1))
    return x, np.sin(2 * x[:, 0]) + np.exp(-1 + 0.7 * x[:, 0]) * random.normal(size=num_data)


def _heteroskedastic(num_data):
    x, y = _sines(num_data)
    return tg.GP(x, y, _kernel(GammaPrior(2.0, 2.0), GammaPrior(2.0, 1.0)), tg.likelihoods.HeteroskedasticGaussian(scale=0.5))


def heteroskedastic_20():
    """20 data, two latent functions."""
    return _heteroskedastic(20)


def heteroskedastic_60():
    """60 data, two latent functions."""
    return _heteroskedastic(60)


def heteroskedastic_100():
    """100 data, two latent functions."""
    return _heteroskedastic(100)


def projected_labels():
    """20 labels, five inducing points."""
    random = np.random.default_rng(0)
    x = np.sort(random.uniform(-2, 2, 20))[:, None]
    y = (np.sin(2 * x[:, 0]) + 0.3 * random.normal(size=20) > 0).astype(float)
    kernel = _kernel(GammaPrior(2.0, 2.0), GammaPrior(2.0, 1.0))
    return tg.ProjectedProcess(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=np.linspace(-2, 2, 5)[:, None])


def robust_classes():
    """30 x 2, three classes by robust max, six inducing points."""
    random = np.random.default_rng(0)
    x, directions = random.normal(size=(30, 2)), random.normal(size=(3, 2))
    y = (x @ directions.T + 0.3 * random.normal(size=(30, 3))).argmax(1).astype(float)
    kernel, z = _kernel(GammaPrior(2.0, 2.0), GammaPrior(2.0, 1.0)), tg.kmeans_inducing_points(x, 6)
    return tg.SparseGP(x, y, kernel, tg.likelihoods.RobustMax(num_classes=3), inducing_points=z)


_RAW = (concentrations, tens_of_thousands, prices, diabetes, linnerud, dates, fitc)
_OTHER = (heteroskedastic_20, heteroskedastic_60, heteroskedastic_100, projected_labels, robust_classes)
CASES = {case.__name__: case for case in _RAW + _OTHER + MODELS + NEWCOMERS}
_BESIDE_NONE = ("fitc", "diabetes", "heteroskedastic_100", "robust_classes")  # a lattice would take minutes
_BESIDE_NONE += ("edges", "four_blobs", "three_digits", "straight_noise", "sparse_counts", "sparse_shares", "three_or_eight")
_BESIDE_NONE += ("twenty_places", "chessboard", "robust_irises")


def report(name):
    """A row of the table."""
    model = CASES[name]()
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        posterior = tg.sample(model, seed=0, progress=False)
    seconds, off = time.process_time() - began, "-"
    if lattice.serves(model) and name not in _BESIDE_NONE:
        (mean, _), (expected, deviation) = means(posterior), means(lattice.reference(model, _DRAWS))
        off = f"{float(((mean - expected) / deviation).abs().max()):.2f}"
    trusted = "trust" if not posterior.complaints() else "no"
    engines = " -> ".join(trial["engine"] for trial in posterior.info["tried"])
    shape = " x ".join(str(size) for size in model.train_x.shape)
    print(f"| {name} | {shape} | {engines} | {seconds:.1f} | {posterior.effective_size():.0f} | {trusted} | {off} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    torch.set_num_threads(1)
    for name in parser.parse_args().names:
        report(name)
