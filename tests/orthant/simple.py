"""Orthant probabilities by formulas and loops written for clarity: what the package's fast ones are held against."""

import math

import numpy as np
import scipy.special
import torch


def one_factor(d):
    """Covariance of paper B's experiment 1: ones on the diagonal, d_i d_j off it."""
    d = torch.as_tensor(d, dtype=torch.float64)
    return torch.outer(d, d) + torch.diag(1 - d * d)


def one_factor_log_probability(d):
    """Paper B, eq. 63, by the trapezoid rule in logarithms."""
    d = np.asarray(d)
    u = np.linspace(-12, 12, 20001)
    log_values = -0.5 * u * u - 0.5 * math.log(2 * math.pi)
    log_values += scipy.special.log_ndtr(np.outer(u, d / np.sqrt(1 - d * d))).sum(1)
    return float(scipy.special.logsumexp(log_values) + math.log(u[1] - u[0]))


def gp_covariance(num_data, seed=0, scale=2.0, lengthscale=0.4):
    """Paper B, eq. 30: C'(I + Sigma)C' for labels drawn from the model itself."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(size=(num_data, 2))
    sigma = scale * np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(-1) / lengthscale**2)
    f = np.linalg.cholesky(sigma + 1e-9 * np.eye(num_data)) @ generator.normal(size=num_data)
    y = np.sign(f + generator.normal(size=num_data))
    return torch.as_tensor((sigma + np.eye(num_data)) * np.outer(y, y))


def closed_form(covariance):
    """P(x > 0) for N <= 3 by the angles between variables."""
    sd = covariance.diagonal().sqrt()
    correlation = covariance / torch.outer(sd, sd)
    angles = [math.asin(float(correlation[i, j])) for i in range(len(sd)) for j in range(i)]
    return {1: 0.5, 2: 0.25 + sum(angles) / (2 * math.pi), 3: 0.125 + sum(angles) / (4 * math.pi)}[len(sd)]


def separated_log_weights(covariance, lower, upper, tilt, uniforms):
    """Separation of variables for one matrix, one point and one variable at a time (Genz 1992; Botev 2016, eq. 9)."""
    factor = np.linalg.cholesky(np.asarray(covariance))
    size, count = len(factor), uniforms.shape[1]
    result = np.zeros(count)
    for p in range(count):
        z = np.zeros(size)
        for i in range(size):
            rest = factor[i, :i] @ z[:i]
            low, high = (lower[i] - rest) / factor[i, i] - tilt[i], (upper[i] - rest) / factor[i, i] - tilt[i]
            a, b = scipy.special.ndtr(low), scipy.special.ndtr(high)
            result[p] += math.log(b - a) + 0.5 * tilt[i] ** 2
            if i < size - 1:
                z[i] = tilt[i] + scipy.special.ndtri(a + uniforms[i, p] * (b - a))
                result[p] -= tilt[i] * z[i]
    return result


def paper_moments(covariance):
    """b_i and sigma_i^2 of paper B's algorithm GPC-MC by its update of Q (eqs 54-56)."""
    r = np.asarray(covariance)
    q = np.array([[1 / r[0, 0]]])
    coefficients, variances = [np.zeros(0)], [r[0, 0]]
    for i in range(1, len(r)):
        b = q @ r[:i, i]
        variance = r[i, i] - r[:i, i] @ b
        coefficients.append(b)
        variances.append(variance)
        corner = np.array([[1 / variance]])
        q = np.block([[q + np.outer(b, b) / variance, -b[:, None] / variance], [-b[None] / variance, corner]])
    return coefficients, variances


def gpc_mc(covariance, num_points, seed):
    """Paper B's algorithm GPC-MC (section 5.6) with the hard count, for one matrix: log of the estimate."""
    generator = np.random.default_rng(seed)
    points = np.zeros((0, num_points))
    total = 0.0
    for b, variance in zip(*paper_moments(covariance), strict=True):
        points = np.vstack([points, b @ points + math.sqrt(variance) * generator.normal(size=num_points)])
        inside = np.flatnonzero(points[-1] >= 0)
        total += math.log(len(inside) / num_points)
        points = points[:, np.concatenate([inside, generator.choice(inside, num_points - len(inside))])]
    return total
