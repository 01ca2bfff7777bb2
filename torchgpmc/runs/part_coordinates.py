"""Coordinates in which the parameters of each of a likelihood's parts are about white: along ridges, covariances their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.ridges import Ridges, ridges_of
from torchgpmc.numerics.linalg import cholesky, identity_matrix, solve_lower
from torchgpmc.samplers.adaptation import WindowedAdaptation, window_ends
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.trees import mapped
from torchgpmc.types import WarmUp


class Parts(NamedTuple):
    """Where the parameters of parts are in theta: B of each of G parts, one parameter of all parts after another."""

    columns: range
    num_parts: int

    @property
    def size(self) -> int:
        """B."""
        return len(self.columns) // self.num_parts

    def rows(self, columns: Tensor) -> Tensor:
        """From ``(C, B G)``, as theta has them, a row a part ``(C G, B)``."""
        return columns.reshape(len(columns), self.size, self.num_parts).mT.reshape(-1, self.size)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        return rows.view(-1, self.num_parts, self.size).mT.flatten(1)

    def within(self, theta: Tensor, rows: Tensor) -> Tensor:
        """theta ``(C, P)`` with these parameters of parts."""
        return torch.cat([theta[:, : self.columns.start], self.from_rows(rows), theta[:, self.columns.stop :]], -1)

    def of(self, theta: Tensor) -> Tensor:
        """The rows of theta ``(C, P)``."""
        return self.rows(theta[:, self.columns.start : self.columns.stop])

    def flattened(self, tree: Any) -> Any:
        """Tensors ``(C, G, ...)`` with a row a part ``(C G, ...)``."""
        return mapped(lambda leaf: leaf.flatten(0, 1), tree)

    def unflattened(self, tree: Any) -> Any:
        """The inverse of :meth:`flattened`."""
        return mapped(lambda leaf: leaf.unflatten(0, (-1, self.num_parts)), tree)


class PartCoordinates(NamedTuple):
    """What each part's parameters are measured from, and by: z = centre + factor x, z being straight along ridges.

    Example:
        >>> import torch
        >>> coordinates = PartCoordinates(torch.tensor([[1.0], [2.0]]), torch.tensor([[[3.0]], [[0.5]]]))  # two parts of one
        >>> coordinates.straight(torch.tensor([[1.0], [2.0]])).flatten(), coordinates.white(torch.tensor([[4.0], [3.0]])).flatten()
        (tensor([4., 3.]), tensor([1., 2.]))
    """

    centre: Tensor  # (G, B)
    factor: Tensor  # (G, B, B), lower triangular

    def straight(self, white: Tensor) -> Tensor:
        """z from x, rows ``(C G, B)``; differentiable."""
        scaled = (self.factor @ white.view(-1, *self.centre.shape).unsqueeze(-1)).squeeze(-1)
        return (self.centre + scaled).flatten(0, 1)

    def white(self, straight: Tensor) -> Tensor:
        """x from z."""
        centred = straight.view(-1, *self.centre.shape) - self.centre  # (C, G, B)
        return solve_lower(self.factor, centred.permute(1, 2, 0)).permute(2, 0, 1).flatten(0, 1)


def unit_coordinates(parts: Parts, like: Tensor) -> PartCoordinates:
    """x = z."""
    unit = identity_matrix(parts.size, like).expand(parts.num_parts, -1, -1)
    return PartCoordinates(like.new_zeros(parts.num_parts, parts.size), unit)


class PartMoments(NamedTuple):
    """Sums over z, ``C`` rows of every part at a time."""

    num_seen: Tensor  # ()
    sums: Tensor  # (G, B)
    products: Tensor  # (G, B, B)


def no_moments(parts: Parts, like: Tensor) -> PartMoments:
    """Nothing seen yet."""
    count, size = parts.num_parts, parts.size
    return PartMoments(like.new_zeros(()), like.new_zeros(count, size), like.new_zeros(count, size, size))


def with_rows(moments: PartMoments, straight: Tensor) -> PartMoments:
    """And these rows ``(C G, B)``."""
    rows = straight.view(-1, *moments.sums.shape)
    products = torch.einsum("cgi,cgj->gij", rows, rows)
    return PartMoments(moments.num_seen + len(rows), moments.sums + rows.sum(0), moments.products + products)


def coordinates_from(moments: PartMoments) -> PartCoordinates:
    """Centre and root of the covariance, shrunk as Stan's towards a small multiple of the identity."""
    count, mean = moments.num_seen, moments.sums / moments.num_seen
    covariance = (moments.products - count * mean.unsqueeze(-1) * mean.unsqueeze(-2)) / (count - 1).clamp_min(1)
    keep, ridge = count / (count + 5), 5e-3 / (count + 5)
    covariance = keep * covariance + ridge * identity_matrix(mean.shape[-1], mean)
    factor, ok = cholesky(covariance)
    diagonal = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1).clamp_min(float(ridge)).sqrt())
    return PartCoordinates(mean, torch.where(ok[:, None, None], factor, diagonal))


class PartsTuning(NamedTuple):
    """What parts are moved with, and what it is learned from."""

    inner: Any  # the sampler's
    coordinates: PartCoordinates
    moments: PartMoments


class PartsWarmUp(NamedTuple):
    """The warm-up of one tuning for all parts, which have centres and covariances of their own.

    Args:
        inner: the sampler's, of rows: it tunes the step size, where it is one of windows; any other is left to itself.
        parts: where they are.
    """

    inner: WarmUp
    parts: Parts

    @property
    def steps(self) -> int:
        """The inner one's."""
        return self.inner.steps

    def _windows(self) -> WindowedAdaptation | None:
        """The inner one, if covariances are to be learned."""
        inner = self.inner
        return inner if isinstance(inner, WindowedAdaptation) and inner.mass_matrix is not MassMatrix.IDENTITY else None

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> PartsTuning:
        """From a row a part."""
        known = None if self._windows() is None else identity_matrix(self.parts.size, position)
        inner = self.inner.start(self.parts.rows(position), known, generator)
        return PartsTuning(inner, unit_coordinates(self.parts, position), no_moments(self.parts, position))

    def update(self, tuning: PartsTuning, iteration: int, state: Any, info: Any, generator: torch.Generator) -> PartsTuning:
        """The inner one's: the states it gets are rows, white ones; and with new coordinates its step size is sought afresh."""
        inner, coordinates, moments = tuning
        inner, windows = self.inner.update(inner, iteration, state, info, generator), self._windows()
        if windows is None:
            return PartsTuning(inner, coordinates, moments)
        ends = window_ends(windows.steps)
        if ends and windows.first_buffer() < iteration <= ends[-1]:
            moments = with_rows(moments, coordinates.straight(state.position))
        if iteration in ends:
            coordinates, moments = coordinates_from(moments), no_moments(self.parts, state.position)
            inner = windows.averaged_anew(inner, None, generator)
        return PartsTuning(inner, coordinates, moments)

    def restarts(self, iteration: int) -> bool:
        """The inner one's."""
        return self.inner.restarts(iteration)

    def statistics(self, tuning: PartsTuning) -> dict[str, Tensor]:
        """None: blocks would share names."""
        return {}


def ridges_of_parts(model: GPModel, parts: Parts) -> Ridges | None:
    """The likelihood's ridges, if each part's follow its own parameters alone."""
    ridges = ridges_of(model)
    if ridges is None:
        return None
    with torch.no_grad():
        theta = model.layout.present(model)
        one = torch.arange(parts.num_parts, device=theta.device).unsqueeze(-1) == 0
        moved = parts.within(theta, torch.where(one, parts.of(theta) + 0.7, parts.of(theta)))
        apart = parts.of(ridges.original(moved))[1:], parts.of(ridges.original(theta))[1:]
        return ridges if torch.equal(*apart) else None
