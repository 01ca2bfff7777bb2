"""Gibbs sampling of latents one after another, on C chains at once, where the likelihood is a product over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.density import as_density, mask_value
from torchgpmc.numerics.linalg import solve_lower
from torchgpmc.numerics.random import normal_like
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.types import Density, Sampler

# From the precision of f a priori (C, N, N), its mean (C, N) and f itself (C, K, N) to the next f, and likelihoods evaluated (C,).
SiteUpdates = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


class GibbsLikeState(NamedTuple):
    """Position ``(C, K N)``, its log likelihood ``(C,)``, what that was made from, and the prior precision of f."""

    position: Tensor
    log_density: Tensor
    payload: Any
    precision: Tensor  # (C, N, N), or (1, N, N) for all chains


class GibbsLikeInfo(NamedTuple):
    """What is known about one sweep over the latents of each chain, each ``(C,)``."""

    acceptance_rate: Tensor  # one over the number of values tried a latent
    n_steps: Tensor  # likelihood evaluations; N factors are one
    n_failures: Tensor  # evaluations of the whole likelihood that gave -inf


def by_slices(pointwise: Callable[[Tensor], Tensor]) -> SiteUpdates:
    r"""Each latent, or the K latents of a datum, by an elliptical slice of p(f_n | f_rest) p(y_n | f_n), whatever its shape.

    Args:
        pointwise: log p(y_n | f_n), of f ``(C, K, N)`` to ``(C, N)``.
    """

    def updates(precision: Tensor, mean: Tensor, f: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        f, mean, current = f.clone(), mean.unsqueeze(1), pointwise(f)
        tried = torch.zeros_like(current[:, 0])
        for site in range(f.shape[-1]):
            row = precision[:, site]
            deviation = row[:, site, None].rsqrt()
            here = f[..., site]
            centre = here - ((f - mean) @ row.unsqueeze(-1)).squeeze(-1) * deviation.square()
            density = _white_site(pointwise, f, site, centre, deviation)
            start = EllipticalSliceState((here - centre) / deviation, current[:, site])
            moved, info = elliptical_slice(density).step(start, generator)
            f[..., site] = centre + deviation * moved.position
            tried = tried + info.n_steps
        return f, tried / f.shape[-1]

    return updates


def _white_site(
    pointwise: Callable[[Tensor], Tensor], f: Tensor, site: int, centre: Tensor, deviation: Tensor
) -> Callable[[Tensor], Tensor]:
    """log p(y_n | f_n) ``(C,)`` as a function of f_n ``(C, K)``, standardised by its prior given the rest."""
    candidate = f.clone()

    def log_likelihood(white: Tensor) -> Tensor:
        candidate[..., site] = centre + deviation * white
        return mask_value(pointwise(candidate)[:, site])

    return log_likelihood


def by_normals(precision: Tensor, shift: Tensor) -> SiteUpdates:
    r"""Exact draws where p(y_n | f_n) is normal in f_n, proportional to exp(shift_n f_n - precision_n f_n^2 / 2).

    A sweep over p(f_n | f_rest, y_n) is one step of Gauss and Seidel with noise, hence one triangular solve (Roberts & Sahu 1997,
    section 2.2): with D + T the lower triangle of the posterior's precision, D its diagonal,

    .. math:: (D + T) f' = D^{1/2} z - T^\top f + \Lambda m + shift, \quad z \sim N(0, I)

    Args:
        precision: W ``(C, N)``, or ``(N,)`` for all chains.
        shift: the same shape.
    """

    def updates(prior: Tensor, mean: Tensor, f: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        posterior = prior + torch.diag_embed(precision)
        linear = (shift - precision * mean).unsqueeze(-2)
        centred = f - mean.unsqueeze(1)
        noise = posterior.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-2) * normal_like(f, generator)
        right = noise + linear - centred @ posterior.tril(-1)
        moved = solve_lower(posterior.tril(), right.mT).mT
        return moved + mean.unsqueeze(1), torch.ones_like(f[:, 0, 0])

    return updates


def gibbs_like(
    log_likelihood: Density | Callable[[Tensor], Tensor], *, factor: Tensor, mean: Tensor, updates: SiteUpdates
) -> Sampler:
    """Each latent drawn given all others and its datum, one after another (Neal 1997; paper C, section 1.4.1).

    Every update is accepted; what is slow is that p(f_n | f_rest) is narrow where f is smooth. A step is a sweep over all latents.

    Args:
        log_likelihood: ``(C, K N) -> (C,)``, of whitened latents v ~ N(0, I).
        factor: L ``(C, N, N)``, lower triangular, with f = m + L v for each of K latent functions; ``(1, N, N)`` for all chains.
        mean: m ``(C, N)``, or ``(1, N)``.
        updates: :func:`by_normals` or :func:`by_slices`, of the same likelihood as a product over f_n.

    Returns:
        A sampler with :class:`GibbsLikeState` and :class:`GibbsLikeInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.samplers.gibbs_like import by_normals, gibbs_like
        >>> generator = torch.Generator().manual_seed(0)
        >>> factor, one = torch.eye(2)[None], torch.ones(2)
        >>> updates = by_normals(one, one)  # p(y | f) is N(f | 1, I): the posterior is N(1/2, 1/2)
        >>> log_likelihood = lambda v: -0.5 * (v - 1).square().sum(-1)
        >>> sampler = gibbs_like(log_likelihood, factor=factor, mean=torch.zeros(1, 2), updates=updates)
        >>> state, info = sampler.step(sampler.init(torch.zeros(1000, 2), generator), generator)
        >>> (state.position.mean(0) - 0.5).abs() < 0.11, (state.position.var(0) - 0.5).abs() < 0.11  # five standard errors
        (tensor([True, True]), tensor([True, True]))
    """
    density = as_density(log_likelihood)

    def init(position: Tensor, generator: torch.Generator) -> GibbsLikeState:
        return GibbsLikeState(position, *density.draw(position, generator), torch.cholesky_inverse(factor))

    def step(state: GibbsLikeState, generator: torch.Generator) -> tuple[GibbsLikeState, GibbsLikeInfo]:
        v = state.position.view(len(state.position), -1, factor.shape[-1])
        f, tried = updates(state.precision, mean, mean.unsqueeze(1) + v @ factor.mT, generator)
        moved = solve_lower(factor, (f - mean.unsqueeze(1)).mT).mT.flatten(1)
        log_density, payload = density.draw(moved, generator)
        info = GibbsLikeInfo(1 / tried, tried + 1, torch.isinf(log_density).to(tried))
        return GibbsLikeState(moved, log_density, payload, state.precision), info

    return Sampler(init, step)
