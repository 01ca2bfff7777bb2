"""Warm-up: step size by dual averaging and mass matrix by windowed moments, both pooled over chains.

One dual-averaging update a step, on the mean acceptance of all chains; M updates in sequence would make the step size oscillate.
While chains that follow gradients move in from their starts it is the harmonic mean: by an ordinary one, a chain that needs smaller
steps than all others would stay where it is for ever.
After warm-up nothing adapts, so the draws come from fixed Markov kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky, identity_matrix
from torchgpmc.samplers.hmc import init_hmc, reasonable_step_size
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner, identity_preconditioner
from torchgpmc.types import LogDensity

# Hoffman & Gelman 2014, section 3.2.1.
_SHRINKAGE = 0.05
_OFFSET = 10.0
_FORGETTING = 0.75
# Stan reference manual, section "Automatic parameter tuning".
_FIRST_BUFFER, _LAST_BUFFER, _FIRST_WINDOW = 75, 50, 25
_LEAST_ACCEPTANCE = 0.05  # that a chain counts with, lest a single lost one rule the step size of all
_FIRST_STEPS = 15  # in which a step size that is far off is put right, at most a quarter of warm-up


class DualAveraging(NamedTuple):
    """Nesterov's dual averaging on log step size (Hoffman & Gelman 2014, algorithm 5); scalars as tensors ``()``."""

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    centre: Tensor
    num_seen: Tensor


def start_dual_averaging(step_size: Tensor) -> DualAveraging:
    """A fresh average around ten times ``step_size``, which errs towards large steps."""
    log_step = step_size.log()
    zero = torch.zeros_like(log_step)
    return DualAveraging(log_step, zero, zero, log_step + math.log(10.0), zero)


def update_dual_averaging(state: DualAveraging, acceptance: Tensor, target: float) -> DualAveraging:
    """One update on a mean acceptance probability ``()``."""
    count = state.num_seen + 1
    weight = 1 / (count + _OFFSET)
    error = (1 - weight) * state.error + weight * (target - acceptance)
    log_step = state.centre - count.sqrt() / _SHRINKAGE * error
    forget = count**-_FORGETTING
    return DualAveraging(log_step, forget * log_step + (1 - forget) * state.log_average, error, state.centre, count)


def harmonic_mean(acceptance: Tensor) -> Tensor:
    """Of the acceptance probabilities ``(C,)`` of all chains, which sees the one that is worst off; none counts as less than 0.05.

    Example:
        >>> harmonic_mean(torch.tensor([1.0, 1.0, 0.0]))
        tensor(0.1364)
    """
    return 1 / (1 / acceptance.clamp_min(_LEAST_ACCEPTANCE)).mean()


class PositionMoments(NamedTuple):
    """Running mean and centred sums of squares of positions: dense for the leading block, diagonal for the rest."""

    num_seen: Tensor  # ()
    mean: Tensor  # (D,)
    dense: Tensor  # (B, B)
    diagonal: Tensor  # (D - B,)


def start_moments(dense_size: int, dimension: int, like: Tensor) -> PositionMoments:
    """No positions seen yet."""
    zeros = torch.zeros(dimension + 1, dtype=like.dtype, device=like.device)
    dense = torch.zeros(dense_size, dense_size, dtype=like.dtype, device=like.device)
    return PositionMoments(zeros[0], zeros[:dimension], dense, zeros[: dimension - dense_size])


def update_moments(moments: PositionMoments, position: Tensor) -> PositionMoments:
    """Adds C positions ``(C, D)`` (Chan, Golub & LeVeque's pairwise update)."""
    added = len(position)
    count = moments.num_seen + added
    batch_mean = position.mean(0)
    centred, shift = position - batch_mean, batch_mean - moments.mean
    weight = moments.num_seen * added / count
    size = len(moments.dense)
    head, tail = centred[:, :size], centred[:, size:]
    dense = moments.dense + head.T @ head + weight * torch.outer(shift[:size], shift[:size])
    diagonal = moments.diagonal + tail.square().sum(0) + weight * shift[size:].square()
    return PositionMoments(count, moments.mean + shift * added / count, dense, diagonal)


def preconditioner_from(moments: PositionMoments) -> Preconditioner:
    """Stan's regularised covariance, n / (n + 5) times the estimate plus 5e-3 / (n + 5) times the identity, as its root."""
    keep, ridge = moments.num_seen / (moments.num_seen + 5), 5e-3 / (moments.num_seen + 5)
    scale = keep / (moments.num_seen - 1).clamp_min(1)
    dense = moments.dense * scale + ridge * identity_matrix(len(moments.dense), ridge)
    factor, ok = cholesky(dense)
    factor = torch.where(ok, factor, dense.diagonal().sqrt().diag())  # rounding broke it: its diagonal still serves
    return Preconditioner(factor, (moments.diagonal * scale + ridge).sqrt())


def window_ends(warmup_steps: int) -> list[int]:
    """Iterations (counted from 1) after which the mass matrix is renewed: doubling windows between two buffers.

    Example:
        >>> window_ends(1000)
        [100, 150, 250, 450, 950]
        >>> window_ends(10)
        []
    """
    if warmup_steps < 20:
        return []
    first, last, window = _FIRST_BUFFER, _LAST_BUFFER, _FIRST_WINDOW
    if first + last + window > warmup_steps:
        first, last = int(0.15 * warmup_steps), int(0.1 * warmup_steps)
        window = warmup_steps - first - last
    ends: list[int] = []
    end = first + window
    while True:
        if end + 2 * window > warmup_steps - last:
            return [*ends, warmup_steps - last]
        ends.append(end)
        window *= 2
        end += window


class Tuning(NamedTuple):
    """What a kernel is made from, and all that it is learned from."""

    step_size: Tensor  # ()
    preconditioner: Preconditioner
    mean: Tensor  # (D,), of the positions that the preconditioner was learned from
    averaging: DualAveraging
    moments: PositionMoments
    learns_mass_matrix: bool
    is_rough: bool  # whether the step size is hardly known yet: long trajectories would be wasted


class BurnIn(NamedTuple):
    """The warm-up of a kernel that needs no tuning: steps on the way from a start to the target, and nothing else."""

    @property
    def steps(self) -> int:
        """None that tune."""
        return 0

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> tuple[()]:
        """Nothing to tune."""
        return ()

    def update(self, tuning: Any, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Any:
        """Unchanged."""
        return tuning

    def restarts(self, iteration: int) -> bool:
        """Never."""
        return False

    def statistics(self, tuning: Any) -> dict[str, Tensor]:
        """None."""
        return {}


class WindowedAdaptation(NamedTuple):
    """Dual averaging of the step size beside moments of the positions in doubling windows; see :func:`window_ends`.

    Args:
        steps: iterations of warm-up.
        mass_matrix: which covariances are learned, for the preconditioner.
        dense_size: leading coordinates that share a dense block.
        step_size: the first; ``None`` for a kernel that has none.
        target_acceptance: mean acceptance that the step size is steered to; ``None`` keeps the step size.
        search_on: of kernels on gradients, whose state has ``position``, ``log_density`` and ``gradient``: the density on which
            single leapfrog steps look for the step size's scale, at the start and with each new preconditioner.
        averages_anew: whether dual averaging forgets what it has seen with each new preconditioner.
        relearns: whether a covariance that is known at the start is only where learning begins.
        num_moving: leading coordinates that kernels move, the others having deviation zero; ``None``: all.
    """

    steps: int
    mass_matrix: MassMatrix
    dense_size: int
    step_size: float | None
    target_acceptance: float | None
    search_on: LogDensity | None = None
    averages_anew: bool = True
    relearns: bool = False
    num_moving: int | None = None

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Tuning:
        """The given step size, and a unit mass matrix to be learned or the inverse of ``covariance`` to be kept or learned."""
        dimension = position.shape[-1]
        step = torch.tensor(self.step_size or 1.0, dtype=position.dtype, device=position.device)
        moments = start_moments(self.dense_size, dimension, position)
        preconditioner = identity_preconditioner(self.dense_size, dimension, position)
        identity = self.mass_matrix is MassMatrix.IDENTITY
        if covariance is not None and not identity:
            head, tail = covariance[: self.dense_size, : self.dense_size], covariance.diagonal()[self.dense_size :]
            preconditioner = Preconditioner(cholesky(head).factor, tail.sqrt())
        preconditioner = self._holding_the_rest(preconditioner)
        mean, learns = position.mean(0), (covariance is None or self.relearns) and not identity
        tuning = Tuning(step, preconditioner, mean, start_dual_averaging(step), moments, learns, self._is_rough(0))
        if self.search_on is None or self.target_acceptance is None or not self.steps:
            return tuning
        return self.averaged_anew(tuning, init_hmc(self.search_on, position), generator)

    def averaged_anew(self, tuning: Tuning, state: Any, generator: torch.Generator) -> Tuning:
        """Dual averaging begun again, at the step size that a search from ``state`` finds if there is one."""
        step_size = tuning.step_size
        if self.search_on is not None:
            step_size = reasonable_step_size(self.search_on, tuning.preconditioner, state, step_size, generator)
        return tuning._replace(step_size=step_size, averaging=start_dual_averaging(step_size))

    def update(self, tuning: Tuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Tuning:
        """From the positions and the acceptance rates ``(C,)``."""
        step_size, preconditioner, mean, averaging, moments, learns, _ = tuning
        if self.target_acceptance is not None:
            moving_in = self.search_on is not None and iteration <= self.first_buffer()
            rate = (harmonic_mean if moving_in else torch.mean)(info.acceptance_rate)
            averaging = update_dual_averaging(averaging, rate, self.target_acceptance)
            step_size = (averaging.log_average if iteration == self.steps else averaging.log_step).exp()
        ends = window_ends(self.steps) if learns else []
        if ends and self.first_buffer() < iteration <= ends[-1]:
            moments = update_moments(moments, state.position)
        renewed = iteration in ends
        if renewed:
            preconditioner, mean = self._holding_the_rest(preconditioner_from(moments)), moments.mean
            moments = start_moments(self.dense_size, state.position.shape[-1], state.position)
        tuning = Tuning(step_size, preconditioner, mean, averaging, moments, learns, self._is_rough(iteration))
        begins_again = renewed and self.averages_anew and self.target_acceptance is not None and iteration < self.steps
        return self.averaged_anew(tuning, state, generator) if begins_again else tuning

    def _holding_the_rest(self, preconditioner: Preconditioner) -> Preconditioner:
        """Under which what does not move stays exactly where it is."""
        if self.num_moving is None:
            return preconditioner
        deviation = preconditioner.deviation.clone()
        deviation[self.num_moving - self.dense_size :] = 0.0
        return preconditioner._replace(deviation=deviation)

    def first_buffer(self) -> int:
        """The iterations in which chains are on their way in."""
        return min(_FIRST_BUFFER, int(0.15 * self.steps))

    def _is_rough(self, iteration: int) -> bool:
        """After so many steps."""
        return self.target_acceptance is not None and iteration < min(_FIRST_STEPS, self.steps // 4)

    def restarts(self, iteration: int) -> bool:
        """Never: the state of a chain does not depend on its kernel's tuning."""
        return False

    def statistics(self, tuning: Tuning) -> dict[str, Tensor]:
        """The step size, of kernels that have one."""
        return {} if self.step_size is None else {"step_size": tuning.step_size}
