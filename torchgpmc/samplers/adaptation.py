"""Warm-up: step size by dual averaging and mass matrix by windowed moments, both pooled over chains.

One dual-averaging update a step, on the mean acceptance of all chains; M updates in sequence would make the step size oscillate.
After warm-up nothing adapts, so the draws come from fixed Markov kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.linalg import cholesky
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner, identity_preconditioner

# Hoffman & Gelman 2014, section 3.2.1.
_SHRINKAGE = 0.05
_OFFSET = 10.0
_FORGETTING = 0.75
# Stan reference manual, section "Automatic parameter tuning".
_FIRST_BUFFER, _LAST_BUFFER, _FIRST_WINDOW = 75, 50, 25


class DualAveraging(NamedTuple):
    """Nesterov's dual averaging on log step size (Hoffman & Gelman 2014, algorithm 5); scalars as tensors ``()``."""

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    center: Tensor
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
    log_step = state.center - count.sqrt() / _SHRINKAGE * error
    forget = count**-_FORGETTING
    return DualAveraging(log_step, forget * log_step + (1 - forget) * state.log_average, error, state.center, count)


class Moments(NamedTuple):
    """Running mean and centred sums of squares of positions: dense for the leading block, diagonal for the rest."""

    num_seen: Tensor  # ()
    mean: Tensor  # (D,)
    dense: Tensor  # (B, B)
    diagonal: Tensor  # (D - B,)


def start_moments(dense_size: int, dimension: int, like: Tensor) -> Moments:
    """No positions seen yet."""
    zeros = torch.zeros(dimension + 1, dtype=like.dtype, device=like.device)
    dense = torch.zeros(dense_size, dense_size, dtype=like.dtype, device=like.device)
    return Moments(zeros[0], zeros[:dimension], dense, zeros[: dimension - dense_size])


def update_moments(moments: Moments, position: Tensor) -> Moments:
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
    return Moments(count, moments.mean + shift * added / count, dense, diagonal)


def preconditioner_from(moments: Moments) -> Preconditioner:
    """Stan's regularised covariance, n / (n + 5) times the estimate plus 5e-3 / (n + 5) times the identity, as its root."""
    keep, ridge = moments.num_seen / (moments.num_seen + 5), 5e-3 / (moments.num_seen + 5)
    scale = keep / (moments.num_seen - 1).clamp_min(1)
    dense = moments.dense * scale + ridge * torch.eye(len(moments.dense), dtype=ridge.dtype, device=ridge.device)
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


class WarmUp(NamedTuple):
    """All that adapts, and the tuning in force: what a checkpoint saves of warm-up."""

    step_size: Tensor  # ()
    preconditioner: Preconditioner
    mean: Tensor  # (D,), of the positions that the preconditioner was learned from
    averaging: DualAveraging
    moments: Moments
    learns_mass_matrix: bool


class WarmUpPlan(NamedTuple):
    """What to adapt, when, and towards which acceptance."""

    steps: int
    target_acceptance: float
    mass_matrix: MassMatrix
    adapt_step_size: bool
    dense_size: int

    def start(self, step_size: float, position: Tensor, covariance: Tensor | None = None) -> WarmUp:
        """The given step size, and a unit mass matrix to be learned or the inverse of ``covariance`` ``(D, D)`` to be kept.

        ``position`` ``(C, D)`` gives dimension, dtype, device and the first mean.
        """
        dimension = position.shape[-1]
        step = torch.tensor(step_size, dtype=position.dtype, device=position.device)
        moments = start_moments(self.dense_size, dimension, position)
        preconditioner = identity_preconditioner(self.dense_size, dimension, position)
        identity = self.mass_matrix is MassMatrix.IDENTITY
        if covariance is not None and not identity:
            head, tail = covariance[: self.dense_size, : self.dense_size], covariance.diagonal()[self.dense_size :]
            preconditioner = Preconditioner(cholesky(head).factor, tail.sqrt())
        mean, learns = position.mean(0), covariance is None and not identity
        return WarmUp(step, preconditioner, mean, start_dual_averaging(step), moments, learns)

    def restart_step_size(self, warm_up: WarmUp, step_size: Tensor) -> WarmUp:
        """The same with dual averaging begun anew at ``step_size`` ``()``."""
        if not self.adapt_step_size:
            return warm_up
        return warm_up._replace(step_size=step_size, averaging=start_dual_averaging(step_size))

    def renews_mass_matrix(self, warm_up: WarmUp, iteration: int) -> bool:
        """Whether a window ends after warm-up iteration ``iteration`` (from 1)."""
        return warm_up.learns_mass_matrix and iteration in window_ends(self.steps)

    def update(self, warm_up: WarmUp, iteration: int, position: Tensor, acceptance: Tensor) -> WarmUp:
        """After warm-up iteration ``iteration`` (from 1), with positions ``(C, D)`` and acceptance probabilities ``(C,)``."""
        averaging = update_dual_averaging(warm_up.averaging, acceptance.mean(), self.target_acceptance)
        log_step = averaging.log_average if iteration == self.steps else averaging.log_step
        step_size = log_step.exp() if self.adapt_step_size else warm_up.step_size
        moments, preconditioner, mean = warm_up.moments, warm_up.preconditioner, warm_up.mean
        ends = window_ends(self.steps)
        if warm_up.learns_mass_matrix and ends:
            first = min(_FIRST_BUFFER, int(0.15 * self.steps))
            if first < iteration <= ends[-1]:
                moments = update_moments(moments, position)
            if iteration in ends:
                preconditioner, mean = preconditioner_from(moments), moments.mean
                moments = start_moments(self.dense_size, position.shape[-1], position)
        return WarmUp(step_size, preconditioner, mean, averaging, moments, warm_up.learns_mass_matrix)
