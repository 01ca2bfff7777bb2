"""Other modes of p(f | y, theta), where the likelihood is not log-concave, than the one that an approximation found."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import GaussianApproximation, LatentProblem
from torchgpmc.approximations.laplace_mode import ascended, mode_near
from torchgpmc.trees import put, take

# A datum alone is looked for within so many standard deviations of its prior mean, on nested grids.
_REACH, _GRIDS, _POINTS = 6.0, 3, 33


def other_modes(problem: LatentProblem, found: GaussianApproximation) -> list[GaussianApproximation]:
    r"""Three more modes (where there is none, an earlier one comes out again): past one datum, past another, and past both.

    A datum that a mode passes by, as an outlier, may be what another mode follows. With g_n the value that datum n alone, under its
    marginal prior, would give f_n, the search starts where the prior moves the mode once f_n is known,

    .. math:: \hat f + K_{\cdot n} (g_n - \hat f_n) / K_{nn}

    The first n has the largest move; the second the largest of those that the prior correlates less with the first, or that go the
    other way. g_n is looked for above the prior mean and below it: a likelihood of two modes a datum shows both. All is a function
    of ``problem`` and ``found``, row by row. No others are looked for with several latents a datum.

    Args:
        problem: without graph.
        found: where to start from, without NaN.
    """
    if problem.model.num_latents > 1:
        return []
    first, second = _targets(problem, found)
    past_first = _mode_near(problem, _through(problem, found, first), found)
    past_second = _mode_near(problem, _through(problem, found, second), found)
    # Where the first led back, past both is past the second.
    rows = (~is_same_mode(found, past_first)).nonzero().squeeze(-1)
    if not len(rows):
        return [past_first, past_second, past_second]
    part, base = problem.select(rows), take(past_first, rows)
    past_both = _mode_near(part, _through(part, base, take(second, rows)), base)
    return [past_first, past_second, put(past_second, rows, past_both)]


def modes_known(problem: LatentProblem, found: GaussianApproximation, starts: Tensor) -> list[GaussianApproximation]:
    """Those of :func:`other_modes` that were found at a nearby theta, followed here; the others are ``found``.

    Args:
        problem: without graph.
        found: where they are other than.
        starts: :func:`starts_of` those there ``(C, 2 N J)``.
    """
    modes = []
    for start in starts.split(2 * problem.mean.shape[-1], -1):
        rows = start.any(-1).nonzero().squeeze(-1)
        mode = found._replace(num_iterations=torch.zeros_like(found.num_iterations))
        if len(rows):
            mode = put(mode, rows, _mode_near(problem.select(rows), start[rows], take(found, rows)))
        modes.append(mode)
    return modes


def starts_of(modes: list[GaussianApproximation], is_new: Tensor) -> Tensor:
    """Alpha and centred f of each of J modes, zeros for those that are not new ``(C, J)``: ``(C, 2 N J)``."""
    return torch.cat(
        [torch.where(new.unsqueeze(-1), mode.start, 0.0) for mode, new in zip(modes, is_new.unbind(-1), strict=True)], -1
    )


def _mode_near(problem: LatentProblem, start: Tensor, known: GaussianApproximation) -> GaussianApproximation:
    """:class:`Laplace`'s mode near ``start`` ``(C, 2 N)``, or ``known`` where steps with its factor lead back there."""
    end = ascended(problem, start, known)
    alpha, centred = end.chunk(2, -1)
    rows = (~is_same_mode(known, known._replace(alpha=alpha, mean=problem.mean + centred))).nonzero().squeeze(-1)
    found = known._replace(num_iterations=torch.zeros_like(known.num_iterations))
    if not len(rows):
        return found
    part = problem.select(rows)
    other = mode_near(part, end[rows])
    return put(found, rows, other.or_prior(other.is_sound(), part.mean))


def is_same_mode(here: GaussianApproximation, there: GaussianApproximation) -> Tensor:
    """Whether one lies within a standard deviation of the other ``(C,)``, of one latent a datum."""
    alpha, delta = there.alpha - here.alpha, there.mean - here.mean
    return (here.precision * delta.square() + alpha * delta).sum(-1) < 1


class _Target(NamedTuple):
    """A datum and a centred value of its latent, ``(C, 1)``."""

    datum: Tensor
    value: Tensor


def _targets(problem: LatentProblem, found: GaussianApproximation) -> tuple[_Target, _Target]:
    variance = problem.covariance.diagonal(dim1=-2, dim2=-1)
    deviation = variance.sqrt()
    value = torch.cat([_alone(problem, deviation, 1.0), _alone(problem, deviation, -1.0)], -1)  # (C, 2 N)
    move = value - (found.mean - problem.mean).repeat(1, 2)
    first = move.abs().argmax(-1, keepdim=True)
    size = variance.shape[-1]
    column = _column(problem.covariance, first % size)
    correlation = (column / (deviation * deviation.gather(-1, first % size))).repeat(1, 2)
    same = correlation * (move * move.gather(-1, first)).sign() > 0.5
    second = move.abs().masked_fill(same, -1.0).argmax(-1, keepdim=True)
    return _Target(first % size, value.gather(-1, first)), _Target(second % size, value.gather(-1, second))


def _through(problem: LatentProblem, found: GaussianApproximation, target: _Target) -> Tensor:
    centred = found.mean - problem.mean
    column = _column(problem.covariance, target.datum)
    shift = (target.value - centred.gather(-1, target.datum)) / column.gather(-1, target.datum)
    return torch.cat([found.alpha.scatter_add(-1, target.datum, shift), centred + column * shift], -1)


def _column(covariance: Tensor, datum: Tensor) -> Tensor:
    return covariance.gather(-2, datum.unsqueeze(-1).expand(-1, -1, covariance.shape[-1])).squeeze(-2)


def _alone(problem: LatentProblem, deviation: Tensor, sign: float) -> Tensor:
    """Where p(y_n | f_n) N(f_n | m_n, K_nn) is largest on one side of m_n ``(C, N)``, centred: on a grid, and finer ones in it.

    Newton's steps overshoot where the likelihood is narrow and its tails flat.
    """
    middle, width = torch.full_like(deviation, 0.5 * _REACH), 0.5 * _REACH
    for _ in range(_GRIDS):
        grid = torch.linspace(-width, width, _POINTS).to(deviation).view(-1, 1, 1)
        at = (middle + grid).clamp(0.0, _REACH)
        f = problem.mean + sign * deviation * at
        value = problem.model.likelihood_function(
            problem.values, lambda part, f=f: part.pointwise_log_prob(f, problem.targets.values)
        )
        best = torch.nan_to_num(value - 0.5 * at.square(), nan=-torch.inf).argmax(0, keepdim=True)
        middle, width = at.gather(0, best).squeeze(0), 2 * width / (_POINTS - 1)
    return sign * deviation * middle
