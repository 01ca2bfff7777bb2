"""Gaussian sites in place of the limits: a tilt that also narrows, matched by expectation propagation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import divided_by_root, identity_matrix, root_under_sites
from torchgpmc.numerics.special import interval_densities, log_ndtr_interval
from torchgpmc.orthant.problem import Problem, in_order
from torchgpmc.orthant.separation import SeparatedProposal, draw, log_weights_at, scaled_limit

_MAX_ITERATIONS = 50
# Where means come to rest more slowly than by a tenth an iteration, steps are shortened, but not for ever.
_SLOW, _SHORTER, _LEAST_STEP = 0.9, 0.7, 0.1
_LEAST_CAVITY = 1e-3  # share of a marginal's precision that its cavity keeps, however precise the site
_FAR = 30.0  # sds, beyond which the variance in a tail comes from its series
_LEAST_ROOM = 1e-6  # of a site's precision below the noise's
_NARROW = 1e-2  # sds, below which an interval is as good as uniform
# Shares of the matched precisions that are tried: each shape of problem prefers another.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PILOT_POINTS = 256
_PILOT_SHARE = 0.25
# The mildest share whose weights spread no more than this times the least: their tails are lighter and nets do better on them.
_TOLERATED_SPREAD = 1.5


class Sites(NamedTuple):
    r"""One factor :math:`\exp(b_i (x_i - m_i) - \tfrac12 \tau_i (x_i - m_i)^2)` for each limit.

    Centred at the mean m of their product with the normal, where the slopes are :math:`b = \Sigma^{-1} m`.
    """

    whitened_mean: Tensor  # (B, N), L^-1 m
    precision: Tensor  # (B, N), tau


def _truncated_moments(below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the standard normal within limits."""
    at_lower, at_upper = interval_densities(below, above, log_ndtr_interval(below, above))
    mean = at_lower - at_upper
    finite_below, finite_above = torch.where(torch.isinf(below), 0.0, below), torch.where(torch.isinf(above), 0.0, above)
    variance = 1 + finite_below * at_lower - finite_above * at_upper - mean.square()
    # Both cancel where the interval is narrow or far out.
    inverse = torch.maximum(below, -above).clamp_min(_FAR).square().reciprocal()
    tail = inverse * (1 - 6 * inverse)
    variance = torch.where(torch.maximum(below, -above) > _FAR, tail, variance)
    width = above - below
    variance = torch.where((width < _NARROW) | (width.square() / 12 < variance), width.square() / 12, variance)
    return mean, variance


def matched_sites(problem: Problem, tolerance: float = 1e-3) -> Sites:
    """Sites matched by expectation propagation, all at once and damped where that does not settle (Cunningham et al. 2011).

    Any sites give unbiased estimates; those of an entry that fails stay as they were.

    Args:
        problem: B problems.
        tolerance: how far means may still be from matched, in standard deviations; sites only guide the points.
    """
    with torch.no_grad():
        factor, lower, upper = problem.factor, problem.lower, problem.upper
        whitened_mean, precision, slope = (torch.zeros_like(lower) for _ in range(3))
        root = identity_matrix(lower.shape[-1], lower).expand_as(factor)
        step = torch.ones_like(lower[:, :1])
        last = torch.full_like(step, torch.inf)
        for _ in range(_MAX_ITERATIONS):
            variance = divided_by_root(factor, root).square().sum(-1)
            mean = (factor @ whitened_mean.unsqueeze(-1)).squeeze(-1)
            cavity_variance = 1 / (1 / variance - precision).clamp_min(_LEAST_CAVITY / variance)
            cavity_sd = cavity_variance.sqrt()
            cavity_mean = mean - slope * cavity_variance
            pull, ratio = _truncated_moments(
                scaled_limit(lower - cavity_mean, cavity_sd), scaled_limit(upper - cavity_mean, cavity_sd)
            )
            moved = cavity_mean + cavity_sd * pull
            new_precision = (1 / ratio - 1).clamp_min(0.0) / cavity_variance
            new_slope = pull / cavity_sd + new_precision * (moved - mean)
            change = ((moved - mean).abs() * variance.rsqrt()).amax(-1, keepdim=True)
            going = change > tolerance
            if not bool(going.any()):
                break
            step = torch.where(change > _SLOW * last, (_SHORTER * step).clamp_min(_LEAST_STEP), step)
            last = change
            trial = precision + step * (new_precision - precision)
            aim = slope + step * (new_slope - slope)
            trial_root, ok = root_under_sites(factor, trial)
            right = (aim.unsqueeze(-2) @ factor).squeeze(-2) - whitened_mean
            inner = torch.linalg.solve_triangular(trial_root.mT, right.unsqueeze(-1), upper=True)
            along = torch.linalg.solve_triangular(trial_root, inner, upper=False).squeeze(-1)
            ok = (ok & torch.isfinite(along).all(-1) & torch.isfinite(trial).all(-1)).unsqueeze(-1) & going
            whitened_mean = torch.where(ok, whitened_mean + along, whitened_mean)
            precision = torch.where(ok, trial, precision)
            slope = torch.where(ok, aim - trial * (factor @ along.unsqueeze(-1)).squeeze(-1), slope)
            root = torch.where(ok.unsqueeze(-1), trial_root, root)
        return Sites(whitened_mean, precision)


def sites_beside_noise(problem: Problem, slope: Tensor, precision: Tensor) -> Sites:
    r"""Matched sites of x = g + e, e standard normal noise, from those of g, which may have been found more cheaply.

    Given its cavity g_i is linear in x_i, so what matches the moments of one matches those of the other: a site of x with variance
    :math:`1 / \tau_i` is one of g with the noise's beside it, :math:`1 / W_i = 1 + 1 / \tau_i`. Slopes are the same.

    Args:
        problem: B problems, of x.
        slope: of the sites at the mean of g ``(B, N)``: the inverse of g's covariance times that mean.
        precision: W ``(B, N)``, below one.
    """
    whitened_mean = (slope.unsqueeze(-2) @ problem.factor).squeeze(-2)
    return Sites(whitened_mean, precision / (1 - precision).clamp_min(_LEAST_ROOM))


def guided(problem: Problem, sites: Sites) -> SeparatedProposal:
    r"""Draws each variable given those before it and the sites of those after it, within its limits.

    The product of normal and sites has mean m and factor C = L G^-1. Given the variables before it and without its own site,
    variable i is normal there with precision 1 / s^2 = 1 / C_ii^2 - tau_i; the weight is what the limits say beyond the sites,

    .. math::
        w = Z \prod_i \frac{P(l_i < N(m_i(x_{<i}), s_i^2) < u_i)}{\int N(x_i; m_i(x_{<i}), s_i^2) \, \text{site}_i(x_i) \, dx_i},
        \qquad Z = \int N(x; 0, \Sigma) \prod_i \text{site}_i(x_i) \, dx

    (Richard & Zhang 2007; Liesenfeld & Richard 2010, who fit the sites by regression). Differentiable in the problem at fixed
    sites.
    """
    whitened_mean, precision = sites
    root, ok = root_under_sites(problem.factor, precision)
    # Where rounding breaks the factorisation, sites without precision still give unbiased weights.
    precision = torch.where(ok.unsqueeze(-1), precision, 0.0)
    root = torch.where(ok.view(-1, 1, 1), root, identity_matrix(root.shape[-1], root))
    factor = divided_by_root(problem.factor, root)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    plain, root_diagonal = problem.factor.diagonal(dim1=-2, dim2=-1), root.diagonal(dim1=-2, dim2=-1)
    # 1 / s^2; at least the variable's own precision given those before it, but for rounding.
    sd = plain * (root_diagonal.square() - precision * plain.square()).clamp_min(1.0).rsqrt()
    ratio = diagonal / sd
    centre = (problem.factor @ whitened_mean.unsqueeze(-1)).squeeze(-1)
    slope = torch.linalg.solve_triangular(problem.factor.mT, whitened_mean.unsqueeze(-1), upper=True).squeeze(-1)
    push = sd * slope
    return SeparatedProposal(
        rows=(factor * (sd / diagonal.square()).unsqueeze(-1)).tril(-1),
        lower=scaled_limit(problem.lower - centre, sd, push),
        upper=scaled_limit(problem.upper - centre, sd, push),
        shift=-push / ratio,
        slope=1 / ratio - ratio,
        scale=1 / ratio,
        constant=0.5 * (push.square() - whitened_mean.square()).sum(-1) - (root_diagonal * ratio).log().sum(-1),
        linear=-push,
        quadratic=0.5 * (1 - ratio.square()),
        along=torch.zeros_like(push),
        centre=centre,
        factor=factor,
    )


def hardest_first(problem: Problem, sites: Sites) -> tuple[Problem, Sites, Tensor]:
    """The problem with the variables first whose limits say most, beside what the normal says: the order ``(B, N)`` and its sites.

    As good as placing one after another the variable least probable given those before (Gibson, Glasbey & Elston 1994), at the
    price of a sort.
    """
    with torch.no_grad():
        centre = (problem.factor @ sites.whitened_mean.unsqueeze(-1)).squeeze(-1)
    moved, order = in_order(problem, order_of(problem, sites))
    with torch.no_grad():
        whitened = torch.linalg.solve_triangular(moved.factor, centre.gather(1, order).unsqueeze(-1), upper=False).squeeze(-1)
        return moved, Sites(whitened, sites.precision.gather(1, order)), order


def order_of(problem: Problem, sites: Sites) -> Tensor:
    """Of the variables, those first whose limits say most beside what the normal says ``(B, N)``."""
    with torch.no_grad():
        hardness = sites.precision * problem.covariance.diagonal(dim1=-2, dim2=-1)
        return (-hardness).argsort(dim=-1, stable=True)


def shared(sites: Sites, share: float) -> Sites:
    """Sites with a share of their precisions; the mean of the product stays."""
    return sites._replace(precision=share * sites.precision)


def mildest(problem: Problem, sites: Sites, uniforms: Tensor) -> Sites:
    r"""The sites at the share of their precisions that makes the weights nearly even, for each entry its own.

    The spread of the weights at a share, :math:`E[w] E[1/w] - 1` over the truncated normal, is estimated for all shares from one
    set of pilot points of a mild proposal, which reaches into the tails where narrower ones would hardly go and have large weights.

    Args:
        problem: B problems.
        sites: matched.
        uniforms: ``(N - 1, P)``, of points that the estimate will not use: then it stays unbiased.
    """
    with torch.no_grad():
        pilot = guided(problem, shared(sites, _PILOT_SHARE))
        log_weight, points = draw(pilot, uniforms.expand(len(problem.lower), -1, -1))
        x = pilot.variables(torch.nn.functional.pad(points, (0, 0, 0, 1)))
        log_share = torch.log_softmax(log_weight, -1).unsqueeze(1)
        shares = torch.tensor(_SHARES, dtype=uniforms.dtype, device=uniforms.device)
        count = len(_SHARES)
        tried = Sites(
            sites.whitened_mean.repeat_interleave(count, 0), (sites.precision.unsqueeze(1) * shares[:, None]).flatten(0, 1)
        )
        repeated = Problem(*(part.repeat_interleave(count, 0) for part in problem))
        candidate = log_weights_at(guided(repeated, tried), x.repeat_interleave(count, 0)).unflatten(0, (-1, count))
        spread = torch.logsumexp(log_share + candidate, -1) + torch.logsumexp(log_share - candidate, -1)
        spread = spread.expm1().clamp_min_(0.0).nan_to_num_(torch.inf)
        mild = (spread <= _TOLERATED_SPREAD**2 * spread.amin(-1, keepdim=True)).to(uniforms).argmax(-1)
        return Sites(sites.whitened_mean, sites.precision * shares[mild].unsqueeze(-1))
