"""The posterior of two or three hyperparameters by a lattice over all of their prior: nothing is followed, so no lobe is missed.

Cells on the scale on which each prior is standard normal, in a box that closes in on those within some nats of the highest, or
grows to hold them; then draws from the Gaussian evidence at the cells' centres, interpolated between them, each weighed by an
unbiased estimate or the exact evidence.
"""

import itertools
from dataclasses import replace

import torch

import torchgpmc as tg
from torchgpmc.approximations import marginal_of
from torchgpmc.evidence import InducingMixture, NoiseAlone, is_heteroskedastic, is_probit, serves_inducing_mixture
from torchgpmc.numerics.random import make_generator
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.parameters.normal_scale import normal_scale
from torchgpmc.runs.chain_targets import estimator_for, suited_approximation
from torchgpmc.storage.draws import Draws

_REACH = 4.0  # at first
_NATS = 14.0
_CELLS = {1: 100, 2: 20, 3: 12}  # along each coordinate
_FEW_CELLS = {1: 100, 2: 12, 3: 8}  # until the box holds what matters
_UNIFORM = 0.1  # of the draws: whatever a cell's centre says, or fails to
_AT_ONCE = 8
_LATENTS = 16  # a theta, for predictions


def serves(model):
    """Whether the hyperparameters are few enough."""
    return model.layout.size in _CELLS


def _has_its_own(model):
    """Whether the default call has estimates of another kind, of which the lattice takes eight times as many samples."""
    return is_heteroskedastic(model) or serves_inducing_mixture(model)


def _evaluated(log_density, points):
    return torch.nan_to_num(torch.cat([log_density(part) for part in points.split(_AT_ONCE)]), nan=-torch.inf)


def _cells(log_density, size):
    """Centres ``(cells, P)`` of a lattice over what matters, their width ``(P,)``, and log densities."""
    low, high = torch.full((2, size), _REACH, dtype=torch.float64) * torch.tensor([[-1.0], [1.0]])
    count = _FEW_CELLS[size]
    while True:
        width = (high - low) / count
        middles = [low[i] + width[i] * (torch.arange(count, dtype=torch.float64) + 0.5) for i in range(size)]
        centres = torch.cartesian_prod(*middles).view(-1, size)
        value = _evaluated(log_density, centres)
        matter = centres[value > value.max() - _NATS]
        # Data may put a hyperparameter where its prior has little: a box whose edge matters grows.
        below, above = matter.amin(0) < low + width, matter.amax(0) > high - width
        span = high - low
        new_low = torch.where(below, low - span / 2, matter.amin(0) - 1.5 * width)
        new_high = torch.where(above, high + span / 2, matter.amax(0) + 1.5 * width)
        if not bool((below | above).any()) and float(((new_high - new_low) / span).prod()) > 0.4:
            if count == _CELLS[size]:
                return centres, width, value
            count = _CELLS[size]
        low, high = new_low, new_high


def _between(centres, width, mass, z):
    """Log density ``(S,)`` at ``z`` of a centre by its mass plus a tent of two widths: what interpolates the masses."""
    count, low = round(len(mass) ** (1 / z.shape[-1])), centres[0]
    place = (z - low) / width
    below, density = place.floor(), torch.zeros_like(place[:, 0])
    for corner in itertools.product((0, 1), repeat=z.shape[-1]):
        index = below + torch.tensor(corner)
        inside = ((index >= 0) & (index < count)).all(-1)
        flat = (index * count ** torch.arange(z.shape[-1]).flip(0)).sum(-1).long()
        density += inside * mass[flat.clamp(0, len(mass) - 1)] * (1 - (place - index).abs()).prod(-1)
    return density.log() - width.log().sum()


def reference(model, num_draws, seed=9):
    """Weighted draws of hyperparameters and latents by the exact evidence, orthant integrals, or 256 importance samples each.

    Of several classes 1024, and cells by 128; of noise with a latent size and of inducing values 512 and 64.
    """
    generator, scale = make_generator(seed), normal_scale(model.layout)
    if _has_its_own(model) or model.num_latents > 1:
        if _has_its_own(model):
            kind = NoiseAlone if is_heteroskedastic(model) else InducingMixture
            estimator, cells = (kind(count).estimator(model) for count in (512, 64))
        else:
            estimator = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=1024)
            cells = replace(estimator, num_importance=128)

        def log_marginal(theta):
            return model.layout.log_prior(theta) + cells.draw(theta, generator).value
    else:
        approximation = suited_approximation(model, tg.EP(tolerance=0.01))  # its evidence chooses cells
        estimator = estimator_for(model, approximation, 256, None, tg.evidence.Orthant() if is_probit(model) else None)
        log_marginal = marginal_of(model, approximation)

    def log_density(z):
        theta, log_slope = scale.theta(z)
        with torch.no_grad():
            return log_marginal(theta) + log_slope

    centres, width, value = _cells(log_density, scale.size)
    mass = (1 - _UNIFORM) * torch.softmax(value, 0) + _UNIFORM / len(value)
    levels = (torch.arange(num_draws) + torch.rand(1, generator=generator)) / num_draws  # systematic
    chosen = torch.searchsorted(mass.cumsum(0), levels.double()).clamp_max(len(mass) - 1)
    tent = torch.rand(2, num_draws, scale.size, generator=generator, dtype=torch.float64).sum(0) - 1
    z = centres[chosen] + width * tent
    theta, log_slope = scale.theta(z)
    with torch.no_grad():
        estimate = estimator.draw(theta, generator, num_latents=_LATENTS)
        log_prior = model.layout.log_prior(theta)
    log_weights = log_prior + log_slope + estimate.value - _between(centres, width, mass, z)
    draws = Draws(theta[None], estimate.whitened[None], log_weights[None], further_whitened=estimate.further_whitened[None])
    lp = log_prior + estimate.log_likelihood + log_standard_normal(estimate.whitened)
    stats = {"lp": lp[None], "log_evidence_variance": estimate.variance[None]}
    return tg.Posterior(model, draws, stats, {"method": "lattice()"})
