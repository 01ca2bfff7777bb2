"""Two posteriors written apart from the library's models, for beside_long_runs.py.

Regression under Student t noise as a mixture of normals: Student's density is normal with a precision that has a gamma density
(Geweke 1993). Given the precisions f integrates out, and log outputscale, log lengthscales and log squared scale move by
Hamiltonian trajectories; f is drawn; given f, degrees of freedom and the scale move with the precisions integrated out; precisions
are drawn. Nothing is approximated, and no sampler of the library's runs.

Noise with a latent size: the density of hyperparameters and white log deviations, f integrated out, for any sampler.
"""

import math
import time

import torch

_STEPS, _TUNED_TO = 4, 0.8
_JITTER, _RELATIVE_JITTER = 1e-8, 1e-6


class Student:
    """y ~ t(f), f ~ GP with a squared exponential of a lengthscale a column; gamma priors as (shape, rate)."""

    def __init__(self, x, y, outputscale, lengthscale, degrees, noise, lower=2.0):
        self.y, self.lower = y, lower
        self.squares = (x[:, None] - x).square().permute(2, 0, 1).flatten(1)  # (D, N * N)
        columns = x.shape[1]
        shapes, rates = zip(outputscale, *[lengthscale] * columns, noise, strict=True)
        self.shapes, self.rates = (torch.tensor(values, dtype=y.dtype) for values in (shapes, rates))
        self.degrees = degrees

    def covariance(self, q):
        """``(C, N, N)`` at log outputscale and log lengthscales."""
        size = len(self.y)
        exponents = -0.5 * (-2 * q[:, 1:-1]).exp() @ self.squares
        return (q[:, :1] + exponents).exp().view(-1, size, size)

    def of_normal_noise(self, q, precisions):
        """Log density of q given precisions, f integrated out, and its gradient; q is log outputscale, lengthscales, scale."""
        covariance = self.covariance(q)
        noise = q[:, -1:].exp() / precisions
        total = covariance + torch.diag_embed(noise + _JITTER)
        factor = torch.linalg.cholesky(total)
        inverse = torch.cholesky_inverse(factor)
        alpha = (inverse @ self.y[:, None]).squeeze(-1)
        value = -factor.diagonal(dim1=1, dim2=2).log().sum(-1) - 0.5 * (alpha @ self.y)
        slope = 0.5 * (alpha[:, :, None] * alpha[:, None] - inverse)
        through = (slope * covariance).flatten(1)
        of_lengths = through @ self.squares.T * (-2 * q[:, 1:-1]).exp()
        of_noise = (slope.diagonal(dim1=1, dim2=2) * noise).sum(-1, keepdim=True)
        gradient = torch.cat([through.sum(-1, keepdim=True), of_lengths, of_noise], -1)
        prior = (self.shapes * q - self.rates * q.exp()).sum(-1)
        return value + prior, gradient + self.shapes - self.rates * q.exp()

    def of_residuals(self, pair, residuals):
        """Log density of log(degrees - lower) and log squared scale given y - f, precisions integrated out."""
        beyond, scale = pair.unbind(-1)
        degrees, squared = beyond.exp() + self.lower, scale.exp()
        half, spread = 0.5 * (degrees + 1), degrees * squared
        logs = (residuals.square() / spread[:, None]).log1p().sum(-1)
        constant = torch.lgamma(half) - torch.lgamma(0.5 * degrees) - 0.5 * torch.log(math.pi * spread)
        prior = (self.degrees[0] - 1) * degrees.log() - self.degrees[1] * degrees + beyond
        prior = prior + self.shapes[-1] * scale - self.rates[-1] * squared
        return len(self.y) * constant - half * logs + prior

    def trajectory(self, q, precisions, step, scales, generator):
        """One transition of q, and its acceptance."""
        value, gradient = self.of_normal_noise(q, precisions)
        momentum = torch.randn(q.shape, generator=generator, dtype=q.dtype)
        energy, new = value - 0.5 * momentum.square().sum(-1), q
        size = step * scales * (0.8 + 0.4 * torch.rand((), generator=generator, dtype=q.dtype))
        for _ in range(_STEPS):
            momentum = momentum + 0.5 * size * gradient
            new = new + size * momentum
            end, gradient = self.of_normal_noise(new, precisions)
            momentum = momentum + 0.5 * size * gradient
        ratio = (end - 0.5 * momentum.square().sum(-1) - energy).exp().clamp_max(1.0).nan_to_num(0.0)
        taken = torch.rand(ratio.shape, generator=generator, dtype=q.dtype) < ratio
        return torch.where(taken[:, None], new, q), float(ratio.mean())

    def drawn(self, q, precisions, generator):
        """f given precisions, by Matheron's rule."""
        covariance, size = self.covariance(q), len(self.y)
        noise = q[:, -1:].exp() / precisions
        eye = torch.eye(size, dtype=q.dtype)
        prior = torch.linalg.cholesky(covariance + _JITTER * q[:, :1, None].exp() * eye)
        white, errors = torch.randn((2, *precisions.shape), generator=generator, dtype=q.dtype)
        f = (prior @ white[..., None]).squeeze(-1)
        total = torch.linalg.cholesky(covariance + torch.diag_embed(noise))
        gap = (self.y - f - noise.sqrt() * errors)[..., None]
        return f + (covariance @ torch.cholesky_solve(gap, total)).squeeze(-1)

    def walked(self, pair, residuals, widths, generator, count=8):
        """Degrees of freedom and scale by random walks."""
        value = self.of_residuals(pair, residuals)
        for _ in range(count):
            new = pair + widths * torch.randn(pair.shape, generator=generator, dtype=pair.dtype)
            other = self.of_residuals(new, residuals)
            taken = torch.rand(value.shape, generator=generator, dtype=pair.dtype).log() < other - value
            pair, value = torch.where(taken[:, None], new, pair), torch.where(taken, other, value)
        return pair


def gibbs(model, seconds, chains=6, warmup=150, seed=9):
    """Draws of [log outputscale, log lengthscales, log(degrees - lower), log squared scale] and of f, after so many CPU seconds."""
    generator = torch.Generator().manual_seed(seed)
    columns = model.shapes.numel() - 2
    q = 0.5 * torch.randn(chains, columns + 2, generator=generator, dtype=model.y.dtype)
    q[:, -1] -= 1.0
    beyond = torch.randn(chains, 1, generator=generator, dtype=q.dtype)
    precisions = torch.ones(chains, len(model.y), dtype=q.dtype)
    step, scales, widths = 0.1, torch.full((columns + 2,), 0.5, dtype=q.dtype), torch.tensor([0.5, 0.15], dtype=q.dtype)
    past, kept, functions = [], [], []
    began, sweep = time.process_time(), 0
    while time.process_time() - began < seconds:
        q, acceptance = model.trajectory(q, precisions, step, scales, generator)
        f = model.drawn(q, precisions, generator)
        residuals = model.y - f
        pair = model.walked(torch.cat([beyond, q[:, -1:]], -1), residuals, widths, generator)
        beyond, q = pair[:, :1], torch.cat([q[:, :-1], pair[:, 1:]], -1)
        degrees = beyond.exp() + model.lower
        rate = 0.5 * (degrees + residuals.square() / q[:, -1:].exp())
        precisions = torch._standard_gamma(0.5 * (degrees + 1).expand_as(rate), generator=generator) / rate
        sweep += 1
        theta = torch.cat([q[:, :-1], beyond, q[:, -1:]], -1)
        if sweep <= warmup:
            step *= math.exp((acceptance - _TUNED_TO) * 2 / sweep**0.6)
            past.append(theta)
            if sweep in (warmup // 2, 3 * warmup // 4):
                recent = torch.stack(past[sweep // 2 :]).flatten(0, 1).std(0)
                scales, widths = torch.cat([recent[:-2], recent[-1:]]), recent[-2:]
                step = 0.6
        else:
            kept.append(theta)
            functions.append(f)
    return torch.stack(kept, 1), torch.stack(functions, 1)


def of_noise(x, y, scale, lengthscale, outputscale):
    """Log density of [log outputscale, log lengthscales, white log deviations], f integrated out: ``(C, 1 + D + N) -> (C,)``.

    Priors are log-normal, (location, sd), and gamma, (shape, rate).
    """
    squares = (x[:, None] - x).square().permute(2, 0, 1)
    size, columns = x.shape
    eye = _RELATIVE_JITTER * torch.eye(size, dtype=x.dtype)

    def density(position):
        q, white = position[:, : columns + 1], position[:, columns + 1 :]
        exponents = torch.einsum("cd,dij->cij", -0.5 * (-2 * q[:, 1:]).exp(), squares)
        covariance = q[:, 0].exp()[:, None, None] * (exponents.exp() + eye)
        prior_factor, failed = torch.linalg.cholesky_ex(covariance)
        deviations = (prior_factor @ white[..., None]).squeeze(-1)
        total = covariance + torch.diag_embed((2 * (math.log(scale) + deviations)).exp())
        factor, failed_too = torch.linalg.cholesky_ex(total)
        gap = torch.linalg.solve_triangular(factor, y[:, None].expand(len(q), size, 1), upper=False).squeeze(-1)
        likelihood = -factor.diagonal(dim1=1, dim2=2).log().sum(-1) - 0.5 * gap.square().sum(-1)
        prior = outputscale[0] * q[:, 0] - outputscale[1] * q[:, 0].exp()
        prior = prior - 0.5 * ((q[:, 1:] - lengthscale[0]) / lengthscale[1]).square().sum(-1)
        value = likelihood + prior - 0.5 * white.square().sum(-1)
        return torch.where((failed == 0) & (failed_too == 0) & value.isfinite(), value, -torch.inf)

    return density
