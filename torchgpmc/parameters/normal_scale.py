"""Theta on the scale on which each hyperparameter's prior is standard normal: where proposals of importance sampling live."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import CubicSpline, PchipInterpolator
from scipy.special import ndtri_exp
from torch import Tensor

from torchgpmc.numerics.random import make_generator
from torchgpmc.parameters.layout import Layout
from torchgpmc.types import LogDensity

_LIMIT = 6.0  # beyond, where the prior has 1e-9 of its mass, the map goes on as a straight line
_SPACING = 0.1
_FURTHEST, _HALVINGS = 16.0, 50  # where the inverse looks, to 1e-14 of it
_DRAWS = 400
_NODES = 4001
_NEGLIGIBLE = 50.0  # nats below the highest density found
_REACHES = 2.0 ** np.arange(-20, 11)


class NormalScale(NamedTuple):
    r"""A smooth increasing map from z to theta, coordinate by coordinate: :math:`\theta_j = F_j^{-1}(\Phi(z_j))`, nearly.

    F is the prior's distribution function. A posterior whose prior has exponential tails (every Gamma prior, in the logarithm)
    has normal ones in z, and N(0, I) covers it wherever the data say little. The map is a spline, so F is approximate; as its
    Jacobian is the spline's own, densities on either scale are exact all the same.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import LogNormalPrior
        >>> kernel = RBFKernel(lengthscale_prior=LogNormalPrior(1.0, 0.5))
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> theta, _ = normal_scale(model.layout).theta(torch.tensor([[0.0], [2.0]], dtype=torch.float64))
        >>> print([round(value, 3) for value in theta.flatten().tolist()])  # log of the lengthscale: 1 + z / 2
        [1.0, 2.0]
    """

    lowest: float
    spacing: float
    coefficients: Tensor  # (P, pieces, 4), highest power first, in the distance from the piece's left end

    @property
    def size(self) -> int:
        """P, the number of hyperparameters."""
        return len(self.coefficients)

    def theta(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """theta ``(C, P)`` at z ``(C, P)``, and the log of its slope in z, summed over coordinates ``(C,)``."""
        theta, slope, _ = self._derivatives(z)
        return theta, slope.log().sum(-1)

    def z(self, theta: Tensor) -> Tensor:
        """The inverse of :meth:`theta`, by bisection; beyond 16 deviations of the prior, there."""
        low, high = torch.full_like(theta, -_FURTHEST), torch.full_like(theta, _FURTHEST)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = self._derivatives(middle)[0] < theta
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def _derivatives(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """theta and its first and second derivatives in z, elementwise."""
        pieces = self.coefficients.shape[1]
        inside = z.clamp(self.lowest, self.lowest + pieces * self.spacing)
        piece = ((inside - self.lowest) / self.spacing).floor().clamp(0, pieces - 1).long()
        coordinate = torch.arange(self.size, device=z.device).expand_as(piece)
        cubic, square, linear, constant = self.coefficients[coordinate, piece].unbind(-1)
        step = inside - self.lowest - piece.to(z) * self.spacing  # a whole number times a float has torch's default dtype
        slope = (3 * cubic * step + 2 * square) * step + linear
        beyond = z - inside
        theta = ((cubic * step + square) * step + linear) * step + constant + slope * beyond
        return theta, slope, torch.where(beyond == 0, 6 * cubic * step + 2 * square, 0.0)


class CentredScale(NamedTuple):
    """A normal scale whose every coordinate is centred and scaled anew: z = centre + deviation w.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import LogNormalPrior
        >>> kernel = RBFKernel(lengthscale_prior=LogNormalPrior(1.0, 0.5))
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> plain, like = normal_scale(model.layout), torch.ones(1).double()
        >>> narrow = CentredScale(plain, 2 * like, 0.1 * like)
        >>> w = torch.tensor([[1.0]]).double()
        >>> bool((narrow.theta(w)[0] - plain.theta(2.1 + 0 * w)[0]).abs() < 1e-9), narrow.z(narrow.theta(w)[0]).round(decimals=6)
        (True, tensor([[1.]], dtype=torch.float64))
    """

    scale: NormalScale
    centre: Tensor  # (P,), of z
    deviation: Tensor  # (P,)

    @property
    def size(self) -> int:
        """P, the number of hyperparameters."""
        return self.scale.size

    def theta(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """theta ``(C, P)`` at w ``(C, P)``, and the log of its slope in w, summed over coordinates ``(C,)``."""
        theta, log_slope = self.scale.theta(self.centre + self.deviation * z)
        return theta, log_slope + self.deviation.log().sum()

    def z(self, theta: Tensor) -> Tensor:
        """The inverse of :meth:`theta`."""
        return (self.scale.z(theta) - self.centre) / self.deviation


class OnNormalScale(NamedTuple):
    """A log density of theta as one of z."""

    density: LogDensity
    scale: NormalScale

    def __call__(self, position: Tensor) -> Tensor:
        theta, log_slope = self.scale.theta(position)
        return self.density(theta) + log_slope

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and its gradient ``(C, P)``, both in z."""
        theta, slope, bend = self.scale._derivatives(position)
        value, gradient = self.density.value_and_grad(theta)
        gradient = torch.where(torch.isfinite(value).unsqueeze(-1), gradient * slope + bend / slope, 0.0)
        return value + slope.log().sum(-1), gradient

    def select(self, rows: Tensor) -> OnNormalScale:
        """The same for some of the chains."""
        return self._replace(density=self.density.select(rows))


def normal_scale(layout: Layout) -> NormalScale:
    """The map for a layout's prior, by quadrature along each coordinate through the prior's median.

    Priors that are not independent across coordinates are made normal on those lines alone; one that cannot be normalised there
    (a user's own, flat one) is taken for a normal density as wide as its starting points.

    Args:
        layout: of a model.
    """
    draws = layout.starting_points(_DRAWS, make_generator(0, layout.device))  # only to know where to look
    centre, spread = draws.median(0).values, draws.std(0)
    curves = [_quantiles(*_density_along(layout, centre, float(spread[index]), index)) for index in range(layout.size)]
    limit = min([_LIMIT, *(min(-z[0], z[-1]) for z, _ in curves)])
    knots = np.linspace(-limit, limit, round(2 * limit / _SPACING) + 1)
    pieces = [_increasing_spline(knots, PchipInterpolator(z, theta)(knots)) for z, theta in curves]
    coefficients = torch.as_tensor(np.stack(pieces)).to(centre) if pieces else centre.new_zeros(0, len(knots) - 1, 4)
    return NormalScale(-limit, float(knots[1] - knots[0]), coefficients)


def linear_scale(layout: Layout) -> NormalScale:
    """Theta itself, centred and scaled to the prior's means and standard deviations: the scale of logarithms, as in paper E."""
    draws = layout.starting_points(_DRAWS, make_generator(0, layout.device))
    none = torch.zeros_like(draws[0])
    return NormalScale(0.0, 1.0, torch.stack([none, none, draws.std(0), draws.mean(0)], -1).unsqueeze(1))


def _density_along(layout: Layout, centre: Tensor, spread: float, index: int) -> tuple[np.ndarray, Callable[..., np.ndarray]]:
    """Ends of an interval that holds all of one coordinate's prior, and the log density there."""

    def log_density(value: np.ndarray) -> np.ndarray:
        theta = centre.repeat(len(value), 1)
        theta[:, index] = torch.as_tensor(value).to(theta)
        found = layout.log_prior(theta)
        # An infinite density, too, is one that overflowed: at s = 0, when exp(theta) underflows, of a prior with a pole there.
        return torch.where(torch.isfinite(found), found, -1e30).detach().double().cpu().numpy()

    middle = float(centre[index])
    points = middle + spread * np.concatenate([-_REACHES[::-1], [0.0], _REACHES])
    found = log_density(points)
    within = np.flatnonzero(found >= found.max() - _NEGLIGIBLE)
    if within[0] == 0 or within[-1] == len(points) - 1:
        ends = np.array([middle - 10 * spread, middle + 10 * spread])
        return ends, lambda value: -0.5 * ((value - middle) / spread) ** 2
    return points[[within[0] - 1, within[-1] + 1]], log_density


def _quantiles(ends: np.ndarray, log_density: Callable[..., np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal quantiles ``z`` and the thetas that have them, both increasing, by the trapezoidal rule."""
    theta = np.linspace(ends[0], ends[1], _NODES)
    for _ in range(2):  # the second time with nodes where the mass is
        value = log_density(theta)
        mass = np.logaddexp(value[1:], value[:-1]) + np.log(np.diff(theta))
        below = np.logaddexp.accumulate(mass)[:-1]
        above = np.logaddexp.accumulate(mass[::-1])[::-1][1:]
        total = np.logaddexp(below, above)
        z = np.where(below < above, ndtri_exp(below - total), -ndtri_exp(above - total))
        rising = np.concatenate([[True], np.diff(np.maximum.accumulate(z)) > 1e-9]) & (np.abs(z) < 1.5 * _LIMIT)
        z, at = z[rising], theta[1:-1][rising]
        theta = np.interp(np.linspace(z[0], z[-1], _NODES), z, at)
    return z, at


def _increasing_spline(knots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients ``(pieces, 4)`` of a cubic spline; where that overshoots, of a piecewise cubic that is always increasing."""
    spline = CubicSpline(knots, values, bc_type="natural")
    if spline.derivative()(np.linspace(knots[0], knots[-1], 20 * len(knots))).min() <= 0:
        spline = PchipInterpolator(knots, values)
    return np.moveaxis(spline.c, 0, -1)
