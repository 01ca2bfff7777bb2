r"""The sparse model's evidence under Gaussian noise with v integrated out, and its gradient, streamed over the data.

With f = m + A'v + rest, a_n = L^-1 k_n the columns of A, r = y - m, noise s and :math:`B = I + A A^T / s`,

.. math:: \int e^{E \log p(y | f)} N(v | 0, I) \, dv
    = N(y | m, A^T A + s I) \, \exp\Big(-\frac{1}{2 s} \sum_n k(x_n, x_n) - a_n^T a_n\Big), \quad
    v | y \sim N(\mu, B^{-1}), \quad \mu = B^{-1} A r / s

(Titsias 2009, eq. 9.) Of the data there are kept A A', A r, r'r and the sum of the prior variances. With
:math:`G = (I - B^{-1} - \mu \mu^T) / s` the slopes are :math:`\bar a_n = G a_n + \mu r_n / s`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.reverse import Part
from torchgpmc.models.sparse_gradient import InducingSums, add_slopes
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower, times_vector, triangular_log_determinant
from torchgpmc.numerics.special import LOG_2PI, log_standard_normal

_NOISE = "noise_covar.raw_noise"


class _Moments(NamedTuple):
    """Sums over data."""

    outer: Tensor  # A A', (C, M, M)
    linear: Tensor  # A r, (C, M)
    square: Tensor  # r'r, (C,)
    variance: Tensor  # sum_n k(x_n, x_n), (C,)


class LatentPosterior(NamedTuple):
    """p(v | y, theta) of C settings, and what is left when v is integrated out."""

    log_evidence: Tensor  # (C,), NaN where a factorisation failed
    mean: Tensor  # (C, M)
    factor: Tensor  # (C, M, M), lower Cholesky factor of the precision B

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """v from standard normals ``(C, M)``, and by Bayes's theorem its E log p(y | f) ``(C,)``."""
        white = torch.linalg.solve_triangular(self.factor.mT, noise.unsqueeze(-1), upper=True).squeeze(-1)
        v = self.mean + white
        log_density = log_standard_normal(noise) + triangular_log_determinant(self.factor)
        return v, self.log_evidence + log_density - log_standard_normal(v)


class CollapsedDensity(InducingSums):
    """log p(theta) plus the evidence at C settings; see the module's words.

    Made with the model, its covariances, data at once, theta ``(C, P)`` and targets, as :class:`InducingSums`.
    """

    def posterior(self) -> LatentPosterior:
        """Of v given the data."""
        return self._given(self._moments())

    def value_and_grad(self) -> tuple[Tensor, Tensor]:
        """log p(theta) p(y | theta) ``(C,)``, NaN where a factorisation failed, and its gradient ``(C, P)``."""
        sums, noise = self._moments(), self._noise
        found = self._given(sums)
        identity = identity_matrix(self.num_inducing, noise)
        # One failed factor would fail the inverse of the whole batch.
        ok = torch.isfinite(found.log_evidence)[:, None, None]
        inverse = torch.cholesky_inverse(torch.where(ok, found.factor, identity))
        mean, column = found.mean, noise.unsqueeze(-1)
        g = (identity - inverse - mean.unsqueeze(-1) * mean.unsqueeze(-2)) / column
        shift = mean / noise
        slopes: dict[str, dict[str, Tensor]] = {"kernel": {}, "mean": {}, "likelihood": self._noise_slope(sums, inverse, mean)}
        outer = None
        for part in self.over_data(lambda rows: self._slopes(rows, g, shift)):
            add_slopes(slopes["kernel"], part.kernel)
            add_slopes(slopes["mean"], part.mean)
            outer = part.outer
        if self.sampled["kernel"]:
            adjoint = g @ sums.outer + shift.unsqueeze(-1) * sums.linear.unsqueeze(-2)
            add_slopes(slopes["kernel"], self.kernel_slopes(adjoint, outer))
        gradient = torch.addcmul(
            self.evaluated.log_prior_slope, self.evaluated.derivative, self.model.layout.gather(slopes, self.theta)
        )
        return self.evaluated.log_prior + found.log_evidence, gradient

    @property
    def _noise(self) -> Tensor:
        """``(C, 1)``."""
        return self.values["likelihood"][_NOISE].view(-1, 1)

    def _moments(self) -> _Moments:
        return functools.reduce(_added, self.over_data(self._moments_of))

    def _moments_of(self, rows: slice) -> _Moments:
        projection, count = self.projection(self.covariance_of(rows)), rows.stop - rows.start
        residual = self._residual(rows, self.prior_mean(rows))
        linear = (residual.to(projection.dtype).unsqueeze(-2) @ projection).squeeze(-2)
        variance = self.prior_variance(rows).value.expand(len(self.theta), count).sum(-1)
        dtype = self.theta.dtype
        return _Moments((projection.mT @ projection).to(dtype), linear.to(dtype), residual.square().sum(-1), variance)

    def _residual(self, rows: slice, mean: Part | None) -> Tensor:
        y = self.targets_of(rows)
        return (y if mean is None else y - mean.value).expand(len(self.theta), -1)

    def _given(self, sums: _Moments) -> LatentPosterior:
        noise, count = self._noise, len(self.model.train_x)
        precision = sums.outer / noise.unsqueeze(-1)
        precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
        factor, ok = cholesky(precision)
        half = solve_lower(factor, (sums.linear / noise).unsqueeze(-1))
        mean = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
        s = noise.squeeze(-1)
        rest = sums.variance - sums.outer.diagonal(dim1=-2, dim2=-1).sum(-1)
        square = (sums.square + rest) / s - half.square().sum((-2, -1))
        value = -0.5 * (square + count * (s.log() + LOG_2PI)) - triangular_log_determinant(factor)
        return LatentPosterior(torch.where(self.ok & ok, value, torch.nan), mean, factor)

    def _noise_slope(self, sums: _Moments, inverse: Tensor, mean: Tensor) -> dict[str, Tensor]:
        if not self.sampled["likelihood"]:
            return {}
        s = self._noise.squeeze(-1)
        trace = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
        explained = 2 * (mean * sums.linear).sum(-1) - (mean * times_vector(sums.outer, mean)).sum(-1)
        rest = sums.variance - sums.outer.diagonal(dim1=-2, dim2=-1).sum(-1)
        degrees = len(self.model.train_x) - self.num_inducing + trace
        return {_NOISE: 0.5 * ((sums.square - explained + rest) / s - degrees) / s}

    def _slopes(self, rows: slice, g: Tensor, shift: Tensor) -> _Slopes:
        mean, noise = self.prior_mean(rows), self._noise
        residual = self._residual(rows, mean)
        found = _Slopes({}, {}, None)
        if not self.sampled["kernel"] and (mean is None or not self.sampled["mean"]):
            return found
        covariance = self.covariance_of(rows)
        projection = self.projection(covariance)
        dtype = projection.dtype
        if mean is not None and self.sampled["mean"]:
            fitted = (projection @ shift.to(dtype).unsqueeze(-1)).squeeze(-1)
            add_slopes(found.mean, mean.slopes(residual / noise - fitted))
        if not self.sampled["kernel"]:
            return found
        outer, a_slope = self.room_for_slopes(projection)
        torch.bmm(projection, g.to(dtype), out=a_slope)
        a_slope.addcmul_(residual.to(dtype).unsqueeze(-1), shift.to(dtype).unsqueeze(-2))
        self.unproject_(a_slope)
        variance = (-0.5 / noise).expand(-1, rows.stop - rows.start)
        add_slopes(found.kernel, self.prior_variance(rows).slopes(variance))
        if self.as_one:
            return found._replace(outer=outer)
        add_slopes(found.kernel, covariance.slopes(outer))
        return found


class _Slopes(NamedTuple):
    """Of some of the data."""

    kernel: dict[str, Tensor]
    mean: dict[str, Tensor]
    outer: Tensor | None  # the slope in K([Z; X], Z), where that is one evaluation


def _added(total: _Moments, part: _Moments) -> _Moments:
    return _Moments(*(a + b for a, b in zip(total, part, strict=True)))
