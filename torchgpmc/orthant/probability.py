"""Gaussian box probabilities and truncated draws, as functions of a batch of covariances."""

from __future__ import annotations

import math

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.checks import check_count, check_object, warn
from torchgpmc.diagnostics.weights import MAX_KHAT
from torchgpmc.numerics.random import make_generator, uniform
from torchgpmc.orthant.low_dimensional import MAX_VARIABLES, Quadrature
from torchgpmc.orthant.problem import OrthantEstimate, OrthantMethod, prepare
from torchgpmc.orthant.truncated import LEAST_ACCEPTANCE, TruncatedDraws, truncated_draws
from torchgpmc.orthant.weighting import SeparationOfVariables

# Standard deviation of the weights over their mean below which not even a heavy tail among them moves the estimate.
_SPREAD_THAT_MATTERS = 0.1


def log_probability(
    covariance: Tensor | ArrayLike,
    *,
    mean: Tensor | float = 0.0,
    lower: Tensor | float = -math.inf,
    upper: Tensor | float = math.inf,
    method: OrthantMethod | None = None,
    num_points: int = 10_000,
    generator: torch.Generator | None = None,
) -> OrthantEstimate:
    r"""Log of :math:`P(l < x < u)` for :math:`x \sim N(m, \Sigma)`, in hundreds of dimensions, for a batch at once.

    The exponential of ``value`` is an unbiased estimate (but for the soft count of :class:`Sequential`). Differentiable once in
    ``covariance``, ``mean`` and the limits (not with :class:`Sequential`), at fixed random numbers. Sources: Genz (1992), Botev
    (2016) and, for the default's guided points, Liesenfeld & Richard (2010); paper B for the sequential counts.

    Args:
        covariance: ``(N, N)`` or ``(B, N, N)``, of x itself (variances, not correlations), positive definite.
        mean: a number, ``(N,)`` or ``(B, N)``, on the scale of x.
        lower: the same; -inf for no limit.
        upper: the same; inf for no limit.
        method: :class:`Quadrature` by default for up to three variables, which leaves no error of sampling, and
            :class:`SeparationOfVariables` for more; :class:`MinimaxTilting`, :class:`Sequential`; :class:`KnownSplit` where
            the covariance is known to have independent noise in it.
        num_points: points, or particles, a problem (nets are rounded to powers of two).
        generator: of the covariance's device; by default a fresh one with seed 0.

    Returns:
        Natural logarithms of the probabilities, relative variances of the probabilities (so, for small ones, variances of the
        logarithms) and diagnostics of the weights, each ``(B,)``, or ``()`` for one matrix.

    Raises:
        TypeError: something that is not a method, or not numbers.
        ValueError: shapes, NaN, limits that cross, a matrix that is not positive definite: names the batch entry.

    Example:
        >>> import torch
        >>> estimate = log_probability(torch.eye(3).double(), lower=0.0)
        >>> round(float(estimate.value.exp()), 6)
        0.125
    """
    if method is not None:
        known = "one of torchgpmc.orthant's, for instance torchgpmc.orthant.SeparationOfVariables()"
        check_object("method", method, "estimate", known)
    prepared = prepare(covariance, mean, lower, upper)
    if method is None:
        method = Quadrature() if prepared.problem.covariance.shape[-1] <= MAX_VARIABLES else SeparationOfVariables()
    generator = make_generator(0, prepared.mean.device) if generator is None else generator
    found = method.estimate(prepared.problem, num_points, generator)
    _complain(found)
    return found if prepared.batched else OrthantEstimate(*(part.squeeze(0) for part in found))


def _complain(found: OrthantEstimate) -> None:
    """Warns where a few points carry an estimate, so that its error is larger than it looks."""
    poor = (found.pareto_khat > MAX_KHAT) & (found.spread > _SPREAD_THAT_MATTERS)
    if bool(poor.any()):
        entry = int(poor.nonzero()[0])
        warn(
            f"the weights of batch entry {entry} have k-hat {float(found.pareto_khat[entry]):.2f} (at most {MAX_KHAT} is reliable; "
            f"effective size {float(found.effective_size[entry]):.0f}; {int(poor.sum())} of {len(poor)} entries are so): the "
            f"estimate is likely too low and its error too small. Use more points, tilting=True, or KnownSplit for known noise."
        )


def truncated_normal_draws(
    covariance: Tensor | ArrayLike,
    *,
    mean: Tensor | float = 0.0,
    lower: Tensor | float = -math.inf,
    upper: Tensor | float = math.inf,
    num_samples: int,
    generator: torch.Generator | None = None,
) -> TruncatedDraws:
    """Draws from multivariate normals within limits, exact wherever at least one proposal in 10,000 is accepted.

    Args:
        covariance: ``(N, N)`` or ``(B, N, N)``.
        mean: a number, ``(N,)`` or ``(B, N)``.
        lower: the same; -inf for no limit.
        upper: the same; inf for no limit.
        num_samples: S.
        generator: by default a fresh one with seed 0.

    Returns:
        :class:`TruncatedDraws`; where acceptance is rarer, weighted proposals with ``exact`` false.

    Raises:
        TypeError: covariance is not numbers.
        ValueError: as :func:`log_probability` does, or ``num_samples`` below 1.

    Example:
        >>> import torch
        >>> found = truncated_normal_draws(torch.eye(2).double(), lower=3.0, num_samples=4)
        >>> found.samples.shape, bool((found.samples > 3).all()), bool(found.exact)
        (torch.Size([4, 2]), True, True)
    """
    check_count("num_samples", num_samples)
    with torch.no_grad():
        prepared = prepare(covariance, mean, lower, upper)
        generator = make_generator(0, prepared.mean.device) if generator is None else generator
        found = truncated_draws(prepared.problem, num_samples, generator)
        x = prepared.sign.unsqueeze(1) * found.samples + prepared.mean.unsqueeze(1)
        found = found._replace(samples=x)
        return found if prepared.batched else TruncatedDraws(*(part.squeeze(0) for part in found))


def truncated_normal_samples(
    covariance: Tensor | ArrayLike,
    *,
    mean: Tensor | float = 0.0,
    lower: Tensor | float = -math.inf,
    upper: Tensor | float = math.inf,
    num_samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The draws of :func:`truncated_normal_draws` alone, ``(num_samples, N)`` or ``(B, num_samples, N)``.

    Where exact draws are out of reach, weighted ones are resampled, with a warning: their distribution is then approximate.

    Arguments and errors are those of :func:`truncated_normal_draws`.

    Example:
        >>> import torch
        >>> draws = truncated_normal_samples(torch.eye(2).double(), lower=3.0, num_samples=4)
        >>> draws.shape, bool((draws > 3).all())
        (torch.Size([4, 2]), True)
    """
    covariance = as_tensor("covariance", covariance)
    generator = make_generator(0, covariance.device) if generator is None else generator
    found = truncated_normal_draws(covariance, mean=mean, lower=lower, upper=upper, num_samples=num_samples, generator=generator)
    if bool(found.exact.all()):
        return found.samples
    warn(
        f"fewer than {LEAST_ACCEPTANCE:g} of the proposals are accepted (as few as {float(found.acceptance_rate.min()):.1g}), "
        f"so that {int((~found.exact).sum())} of {found.exact.numel()} sets of draws are resampled from weighted ones and only "
        f"approximate: truncated_normal_draws returns their weights."
    )
    weights = torch.softmax(found.log_weight, -1)
    marks = (torch.arange(num_samples, device=weights.device) + uniform((*weights.shape[:-1], 1), weights, generator)) / num_samples
    chosen = torch.searchsorted(weights.cumsum(-1), marks).clamp_max(num_samples - 1)
    chosen = torch.where(found.exact.unsqueeze(-1), torch.arange(num_samples, device=weights.device), chosen)
    return found.samples.gather(-2, chosen.unsqueeze(-1).expand_as(found.samples))
