r"""The posterior in coordinates that are white under a Gaussian fit at every theta: v follows theta as u does that data hold.

A fit at one theta, :math:`\theta_0`, says of v there that it is normal with a precision :math:`I + \Lambda`: what data add to the
prior. They do so by way of the function's values u = m + L v, whatever theta is; so at another theta

.. math:: v_0 = T v + d, \quad T = L_0^{-1} L(\theta), \quad d = L_0^{-1} (m(\theta) - m_0), \quad P = I + T^T \Lambda T = R R^T

with the density of v N(P^-1 b, P^-1). Means of v bend with theta, along L(theta)^-1, where data say much of u: with fifty inducing
points and three classes by eleven deviations within one posterior deviation of a lengthscale. What data say of u changes with theta
in how f at the data is interpolated from u: little where the inducing points resolve f, else much, and ``slope`` makes up for that,
to first order.

Coordinates like these, of sites held at one theta, decide the speed alone: the volume is in the density.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.affine import Mapped
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.whitening import white_under_precision
from torchgpmc.numerics.linalg import factor_adjoint, factor_with_gradient, identity_matrix, inverse_lower, solve_lower

_STEP = 1e-3  # of theta, for the slope of the mean


class FollowingMap(NamedTuple):
    r"""v = P^-1 b + slope (theta - origin) + R^-T w, for B independent blocks of latents.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.zeros(1), torch.ones(1), kernel, tg.likelihoods.Bernoulli(), jitter=1e-9)
        >>> one, three = torch.ones(1, 1).double(), 3 * torch.ones(1, 1, 1).double()  # N(2, 1 / 3) beside N(0, 1)
        >>> white = following_map(model, torch.zeros(1).double(), 1.5 * one, 0.5 * one[None])
        >>> white.latents(torch.zeros(2, 1).double(), torch.tensor([[0.0], [1.0]]).double()).flatten()
        tensor([1.5000, 2.0000], dtype=torch.float64)
    """

    model: GPModel
    origin: Tensor  # (P,), the theta of the fit, as positions have it
    factor: Tensor  # L_0, (M, M)
    mean: Tensor  # m_0, (M,)
    precision: Tensor  # Lambda, (B, m, m), positive semidefinite: all latents together, m = V, or a block a function, m = M
    linear: Tensor  # (I + Lambda) times the fit's mean, (B, m)
    slope: Tensor  # (V, P)

    @property
    def num_functions(self) -> int:
        """Of a block."""
        return self.linear.shape[1] // len(self.mean)

    def latents(self, theta: Tensor, white: Tensor) -> Tensor:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``."""
        return self.whitened(theta, white)[0]

    def whitened(self, theta: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """v, and log |dv / dw| ``(C,)``, differentiable; NaN where a covariance does not factorise."""
        prior = self.model.prior(theta)
        root, explained, ok = self._given(prior, factor_with_gradient(prior.covariance, prior.factor))
        total = explained + white.view(len(white), *self.linear.shape, 1)
        v = torch.linalg.solve_triangular(root.mT, total, upper=True).view_as(white)
        log_volume = -root.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        return v + (theta - self.origin) @ self.slope.mT, torch.where(ok, log_volume, torch.nan)

    def white(self, theta: Tensor, v: Tensor) -> Tensor:
        """w ``(C, V)`` from theta and v: what :meth:`latents` undoes; NaN where a covariance does not factorise."""
        prior = self.model.prior(theta)
        root, explained, ok = self._given(prior, prior.factor)
        rest = (v - (theta - self.origin) @ self.slope.mT).view(len(v), *self.linear.shape, 1)
        white = root.mT @ rest - explained
        return torch.where(ok.unsqueeze(-1), white.view_as(v), torch.nan)

    def normal_at(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of v ``(C, V)`` at thetas, roots of its covariance ``(C, B, m, m)``, R^-T, and whether there is one ``(C,)``."""
        prior = self.model.prior(theta)
        root, explained, ok = self._given(prior, prior.factor)
        scale = inverse_lower(root).mT
        return (scale @ explained).view(len(theta), -1) + (theta - self.origin) @ self.slope.mT, scale, ok

    def moved(self, origin: Tensor, jacobian: Tensor) -> FollowingMap:
        """With other numbers in theta's place, to first order: these at the fit, and theta's derivatives in them ``(P, P)``."""
        return self._replace(origin=origin, slope=self.slope @ jacobian)

    def mapped(self, theta: Tensor, white: Tensor) -> Mapped:
        """v and the volume, with their slopes by formulas."""
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_(True)
            prior = self.model.prior(leaf)
        with torch.no_grad():
            turn, shift = self._turn(prior.mean.detach(), prior.factor)
            linear = self._linear(turn, shift)
            found = white_under_precision(self._precision(turn), linear, white.view(len(white), *self.linear.shape))
            v = found.v.reshape(white.shape) + (theta - self.origin) @ self.slope.mT

        def slopes(gradient: Tensor) -> tuple[Tensor, Tensor]:
            parts = found.slopes(gradient.view_as(linear), self.num_functions)
            rows = linear.view(len(linear), -1, len(self.mean))
            half = parts.half + rows.mT @ parts.linear.view_as(rows)
            of_theta = gradient @ self.slope + self._theta_slope(prior, leaf, half, parts.linear, turn)
            return of_theta, parts.white.reshape(gradient.shape)

        return Mapped(v, torch.where(prior.ok, found.log_volume, torch.nan), slopes)

    def _given(self, prior: LatentPrior, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """R ``(C, B, m, m)``, R^-1 b ``(C, B, m, 1)``, and whether both could be had ``(C,)``."""
        turn, shift = self._turn(prior.mean, factor)
        root, info = torch.linalg.cholesky_ex(self._precision(turn))
        return root, solve_lower(root, self._linear(turn, shift).unsqueeze(-1)), prior.ok & (info == 0).all(-1)

    def _turn(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """T ``(C, M, M)`` and d ``(C, M)``."""
        base = self.factor.expand_as(factor)
        return solve_lower(base, factor), solve_lower(base, (mean - self.mean).unsqueeze(-1)).squeeze(-1)

    def _precision(self, turn: Tensor) -> Tensor:
        """P ``(C, B, m, m)``."""
        count, blocks, size = len(turn), *self.linear.shape
        once = self.precision.reshape(1, -1, turn.shape[-1]).expand(count, -1, -1) @ turn
        twice = once.view(count, blocks, size, size).mT.reshape(count, -1, turn.shape[-1]) @ turn
        return twice.view(count, blocks, size, size) + identity_matrix(size, turn)

    def _linear(self, turn: Tensor, shift: Tensor) -> Tensor:
        """b ``(C, B, m)``."""
        right = self.linear - self._weighed(shift.repeat(1, self.num_functions).unsqueeze(1).expand(-1, *self.linear.shape))
        return (right.view(len(turn), -1, turn.shape[-1]) @ turn).view_as(right)

    def _weighed(self, rows: Tensor) -> Tensor:
        """Lambda times rows ``(C, B, m)``."""
        return (rows.transpose(0, 1) @ self.precision).transpose(0, 1)

    def _theta_slope(self, prior: LatentPrior, leaf: Tensor, half: Tensor, linear: Tensor, turn: Tensor) -> Tensor:
        """By way of the prior's covariance and mean, from the slopes in T (T' times it) and in b."""
        rows = linear.view(len(linear), -1, len(self.mean)) @ turn.mT
        of_shift = -self._weighed(rows.view_as(linear)).view_as(rows).sum(1)
        of_mean = torch.linalg.solve_triangular(self.factor, of_shift, upper=False, left=False)
        parts = (prior.covariance, factor_adjoint(prior.factor, half)), (prior.mean, of_mean)
        moving = [(value, slope) for value, slope in parts if value.requires_grad]
        if not moving:
            return torch.zeros_like(leaf)
        values, slopes = zip(*moving, strict=True)
        (found,) = torch.autograd.grad(values, leaf, slopes)
        return found


def following_map(model: GPModel, theta: Tensor, mean: Tensor, scale: Tensor, slope: Tensor | None = None) -> FollowingMap:
    """Coordinates that are white under N(mean, scale scale') at theta, whose mean has that slope there.

    Args:
        model: whose latents, with one data set.
        theta: of the fit, ``(P,)``.
        mean: of v, ``(B, m)``.
        scale: lower triangular, ``(B, m, m)``; no direction stays wider than in the prior.
        slope: of the mean in theta ``(V, P)``; where it is not given, that which u has where it stays.
    """
    inverse = inverse_lower(scale)
    values, vectors = torch.linalg.eigh(inverse.mT @ inverse)
    added = (vectors * (values - 1.0).clamp_min(0.0).unsqueeze(-2)) @ vectors.mT
    linear = mean + (added @ mean.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        prior = model.prior(theta[None])
        nothing = theta.new_zeros(mean.numel(), len(theta))
        of_u = FollowingMap(model, theta, prior.factor[0], prior.mean[0], added, linear, nothing)
        if slope is None:
            return of_u
        steps = _STEP * torch.stack([unit := identity_matrix(len(theta), theta), -unit], 1)
        ends = torch.stack([of_u.latents(theta + pair, mean.new_zeros(2, mean.numel())) for pair in steps])
        return of_u._replace(slope=slope - (ends[:, 0] - ends[:, 1]).mT / (2 * _STEP))
