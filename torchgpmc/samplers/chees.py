"""ChEES-HMC: many chains, one trajectory length for all, learned from how far apart their proposals land."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation, harmonic_mean
from torchgpmc.samplers.hmc import HMCState, init_hmc, transition
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.types import LogDensity, Sampler

# Hoffman, Radul & Sountsov 2021: Adam without momentum on the log of the length.
_RATE, _FORGETTING = 0.025, 0.95
_AVERAGING = 0.75  # as the step size's
_FIRST_STEPS = 5  # in the first trajectory length
_LOG_QUARTER = math.log(math.pi / 2)  # of the period of coordinates of unit scale
# While chains are on their way in, step sizes swing by orders of magnitude, and a trajectory would take as many more steps.
_EARLY_SHARE, _EARLY_STEPS = 0.15, 32
_NUM_PLACES = 2**16  # of the sequence, where a run of it may begin


class ChEESState(NamedTuple):
    """Position ``(C, D)`` with its log density ``(C,)`` and gradient ``(C, D)``; all chains are at one place of the sequence."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor
    place: int


class TrajectoryEnds(NamedTuple):
    """What a transition tells about its length, for warm-up."""

    start: Tensor  # (C, D)
    end: Tensor  # (C, D), accepted or not
    end_rho: Tensor  # (C, D), preconditioned momenta
    share: float  # of the trajectory length


class ChEESInfo(NamedTuple):
    """What is known about one transition of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # acceptance probability at the trajectory's end
    diverging: Tensor
    energy: Tensor  # Hamiltonian at the new position and the momentum drawn at the start
    n_steps: Tensor  # gradient evaluations, the same for every chain
    n_failures: Tensor  # evaluations that gave -inf
    proposal: TrajectoryEnds


def van_der_corput(index: int) -> float:
    """The radical inverse of ``index`` in base 2: a sequence on [0, 1) whose every stretch fills it evenly.

    Example:
        >>> [van_der_corput(index) for index in range(6)]
        [0.0, 0.5, 0.25, 0.75, 0.125, 0.625]
    """
    return int(f"{index:b}"[::-1], 2) / 2 ** index.bit_length()


def chees(
    density: LogDensity, *, step_size: Tensor, preconditioner: Preconditioner, trajectory_length: Tensor, max_steps: int = 1000
) -> Sampler:
    """Hamiltonian Monte Carlo with jittered lengths (Hoffman, Radul & Sountsov 2021): h_n T / step_size leapfrog steps, rounded up.

    h_n is a van der Corput sequence, begun at a random place, so each transition's share of T is uniform on [0, 1) and all chains
    take the same number of steps. The host waits for the device once a transition.

    Args:
        density: target on ``(C, D)``.
        step_size: ``()``.
        preconditioner: see :class:`Preconditioner`.
        trajectory_length: T ``()``, in the time of the preconditioned coordinates.
        max_steps: at most this many leapfrog steps a transition.

    Returns:
        A sampler with :class:`ChEESState` and :class:`ChEESInfo`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> density, generator = tg.joint_log_density(model), torch.Generator().manual_seed(0)
        >>> unit = tg.samplers.Preconditioner(torch.zeros(0, 0), torch.ones(9))  # one hyperparameter, eight latents
        >>> step_size, length = torch.tensor(0.2), torch.tensor(1.5)
        >>> sampler = tg.samplers.chees(density, step_size=step_size, preconditioner=unit, trajectory_length=length)
        >>> state, info = sampler.step(sampler.init(torch.zeros(4, 9).double(), generator), generator)
        >>> state.position.shape, len(info.n_steps.unique())
        (torch.Size([4, 9]), 1)
    """

    def init(position: Tensor, generator: torch.Generator) -> ChEESState:
        place = int(torch.randint(_NUM_PLACES, (), generator=generator, device=generator.device))
        return ChEESState(*init_hmc(density, position), place)

    def step(state: ChEESState, generator: torch.Generator) -> tuple[ChEESState, ChEESInfo]:
        share = van_der_corput(state.place)
        wanted = float(share * trajectory_length / step_size)
        num_steps = min(max(1, math.ceil(wanted)), max_steps)
        new, info, end, end_rho = transition(density, preconditioner, step_size, num_steps, HMCState(*state[:3]), generator)
        proposal = TrajectoryEnds(state.position, end.position, end_rho, share)
        known = ChEESInfo(info.acceptance_rate, info.diverging, info.energy, info.n_steps, info.n_failures, proposal)
        return ChEESState(*new, state.place + 1), known

    return Sampler(init, step)


class Trajectory(NamedTuple):
    """Stochastic ascent on the log of the trajectory length; scalars as tensors ``()``."""

    log_length: Tensor
    log_average: Tensor
    squared_slope: Tensor
    num_seen: Tensor


class ChEESTuning(NamedTuple):
    """What the kernel is made from, and all that it is learned from."""

    adaptation: Tuning
    trajectory: Trajectory
    max_steps: int


def chees_slope(proposal: TrajectoryEnds, preconditioner: Preconditioner, acceptance: Tensor) -> Tensor:
    r"""The slope ``()`` of the criterion in log T (Hoffman, Radul & Sountsov 2021, section 3), up to a positive factor.

    .. math:: E[\tfrac14 (|x' - E x'|^2 - |x - E x|^2)^2]

    is the criterion, in preconditioned coordinates; its slope along each trajectory is the bracket times (x' - E x') . x'-dot times
    the trajectory's share of T. Chains count by their acceptance probabilities ``(C,)``.
    """
    weight = torch.where(torch.isfinite(proposal.end).all(-1) & torch.isfinite(proposal.end_rho).all(-1), acceptance, 0.0)
    weight = weight / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)
    usable = (weight > 0).unsqueeze(-1)
    # Of chains that count for nothing the numbers may be infinite.
    end, end_rho = (torch.where(usable, part, 0.0) for part in (proposal.end, proposal.end_rho))
    end = preconditioner.solve(end - weight @ end)
    start = preconditioner.solve(proposal.start - proposal.start.mean(0))
    change = end.square().sum(-1) - start.square().sum(-1)
    return proposal.share * (weight * change * (end * end_rho).sum(-1)).sum()


class ChEESAdaptation(NamedTuple):
    """Step size and mass matrix in windows, on the harmonic mean acceptance of all chains; the trajectory length beside them.

    A harmonic mean sees the chain that is worst off, to which all others' steps are then fitted.

    Args:
        windows: the warm-up of step size and mass matrix.
        max_steps: leapfrog steps a transition at most; fewer while chains are on their way in.
    """

    windows: WindowedAdaptation
    max_steps: int

    @property
    def steps(self) -> int:
        """Iterations of warm-up."""
        return self.windows.steps

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> ChEESTuning:
        """A few steps long; where scales are known, a quarter of their period."""
        adaptation = self.windows.start(position, covariance, generator)
        log_length = (_FIRST_STEPS * adaptation.step_size).log()
        if covariance is not None:
            log_length = log_length.clamp_min(_LOG_QUARTER)
        zero = torch.zeros_like(log_length)
        return ChEESTuning(adaptation, Trajectory(log_length, log_length, zero, zero), self._most_steps(1))

    def update(self, tuning: ChEESTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> ChEESTuning:
        """From the proposals of all chains."""
        before, trajectory, _ = tuning
        slope = chees_slope(info.proposal, before.preconditioner, info.acceptance_rate)
        pooled = info._replace(acceptance_rate=harmonic_mean(info.acceptance_rate).expand(len(info.acceptance_rate)))
        adaptation = self.windows.update(before, iteration, state, pooled, generator)
        trajectory = _ascended(trajectory, slope)
        if adaptation.preconditioner is not before.preconditioner:
            trajectory = _rescaled(trajectory, before.preconditioner, adaptation.preconditioner)
        if iteration == self.steps:
            trajectory = trajectory._replace(log_length=trajectory.log_average)
        return ChEESTuning(adaptation, trajectory, self._most_steps(iteration + 1))

    def _most_steps(self, iteration: int) -> int:
        return min(_EARLY_STEPS, self.max_steps) if iteration <= _EARLY_SHARE * self.steps else self.max_steps

    def restarts(self, iteration: int) -> bool:
        """Never."""
        return False

    def statistics(self, tuning: ChEESTuning) -> dict[str, Tensor]:
        """Step size and trajectory length."""
        return {**self.windows.statistics(tuning.adaptation), "trajectory_length": tuning.trajectory.log_length.exp()}


def _rescaled(trajectory: Trajectory, old: Preconditioner, new: Preconditioner) -> Trajectory:
    """The same length in the time of new coordinates, in which the slowest runs faster; at least a quarter of their period."""
    shift = (new.standard_deviation() / old.standard_deviation()).max().log()
    log_length, log_average = ((log - shift).clamp_min(_LOG_QUARTER) for log in trajectory[:2])
    return trajectory._replace(log_length=log_length, log_average=log_average)


def _ascended(trajectory: Trajectory, slope: Tensor) -> Trajectory:
    """One step of Adam without momentum, and the average of the iterates."""
    count = trajectory.num_seen + 1
    squared = _FORGETTING * trajectory.squared_slope + (1 - _FORGETTING) * slope.square()
    scale = (squared / (1 - _FORGETTING**count)).sqrt().clamp_min(torch.finfo(slope.dtype).tiny)
    log_length = trajectory.log_length + _RATE * slope / scale
    forget = count**-_AVERAGING
    return Trajectory(log_length, forget * log_length + (1 - forget) * trajectory.log_average, squared, count)
