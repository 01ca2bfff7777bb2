"""Moves of the latents in coordinates that are white under Gaussian sites, for kernels that know a standard normal prior alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation
from torchgpmc.density import as_linear
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.whitening import GaussianSites, root_and_shift
from torchgpmc.numerics.linalg import identity_matrix, solve_lower, times_blocks
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.types import Density, Sampler, WarmUp


class WhiteState(NamedTuple):
    """v ``(C, V)`` and its log likelihood ``(C,)``; the kernel's state in w, and what leads from one to the other."""

    position: Tensor
    log_density: Tensor
    inner: Any
    coordinates: Any  # WhiteMap


class WhiteMap(NamedTuple):
    """v = (w + shift) R^-1, as rows; of C thetas, or of one for all chains."""

    root: Tensor  # R', (C, V, V)
    inverse: Tensor  # R^-1
    shift: Tensor  # (C, V)

    def white(self, v: Tensor) -> Tensor:
        """w ``(C, V)``."""
        return times_blocks(v, self.root.mT) - self.shift

    def latents(self, white: Tensor) -> Tensor:
        """v ``(C, V)``."""
        return times_blocks(white + self.shift, self.inverse)


def white_map(projection: Tensor, mean: Tensor, sites: GaussianSites) -> WhiteMap:
    """The coordinates that are white under the posterior which the sites give; v itself where that cannot be factorised.

    Args:
        projection: A' with f = m + A' v, ``(C, N, V)``.
        mean: m ``(C, N)``.
        sites: of one latent function, ``(N,)`` or ``(C, N)``.

    Example:
        >>> import torch
        >>> sites = GaussianSites(torch.tensor([3.0]), torch.tensor([6.0]))  # N(2, 1 / 3) beside the prior N(0, 1)
        >>> coordinates = white_map(torch.ones(1, 1, 1), torch.zeros(1, 1), sites)
        >>> coordinates.latents(torch.tensor([[0.0], [1.0]])).flatten()  # mean 1.5, and one deviation of 1 / 2 above
        tensor([1.5000, 2.0000])
    """
    root, shift = root_and_shift(projection, mean, sites)
    unit = identity_matrix(root.shape[-1], root).expand_as(root)
    ok = torch.isfinite(root).all(-1).all(-1) & torch.isfinite(shift).all(-1).all(-1)
    root = torch.where(ok[:, None, None], root, unit)
    return WhiteMap(root.mT, solve_lower(root, unit), torch.where(ok[:, None], shift.squeeze(-1), 0.0))


class _DensityOfWhite:
    """log p(y | v) N(v | 0, I) / N(w | 0, I) of w ``(C, V)``; its payload is v and log p(y | v)."""

    def __init__(self, log_likelihood: Any, coordinates: WhiteMap):
        self.log_likelihood = as_linear(log_likelihood)
        self.coordinates = coordinates

    def draw(self, white: Tensor, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        v = self.coordinates.latents(white)
        return self._weighed(white, v, self.log_likelihood.draw(v, generator)[0])

    def image(self, vectors: Tensor) -> Tensor:
        """w, v and what the likelihood sees of v, for vectors w ``(C, B, V)`` without shift."""
        v = times_blocks(vectors, self.coordinates.inverse)
        return torch.cat([vectors, v, self.log_likelihood.image(v)], -1)

    def draw_at(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same from :meth:`image`, without a product."""
        size = self.coordinates.shift.shape[-1]
        white, v, seen = image.split([size, size, image.shape[-1] - 2 * size], -1)
        v = v + self._origin[:, :size]
        return self._weighed(white, v, self.log_likelihood.draw_at(seen + self._origin[:, size:], generator)[0])

    @cached_property
    def _origin(self) -> Tensor:
        """v at w = 0, and what the likelihood sees of it."""
        size = self.coordinates.shift.shape[-1]
        return self.image(self.coordinates.shift.unsqueeze(1)).squeeze(1)[:, size:]

    def _weighed(self, white: Tensor, v: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return value + log_standard_normal(v) - log_standard_normal(white), (v, value)


def in_white_coordinates(log_likelihood: Any, sites: GaussianSites, kernel: Callable[[Density], Sampler]) -> Sampler:
    r"""A kernel for N(0, I) priors, such as :func:`pcn`, with the posterior under Gaussian sites in the prior's place.

    .. math:: p(v | y) \propto N(w | 0, I) \; \frac{p(y | v) N(v | 0, I)}{N(w | 0, I)}

    where w is white under the sites (:mod:`torchgpmc.models.whitening`). Exact whatever the sites, which must be functions of the
    data and theta alone; the nearer the posterior is to normal, the further a kernel moves. A theta takes one factorisation.

    Args:
        log_likelihood: of v, a :class:`torchgpmc.runs.blocks.LatentsGivenTheta` without prior.
        sites: of one latent function, ``(N,)`` or ``(C, N)``.
        kernel: from a density of w, whose payload it keeps, to a sampler.

    Returns:
        A sampler with :class:`WhiteState` and the kernel's Info.

    Source: the idea, for elliptical slices, is Nishihara, Murray & Adams 2014's; here the approximation is fixed.
    """

    def inner(coordinates: WhiteMap) -> Sampler:
        return kernel(_DensityOfWhite(log_likelihood, coordinates))

    def seen(state: Any, coordinates: WhiteMap) -> WhiteState:
        v, value = state.payload
        return WhiteState(v, value, state, coordinates)

    def init(position: Tensor, generator: torch.Generator) -> WhiteState:
        at = log_likelihood.kept.at
        with torch.no_grad():
            coordinates = white_map(at.projection.mT, at.mean, sites)
        return seen(inner(coordinates).init(coordinates.white(position), generator), coordinates)

    def step(state: WhiteState, generator: torch.Generator) -> tuple[WhiteState, Any]:
        moved, info = inner(state.coordinates).step(state.inner, generator)
        return seen(moved, state.coordinates), info

    return Sampler(init, step)


def white_move(model: GPModel, whitening: Approximation | None, kernel: Callable[[Density, Any], Sampler], warm_up: WarmUp) -> Move:
    """A move by a kernel for N(0, I) priors, in coordinates that are white under the prior or an approximation's sites.

    The sites are those at the mode of theta, as of ``NUTS(whitening=)``. Chains start around the mean of the posterior that the
    sites give: in the tails of a normal density, where the posterior's ratio to it is large, such kernels hardly move.

    Raises:
        ValueError: a model that cannot be approximated so.
        TypeError: something that is not an approximation.
    """
    if whitening is None:
        return Move(kernel, warm_up)
    sites = posterior_sites(model, whitening)

    def white(density: Any, tuning: Any) -> Sampler:
        return in_white_coordinates(density, sites, lambda of_white: kernel(of_white, tuning))

    def start(density: Any, normals: Tensor) -> Tensor:
        at = density.kept.at
        return white_map(at.projection.mT, at.mean, sites).latents(normals)

    return Move(white, warm_up, num_factorizations=1, start=start)
