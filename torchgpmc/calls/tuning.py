"""Trajectory lengths of Hamiltonian Monte Carlo by Bayesian optimisation, as paper D tunes them."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.stats
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from torchgpmc.checks import check_count
from torchgpmc.methods import HMC
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.remedies import checked_model
from torchgpmc.numerics.random import make_generator
from torchgpmc.runs.run import Settings
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.hmc import HMCState, hmc

_WIDEST = math.log(4.0)  # either way of the step size that warm-up found
_FIRST_TRIALS = 6  # spread out, before there is anything to learn from
_CANDIDATES = 1000
_ACCEPTANCE = 0.3, 0.98  # beyond these the step size hardly depends on it


def tune_hmc(
    model: GPModel,
    method: HMC | None = None,
    *,
    max_steps: int = 40,
    num_trials: int = 30,
    trial_steps: int = 30,
    warmup_steps: int = 200,
    num_chains: int | None = None,
    seed: int | None = None,
) -> HMC:
    """HMC with the trajectory length and acceptance that make chains jump furthest for their cost (paper D, section 3).

    Step sizes and L are tried out, L being the most steps of a trajectory, by Bayesian optimisation of the expected squared jump
    over sqrt(L) (Wang, Mohamed & de Freitas 2013), distances taken in the preconditioner's coordinates. The chains go on from trial
    to trial, after a warm-up.

    Args:
        model: to be sampled.
        method: whose other options are kept; ``HMC()`` by default.
        max_steps: L at most.
        num_trials: pairs that are tried.
        trial_steps: transitions a trial.
        warmup_steps: before the trials.
        num_chains: 4 by default.
        seed: of all randomness.

    Returns:
        ``method`` with ``num_steps`` L and ``random_length``, the best step size to begin the search at, and the acceptance found
        there as ``target_accept_prob``: warm-up finds the step size again, whatever mass matrix it learns.

    Raises:
        TypeError: ``model`` is none, or ``method`` is not an :class:`HMC`.
        ValueError: a number out of range, or a model that the method cannot sample.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.tune_hmc(model, max_steps=10, num_trials=8, trial_steps=5, warmup_steps=20, seed=0)
        >>> 1 <= method.num_steps <= 10, method.random_length
        (True, True)
    """
    checked_model(model)
    method = HMC() if method is None else method
    if not isinstance(method, HMC):
        raise TypeError(f"method is {method!r}. Expected torchgpmc.HMC(...), whose trajectory length is tuned.")
    for name, value, least in (
        ("max_steps", max_steps, 1),
        ("num_trials", num_trials, _FIRST_TRIALS),
        ("trial_steps", trial_steps, 1),
        ("warmup_steps", warmup_steps, 0),
    ):
        check_count(name, value, least)
    if num_chains is not None:
        check_count("num_chains", num_chains)
    seed = secrets.randbits(31) if seed is None else seed
    check_count("seed", seed, 0)
    model.refresh()
    generator = make_generator(seed, model.train_x.device)
    run = method.prepare(model, Settings(1, warmup_steps, num_chains, None))
    state = run.init(generator)
    for _ in range(warmup_steps):
        state, _, _ = run.advance(state, generator)
    trials = _Trials(run.target.density, state.chain, state.tuning, max_steps, trial_steps, generator)
    point = maximise(trials.efficiency, num_trials, np.random.default_rng(seed))
    step_size, num_steps = trials.options(point)
    low, high = _ACCEPTANCE
    acceptance = min(max(trials.acceptance[tuple(point)], low), high)
    return replace(method, num_steps=num_steps, random_length=True, step_size=float(step_size), target_accept_prob=acceptance)


class _Trials:
    """Chains that go on under one pair of options after another, each a point of the unit square."""

    def __init__(self, density: Any, chain: HMCState, tuning: Tuning, max_steps: int, trial_steps: int, generator: torch.Generator):
        self.density = density
        self.chain = chain
        self.tuning = tuning
        self.max_steps = max_steps
        self.trial_steps = trial_steps
        self.generator = generator
        self.acceptance: dict[tuple[float, ...], float] = {}

    def options(self, point: np.ndarray) -> tuple[torch.Tensor, int]:
        """Step size and L, both on a log scale."""
        step_size = self.tuning.step_size * math.exp(_WIDEST * (2 * point[0] - 1))
        return step_size, round(math.exp(point[1] * math.log(self.max_steps)))

    def efficiency(self, point: np.ndarray) -> float:
        """Log of the mean squared jump over sqrt(L)."""
        step_size, num_steps = self.options(point)
        unit = self.tuning.preconditioner
        sampler = hmc(self.density, step_size=step_size, preconditioner=unit, num_steps=num_steps, random_length=True)
        jump = acceptance = torch.zeros(())
        for _ in range(self.trial_steps):
            before = self.chain.position
            self.chain, info = sampler.step(self.chain, self.generator)
            jump = jump + unit.solve(self.chain.position - before).square().sum(-1).mean()
            acceptance = acceptance + info.acceptance_rate.mean()
        self.acceptance[tuple(point)] = float(acceptance) / self.trial_steps
        return math.log(float(jump) / self.trial_steps + 1e-12) - 0.5 * math.log(num_steps)


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """E max(g - best, 0) of normal variables g.

    Example:
        >>> expected_improvement(np.array([1.0]), np.array([2.0]), 1.0).round(4)  # 2 / sqrt(2 pi)
        array([0.7979])
    """
    z = (mean - best) / deviation
    return (mean - best) * scipy.stats.norm.cdf(z) + deviation * scipy.stats.norm.pdf(z)


def maximise(objective: Callable[[np.ndarray], float], num_trials: int, generator: np.random.Generator) -> np.ndarray:
    """The tried point of the unit square whose value, noise taken out, is largest; tried where improvement is expected."""
    kernel = ConstantKernel(1.0) * Matern([0.5, 0.5], (0.05, 10.0), nu=2.5) + WhiteKernel(0.1, (1e-4, 1.0))
    points = scipy.stats.qmc.Sobol(2, seed=generator).random(8)[:_FIRST_TRIALS]
    values = [objective(point) for point in points]
    while True:
        regression = GaussianProcessRegressor(kernel, normalize_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a bound that is reached says nothing to the user
            regression.fit(points, values)
        smoothed = regression.predict(points)
        if len(points) >= num_trials:
            return points[int(smoothed.argmax())]
        candidates = generator.random((_CANDIDATES, 2))
        mean, deviation = regression.predict(candidates, return_std=True)
        chosen = candidates[int(expected_improvement(mean, deviation, smoothed.max()).argmax())]
        points = np.vstack([points, chosen])
        values.append(objective(chosen))
