"""Importance sampling for covariances that are known to be diagonal noise plus another covariance, as probit GPs have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky, identity_matrix, times_vector, triangular_log_determinant
from torchgpmc.numerics.special import interval_densities, log_ndtr_interval
from torchgpmc.orthant.problem import OrthantEstimate, Problem
from torchgpmc.orthant.weighting import estimate_from_weights, points_of_replicate, sobol_chunks

_MAX_ITERATIONS = 50
# Moved from the noise to the smooth part so that this can be factorised; their sum stays what it was.
_MOVED_VARIANCE = 1e-8


class _Smooth(NamedTuple):
    """x = s + e with s ~ N(0, L L') and independent e of standard deviation ``noise``, within limits."""

    factor: Tensor  # (B, N, N), L
    noise: Tensor  # (B, N)
    lower: Tensor
    upper: Tensor

    def log_likelihood(self, s: Tensor) -> Tensor:
        """Log probability that each x is within its limits given s ``(B, ..., N)``."""
        shape = (len(s), *[1] * (s.dim() - 2), s.shape[-1])
        noise, lower, upper = (part.view(shape) for part in (self.noise, self.lower, self.upper))
        return log_ndtr_interval((lower - s) / noise, (upper - s) / noise)


class _Mode(NamedTuple):
    """The mode of s within the limits and the curvature there."""

    s: Tensor  # (B, N)
    alpha: Tensor  # (B, N), covariance^-1 s
    precision: Tensor  # (B, N), minus the second derivative of the log likelihood


@dataclass(frozen=True, eq=False)
class KnownSplit:
    """Laplace importance sampling of the smooth part of covariance = smooth + diagonal noise.

    With independent noise each limit is a likelihood for the smooth part (for a GP the probit one), whose posterior is nearly
    normal: the best method by an order of magnitude where the noise is known and not small. Never guess a split: with the smallest
    eigenvalue in place of the noise this fails badly.

    Args:
        noise: variances on the diagonal, a number, ``(N,)`` or ``(B, N)``.
        num_replicates: independent randomisations of the Sobol points; their spread is the error.

    Example:
        >>> import torch
        >>> from torchgpmc.orthant import log_probability
        >>> covariance = torch.full((20, 20), 0.5, dtype=torch.float64) + 0.5 * torch.eye(20)
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = log_probability(covariance, lower=0.0, method=KnownSplit(noise=0.5), generator=generator)
        >>> abs(float(found.value.exp()) * 21 - 1) < 0.1  # it is 1 / 21
        True
    """

    noise: Tensor | float
    num_replicates: int = 8

    def estimate(self, problem: Problem, num_points: int, generator: torch.Generator) -> OrthantEstimate:
        """Estimates with about ``num_points`` points a problem: the nearest power of two a replicate.

        Raises:
            ValueError: noise that is not positive, or not part of the covariance.
        """
        replicates = self.num_replicates
        each = points_of_replicate(num_points, replicates)
        smooth = _split(problem, self.noise)
        mode = _find_mode(smooth)
        parts: list[Tensor] = []
        wanted = torch.is_grad_enabled() and any(part.requires_grad for part in smooth)
        for rows, uniforms in sobol_chunks(problem.lower, problem.lower.shape[-1], each, replicates, generator):
            some = _Smooth(*(part[rows] for part in smooth))
            parts.append(_weigh(some, _Mode(*(part[rows] for part in mode)), uniforms, wanted))
        return estimate_from_weights(torch.cat(parts), replicates)


def _split(problem: Problem, noise: Tensor | float) -> _Smooth:
    covariance = problem.covariance
    variance = torch.as_tensor(noise, dtype=covariance.dtype, device=covariance.device)
    if variance.dim() > 2 or (variance.dim() and variance.shape[-1] not in (1, covariance.shape[-1])):
        raise ValueError(f"noise has shape {tuple(variance.shape)}. Expected a number, (N,) or (B, N).")
    variance = variance.expand(covariance.shape[:2])
    if not bool((variance > 0).all()):
        raise ValueError("noise has elements that are not positive. Expected variances above 0.")
    moved = _MOVED_VARIANCE * covariance.detach().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    moved = torch.minimum(moved, 0.5 * variance.detach().amin(-1, keepdim=True))
    factor, ok = cholesky(covariance - torch.diag_embed(variance - moved))
    if not bool(ok.all()):
        entry = int((~ok).nonzero()[0])
        raise ValueError(
            f"batch entry {entry}: covariance less the noise is not positive semidefinite. Expected the noise that the covariance "
            f"was made with; without a known split use SeparationOfVariables()."
        )
    return _Smooth(factor, (variance - moved).sqrt(), problem.lower, problem.upper)


def _slopes(smooth: _Smooth, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log likelihood ``(B,)``, its first derivative and minus its second ``(B, N)``."""
    below, above = (smooth.lower - s) / smooth.noise, (smooth.upper - s) / smooth.noise
    value = log_ndtr_interval(below, above)
    at_lower, at_upper = interval_densities(below, above, value)
    pull = at_lower - at_upper
    ends = torch.where(torch.isinf(below), 0.0, below) * at_lower - torch.where(torch.isinf(above), 0.0, above) * at_upper
    return value.sum(-1), pull / smooth.noise, (pull.square() - ends).clamp_min(0.0) / smooth.noise.square()


def _find_mode(smooth: _Smooth) -> _Mode:
    """Newton's method with step halving (Rasmussen & Williams 2006, algorithm 3.1); any point near the mode will do."""
    with torch.no_grad():
        covariance = smooth.factor @ smooth.factor.mT
        alpha = torch.zeros_like(smooth.lower)
        s = torch.zeros_like(alpha)
        value, first, precision = _slopes(smooth, s)
        eye = identity_matrix(alpha.shape[-1], alpha)
        going = torch.ones_like(value, dtype=torch.bool)
        for _ in range(_MAX_ITERATIONS):
            root = precision.sqrt()
            factor, _ = cholesky(eye + root.unsqueeze(-1) * covariance * root.unsqueeze(-2))
            target = precision * s + first
            inner = torch.cholesky_solve((root * times_vector(covariance, target)).unsqueeze(-1), factor).squeeze(-1)
            step = target - root * inner - alpha
            length = going.to(alpha)
            while True:
                moved = alpha + length.unsqueeze(-1) * step
                moved_s = times_vector(covariance, moved)
                likelihood, moved_first, moved_precision = _slopes(smooth, moved_s)
                moved_value = likelihood - 0.5 * (moved * moved_s).sum(-1)
                worse = ~(moved_value >= value - 1e-10 * value.abs()) & (length > 0)
                if not bool(worse.any()):
                    break
                length = torch.where(worse, torch.where(length < 1e-3, 0.0, 0.5 * length), length)
            change = (moved_s - s).square().mean(-1)
            alpha, s, value, first, precision = moved, moved_s, moved_value, moved_first, moved_precision
            going = going & (change > 1e-8)
            if not bool(going.any()):
                break
        return _Mode(s, alpha, precision)


def _weigh(smooth: _Smooth, mode: _Mode, uniforms: Tensor, wanted: bool) -> Tensor:
    """Log weights ``(B, P)`` of draws s ~ N(mode, (S^-1 + W)^-1); with derivatives of log(mean weight) if wanted."""
    with torch.no_grad():
        factor = smooth.factor
        eye = identity_matrix(factor.shape[-1], factor)
        root, _ = cholesky(eye + factor.mT @ (mode.precision.unsqueeze(-1) * factor))
        log_determinant = triangular_log_determinant(root).unsqueeze(-1)
        # Whitened, v = L^-1 s has covariance (root root')^-1 about the mode's L' alpha.
        spread = torch.linalg.solve_triangular(root.mT, torch.special.ndtri(uniforms), upper=True).mT
        gap = spread @ factor.mT
        s = mode.s.unsqueeze(1) + gap
        constant = 0.5 * (mode.alpha * mode.s).sum(-1, keepdim=True) + log_determinant
        weights = (
            smooth.log_likelihood(s).sum(-1)
            + 0.5 * (gap.square() @ mode.precision.unsqueeze(-1)).squeeze(-1)
            - (gap @ mode.alpha.unsqueeze(-1)).squeeze(-1)
            - constant
        )
        v = spread + (mode.alpha.unsqueeze(-2) @ factor)
    if not wanted:
        return weights
    with torch.enable_grad():
        # Whitened draws keep their weights' other factors fixed, so that the likelihood alone has derivatives.
        moving = smooth.log_likelihood(v @ smooth.factor.mT).sum(-1)
        linear = (torch.softmax(weights, -1) * moving).sum(-1, keepdim=True)
        return weights + (linear - linear.detach())
