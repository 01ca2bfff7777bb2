"""Where control variables are, and how many: found in warm-up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import AutogradDensity
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.numerics.ascent import ascend
from torchgpmc.numerics.linalg import cholesky, solve_lower
from torchgpmc.samplers.adaptation import DualAveraging, start_dual_averaging, update_dual_averaging
from torchgpmc.samplers.control_variables import ControlPrior, control_prior
from torchgpmc.trees import take

_MOST_ROUNDS = 20
_SHORTEST_ROUND = 5  # iterations
_SEARCH_STEPS = 20  # of L-BFGS, each time control variables are added
_GROWTH = 8  # one in so many is added at once
_MOST_SETTINGS = 4  # hyperparameters that the search averages over
_FIRST_STEP = 0.1  # of a walk, in prior standard deviations
_NOISE = 1e-6  # of the control variables' own, as a share of their variance

Values = dict[str, dict[str, Tensor]]


def prior_of_controls(model: GPModel, prior: LatentPrior, inputs: Tensor) -> ControlPrior:
    """The prior of whitened latents and of f at ``inputs`` ``(M, D)`` with a little noise.

    Args:
        model: of the latents.
        prior: at C settings.
        inputs: of the control variables.
    """
    with torch.no_grad():
        cross = model.cross(prior, inputs).covariance
        return control_prior(prior.factor, cross, _with_noise(model, model.prior_covariance(prior, inputs)))


def _with_noise(model: GPModel, covariance: Tensor) -> Tensor:
    """Of the control variables' own, without which one that sits at a datum would be a function of f."""
    return covariance + torch.diag_embed(_NOISE * covariance.diagonal(dim1=-2, dim2=-1) + model.jitter)


def unexplained(model: GPModel, values: Values, inputs: Tensor) -> Tensor:
    r"""Shares of the prior variances of f that remain given the control variables, ``(C, N)``: their sum is G / tr K (sec. 1.4.4).

    .. math:: G(X_c) = tr(K_{ff} - K_{fc} K_{cc}^{-1} K_{cf})

    Args:
        model: with f at its N latent inputs.
        values: constrained parameters at C settings.
        inputs: X_c ``(M, D)``; a gradient flows through it.
    """
    kernel, x = values["kernel"], model.latent_inputs
    variance = model.covariance.diagonal(kernel, x)
    inner = _with_noise(model, model.covariance.bind(inputs, inputs)(kernel))
    white = solve_lower(cholesky(inner).factor, model.covariance.bind(inputs, x)(kernel))
    return (variance - white.square().sum(-2)) / variance.sum(-1, keepdim=True)


def add_controls(model: GPModel, values: Values, inputs: Tensor, explained: float, least: int = 0) -> Tensor:
    """Control inputs, to which others are added until ``explained`` of the prior variance is, all of them moved to explain most.

    New ones come to the inputs of f that the others say least of; then L-BFGS takes G to a minimum in all of X_c.

    Args:
        model: with f at its latent inputs; there are never more control variables than these.
        values: constrained parameters at some settings, over which shares are averaged.
        inputs: X_c ``(M, D)``; none at all if M is 0.
        explained: share of the total prior variance.
        least: how many to add in any case.
    """
    x = model.latent_inputs
    wanted = len(inputs) + least
    values = take(values, slice(_MOST_SETTINGS))
    while len(inputs) < len(x) and (len(inputs) < wanted or _left(model, values, inputs) > 1 - explained):
        for _ in range(max(1, len(inputs) // _GROWTH)):
            inputs = torch.cat([inputs, x[_least_known(model, values, inputs)][None]])
        inputs = _moved(model, values, inputs[: len(x)])
    return inputs


def _left(model: GPModel, values: Values, inputs: Tensor) -> float:
    if not len(inputs):
        return 1.0
    with torch.no_grad():
        return float(unexplained(model, values, inputs).sum(-1).mean())


def _least_known(model: GPModel, values: Values, inputs: Tensor) -> Tensor:
    if not len(inputs):
        middle = model.latent_inputs.mean(0, keepdim=True)
        return torch.cdist(middle, model.latent_inputs).argmin()
    with torch.no_grad():
        return unexplained(model, values, inputs).mean(0).argmax()


def _moved(model: GPModel, values: Values, inputs: Tensor) -> Tensor:
    """At a lower G, unless the kernel has no derivative in its inputs."""

    def explained(positions: Tensor) -> Tensor:
        shares = [unexplained(model, values, row.view_as(inputs)).sum(-1).mean() for row in positions]
        return -torch.stack(shares)

    bound = 2 * float(model.latent_inputs.abs().max()) + 1
    found = ascend(AutogradDensity(explained), inputs.flatten(), bound=bound, max_iterations=_SEARCH_STEPS)
    return inputs if found is None else found.position.view_as(inputs)


class ControlTuning(NamedTuple):
    """Where control variables are, acceptance since they are there, and the step size of a walk."""

    inputs: Tensor  # (M, D)
    accepted: Tensor  # (), sum over iterations of the chains' mean
    num_seen: Tensor  # (), iterations
    step_size: Tensor  # ()
    averaging: DualAveraging


class ControlSearch(NamedTuple):
    """Finds the inputs of control variables for the chains' hyperparameters, and adds some while acceptance is low.

    The chains begin with one; after the first round there are as many as explain what they should (paper C, section 1.4.4). While
    hyperparameters are on their way, in the first half of warm-up, each round's search begins anew.

    Args:
        steps: iterations of warm-up.
        model: of the latents.
        explained: share of the prior variance of f that control variables are to explain.
        target_acceptance: while the chains' mean is below it, control variables are added; a walk's step size is steered to it, and
            they are added while the mean is below half of it.
        walks: whether there is a step size to tune.
    """

    steps: int
    model: GPModel
    explained: float
    target_acceptance: float
    walks: bool

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> ControlTuning:
        """One control variable, in the middle."""
        x = self.model.latent_inputs
        zero, step = x.new_zeros(()), x.new_tensor(_FIRST_STEP)
        middle = torch.cdist(x.mean(0, keepdim=True), x).argmin()
        return ControlTuning(x[middle][None], zero, zero, step, start_dual_averaging(step))

    def update(self, tuning: ControlTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> ControlTuning:
        """From the kernel's Info, which must have the chains' ``values``: their hyperparameters."""
        rate = info.acceptance_rate.mean()
        step_size, averaging = tuning.step_size, tuning.averaging
        if self.walks:
            averaging = update_dual_averaging(averaging, rate, self.target_acceptance)
            step_size = (averaging.log_average if iteration == self.steps else averaging.log_step).exp()
        accepted, num_seen, inputs = tuning.accepted + rate, tuning.num_seen + 1, tuning.inputs
        if self.restarts(iteration):
            # A walk's step size holds acceptance near the target as long as that can be reached.
            low = self.target_acceptance * (0.5 if self.walks else 1.0)
            inputs = self._searched(inputs, iteration, bool(accepted < low * num_seen), info.values)
            accepted, num_seen = torch.zeros_like(accepted), torch.zeros_like(num_seen)
        return ControlTuning(inputs, accepted, num_seen, step_size, averaging)

    def _searched(self, inputs: Tensor, iteration: int, too_few: bool, values: Values) -> Tensor:
        on_the_way = self.model.layout.size > 0 and 2 * iteration <= self.steps
        if iteration == self._round or on_the_way:
            return add_controls(self.model, values, inputs[:0], self.explained)
        return add_controls(self.model, values, inputs, self.explained, max(1, len(inputs) // _GROWTH) if too_few else 0)

    @property
    def _round(self) -> int:
        return max(_SHORTEST_ROUND, self.steps // _MOST_ROUNDS)

    def restarts(self, iteration: int) -> bool:
        """After each round: there may be other control variables."""
        return iteration % self._round == 0

    def statistics(self, tuning: ControlTuning) -> dict[str, Tensor]:
        """How many control variables there are, and the step size of a walk."""
        count = tuning.accepted.new_tensor(float(len(tuning.inputs)))
        return {"num_controls": count} | ({"step_size": tuning.step_size} if self.walks else {})
