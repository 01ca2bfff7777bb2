"""Searches for the highest bound, all data at once: short ones from several values of theta, and one in rounds to its end."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.normal_latents import LatentSites
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.ascent import ascend
from torchgpmc.numerics.joint_ascent import ascend_together
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator
from torchgpmc.trees import concatenate, take
from torchgpmc.variational.bound import HeldSites, Positions, VariationalMarginal, inducing_positions

_BOUND = 12.0  # of theta, and of inducing points in deviations of the inputs
_NUM_CANDIDATES = 8
_SLOPE = 0.01  # of the bound, in nats for a unit of theta or a deviation of the inputs: where it is smaller all over, a search ends
_MOVE = 1e-4  # nats that Newton's step promises, at less of which a round's moves end
_TOLERANCE = 1e-8  # of q while theta is far from where it will end
_CHUNK_ELEMENTS = 4_000_000  # of projections, and of precisions
_FIRST_STEPS, _ROUND_STEPS, _ROUND_MOVES = 100, 10, 20  # of q in the first and last rounds, and in others; of L-BFGS
_END = 1e-3  # nats that a round gained, by less of which a search ends
_CANDIDATE_STEPS = 20
SMALL_GAIN = 0.01  # nats: by less a search that ends, however it ends, has converged
_FURTHER = 2  # searches that begin where those before did not all meet
_SHORT = 1  # rounds of a search that only tells how good a beginning is
_MOST_DATA = 4000  # for that; of more, so many drawn at random tell as much
# Where functions hang together a datum is in a product for every two: then as many as take about as long, and no fewer than these.
_PRODUCTS, _LEAST_DATA = 24_000, 500


class Found(NamedTuple):
    """Where a search ended."""

    position: Tensor  # (D,)
    sites: LatentSites | None
    value: float  # of the bound and the prior
    rise: float  # of that in the last round


class Beginning(NamedTuple):
    """Where the search that goes on begins."""

    theta: Tensor  # (P,)
    sites: LatentSites | None
    tried: tuple[float, ...]  # bound and prior where short searches ended, in the order of their beginnings; NaN of one that failed
    ends: tuple[Found, ...] = ()  # of the other short searches
    further: tuple[Found, ...] = ()  # beginnings of more, from which none has begun


def best_beginning(model: GPModel, num_starts: int, seed: int, bar: tqdm) -> Beginning:
    """The end of the best of ``num_starts`` short searches, inducing points where they are.

    They begin at the one of the present theta and some draws from the prior where the bound is highest, at the present theta and
    at draws as they come. The bound at a beginning says little of where a search will end: the highest is often that of a small
    variance, under which all labels are noise, and next to poor optima. One round of steps tells most optima apart.

    Args:
        model: with a factorised likelihood and one data set.
        num_starts: short searches; of one there is none, and the search begins where the bound is highest.
        seed: of the draws from the prior, and of the data that short searches see where there are many.
        bar: counts rounds.

    Raises:
        ValueError: a bound that is finite nowhere.
    """
    generator = make_generator(seed, model.train_x.device)
    drawn = model.layout.starting_points(max(_NUM_CANDIDATES, num_starts - 1), generator)
    theta = torch.cat([model.layout.present(model), drawn]).detach()
    if not model.layout.size:
        return Beginning(theta[0], None, ())
    part = _some_data(model, generator)
    value, sites = values_at(part, theta)
    if not bool(torch.isfinite(value).any()):
        raise ValueError(
            f"the variational bound is not finite at the model's hyperparameters, nor at {len(drawn)} draws from their prior. "
            f"Expected it to be somewhere; check the scale of train_x and train_y, and raise jitter (now {model.jitter:g})."
        )
    highest = int(value.nan_to_num(-math.inf).argmax())
    if num_starts == 1:
        return Beginning(theta[highest], None, ())
    rows = [highest, *(row for row in range(len(theta)) if row != highest)][:num_starts]
    still = inducing_positions(model, False)
    ends = [search(part, still, theta[row], take(sites, slice(row, row + 1)), _SHORT, bar) for row in rows]
    tried = tuple(end.value if math.isfinite(end.value) else math.nan for end in ends)
    best = max(ends, key=lambda end: end.value if math.isfinite(end.value) else -math.inf)
    if not math.isfinite(best.value):
        return Beginning(theta[highest], None, tried)
    if part is not model:  # sites are those of some data
        ends, best = [end._replace(sites=None) for end in ends], best._replace(sites=None)
    others = tuple(end for end in ends if end.position is not best.position and math.isfinite(end.value))
    left = [row for row in range(len(theta)) if row not in rows and bool(torch.isfinite(value[row]))][:_FURTHER]
    further = tuple(Found(theta[row], take(sites, slice(row, row + 1)), -math.inf, math.inf) for row in left)
    if part is not model:  # where a round is dear
        further = ()
    return Beginning(best.position, best.sites, tried, others, further)


def _some_data(model: GPModel, generator: torch.Generator) -> GPModel:
    """The model, or one of as many of its data as tell beginnings apart."""
    count, products = len(model.train_x), model.num_latents * (model.num_latents + 1) // 2
    most = min(_MOST_DATA, max(_LEAST_DATA, _PRODUCTS // products))
    if model.has_latents_at_data or count <= most:
        return model
    return model.on_rows(torch.randperm(count, generator=generator, device=model.train_x.device)[:most])


def values_at(model: GPModel, theta: Tensor, sites: LatentSites | None = None) -> tuple[Tensor, LatentSites]:
    """The bound and prior ``(C,)``, and q's sites, after a few steps of q at thetas ``(C, P)``, from sites at each or from none.

    From none roughly, where expectations are dear.
    """
    roughly = sites is None and _are_dear(model)
    found = []
    with torch.no_grad():
        for rows in torch.arange(len(theta)).split(_at_once(model)):
            marginal = VariationalMarginal(model, tolerance=_TOLERANCE, max_steps=_CANDIDATE_STEPS, roughly=roughly)
            marginal.sites = None if sites is None else take(sites, rows)
            value, optimum = marginal.evaluate(theta[rows])
            found.append((value, optimum.sites))
    values, ends = zip(*found, strict=True)
    return torch.cat(values), concatenate(ends)


def moved_together(model: GPModel, theta: Tensor, sites: LatentSites) -> Tensor:
    """Thetas ``(C, P)`` after a round's moves, the sites of each held; one stays where the algebra fails."""
    moved, still, size = [], inducing_positions(model, False), theta.shape[-1]
    for rows in torch.arange(len(theta)).split(_at_once(model)):
        held = HeldSites(model, still, take(sites, rows))
        covariance = identity_matrix(size, theta).expand(len(rows), -1, -1)
        moved.append(ascend_together(held, theta[rows], covariance, rise=_MOVE, max_iterations=_ROUND_MOVES).position)
    return torch.cat(moved).clamp(-_BOUND, _BOUND)


def _at_once(model: GPModel) -> int:
    """As many thetas as memory is given for."""
    return max(1, _CHUNK_ELEMENTS // (model.latent_size * max(model.latent_size, len(model.train_x))))


def _are_dear(model: GPModel) -> bool:
    """Whether expectations are long integrals: how functions hang together takes one of each a step, and few points do at first.

    Of 1980 data, seven classes, M = 100, steps to the best q take 2 CPU seconds a theta by points, and 40 by integrals.
    """
    likelihood = as_likelihood(model.likelihood)
    return model.num_latents > 1 and likelihood.is_smooth and likelihood.expectation_operations > 0


def search(
    model: GPModel, positions: Positions, position: Tensor, sites: LatentSites | None, max_iterations: int, bar: tqdm
) -> Found:
    """From ``position`` ``(D,)``, in rounds: natural-gradient steps for q, then L-BFGS for the rest while q's sites are held."""
    value, num_steps = -math.inf, _FIRST_STEPS
    for number in range(max_iterations + 1):
        marginal = VariationalMarginal(model, positions, _TOLERANCE, num_steps)
        marginal.sites = sites
        with torch.no_grad():
            best, found = marginal.evaluate(position[None])
        rise, value, sites = float(best) - value, float(best), found.sites
        bar.update()
        bar.set_postfix(bound=f"{value:.4f}", refresh=False)
        if not len(position):
            rise = 0.0
        # A few steps may say little of many: near a saddle q gains next to nothing for a while.
        if (rise <= _END and num_steps == _FIRST_STEPS) or number == max_iterations:
            fresh = _from_no_sites(model, positions, position)
            if number == max_iterations or fresh is None or fresh[0] <= value + _END:
                break
            value, sites = fresh
        num_steps = _ROUND_STEPS if rise > _END else _FIRST_STEPS
        step = ascend(HeldSites(model, positions, sites), position, bound=_BOUND, max_iterations=_ROUND_MOVES, slope=_SLOPE)
        if step is None:  # the algebra failed where it had not a moment ago
            break
        position = step.position
    return Found(position, sites, value, rise)


def _from_no_sites(model: GPModel, positions: Positions, position: Tensor) -> tuple[float, LatentSites] | None:
    """Bound and sites of q sought afresh where it may have several optima, of which carrying its sites along sees one."""
    if as_likelihood(model.likelihood).is_log_concave:
        return None
    with torch.no_grad():
        best, found = VariationalMarginal(model, positions, _TOLERANCE, _FIRST_STEPS).evaluate(position[None])
    return float(best), found.sites
