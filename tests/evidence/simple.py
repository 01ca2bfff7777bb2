"""The first correct batched importance estimate from Laplace's approximation: dense algebra throughout, for one likelihood.

The reference that the fast one is held against, in the tests for its values and in ``benchmarks/evidence.py`` for its time.
"""

import math

import torch


def covariance(x, lengthscale, outputscale):
    """Isotropic RBF at C settings: ``(C, N, N)``."""
    scaled = x / lengthscale[:, None, None]
    square = (scaled.unsqueeze(2) - scaled.unsqueeze(1)).square().sum(-1)
    return outputscale[:, None, None] * torch.exp(-0.5 * square)


def laplace(matrix, sign):
    """Newton's iteration for all thetas until the slowest meets paper A's criterion."""
    count, size = matrix.shape[:2]
    identity = torch.eye(size, dtype=matrix.dtype)
    f = torch.zeros(count, size, dtype=matrix.dtype)
    while True:
        z = sign * f
        hazard = torch.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(z))
        gradient, precision = sign * hazard, hazard * (z + hazard)
        root = precision.sqrt()
        factor = torch.linalg.cholesky(identity + root.unsqueeze(-1) * matrix * root.unsqueeze(-2))
        right = (precision * f + gradient).unsqueeze(-1)
        inner = torch.cholesky_solve(root.unsqueeze(-1) * (matrix @ right), factor)
        alpha = right - root.unsqueeze(-1) * inner
        new = (matrix @ alpha).squeeze(-1)
        change = (new - f).square().sum(-1).max()
        f = new
        if change < size / 1e4:
            return f, root, factor


def log_estimate(matrix, sign, num_importance, generator):
    """Eq. 25 of paper A with log densities written out: ``(C,)``."""
    size = matrix.shape[-1]
    identity = torch.eye(size, dtype=matrix.dtype)
    mean, root, factor = laplace(matrix, sign)
    half = torch.linalg.solve_triangular(factor, root.unsqueeze(-1) * matrix, upper=False)
    posterior_factor = torch.linalg.cholesky(matrix - half.mT @ half + 1e-8 * identity)
    prior_factor = torch.linalg.cholesky(matrix)
    noise = torch.randn(len(matrix), num_importance, size, dtype=matrix.dtype, generator=generator)
    f = mean.unsqueeze(1) + noise @ posterior_factor.mT
    white = torch.linalg.solve_triangular(prior_factor, f.mT, upper=False)
    log_prior = -0.5 * white.square().sum(1) - prior_factor.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    log_density = -0.5 * noise.square().sum(-1) - posterior_factor.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    log_likelihood = torch.special.log_ndtr(sign * f).sum(-1)
    return torch.logsumexp(log_likelihood + log_prior - log_density, -1) - math.log(num_importance)
