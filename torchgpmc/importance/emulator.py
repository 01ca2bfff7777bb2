r"""A Gaussian process that tells a log density from its values at some points, for chains to move on in its place.

Its mean at z is

.. math::
    m + \sum_i \alpha_i \, k(x(z), x(z_i)), \quad k(x, x') = \sigma^2 \exp(-\tfrac12 |x - x'|^2) + \lambda^2 x^T x', \quad
    x_j(z) = \tanh(a (z_j - b_j)) / (a \, l_j), \quad \alpha = (K + \nu^2 I)^{-1} (y - m)

Coordinates are bent (Snoek et al. 2014 bend theirs by another function): a log evidence hardly depends on a lengthscale that is
long, or on one so short that f is white noise, and in between may fall by a hundred nats. What a sum of such bends tells, the
linear part learns from few points of many dimensions: of sixty lengthscales 400 tell with it what 600 do not without, by half.
Rasmussen 2003, "Gaussian processes to speed up hybrid Monte Carlo for expensive Bayesian integrals".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky, identity_matrix

_JITTER = 1e-6  # of the signal's variance
_MOST_FITTED = 1000  # points that the emulator's own hyperparameters are fitted to: half of them the latest
_FIRST_STEPS, _FURTHER_STEPS = 50, 20  # of L-BFGS
_STEEP = 1.0  # a slope in nats at which no search has converged
_SLOPE, _SLOPE_SPREAD = math.log(0.5), 0.5  # prior of log a: bent beyond two deviations of the prior
_LENGTHSCALE, _NOISE = 1.0, math.log(0.3)  # prior means of log l and log nu; deviations are 1
_LINEAR, _LINEAR_SPREAD = 2.0, 3.0  # where the search for log lambda begins, and the deviation of its prior around zero
# Of a :class:`Bends`, field by field. Coordinates that are hardly bent have a linear part that knows no end: chains left for it.
_BOUNDS = (-3.0, 6.0), (-2.0, 8.0), (-7.0, 3.0), (-1.0, 1.5), (-3.0, 3.0), (-6.0, 6.0)


class Bends(NamedTuple):
    """The emulator's own hyperparameters; l, sigma, nu, a and lambda in logarithms."""

    log_lengthscale: Tensor  # (D,), of bent coordinates
    log_signal: Tensor  # ()
    log_noise: Tensor  # (), of values, and of what the emulator cannot follow
    log_slope: Tensor  # ()
    bend: Tensor  # (D,)
    log_linear: Tensor  # ()

    def bounds(self) -> list[tuple[float, float]]:
        """Of each number, in the order of the fields."""
        return [limits for part, limits in zip(self, _BOUNDS, strict=True) for _ in range(part.numel())]

    def features(self, position: Tensor) -> Tensor:
        """x ``(S, D)`` of positions ``(S, D)``."""
        slope = self.log_slope.exp()
        return torch.tanh(slope * (position - self.bend)) / slope / self.log_lengthscale.exp()

    def slopes(self, position: Tensor) -> Tensor:
        """dx/dz of each coordinate ``(S, D)``."""
        bent = torch.tanh(self.log_slope.exp() * (position - self.bend))
        return (1 - bent.square()) / self.log_lengthscale.exp()


class Emulator(NamedTuple):
    """A log density on ``(C, D)``: the Gaussian process's mean less |z|^2 / 2; a :class:`torchgpmc.types.LogDensity`.

    Of positions in single precision, too, it is worked out in double: its points lie close to one another.

    What is left of the log density of z is mostly log p(y | theta), where the prior of z is standard normal; so far from all points
    it falls off as the prior does.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> position = torch.randn(200, 2, generator=generator, dtype=torch.float64)
        >>> def log_density(z):
        ...     return -0.5 * z.square().sum(-1) - (z[:, 0] - z[:, 1].tanh()).square()
        >>> emulator = emulated(position, log_density(position))
        >>> other = torch.randn(50, 2, generator=generator, dtype=torch.float64)
        >>> bool((emulator(other) - log_density(other)).abs().median() < 0.1)
        True
    """

    bends: Bends
    mean: Tensor  # ()
    points: Tensor  # (n, D), x of the points
    coefficients: Tensor  # (n,), alpha times the signal's variance
    linear: Tensor  # (D,), of x: what the linear part makes of all points

    def __call__(self, position: Tensor) -> Tensor:
        """``(C, D) -> (C,)``."""
        z = position.double()
        similarity, features = self._similarity(z)
        return (self.mean + similarity.sum(-1) + features @ self.linear - 0.5 * z.square().sum(-1)).to(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``(C,)`` and gradients ``(C, D)``."""
        z = position.double()
        similarity, features = self._similarity(z)
        total = similarity.sum(-1)
        slope = (similarity @ self.points - total.unsqueeze(-1) * features + self.linear) * self.bends.slopes(z)
        value = self.mean + total + features @ self.linear - 0.5 * z.square().sum(-1)
        return value.to(position), (slope - z).to(position)

    def select(self, rows: Tensor) -> Emulator:
        """The same for some chains."""
        return self

    def _similarity(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Each point's part of the mean ``(C, n)``, and x ``(C, D)``."""
        features = self.bends.features(position)
        return _similarity(features, self.points) * self.coefficients, features


def _similarity(one: Tensor, other: Tensor) -> Tensor:
    """exp(-|x - x'|^2 / 2), by one product."""
    square = one.square().sum(-1).unsqueeze(-1) + other.square().sum(-1) - 2 * one @ other.mT
    return torch.exp(-0.5 * square.clamp_min(0.0))


def emulated(position: Tensor, log_density: Tensor, before: Bends | None = None) -> Emulator:
    """The emulator of a log density known, with noise or without, at some positions.

    Its own hyperparameters have the highest posterior given up to 1000 of the values (Rasmussen & Williams 2006, eq. 5.8), under
    weak priors that keep a few points from being followed to the last digit.

    Args:
        position: ``(n, D)``, of a target whose prior is standard normal, or nearly.
        log_density: ``(n,)``, finite.
        before: hyperparameters of an earlier fit, to begin with.

    Example:
        >>> import torch
        >>> position = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
        >>> emulator = emulated(position, -0.5 * position[:, 0] ** 2 - position[:, 0])  # N(-1, 1)
        >>> value, gradient = emulator.value_and_grad(torch.tensor([[-1.0]], dtype=torch.float64))
        >>> bool(gradient.abs() < 0.2)  # at its mode
        True
    """
    position, log_density = position.double(), log_density.double()
    values = log_density + 0.5 * position.square().sum(-1)
    mean = values.mean()
    values = values - mean
    first = _first_guess(position, values) if before is None else before
    rows = _fitted_rows(len(position), position.device)
    bends = _fitted(first, position[rows], values[rows], _FIRST_STEPS if before is None else _FURTHER_STEPS)
    factor, ok = cholesky(_covariance(bends, position))
    solved = torch.cholesky_solve(values.unsqueeze(-1), factor).squeeze(-1)
    # Should that fail, it knows the mean alone: weights tell.
    solved = torch.where(ok, solved, 0.0)
    points = bends.features(position)
    return Emulator(bends, mean, points, solved * (2 * bends.log_signal).exp(), (2 * bends.log_linear).exp() * solved @ points)


def empty_emulator(like: Tensor) -> Emulator:
    """Of no points: log N(0, I) but for its constant, with ``like`` ``(D,)``.

    Example:
        >>> import torch
        >>> float(empty_emulator(torch.zeros(2))(torch.ones(1, 2)))
        -1.0
    """
    like = like.double()
    bends = _first_guess(like[None], torch.ones_like(like[:1]))
    return Emulator(bends, torch.zeros_like(like.sum()), like[None][:0], like[:0], torch.zeros_like(like))


def _first_guess(position: Tensor, values: Tensor) -> Bends:
    like = position[0]
    scalars = (values.std(correction=0).clamp_min(0.1).log(), values.new_tensor(_NOISE), values.new_tensor(_SLOPE))
    return Bends(torch.full_like(like, _LENGTHSCALE), *scalars, torch.zeros_like(like), values.new_tensor(_LINEAR))


def _fitted_rows(count: int, device: torch.device) -> Tensor:
    """Of many points: the latest, which chains have come to, and as many evenly spread over the others."""
    if count <= _MOST_FITTED:
        return torch.arange(count, device=device)
    half = _MOST_FITTED // 2
    early = torch.linspace(0, count - half - 1, half, device=device).long()
    return torch.cat([early, torch.arange(count - half, count, device=device)])


def _covariance(bends: Bends, position: Tensor) -> Tensor:
    features, signal = bends.features(position), (2 * bends.log_signal).exp()
    unit = identity_matrix(len(position), position)
    linear = (2 * bends.log_linear).exp() * features @ features.mT
    return signal * _similarity(features, features) + linear + ((2 * bends.log_noise).exp() + _JITTER * signal) * unit


def _fitted(bends: Bends, position: Tensor, values: Tensor, steps: int) -> Bends:
    """The highest posterior near ``bends``."""
    sizes = [part.numel() for part in bends]
    start = torch.cat([part.flatten() for part in bends])

    def unpacked(flat: Tensor) -> Bends:
        return Bends(*(part.view_as(like) for part, like in zip(flat.split(sizes), bends, strict=True)))

    def loss(numbers: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _negative_log_posterior(unpacked(torch.as_tensor(numbers).to(start)), position, values)
        return value, gradient.cpu().double().numpy()

    numbers = start.cpu().double().numpy()
    while steps > 0:
        options = {"maxiter": steps}
        found = minimize(loss, numbers, jac=True, method="L-BFGS-B", bounds=bends.bounds(), options=options)
        numbers, steps = found.x, steps - found.nit
        # A search along a line that comes by a loss of 1e10 ends all as if it had converged, 400 nats from where it would have.
        if not found.nit or abs(found.jac).max() < _STEEP:
            break
    return unpacked(torch.as_tensor(numbers).to(start))


def _negative_log_posterior(bends: Bends, position: Tensor, values: Tensor) -> tuple[float, Tensor]:
    """With its gradient in all numbers of ``bends``: one factor, one inverse, and autograd in the covariance alone."""
    with torch.enable_grad():
        bends = Bends(*(part.detach().requires_grad_() for part in bends))
        covariance = _covariance(bends, position)
        penalty = _penalty(bends)
        with torch.no_grad():
            factor, ok = cholesky(covariance.detach())
            if not bool(ok):
                return math.inf, torch.zeros(sum(part.numel() for part in bends))
            inverse = torch.cholesky_inverse(factor)
            solved = inverse @ values
            value = 0.5 * values @ solved + factor.diagonal().log().sum() + penalty
            # d/dK of y' K^-1 y / 2 + log |K| / 2 (Rasmussen & Williams 2006, eq. 5.9).
            slope = 0.5 * (inverse - torch.outer(solved, solved))
        parts = torch.autograd.grad((slope * covariance).sum() + penalty, tuple(bends))
    return float(value), torch.cat([part.flatten() for part in parts])


def _penalty(bends: Bends) -> Tensor:
    """Less the log prior density, but for constants."""
    gaps = (
        bends.log_lengthscale - _LENGTHSCALE,
        bends.bend,
        ((bends.log_slope - _SLOPE) / _SLOPE_SPREAD)[None],
        (bends.log_noise - _NOISE)[None],
        (bends.log_linear / _LINEAR_SPREAD)[None],
    )
    return 0.5 * torch.cat(gaps).square().sum()
