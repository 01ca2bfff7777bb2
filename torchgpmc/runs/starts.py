"""Where runs start: at draws from the prior, or near the modes of an approximate posterior of theta (which proposals need too)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgpmc.approximations import ApproximateMarginal, CollapsedMarginal
from torchgpmc.approximations.gaussian_form import matrix_size
from torchgpmc.approximations.held_sites import HeldSitesMarginal
from torchgpmc.checks import warn
from torchgpmc.importance import Mode, find_modes, further_modes
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.random import normal_like
from torchgpmc.parameters.normal_scale import NormalScale, OnNormalScale, normal_scale
from torchgpmc.runs.periods import has_a_period, with_multiples
from torchgpmc.types import LogDensity

Marginal = ApproximateMarginal | CollapsedMarginal | HeldSitesMarginal

_NUM_STARTS = 4
_CANDIDATES_A_START = 8
_SEARCHES = 3  # from as many starts each, until a mode is found
_CHUNK_ELEMENTS = 400_000  # of covariance matrices
_QUIET_STARTS, _LITTLE = 2, -3.5  # of noise, on the normal scale
_MAX_ATTEMPTS = 100
_NUM_HALVINGS = 30
_LATENT_SPREAD = 0.1
_MOST_LINES, _REACH = 8, 4.0  # hyperparameters, of which other lobes are looked for along each; deviations of their priors
_OVERDISPERSION = 2.0  # of starts around a fit, in its deviations of theta
_DEVIATIONS_LOWER = 5.0  # of half a weighted sum of squares: what starts may lack in log density


def posterior_modes(
    marginal: Marginal, num_starts: int, generator: torch.Generator, scale: NormalScale | None = None
) -> list[Mode]:
    """Distinct modes, best first; empty, after a warning, where none has a positive definite curvature.

    Args:
        marginal: the approximate posterior of theta.
        num_starts: of the search, the best of eight times as many draws from the prior; the next best where those find nothing.
        generator: of those draws.
        scale: if given, what is searched is the density of z on that scale, whose modes and curvatures are others.
    """
    model, count = marginal.model, _CANDIDATES_A_START * num_starts
    density: LogDensity = marginal
    rough: LogDensity = marginal.roughly()
    candidates = model.layout.starting_points(count, generator)
    if scale is not None:
        density, rough = OnNormalScale(density, scale), OnNormalScale(rough, scale)
        candidates = normal_like(candidates, generator)
        quiet = _with_little_noise(model, candidates)
    elif _may_have_little_noise(model):
        usual = normal_scale(model.layout)
        quiet = usual.theta(_with_little_noise(model, usual.z(candidates)))[0]
    else:
        quiet = candidates[:0]

    def best_first(thetas: Tensor) -> Tensor:
        # Far out a search takes many steps, and slow ones.
        value = torch.cat([rough(part) for part in thetas.split(max(1, _CHUNK_ELEMENTS // matrix_size(model)))])
        return thetas[value.argsort(descending=True)]

    quiet = best_first(quiet)[:_QUIET_STARTS] if len(quiet) else quiet
    modes: list[Mode] = []
    # An approximation that fails at some thetas stops the searches that meet one: then others have their turn.
    for starts in best_first(candidates).split(num_starts)[:_SEARCHES]:
        modes = modes or find_modes(density, torch.cat([starts, quiet]), resolution=marginal.resolution)
    if not modes:
        warn(
            f"no mode of the approximate posterior with a positive definite curvature was found in {_SEARCHES * num_starts} "
            f"starts: sampling begins from the prior instead, and may need more draws."
        )
    elif scale is not None and scale.size <= _MOST_LINES:
        # Where noise is next to nothing lengthscales are others: of 65 animals' weights e^-6, 80 nats above those of e^3.
        # And under a prior of little noise the lobe where all of it is noise may be far above that: of 200 hours worked by 7 nats.
        best = modes[0].position[None]
        through = torch.cat([_with_little_noise(model, best), _with_noise_alone(model, best, scale)])
        modes = further_modes(density, modes, reach=_REACH, through=through, resolution=marginal.resolution)
    elif scale is not None and has_a_period(model):
        # Of sums of kernels. Lines of all would take long, and tails are looked for by other means.
        modes = further_modes(density, modes, reach=_REACH, rough_alone=True, resolution=marginal.resolution)
    return modes if scale is None or not modes else with_multiples(model, density, modes, scale, marginal.resolution)


def _may_have_little_noise(model: GPModel) -> bool:
    """Whether it is a regression whose noise is sampled."""
    return (model.is_conjugate or model.collapses) and any(name.startswith("likelihood.") for name in model.layout.names)


def _with_little_noise(model: GPModel, z: Tensor) -> Tensor:
    """The same but for the noise of a regression, which is next to nothing: a lobe of its own. Of other models none.

    There f goes through the data. No draw from the prior is near it: of 500 wines, some of them listed twice, it has all of the
    mass, fifty nats of evidence above the mode where what differs is noise; of 40 data that are noise it has a hundredth.
    """
    if not _may_have_little_noise(model):
        return z[:0]
    noise = torch.tensor(model.layout.columns("likelihood"), dtype=torch.long, device=z.device)
    return z.index_fill(-1, noise, _LITTLE)


def _with_noise_alone(model: GPModel, z: Tensor, scale: NormalScale) -> Tensor:
    """The same but for the noise of a regression, which has the variance of the targets. Of other models none."""
    if not _may_have_little_noise(model):
        return z[:0]
    noise = torch.tensor(model.layout.columns("likelihood"), dtype=torch.long, device=z.device)
    variance = model.targets.values.var().clamp_min(torch.finfo(z.dtype).tiny)
    return scale.z(scale.theta(z)[0].index_fill(-1, noise, float(variance.log())))


def start_at_mode(marginal: Marginal, num_chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """Draws of theta ``(C, P)`` from the normal approximation at the mode of most mass, and its covariance; or ``None``."""
    modes = posterior_modes(marginal, _NUM_STARTS, generator)
    if not modes:
        return None
    mode = max(modes, key=lambda found: float(found.log_mass))
    noise = normal_like(mode.position.new_empty(num_chains, len(mode.position)), generator)
    theta = mode.position + noise @ cholesky(mode.covariance).factor.mT
    possible = torch.isfinite(marginal(theta)).unsqueeze(-1)
    return torch.where(possible, theta, mode.position), mode.covariance


def check_one_data_set(model: GPModel, from_mode: bool) -> None:
    """Raises a ``ValueError`` if every chain has a posterior of its own, and so no common mode to start from."""
    if from_mode and model.targets.one_a_chain:
        raise ValueError(
            "from_mode=True starts all chains from one mode, and the model has several data sets, each with its own posterior. "
            "Expected from_mode=False."
        )


def starting_positions(model: GPModel, density: LogDensity, num_chains: int, generator: torch.Generator) -> Tensor:
    """Positions [theta, v] of finite log density ``(C, P + V)``: theta from the prior, v small.

    Raises:
        ValueError: some chain found no such position in many prior draws.
    """
    position = _joint_start(model, num_chains, generator)
    for _ in range(_MAX_ATTEMPTS):
        value, gradient = density.value_and_grad(position)
        bad = torch.isinf(value) | (gradient.abs().amax(-1) > 1e100 if gradient.shape[-1] else torch.isinf(value))
        if not bool(bad.any()):
            return position
        position = torch.where(bad.unsqueeze(-1), _joint_start(model, num_chains, generator), position)
    raise ValueError(
        f"{int(bad.sum())} of {num_chains} chains found no starting point of finite log density in {_MAX_ATTEMPTS} draws "
        f"from the prior. Expected the prior to give the data some probability; check the scale of train_x and train_y, "
        f"the priors, and raise jitter (now {model.jitter:g}) if factorisations fail."
    )


def positions_around(
    centre: Tensor, covariance: Tensor, num_hyperparameters: int, density: LogDensity, num_chains: int, generator: torch.Generator
) -> Tensor:
    """Positions [theta, w] of finite log density ``(C, P + V)`` around a Gaussian fit.

    Theta is spread twice as wide as the fit has it, for R-hat to tell; w, and with it v given theta, as wide. What is impossible so
    far out, or lower than the centre by five deviations more than if the fit were right, comes half as near.

    Args:
        centre: ``(P + V,)``.
        covariance: of the fit, ``(P + V, P + V)``.
        num_hyperparameters: P.
        density: of [theta, w].
        num_chains: C.
        generator: of the draws.

    Raises:
        ValueError: the density is zero at the centre too.
    """
    offset = normal_like(centre.expand(num_chains, -1), generator) @ cholesky(covariance).factor.mT
    offset[:, :num_hyperparameters] *= _OVERDISPERSION
    squares = torch.ones_like(centre)
    squares[:num_hyperparameters] = _OVERDISPERSION**2
    lower = 0.5 * squares.sum() + _DEVIATIONS_LOWER * (0.5 * squares.square().sum()).sqrt()
    lowest = density(centre.expand(num_chains, -1)) - lower
    for _ in range(_NUM_HALVINGS):
        value = density(centre + offset)
        bad = torch.isinf(value) | (value < lowest)
        if not bool(bad.any()):
            return centre + offset
        offset = torch.where(bad.unsqueeze(-1), 0.5 * offset, offset)
    raise ValueError(
        "the posterior density is zero at the start. Expected a start fitted to this model; fit again, or sample without start."
    )


def _joint_start(model: GPModel, num_chains: int, generator: torch.Generator) -> Tensor:
    theta = model.layout.starting_points(num_chains, generator)
    v = torch.randn(num_chains, model.latent_size, dtype=theta.dtype, device=theta.device, generator=generator)
    return torch.cat([theta, _LATENT_SPREAD * v], -1)


def starting_thetas(model: GPModel, density: Callable[[Tensor], Tensor], num_chains: int, generator: torch.Generator) -> Tensor:
    """Draws of theta from the prior ``(C, P)`` at which ``density`` is not zero.

    Raises:
        ValueError: some chain found none in many draws.
    """
    theta = model.layout.starting_points(num_chains, generator)
    for _ in range(_MAX_ATTEMPTS):
        bad = torch.isinf(density(theta))
        if not bool(bad.any()):
            return theta
        theta = torch.where(bad.unsqueeze(-1), model.layout.starting_points(num_chains, generator), theta)
    raise ValueError(
        f"the approximation failed for {int(bad.sum())} of {num_chains} chains in each of {_MAX_ATTEMPTS} draws of the "
        f"hyperparameters from their prior. Expected it to converge somewhere; try the other of Laplace() and EP(), raise "
        f"max_iterations or the model's jitter (now {model.jitter:g}), or sample with NUTS()."
    )
