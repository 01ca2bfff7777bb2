"""One random model and everything that brute force knows about it; position is [theta, v], as the package has it."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import scipy.special
import torch

import torchgpmc as tg
from tests.attack.kernels import Part, random_kernel, random_mean
from tests.attack.likelihoods import Likelihood, random_likelihood
from tests.attack.parameters import Drawing, below

MAX_HYPERPARAMETERS = 6
BLOCK = 20_000  # numbers at once
GAUSS_LEGENDRE = np.polynomial.legendre.leggauss(12)


class Latents(NamedTuple):
    """p(f | theta) at S settings: mean ``(S, N)`` and factor ``(S, M, M)``; a sparse model's projection and variance too."""

    mean: np.ndarray
    factor: np.ndarray
    projection: np.ndarray | None
    variance: np.ndarray | None


class Problem(NamedTuple):
    """A model of the package beside its formulas."""

    index: int
    kind: type
    model: tg.models.GPModel
    kernel: Part
    mean: Part
    likelihood: Likelihood
    x: np.ndarray
    y: np.ndarray
    inducing: np.ndarray | None
    jitter: float
    test_x: np.ndarray
    test_y: np.ndarray

    def __repr__(self):
        parts = self.kernel.module, self.mean.module, self.likelihood.module
        free = ", ".join(f"{p.name} {p.shape} ~ {type(p.prior.module).__name__}" for p in self.free)
        name = self.kind.__name__
        sizes = f"N={len(self.x)}, {self.dtype}, jitter {self.jitter}"
        return f"model {self.index}: {name}, {sizes}, {self.likelihood.name}; {free}; {parts}"

    @property
    def dtype(self):
        return self.model.train_x.dtype

    @property
    def parameters(self):
        named = zip(("kernel", "mean", "likelihood"), (self.kernel, self.mean, self.likelihood), strict=True)
        return [parameter for prefix, part in named for parameter in below(prefix, part.parameters)]

    @property
    def free(self):
        """Sampled parameters in the order of theta: that in which the modules hold them."""
        return [parameter for parameter in self.parameters if parameter.prior is not None]

    @property
    def num_hyperparameters(self):
        return sum(math.prod(parameter.shape) for parameter in self.free)

    @property
    def integrates_out(self):
        """Whether brute force integrates f out in closed form."""
        return self.likelihood.has_gaussian_noise and self.kind is not tg.SparseGP

    @property
    def latent_size(self):
        return self.likelihood.num_latents * len(self.x if self.inducing is None else self.inducing)

    def values(self, theta):
        """theta ``(S, P)`` to values by module, each ``(S, *shape)``, and the log prior of theta ``(S,)``."""
        by_module, start, log_prior = {"kernel": {}, "mean": {}, "likelihood": {}}, 0, np.zeros(len(theta))
        for parameter in self.parameters:
            module, _, name = parameter.name.partition(".")
            if parameter.prior is None:
                by_module[module][name] = np.broadcast_to(parameter.value, (len(theta), *parameter.shape))
                continue
            size = math.prod(parameter.shape)
            by_module[module][name], slope = parameter.constrain(theta[:, start : start + size])
            log_prior = log_prior + slope + parameter.prior.log_density(by_module[module][name])
            start += size
        return by_module, log_prior

    def draw_theta(self, rng, count):
        columns = [parameter.unconstrain(parameter.prior.draw(rng, count, parameter.shape)) for parameter in self.free]
        return np.concatenate([np.zeros((count, 0)), *columns], -1)

    def covariance(self, values, a, b):
        return np.broadcast_to(self.kernel.formula(values["kernel"], a, b), (len(values["count"]), len(a), len(b)))

    def latents(self, values):
        """Raises ``LinAlgError`` never: a covariance that cannot be factorised has a factor of NaN."""
        inner = self.x if self.inducing is None else self.inducing
        factor = safe_cholesky(self.covariance(values, inner, inner) + self.jitter * np.eye(len(inner)))
        mean = self.mean.formula(values["mean"], self.x) * np.ones((len(factor), 1))
        if self.inducing is None:
            return Latents(mean, factor, None, None)
        projection = np.linalg.solve(factor, self.covariance(values, self.inducing, self.x))
        return Latents(mean, factor, projection, self.diagonal(values, self.x) - (projection**2).sum(1))

    def diagonal(self, values, x):
        rows = [self.covariance(values, x[n : n + 1], x[n : n + 1])[:, 0, 0] for n in range(len(x))]
        return np.stack(rows, -1)

    def functions(self, latents, v):
        """Means of f at the data given v, ``(S, N)`` or ``(S, N, K)``."""
        white = v.reshape(len(v), self.likelihood.num_latents, -1)
        along = white @ (latents.factor.swapaxes(-1, -2) if latents.projection is None else latents.projection)
        f = latents.mean[:, None] + along
        return f[:, 0] if self.likelihood.num_latents == 1 else f.swapaxes(1, 2)

    def unpack(self, theta):
        values, log_prior = self.values(theta)
        values["count"] = range(len(theta))
        return values, log_prior

    def log_joint(self, position, precise=False):
        """log p(theta) + log N(v) + log p(y | f), or its expectation; ``(S,)``, a part that cannot be factorised -inf.

        An expectation is by 64 Gauss-Hermite nodes, enough beside Monte Carlo errors, or ``precise``.
        """
        theta, v = position[:, : self.num_hyperparameters], position[:, self.num_hyperparameters :]
        values, log_prior = self.unpack(theta)
        latents = self.latents(values)
        f = self.functions(latents, v)
        if latents.variance is None:
            log_likelihood = self.likelihood.log_density(f, self.y, values["likelihood"])
        else:
            nodes, log_weights = (self.normal_nodes if precise else self.few_nodes)(f, variance_like(latents.variance, f), self.y)
            log_likelihood = (np.exp(log_weights) * self.at_nodes(nodes, self.y, values)).sum(0)
        total = log_prior + normal_log_density(v) + log_likelihood.sum(-1)
        return np.where(np.isfinite(total), total, -np.inf)

    def log_marginal(self, theta):
        """log p(theta) + log p(y | theta) under Gaussian noise, ``(S,)``."""
        values, log_prior = self.unpack(theta)
        _, factor, residual = self.noisy(values)
        white = np.linalg.solve(factor, residual[..., None])[..., 0]
        total = log_prior + normal_log_density(white) - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(-1)
        return np.where(np.isfinite(total), total, -np.inf)

    def noisy(self, values):
        """Covariance of f, factor of the covariance of y, and y less its mean."""
        covariance = self.covariance(values, self.x, self.x) + self.jitter * np.eye(len(self.x))
        noise = values["likelihood"]["noise_covar.raw_noise"].reshape(-1, 1, 1)
        mean = self.mean.formula(values["mean"], self.x) * np.ones((len(covariance), 1))
        return covariance, safe_cholesky(covariance + noise * np.eye(len(self.x))), self.y - mean

    def draw_v(self, rng, theta):
        """v from p(v | y, theta) under Gaussian noise: a prior draw, corrected by its own noisy observation (Matheron)."""
        values, _ = self.unpack(theta)
        covariance, factor, residual = self.noisy(values)
        prior_factor = safe_cholesky(covariance)
        v = rng.standard_normal(residual.shape)
        noise = np.sqrt(values["likelihood"]["noise_covar.raw_noise"].reshape(-1, 1))
        gap = residual - (prior_factor @ v[..., None])[..., 0] - noise * rng.standard_normal(residual.shape)
        weights = np.linalg.solve(factor.swapaxes(-1, -2), np.linalg.solve(factor, gap[..., None]))
        return v + (prior_factor.swapaxes(-1, -2) @ weights)[..., 0]

    def at_nodes(self, nodes, y, values):
        """log p(y | nodes) ``(Q, S, T)``, as many nodes at a time as stay in a cache."""
        step = max(1, BLOCK // nodes[0].size)
        blocks = np.split(nodes, range(step, len(nodes), step))
        return np.concatenate([self.likelihood.log_density(block, y, values["likelihood"]) for block in blocks])

    def normal_nodes(self, mean, variance, y):
        """Nodes ``(Q, S, T[, K])`` and log weights ``(Q, S, T)`` of integrals over N(mean, variance) with p(y | f) in them.

        One latent: Gauss-Legendre on panels that narrow towards the normal's centre and towards the likelihood's; several: a
        product of Gauss-Hermite rules.
        """
        if self.likelihood.num_latents > 1:
            return self.few_nodes(mean, variance, y, 80 if self.likelihood.num_latents == 2 else 40)
        deviation = np.sqrt(variance)
        steps = np.concatenate([[0.0], 0.5 ** np.arange(8, -1, -1), np.arange(2, 15, 1.0)])
        steps = np.concatenate([-steps[:0:-1], steps])
        shape = (-1, 1, 1)
        edges = np.concatenate(
            [mean + deviation * steps.reshape(shape), self.likelihood.peak(y) + deviation * steps.reshape(shape)]
        )
        edges = np.sort(edges, 0).clip(mean - 14 * deviation, mean + 14 * deviation)
        nodes, weights = GAUSS_LEGENDRE
        half = np.diff(edges, axis=0) / 2
        points = (edges[:-1] + half)[None] + half[None] * nodes.reshape(-1, 1, 1, 1)
        with np.errstate(divide="ignore"):  # empty panels
            log_weights = np.log(half)[None] + np.log(weights).reshape(-1, 1, 1, 1)
        log_weights = log_weights - 0.5 * ((points - mean) / deviation) ** 2 - np.log(deviation) - 0.5 * math.log(2 * math.pi)
        return points.reshape(-1, *mean.shape), log_weights.reshape(-1, *mean.shape)

    def few_nodes(self, mean, variance, y, count=None):
        """The same by (a product of) Gauss-Hermite rules of ``count`` nodes."""
        latents = self.likelihood.num_latents
        nodes, weights = np.polynomial.hermite_e.hermegauss(count or (64 if latents == 1 else 6))
        grid = np.stack(np.meshgrid(*[nodes] * latents), -1).reshape(-1, latents)
        shares = np.stack(np.meshgrid(*[weights / weights.sum()] * latents), -1).prod(-1).reshape(-1, 1, 1)
        spread = grid.reshape(len(grid), 1, -1) if latents == 1 else grid.reshape(len(grid), 1, 1, -1)
        return mean + np.sqrt(variance) * spread, np.log(shares) * np.ones((1, *mean.shape[:2]))

    def predictive_log_densities(self, theta, v):
        """log p(y* | theta, v) at the test points ``(S, T)``."""
        values, _ = self.unpack(theta)
        latents = self.latents(values)
        inner = self.x if self.inducing is None else self.inducing
        projection = np.linalg.solve(latents.factor, self.covariance(values, inner, self.test_x))
        mean = self.mean.formula(values["mean"], self.test_x) * np.ones((len(theta), 1))
        variance = (self.diagonal(values, self.test_x) - (projection**2).sum(1)).clip(1e-12)
        f = self.functions(Latents(mean, latents.factor, projection, variance), v)
        nodes, log_weights = self.normal_nodes(f, variance_like(variance, f), self.test_y)
        return scipy.special.logsumexp(log_weights + self.at_nodes(nodes, self.test_y, values), axis=0)


def variance_like(variance, mean):
    return variance if mean.ndim == 2 else np.broadcast_to(variance[..., None], mean.shape)


def normal_log_density(v):
    return -0.5 * (v**2).sum(-1) - 0.5 * v.shape[-1] * math.log(2 * math.pi)


def safe_cholesky(matrices):
    try:
        return np.linalg.cholesky(matrices)
    except np.linalg.LinAlgError:
        return np.stack([cholesky_or_nan(matrix) for matrix in matrices])


def cholesky_or_nan(matrix):
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def random_problem(index):
    """Model number ``index``; those with too many hyperparameters for brute force are drawn again."""
    rng = np.random.default_rng((20260, index))
    while (found := drawn_problem(index, rng)) is None:
        pass
    return found


def drawn_problem(index, rng):
    kind = rng.choice([tg.GP, tg.SparseGP, tg.GPRegression], p=[0.6, 0.2, 0.2])
    num_columns = int(rng.integers(1, 4))
    num_data = int(rng.integers(1, 13))
    x = rng.integers(-64, 65, (num_data, num_columns)) / 64
    if num_data > 2 and rng.uniform() < 0.15:
        x[-1] = x[0]  # two observations at one input
    drawing = Drawing(rng, 1.0 if rng.uniform() < 0.08 else 0.25)
    kernel, mean = random_kernel(drawing, num_columns), random_mean(drawing, num_columns)
    likelihood = random_likelihood(drawing, kind is tg.GPRegression)
    inducing = rng.integers(-64, 65, (int(rng.integers(1, 5)), num_columns)) / 64 if kind is tg.SparseGP else None
    inducing = None if inducing is None else inducing[:num_data]  # more than data are refused
    dtype = torch.float32 if rng.uniform() < 0.1 else torch.float64
    jitter = float(rng.choice([2.0**-20, 2.0**-10, 2.0**-4])) if dtype == torch.float64 else 2.0**-8
    test_x = rng.integers(-96, 97, (3, num_columns)) / 64
    problem = Problem(index, kind, None, kernel, mean, likelihood, x, None, inducing, jitter, test_x, None)
    if problem.num_hyperparameters > MAX_HYPERPARAMETERS:
        return None
    y = drawn_targets(problem, rng)
    extra = {} if inducing is None else {"inducing_points": torch.tensor(inducing)}
    extra |= {"mean": mean.module, "jitter": jitter, "dtype": dtype}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a column that is the same at all of a few data
        model = kind(torch.tensor(x), torch.tensor(y[:num_data]), kernel.module, likelihood.module, **extra)
    return problem._replace(model=model, y=model.train_y.double().numpy(), test_y=y[num_data:])


def drawn_targets(problem, rng):
    """For the data and the test points: from a smooth f, or from pure noise, at one draw of the likelihood's parameters."""
    values, _ = problem.values(problem.draw_theta(rng, 1))
    points = np.concatenate([problem.x, problem.test_x])
    waves = rng.standard_normal((points.shape[1], problem.likelihood.num_latents))
    f = 1.2 * np.sin(3 * points @ waves + rng.uniform(0, 6)) * rng.choice([0.3, 1.0, 2.0])
    f = f[None, :, 0] if problem.likelihood.num_latents == 1 else f[None]
    y = problem.likelihood.draw(rng, f, values["likelihood"])[0]
    return (
        y if problem.likelihood.name in ("probit", "logit", "softmax", "poisson", "beta") else np.round(y.clip(-50, 50) * 64) / 64
    )
