"""Brute force: importance sampling of [theta, v] (of theta alone under Gaussian noise) with a share of prior draws, numpy alone."""

from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats

from tests.attack.problem import normal_log_density

PRIOR_SHARE = 0.2
DEGREES = 5
ROUNDS = 5
BLOCK = 1000  # rows at once, to bound memory


class Draws(NamedTuple):
    """Weighted, independent draws."""

    theta: np.ndarray
    v: np.ndarray
    log_weights: np.ndarray

    @property
    def effective_size(self):
        weights = np.exp(self.log_weights - self.log_weights.max())
        return weights.sum() ** 2 / (weights**2).sum()

    def log_evidence(self):
        """The log of the mean weight and its standard error."""
        peak = self.log_weights.max()
        weights = np.exp(self.log_weights - peak)
        return peak + np.log(weights.mean()), weights.std() / weights.mean() / len(weights) ** 0.5


class Target:
    """The unnormalised posterior of a problem, and draws from its prior."""

    def __init__(self, problem):
        self.problem = problem
        self.marginal = problem.integrates_out
        self.num_latents = 0 if self.marginal else problem.latent_size

    def log_density(self, position):
        function = self.problem.log_marginal if self.marginal else self.problem.log_joint
        blocks = np.split(position, range(BLOCK, len(position), BLOCK))
        return np.concatenate([function(block) for block in blocks])

    def log_prior(self, position):
        size = self.problem.num_hyperparameters
        return self.problem.values(position[:, :size])[1] + normal_log_density(position[:, size:])

    def draw_prior(self, rng, count):
        return np.concatenate([self.problem.draw_theta(rng, count), rng.standard_normal((count, self.num_latents))], -1)


class Proposal(NamedTuple):
    """A Student t density, beside the prior."""

    mean: np.ndarray
    factor: np.ndarray

    def draw(self, rng, count, target):
        normal = rng.standard_normal((count, len(self.mean))) / np.sqrt(rng.chisquare(DEGREES, (count, 1)) / DEGREES)
        student = self.mean + normal @ self.factor.T
        return np.where(rng.uniform(size=(count, 1)) < PRIOR_SHARE, target.draw_prior(rng, count), student)

    def log_density(self, position, target):
        size = len(self.mean)
        white = np.linalg.solve(self.factor, (position - self.mean).T)
        constant = (
            scipy.special.gammaln((DEGREES + size) / 2) - scipy.special.gammaln(DEGREES / 2) - size / 2 * np.log(DEGREES * np.pi)
        )
        student = constant - np.log(np.diag(self.factor)).sum() - (DEGREES + size) / 2 * np.log1p((white**2).sum(0) / DEGREES)
        return np.logaddexp(np.log(1 - PRIOR_SHARE) + student, np.log(PRIOR_SHARE) + target.log_prior(position))


def tempered(log_weights, least):
    """Weights to the power at which their effective size is ``least``, or 1 if it is more."""
    low, high, power = 0.0, 1.0, 1.0
    for _ in range(20):
        weights = np.exp(power * (log_weights - log_weights.max()))
        enough = weights.sum() ** 2 / (weights**2).sum() >= least
        if enough and power == 1.0:
            break
        low, high = (power, high) if enough else (low, power)
        power = (low + high) / 2
    return weights / weights.sum()


def fitted(position, log_weights, size):
    weights = tempered(log_weights, 20 * size)
    mean = weights @ position
    covariance = ((position - mean).T * weights) @ (position - mean)
    return Proposal(mean, np.linalg.cholesky(covariance + 1e-10 * np.eye(size)))


def reference(problem, rng, num_draws, pilot_draws=2000):
    """The adaptive rounds are forgotten; the last proposal is fixed, so that weights are independent and their mean unbiased."""
    target = Target(problem)
    size = problem.num_hyperparameters + target.num_latents
    if size == 0:
        theta = np.zeros((num_draws, 0))
        return Draws(theta, problem.draw_v(rng, theta), np.full(num_draws, target.log_density(theta[:1])[0]))
    position = target.draw_prior(rng, pilot_draws)
    with np.errstate(all="ignore"):
        proposal = fitted(position, target.log_density(position) - target.log_prior(position), size)
        for _ in range(ROUNDS):
            position = proposal.draw(rng, pilot_draws, target)
            proposal = fitted(position, target.log_density(position) - proposal.log_density(position, target), size)
        position = proposal.draw(rng, num_draws, target)
        log_weights = target.log_density(position) - proposal.log_density(position, target)
    theta, v = position[:, : problem.num_hyperparameters], position[:, problem.num_hyperparameters :]
    keep = np.isfinite(log_weights)
    theta, v, log_weights = theta[keep], v[keep], log_weights[keep] + np.log(keep.mean())
    return Draws(theta, problem.draw_v(rng, theta) if target.marginal else v, log_weights)
