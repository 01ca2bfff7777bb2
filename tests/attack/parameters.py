"""Hyperparameters of random models: gpytorch's priors beside formulas of them written out with numpy and scipy.

A prior of a parameter is restricted to the parameter's constraint and renormalised there; every number is exact in float32, which
gpytorch keeps them in.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import scipy.stats
import torch


class Prior(NamedTuple):
    """A gpytorch prior, and what it should be: log density ``(S, *shape)`` to ``(S,)``, draws, both on its restriction."""

    module: Any
    log_density: Callable[[np.ndarray], np.ndarray]
    draw: Callable[[np.random.Generator, int, tuple], np.ndarray]
    lower: float
    upper: float


class Parameter(NamedTuple):
    """One parameter of a module; ``prior`` is None where it is fixed at ``value``."""

    name: str
    shape: tuple
    prior: Prior | None
    value: np.ndarray | None

    def constrain(self, theta):
        """theta ``(S, size)`` to values ``(S, *shape)`` and the log Jacobian ``(S,)``."""
        lower, upper = self.prior.lower, self.prior.upper
        if math.isinf(lower):
            value, slope = theta, np.zeros_like(theta)
        elif math.isinf(upper):
            value, slope = lower + np.exp(theta), theta
        else:
            log_share, log_rest = -np.logaddexp(0, -theta), -np.logaddexp(0, theta)
            value, slope = lower + (upper - lower) * np.exp(log_share), np.log(upper - lower) + log_share + log_rest
        return value.reshape(-1, *self.shape), slope.sum(-1)

    def unconstrain(self, value):
        flat = value.reshape(len(value), -1)
        lower, upper = self.prior.lower, self.prior.upper
        if math.isinf(lower):
            return flat
        return np.log(flat - lower) if math.isinf(upper) else np.log(flat - lower) - np.log(upper - flat)


class SmoothedBox:
    """Uniform on [a, b] with normal tails of standard deviation ``scale`` beyond, as scipy would have it."""

    def __init__(self, a, b, scale):
        self.a, self.b, self.scale = a, b, scale
        self.total = b - a + math.sqrt(2 * math.pi) * scale

    def logpdf(self, x):
        beyond = np.maximum(np.maximum(self.a - x, x - self.b), 0)
        return -0.5 * (beyond / self.scale) ** 2 - math.log(self.total)

    def cdf(self, x):
        tail = math.sqrt(2 * math.pi) * self.scale
        left = tail * scipy.stats.norm.cdf(np.minimum(x - self.a, 0) / self.scale)
        right = tail * (scipy.stats.norm.cdf(np.maximum(x - self.b, 0) / self.scale) - 0.5)
        return (left + np.clip(x - self.a, 0, self.b - self.a) + right) / self.total

    def rvs(self, size, random_state):
        tail = math.sqrt(2 * math.pi) * self.scale
        normal = self.scale * random_state.standard_normal(size)
        outside = np.where(normal < 0, self.a, self.b) + normal
        inside = random_state.uniform(self.a, self.b, size)
        return np.where(random_state.uniform(size=size) < tail / self.total, outside, inside)


_LEAST_MASS = 1e-4  # that a constraint leaves of a prior: with less, draws by rejection take for ever


def elementwise(module, distribution, support, lower, upper):
    """Independent elements of a scipy distribution, restricted to (lower, upper)."""
    lower, upper = max(lower, support[0]), min(upper, support[1])
    mass = distribution.cdf(upper) - distribution.cdf(lower)

    def log_density(x):
        return (distribution.logpdf(x) - math.log(mass)).reshape(len(x), -1).sum(-1)

    def draw(rng, count, shape):
        x = distribution.rvs(size=(count, *shape), random_state=rng)
        while (outside := (x <= lower) | (x >= upper)).any():
            x[outside] = distribution.rvs(size=outside.sum(), random_state=rng)
        return x

    return Prior(module, log_density, draw, lower, upper)


def multivariate_normal(rng, size, lower):
    """Of a whole vector, on (lower, inf) in every element."""
    mean, slope = 0.25 * rng.integers(1, 5, size), 0.25 * rng.integers(1, 3)
    covariance = np.eye(size) * 0.5 + slope
    module = gpytorch.priors.MultivariateNormalPrior(
        torch.tensor(mean, dtype=torch.float32), covariance_matrix=torch.tensor(covariance, dtype=torch.float32)
    )
    factor = module._unbroadcasted_scale_tril.double().numpy()  # rounded to single precision, which its density rests on
    covariance = factor @ factor.T
    distribution = scipy.stats.multivariate_normal(mean, covariance)
    # The mass above lower is that of -x below -lower.
    mass = 1.0 if math.isinf(lower) else scipy.stats.multivariate_normal(-mean, covariance).cdf(np.full(size, -lower))

    def log_density(x):
        return distribution.logpdf(x.reshape(len(x), size)).reshape(len(x)) - math.log(mass)

    def draw(rng, count, shape):
        x = distribution.rvs(count, random_state=rng).reshape(count, size)
        while (outside := (x <= lower).any(-1)).any():
            x[outside] = distribution.rvs(int(outside.sum()), random_state=rng).reshape(-1, size)
        return x.reshape(count, *shape)

    return Prior(module, log_density, draw, lower, math.inf)


class OwnPrior(gpytorch.priors.Prior):
    """A user's: the Rayleigh density, by ``log_prob`` and ``sample`` alone."""

    support = torch.distributions.constraints.positive
    arg_constraints = {}

    def __init__(self):
        torch.nn.Module.__init__(self)
        torch.distributions.Distribution.__init__(self, validate_args=False)

    def log_prob(self, x):
        return x.log() - 0.5 * x.square()

    def sample(self, sample_shape=()):
        return (-2 * torch.rand(sample_shape).log()).sqrt()

    rsample = sample


def quarter(rng, low, high):
    """A random multiple of 1/4."""
    return 0.25 * rng.integers(round(4 * low), round(4 * high) + 1)


def random_prior(rng, lower=0.0, size=1):
    """A prior of a parameter that is constrained to (lower, inf)."""
    gp = gpytorch.priors
    a, b = quarter(rng, 1.25, 4), quarter(rng, 1, 4)
    location, scale = quarter(rng, -1, 1), quarter(rng, 0.25, 1)
    positive, line = (0.0, math.inf), (-math.inf, math.inf)
    start = scale + (-2.0 if math.isinf(lower) else math.floor(lower))
    kinds = {
        "gamma": lambda: (gp.GammaPrior(a, b), scipy.stats.gamma(a, scale=1 / b), positive),
        "log normal": lambda: (gp.LogNormalPrior(location, scale), scipy.stats.lognorm(scale, scale=math.exp(location)), positive),
        "normal": lambda: (gp.NormalPrior(location, b), scipy.stats.norm(location, b), line),
        "half normal": lambda: (gp.HalfNormalPrior(b), scipy.stats.halfnorm(scale=b), positive),
        "half Cauchy": lambda: (gp.HalfCauchyPrior(scale), scipy.stats.halfcauchy(scale=scale), positive),
        "uniform": lambda: (gp.UniformPrior(start, start + b), scipy.stats.uniform(start, b), (start, start + b)),
        "smoothed box": lambda: (gp.SmoothedBoxPrior(start, start + b, 0.125), SmoothedBox(start, start + b, 0.125), line),
        "own": lambda: (OwnPrior(), scipy.stats.rayleigh(), positive),
    }  # fmt: skip
    shares = np.array([4, 4, 2, 2, 1, 1, 1, 1, 2 if size > 1 else 0])
    kind = rng.choice([*kinds, "joint"], p=shares / shares.sum())
    if kind == "joint":
        return multivariate_normal(rng, size, lower)
    module, distribution, support = kinds[kind]()
    if 1 - distribution.cdf(lower) < _LEAST_MASS:
        return random_prior(rng, lower, size)
    return elementwise(module, distribution, support, lower, math.inf)


class Drawing:
    """What a random module is drawn with: half of the chance of fixing a parameter that ``fixed_share`` is."""

    def __init__(self, rng, fixed_share):
        self.rng = rng
        self.fixed_share = fixed_share

    def parameter(self, module, name, lower=0.0, low=0.5, high=2.0):
        """Gives a parameter of ``module`` (``raw_...``, or its own name where it has no constraint) a prior, or fixes it."""
        raw = getattr(module, name)
        shape, public = tuple(raw.shape), name.removeprefix("raw_")
        if self.rng.uniform() < self.fixed_share:
            value = self.rng.uniform(low, high, shape)
            with torch.no_grad():
                module.double().initialize(**{public: torch.as_tensor(value)})
            raw.requires_grad_(False)
            return Parameter(name, shape, None, value)
        is_vector = shape[-1:] == (math.prod(shape),)  # what a multivariate prior is of: the last dimension
        prior = random_prior(self.rng, lower, math.prod(shape) if is_vector else 1)
        module.register_prior(f"{public}_prior", prior.module, public)
        return Parameter(name, shape, prior, None)


def below(prefix, parameters):
    """The same parameters as a parent names them."""
    return [parameter._replace(name=f"{prefix}.{parameter.name}") for parameter in parameters]
