"""Expectation propagation with parallel updates, batched over theta."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import (
    Approximation,
    GaussianApproximation,
    LatentProblem,
    iterate,
    needs_gradient,
    problem_at,
    problem_of,
    with_gradient,
    without_graph,
)
from torchgpmc.approximations.single_precision import SEEN_IN_DRAWS, in_single_precision, may_be_single, rounding_shows
from torchgpmc.approximations.site_algebra import apply_r, made_by, posterior_times, site_marginals
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import triangular_log_determinant, weighed_square
from torchgpmc.trees import concatenate, put, take

# Sites of likelihoods that are not log-concave may want a negative precision; they get this one, over the model's unit.
_LEAST_PRECISION = 1e-10
_LEAST_DAMPING = 1e-3
# The share of a marginal's precision that its site has, from which on the rest has lost half its digits, as of counts of 1e8.
_STIFF = 1 - 1e-7
# Of the worst datum, to draw from: half the sweeps of 1e-3, and importance weights as even.
_NEAR = 0.03
# Of 1500 thetas of 200 labels, white noise out, the evidence is 0.12 nats off in 1.1 sweeps, by 0.3 it is 0.09 off in 1.5.
_HASTY = 1.0
# In single precision. Of 11,000 searches of labels and counts one in 500 took more and ended; hundreds went on and ended nowhere.
_FEW_SWEEPS = 10
# Of what sites lack together, in posterior deviations, to what one of them lacks.
_TOGETHER = 3.0
# The same where the sites that a sweep ends with are used, which match better than those it began with.
_BEFORE_THE_LAST = 0.3


class _Sites(NamedTuple):
    """Gaussian sites exp(-precision f^2 / 2 + shift f) in the centred f, and how they were last moved."""

    precision: Tensor  # (C, N)
    shift: Tensor  # (C, N), precision times mean
    precision_step: Tensor
    shift_step: Tensor
    damping: Tensor  # (C, 1)
    mismatch: Tensor  # (C,)


class _FixedPoint(NamedTuple):
    """Sites, with the approximation they make."""

    precision: Tensor
    shift: Tensor
    alpha: Tensor
    centred: Tensor
    factor: Tensor
    inverse_factor: Tensor
    log_evidence: Tensor
    cavity_mean: Tensor
    cavity_variance: Tensor
    next_precision: Tensor  # of the sites that the sweep ended with
    next_shift: Tensor

    def slope_in_covariance(self) -> Tensor:
        """Of the log evidence in K, (alpha alpha' - R) / 2 with R = W^1/2 B^-1 W^1/2; takes over the inverse factor's memory."""
        half = self.inverse_factor.mul_(self.precision.sqrt().unsqueeze(-2))
        slope = weighed_square(half, half.new_full(self.alpha.shape, -0.5))
        return slope.addcmul_(self.alpha.unsqueeze(-1), self.alpha.unsqueeze(-2), value=0.5)


@dataclass(frozen=True)
class EP(Approximation):
    """Expectation propagation: one Gaussian site a datum, moments matched (paper A, eqs 14-18; Minka 2001).

    All sites are updated at once from one factorisation. A theta whose sites stop improving is damped more; one that cannot be
    brought to a fixed point is reported as not converged.

    Args:
        tolerance: the iteration ends when tilted and approximate marginals agree to this in every mean (in standard deviations)
            and variance (relative). ``None``: 1e-6 where the evidence or its gradient is wanted; to draw from 0.3 before a last
            sweep, 0.03 where the likelihood is not log-concave. From 1e-3 on, sites of log-concave ones to draw from are sought in
            single precision, double where that shows.
        damping: fraction of the way that sites move at first.
        max_iterations: a theta that takes more counts as not converged.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> found = tg.EP().evidence(model, model.prior(torch.zeros(3, 1, dtype=torch.float64)))
        >>> found.log_evidence.shape, bool(found.converged.all())
        (torch.Size([3]), True)
    """

    tolerance: float | None = None
    damping: float = 1.0
    max_iterations: int = 200

    def importance_density(
        self, model: GPModel, prior: LatentPrior, targets: Targets | None = None, start: Tensor | None = None
    ) -> GaussianApproximation:
        """The approximation at the thetas of ``prior``; ``start``, earlier sites ``(C, 2 N)``, saves iterations."""
        problem = without_graph(problem_of(model, prior, targets))
        with torch.no_grad():
            if may_be_single(model, _NEAR if self.tolerance is None else self.tolerance):
                return self._found_quickly(problem, start)
            return self._found_from_either(problem, start)

    def rough_evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> GaussianApproximation:
        """In double precision: that of sites before the last sweep may be off by several nats, which draws do not mind."""
        with torch.no_grad():
            return self.found_from(without_graph(problem_of(model, prior, targets)), _NEAR, None)[0]

    def quick_evidence(self, model: GPModel, theta: Tensor, targets: Targets | None = None) -> Tensor:
        """In single precision where rounding does not show, from sites of the prior's marginals: one sweep may do."""
        problem = problem_at(model, theta, targets)
        with torch.no_grad():
            if may_be_single(model, _HASTY if self.tolerance is None else self.tolerance):
                begun, _ = _from_prior_marginals(problem, self.damping)
                if not bool(rounding_shows(problem, begun, SEEN_IN_DRAWS).any()):
                    problem = in_single_precision(problem)
            return self.found_from(problem, _HASTY, None)[0].log_evidence.to(theta)

    def evidence(self, model: GPModel, prior: LatentPrior, targets: Targets | None = None) -> GaussianApproximation:
        """The approximation with a differentiable ``log_evidence``: at a fixed point the sites may be held (Seeger 2005)."""
        problem = problem_of(model, prior, targets)
        with torch.no_grad():
            found, point = self.found_from(without_graph(problem), 1e-6, None)
        if not needs_gradient(problem):
            return found
        with torch.no_grad():
            covariance = point.slope_in_covariance()
        cavities = problem._replace(mean=problem.mean.detach())
        likelihood = cavities.tilted_moments(point.cavity_mean, point.cavity_variance).log_normaliser.sum(-1)
        return found._replace(log_evidence=with_gradient(found.log_evidence, problem, covariance, found.alpha, likelihood))

    def found_from(self, problem: LatentProblem, default: float, start: Tensor | None) -> tuple[GaussianApproximation, _FixedPoint]:
        """The approximation of a problem without graph and its cavities, to ``default`` or the tolerance that was asked for."""
        tolerance = default if self.tolerance is None else self.tolerance
        zero = torch.zeros_like(problem.mean)
        precision, shift = _from_prior_marginals(problem, self.damping) if start is None else start.chunk(2, -1)
        column = zero[:, :1]
        sites = _Sites(precision, shift, zero, zero, column + self.damping, column[:, 0] + torch.inf)
        point, converged, counts = iterate(problem, sites, lambda part, state: _sweep(part, state, tolerance), self.max_iterations)
        mean = problem.mean + point.centred
        return GaussianApproximation(
            mean,
            point.alpha,
            point.precision,
            point.factor,
            point.log_evidence,
            converged,
            counts,
            torch.cat([point.precision, point.shift], -1),
        ), point

    def _found_quickly(self, problem: LatentProblem, start: Tensor | None) -> GaussianApproximation:
        """By sweeps in single precision where rounding does not show."""
        begun, _ = _from_prior_marginals(problem, self.damping) if start is None else start.chunk(2, -1)
        shows = rounding_shows(problem, begun, SEEN_IN_DRAWS)
        if bool(shows.all()):
            return self._found_from_either(problem, start)
        if not bool(shows.any()):
            return self._found_in_single_precision(problem, start)
        apart, rest = shows.nonzero().squeeze(-1), (~shows).nonzero().squeeze(-1)
        found = concatenate(
            [
                self._found_from_either(problem.select(apart), None if start is None else start[apart]),
                self._found_in_single_precision(problem.select(rest), None if start is None else start[rest]),
            ]
        )
        return take(found, torch.cat([apart, rest]).argsort())

    def _found_in_single_precision(self, problem: LatentProblem, start: Tensor | None) -> GaussianApproximation:
        """Sites by sweeps in single precision, and what they make in double; where those end nowhere, all in double."""
        few = replace(self, max_iterations=min(self.max_iterations, round(_FEW_SWEEPS / self.damping)))
        sweeps = in_single_precision(problem)
        rough, point = few.found_from(sweeps, _BEFORE_THE_LAST, None if start is None else start.to(sweeps.mean))
        precision, shift = point.next_precision.to(problem.mean), point.next_shift.to(problem.mean)
        made = made_by(problem.covariance, precision, shift)
        found = GaussianApproximation(
            problem.mean + made.centred,
            made.alpha,
            precision,
            made.factor,
            rough.log_evidence.to(problem.mean),
            rough.converged,
            rough.num_iterations + 1,
            torch.cat([precision, shift], -1),
        )
        again = (~(rough.converged & made.ok) | rounding_shows(problem, precision, SEEN_IN_DRAWS)).nonzero().squeeze(-1)
        if not len(again):
            return found
        return put(found, again, self._found_from_either(problem.select(again), None if start is None else start[again]))

    def _found_from_either(self, problem: LatentProblem, start: Tensor | None) -> GaussianApproximation:
        """From ``start``, and from nothing where that leads nowhere: of counts of 2000, for one draw in forty from the prior."""
        found = self.found_from(problem, _NEAR, start)[0]
        if start is None or bool(found.converged.all()):
            return found
        failed = (~found.converged).nonzero().squeeze(-1)
        return put(found, failed, self.found_from(problem.select(failed), _NEAR, None)[0])


def _from_prior_marginals(problem: LatentProblem, damping: float) -> tuple[Tensor, Tensor]:
    """The sites after one sweep from none at all, whose cavities are the prior's marginals: no factorisation."""
    variance = problem.covariance.diagonal(dim1=-2, dim2=-1).to(problem.mean)
    tilted = problem.tilted_moments(torch.zeros_like(variance), variance)
    precision = (1 / tilted.variance - 1 / variance).clamp_min(_LEAST_PRECISION / problem.model.unit)
    shift = (precision + 1 / variance) * tilted.mean
    sound = (torch.isfinite(shift) & torch.isfinite(precision)).all(-1, keepdim=True)
    return torch.where(sound, damping * precision, 0.0), torch.where(sound, damping * shift, 0.0)


def _sweep(problem: LatentProblem, sites: _Sites, tolerance: float) -> tuple[_Sites, _FixedPoint, Tensor, Tensor]:
    """The approximation that the sites make, and their next values (Rasmussen & Williams 2006, section 3.6)."""
    root, factor, ok, alpha, centred = made_by(problem.covariance, sites.precision, sites.shift)
    inverse_factor, inverse_diagonal, variance = site_marginals(problem.covariance, factor, ok, root)
    variance = variance.to(centred)

    cavity_precision = 1 / variance - sites.precision
    cavity_variance = 1 / cavity_precision
    cavity_mean = (centred / variance - sites.shift) * cavity_variance
    stiff = sites.precision * variance > _STIFF
    if bool(stiff.any()):
        apart = _left_out(factor, inverse_diagonal, root, sites)
        cavity_variance = torch.where(stiff, apart.variance, cavity_variance)
        cavity_mean = torch.where(stiff, apart.mean, cavity_mean)
        cavity_precision = torch.where(stiff, 1 / apart.variance, cavity_precision)
        variance = torch.where(stiff, 1 / (sites.precision + cavity_precision), variance)
        centred = torch.where(stiff, variance * (sites.shift + cavity_mean * cavity_precision), centred)
    tilted = problem.tilted_moments(cavity_mean, cavity_variance)
    least = _LEAST_PRECISION / problem.model.unit
    new_precision = (1 / tilted.variance - cavity_precision).clamp_min(least)
    new_shift = (new_precision + cavity_precision) * tilted.mean - cavity_mean * cavity_precision

    mismatch = torch.maximum((tilted.mean - centred).abs() * variance.rsqrt(), (tilted.variance / variance - 1).abs())
    clamped = (new_precision <= least) & (sites.precision <= 2 * least)
    mismatch = torch.where(clamped, (tilted.mean - centred).abs() * variance.rsqrt(), mismatch).amax(-1)
    # What every site lacks of a mean they share adds up: 0.03 of a deviation at each of 200 data was five of the posterior's.
    step = (new_shift - sites.shift) - (new_precision - sites.precision) * centred
    lacking = (posterior_times(problem.covariance, inverse_factor, root, step) * variance.rsqrt()).abs().amax(-1)
    finite = torch.isfinite(mismatch + new_shift.sum(-1) + new_precision.sum(-1) + (cavity_mean + cavity_variance).sum(-1))
    sound = ok & finite & (cavity_precision > 0).all(-1)

    log_evidence = _log_evidence(tilted.log_normaliser, factor, sites, cavity_precision, cavity_mean, centred)
    moved = _move(sites, new_precision, new_shift, sound, mismatch)
    cavities, further = (cavity_mean, cavity_variance), (moved.precision, moved.shift)
    point = _FixedPoint(sites.precision, sites.shift, alpha, centred, factor, inverse_factor, log_evidence, *cavities, *further)
    # A sweep more is all that takes; where rounding is what sites lack, no more would do.
    settled = (lacking < _TOGETHER * tolerance) | (sites.mismatch < tolerance)
    return moved, point, sound & (mismatch < tolerance) & settled, moved.damping[:, 0] < _LEAST_DAMPING


class _LeftOut(NamedTuple):
    """Mean and variance of centred f at a datum given the sites of all others, ``(C, N)``."""

    mean: Tensor
    variance: Tensor


def _left_out(factor: Tensor, inverse_diagonal: Tensor, root: Tensor, sites: _Sites) -> _LeftOut:
    """By the rows of R = (K + W^-1)^-1 (Rasmussen & Williams 2006, eqs 5.10-5.12): nothing cancels where a site says nearly all."""
    diagonal = inverse_diagonal * root.square()
    place = sites.shift / sites.precision
    alpha = apply_r(factor, root, place.to(root).unsqueeze(-1)).squeeze(-1)
    return _LeftOut(place - alpha / diagonal, 1 / diagonal - 1 / sites.precision)


def _move(sites: _Sites, precision: Tensor, shift: Tensor, sound: Tensor, mismatch: Tensor) -> _Sites:
    """Damped steps; half of the last one is taken back where it led to improper cavities."""
    growing = mismatch > sites.mismatch
    damping = sites.damping * torch.where(sound, torch.where(growing, 0.7, 1.0), 0.5).to(sites.damping).unsqueeze(-1)
    good = sound.unsqueeze(-1)
    precision_step = torch.where(good, damping * (precision - sites.precision), -0.5 * sites.precision_step)
    shift_step = torch.where(good, damping * (shift - sites.shift), -0.5 * sites.shift_step)
    # Taking back half a step leaves the other half, which is what the next retreat halves again.
    return _Sites(
        sites.precision + precision_step,
        sites.shift + shift_step,
        torch.where(good, precision_step, 0.5 * sites.precision_step),
        torch.where(good, shift_step, 0.5 * sites.shift_step),
        damping,
        torch.where(sound, mismatch, sites.mismatch),
    )


def _log_evidence(
    log_normaliser: Tensor, factor: Tensor, sites: _Sites, cavity_precision: Tensor, cavity_mean: Tensor, centred: Tensor
) -> Tensor:
    """log Z of EP (Rasmussen & Williams 2006, eq. 3.65), arranged so that a site precision of zero is harmless."""
    tau, nu = sites.precision, sites.shift
    total = tau + cavity_precision
    log_determinant = 0.5 * torch.log1p(tau / cavity_precision).sum(-1) - triangular_log_determinant(factor)
    quadratic = nu * (centred - nu / total) + cavity_mean * cavity_precision / total * (tau * cavity_mean - 2 * nu)
    return log_normaliser.sum(-1) + log_determinant + 0.5 * quadratic.sum(-1)
