"""Random likelihoods: modules beside log densities of y given f, draws of y, and where p(y | f) may be narrow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import scipy.special
import scipy.stats

import torchgpmc as tg
from tests.attack.parameters import Parameter


class Likelihood(NamedTuple):
    """``log_density(f, y, values)``: f ``(S, N)``, or ``(S, N, K)``, to ``(S, N)``; values ``{name: (S, *shape)}``."""

    name: str
    module: Any
    parameters: list[Parameter]
    log_density: Callable
    draw: Callable  # (rng, f, values) -> y
    peak: Callable  # y -> the f about which p(y | f), or its logarithm, turns
    num_latents: int = 1

    @property
    def promise(self):
        """What an expectation under a normal may be off by, a datum: as the likelihood's docstring has it, or next to nothing."""
        return 1e-6 if self.name in ("beta", "laplace", "softmax") else 0.0

    @property
    def has_gaussian_noise(self):
        return self.name == "gaussian"


def column(values, name):
    return values[name].reshape(-1, 1)


def of_labels(link, log_share):
    def log_density(f, y, values):
        return log_share((2 * y - 1) * f)

    def draw(rng, f, values):
        return (rng.uniform(size=f.shape) < np.exp(log_share(f))).astype(float)

    return Likelihood(link, tg.likelihoods.Bernoulli(link=link), [], log_density, draw, lambda y: np.zeros_like(y))


def gaussian(drawing, module):
    name = "noise_covar.raw_noise"
    parameter = drawing.parameter(module.noise_covar, "raw_noise", float(np.float32(1e-4)), 0.1, 1.0)._replace(name=name)
    return Likelihood(
        "gaussian",
        module,
        [parameter],
        lambda f, y, v: scipy.stats.norm.logpdf(y, f, np.sqrt(column(v, name))),
        lambda rng, f, v: f + np.sqrt(column(v, name)) * rng.standard_normal(f.shape),
        lambda y: y,
    )


def student_t(drawing, module):
    parameters = [drawing.parameter(module, "raw_deg_free", 2.0, 2.5, 6.0), drawing.parameter(module, "raw_noise", 0.0, 0.05, 1.0)]

    def noise(v):
        return scipy.stats.t(column(v, "raw_deg_free"), scale=np.sqrt(column(v, "raw_noise")))

    def log_density(f, y, v):
        df, scale = column(v, "raw_deg_free"), column(v, "raw_noise")
        constant = scipy.special.gammaln((df + 1) / 2) - scipy.special.gammaln(df / 2) - 0.5 * np.log(np.pi * df * scale)
        return constant - (df + 1) / 2 * np.log1p((y - f) ** 2 / df / scale)

    return Likelihood(
        "student t", module, parameters, log_density, lambda rng, f, v: f + noise(v).rvs(f.shape, random_state=rng), lambda y: y
    )


def laplace_noise(drawing):
    module = gpytorch.likelihoods.LaplaceLikelihood()
    parameter = drawing.parameter(module, "raw_noise", 0.0, 0.05, 1.0)

    def log_density(f, y, v):
        scale = np.sqrt(column(v, "raw_noise"))
        return -np.abs(y - f) / scale - np.log(2 * scale)

    return Likelihood(
        "laplace",
        module,
        [parameter],
        log_density,
        lambda rng, f, v: f + rng.laplace(0, np.sqrt(column(v, "raw_noise")), f.shape),
        lambda y: y,
    )


def beta(drawing):
    module = gpytorch.likelihoods.BetaLikelihood()
    parameter = drawing.parameter(module, "raw_scale", 0.0, 1.0, 4.0)

    def shapes(f, v):
        share = scipy.special.expit(f)
        return share * column(v, "raw_scale") + 1, (1 - share) * column(v, "raw_scale") + 1

    def log_density(f, y, v):
        a, b = shapes(f, v)
        return (a - 1) * np.log(y) + (b - 1) * np.log1p(-y) - scipy.special.betaln(a, b)

    return Likelihood(
        "beta",
        module,
        [parameter],
        log_density,
        lambda rng, f, v: rng.beta(*shapes(f, v)).clip(1e-3, 1 - 1e-3),
        lambda y: np.zeros_like(y),
    )


def softmax(rng):
    classes = int(rng.integers(2, 4))
    module = tg.likelihoods.Softmax(num_classes=classes, num_features=classes, mixing_weights=False)

    def log_density(f, y, v):
        logs = f - scipy.special.logsumexp(f, -1, keepdims=True)
        return np.take_along_axis(logs, np.broadcast_to(y.astype(int), logs.shape[:-1])[..., None], -1)[..., 0]

    def draw(rng, f, v):
        return (f + rng.gumbel(size=f.shape)).argmax(-1).astype(float)

    return Likelihood("softmax", module, [], log_density, draw, None, classes)


def poisson():
    return Likelihood(
        "poisson",
        tg.likelihoods.Poisson(),
        [],
        lambda f, y, v: y * f - np.exp(f) - scipy.special.gammaln(y + 1),
        lambda rng, f, v: rng.poisson(np.exp(f.clip(-20, 6))).astype(float),
        lambda y: np.log(y + 0.5),
    )


def negative_binomial(drawing):
    module = tg.likelihoods.NegativeBinomial(exposure=0.5)
    parameter = drawing.parameter(module, "raw_dispersion", 0.0, 0.1, 2.0)

    def size_and_share(f, v):
        size = 1 / column(v, "raw_dispersion")
        return size, size / (size + 0.5 * np.exp(f))

    def log_density(f, y, v):
        size, log_odds = 1 / column(v, "raw_dispersion"), f + np.log(0.5 * column(v, "raw_dispersion"))
        choices = scipy.special.gammaln(y + size) - scipy.special.gammaln(size) - scipy.special.gammaln(y + 1)
        return choices - y * np.logaddexp(0, -log_odds) - size * np.logaddexp(0, log_odds)

    return Likelihood(
        "negative binomial",
        module,
        [parameter],
        log_density,
        lambda rng, f, v: rng.negative_binomial(*size_and_share(f, v)).clip(0, 400).astype(float),
        lambda y: np.log(2 * y + 1.0),
    )


def ordinal(drawing):
    levels = int(drawing.rng.integers(3, 5))
    module = tg.likelihoods.Ordinal(num_levels=levels)
    parameters = [drawing.parameter(module, "first_cut", -np.inf, -1.0, 0.5), drawing.parameter(module, "raw_gaps", 0.0, 0.3, 1.5)]

    def cuts(v):
        inner = column(v, "first_cut") + np.cumsum(v["raw_gaps"].reshape(len(v["raw_gaps"]), -1), -1)
        return np.concatenate([column(v, "first_cut"), inner], -1)

    def log_density(f, y, v):
        ends = np.pad(cuts(v), ((0, 0), (1, 1)), constant_values=((0, 0), (-np.inf, np.inf)))
        level = np.broadcast_to(y.astype(int), (len(ends), len(y)))
        low, high = (np.take_along_axis(ends, level + side, -1) - f for side in (0, 1))
        above = low + high > 0  # the probability as a difference of small numbers
        low, high = np.where(above, -high, low), np.where(above, -low, high)
        return scipy.special.log_ndtr(high) + np.log1p(-np.exp(scipy.special.log_ndtr(low) - scipy.special.log_ndtr(high)))

    def draw(rng, f, v):
        return ((f + rng.standard_normal(f.shape))[..., None] > cuts(v)[:, None]).sum(-1).astype(float)

    return Likelihood("ordinal", module, parameters, log_density, draw, lambda y: np.zeros_like(y))


def random_likelihood(drawing, gaussian_only):
    """Gaussian noise alone, or any."""
    kinds = {
        "gaussian": lambda: gaussian(drawing, tg.likelihoods.Gaussian()),
        "gpytorch's gaussian": lambda: gaussian(drawing, gpytorch.likelihoods.GaussianLikelihood()),
        "probit": lambda: of_labels("probit", scipy.special.log_ndtr),
        "logit": lambda: of_labels("logit", lambda f: -np.logaddexp(0, -f)),
        "student t": lambda: student_t(drawing, tg.likelihoods.StudentT()),
        "gpytorch's student t": lambda: student_t(drawing, gpytorch.likelihoods.StudentTLikelihood()),
        "laplace": lambda: laplace_noise(drawing),
        "beta": lambda: beta(drawing),
        "poisson": poisson,
        "softmax": lambda: softmax(drawing.rng),
        "negative binomial": lambda: negative_binomial(drawing),
        "ordinal": lambda: ordinal(drawing),
    }
    shares = np.array([1, 1, 4, 2, 1, 1, 1, 1, 2, 1, 1, 1], float)
    return kinds[
        drawing.rng.choice(list(kinds)[:2] if gaussian_only else list(kinds), p=None if gaussian_only else shares / shares.sum())
    ]()
