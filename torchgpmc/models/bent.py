r"""The posterior in coordinates that are white under a Gaussian fit near its theta, where following them everywhere is dear.

What v has for mean and covariance under data that hold u (:mod:`torchgpmc.models.following`) takes a factorisation as large as all
latents together at every theta. Around a fit it is nearly a polynomial of few terms, which are worked out once: with t the distance
of theta from the fit's in its deviations,

.. math:: v = c + A (\theta - \theta_0) + \tfrac{1}{2} \sum_{pq} B_{pq} t_p t_q + S(t) w

where S is upper triangular, its strict part :math:`S_0 + \sum_p t_p S_p` and the logarithm of its diagonal
:math:`d_0 + \sum_p t_p d_p`: one to one at every theta, with a volume that costs nothing. Far off t goes no further than three
deviations (a hyperbolic tangent), so that no power of it runs away. Coordinates decide the speed alone: their volume is counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.models.affine import Mapped
from torchgpmc.models.following import FollowingMap
from torchgpmc.numerics.linalg import identity_matrix

_FURTHEST = 3.0  # deviations


class _Point(NamedTuple):
    """Where one theta of each chain is."""

    offset: Tensor  # (C, P), theta - origin
    terms: Tensor  # (C, 1 + P), one and t
    rates: Tensor  # (C, P), derivatives of t in theta's distances
    diagonal: Tensor  # (C, B, m), of S


class BentMap(NamedTuple):
    """The map, for B independent blocks of latents.

    Example:
        >>> import torch
        >>> zero, half = torch.zeros(1, 1), torch.tensor([[[0.0, 0.5]]])
        >>> rising = BentMap(zero[0], torch.ones(1, 1), zero, zero[None], half, torch.zeros(1, 2, 1, 1), zero)
        >>> rising.latents(torch.tensor([[0.0], [0.1], [90.0]]), torch.ones(3, 1)).flatten()  # S is exp(t / 2), t at most 3
        tensor([1.0000, 1.0513, 4.4817])
    """

    origin: Tensor  # (P,), the theta of the fit, as positions have it
    units: Tensor  # (P, T), distances in theta to t's, but for the tangent
    slope: Tensor  # (V, P), A
    bend: Tensor  # (V, T, T), symmetric, B
    log_diagonal: Tensor  # (B, m, 1 + T), d
    strict: Tensor  # (B, 1 + T, m, m), strictly upper triangular
    centre: Tensor  # (B, m), c

    def latents(self, theta: Tensor, white: Tensor) -> Tensor:
        """v ``(C, V)`` from theta ``(C, P)`` and w ``(C, V)``."""
        return self._mapped(theta, white)[0]

    def whitened(self, theta: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """v, and log |dv / dw| ``(C,)``; differentiable."""
        v, log_volume, *_ = self._mapped(theta, white)
        return v, log_volume

    def white(self, theta: Tensor, v: Tensor) -> Tensor:
        """w ``(C, V)`` from theta and v: what :meth:`latents` undoes."""
        at = self._at(theta)
        rest = (v - self._mean(at)[0]).view(len(v), *self.centre.shape, 1)
        scale = torch.einsum("ct,btij->cbij", at.terms, self.strict) + torch.diag_embed(at.diagonal)
        return torch.linalg.solve_triangular(scale, rest, upper=True).reshape(v.shape)

    def mapped(self, theta: Tensor, white: Tensor) -> Mapped:
        """v and the volume, with their slopes by formulas."""
        v, log_volume, at, products, bent = self._mapped(theta, white)
        of_volume = self.log_diagonal.sum((0, 1))[1:]

        def slopes(gradient: Tensor) -> tuple[Tensor, Tensor]:
            rows = gradient.view(len(gradient), *self.centre.shape)
            of_diagonal = rows * at.diagonal
            terms = at.terms.T.unsqueeze(-1)  # (1 + T, C, 1)
            stretched = (rows.transpose(0, 1).unsqueeze(1) * terms).transpose(1, 2).flatten(2)  # of each block (C, (1 + T) m)
            of_white = (stretched @ self.strict.flatten(1, 2)).transpose(0, 1) + of_diagonal
            of_terms = torch.einsum("bcti,cbi->ct", products[:, :, 1:], rows)
            own = of_diagonal * white.view_as(rows)
            of_terms = of_terms + (own.flatten(1) @ self.log_diagonal.flatten(0, 1))[:, 1:] + of_volume
            of_terms = of_terms + (gradient.unsqueeze(-1) * bent).sum(1)
            return gradient @ self.slope + (of_terms * at.rates) @ self.units.mT, of_white.reshape(gradient.shape)

        return Mapped(v, log_volume, slopes)

    def moved(self, origin: Tensor, jacobian: Tensor) -> BentMap:
        """With other numbers in theta's place, to first order: these at the fit, and theta's derivatives in them ``(P, P)``."""
        return self._replace(origin=origin, units=jacobian.mT @ self.units, slope=self.slope @ jacobian)

    def _at(self, theta: Tensor) -> _Point:
        offset = theta - self.origin
        bounded = torch.tanh(offset @ self.units / _FURTHEST)
        terms = torch.cat([torch.ones_like(bounded[:, :1]), _FURTHEST * bounded], -1)
        diagonal = torch.einsum("ct,bit->cbi", terms, self.log_diagonal).exp()
        return _Point(offset, terms, 1 - bounded.square(), diagonal)

    def _mean(self, at: _Point) -> tuple[Tensor, Tensor]:
        """v where w is zero ``(C, V)``, and B t ``(C, V, T)``."""
        t = at.terms[:, 1:]
        bent = torch.einsum("vpq,cq->cvp", self.bend, t)
        return self.centre.flatten() + at.offset @ self.slope.mT + 0.5 * (bent * t.unsqueeze(1)).sum(-1), bent

    def _mapped(self, theta: Tensor, white: Tensor) -> tuple[Tensor, Tensor, _Point, Tensor, Tensor]:
        """v, the volume, where theta is, each S_p w ``(B, C, 1 + T, m)``, and B t."""
        at = self._at(theta)
        mean, bent = self._mean(at)
        rows = white.view(len(white), *self.centre.shape)
        products = (rows.transpose(0, 1) @ self.strict.flatten(1, 2).mT).unflatten(-1, (at.terms.shape[-1], -1))
        turned = torch.einsum("bcti,ct->cbi", products, at.terms) + at.diagonal * rows
        log_volume = at.terms @ self.log_diagonal.sum((0, 1))
        return mean + turned.reshape(white.shape), log_volume, at, products, bent


def bent_map(following: FollowingMap, deviations: Tensor) -> BentMap | None:
    """What a map that follows theta is like around its origin, from its means and roots one deviation away.

    Args:
        following: the map.
        deviations: of theta under the fit ``(P,)``.

    Returns:
        The map; ``None`` where a covariance one deviation away does not factorise.
    """
    size = len(deviations)
    unit = identity_matrix(size, deviations)
    first, second = torch.triu_indices(size, size, 1, device=deviations.device)
    steps = torch.cat([torch.zeros_like(unit[:1]), unit, -unit, unit[first] + unit[second]])
    means: list[Tensor] = []
    scales: list[Tensor] = []
    with torch.no_grad():
        for step in steps:  # one after another: of each a factorisation as large as all latents
            theta = following.origin + step * deviations
            mean, scale, ok = following.normal_at(theta[None])
            if not bool(ok.all()):
                return None
            means.append(mean[0])
            if len(scales) <= 2 * size:
                scales.append(scale[0])
    return _by_differences(following, deviations, torch.stack(means), torch.stack(scales))


def _by_differences(following: FollowingMap, deviations: Tensor, means: Tensor, scales: Tensor) -> BentMap:
    """From means at the fit, above it and below in each of theta, above in pairs ``(1 + 2 P + pairs, V)``; roots but of pairs."""
    size = len(deviations)
    reach = _FURTHEST * math.tanh(1 / _FURTHEST)  # what t is a deviation away
    centre, above, below, pairs = means.split([1, size, size, len(means) - 2 * size - 1])
    first, second = torch.triu_indices(size, size, 1, device=deviations.device)
    bend = means.new_zeros(size, size, means.shape[-1])
    bend[first, second] = bend[second, first] = pairs - above[first] - above[second] + centre
    bend.diagonal().copy_((above - 2 * centre + below).T)
    logs, strict = scales.diagonal(dim1=-2, dim2=-1).log(), scales.triu(1)

    def polynomial(values: Tensor) -> Tensor:
        """Value and slopes in t, first."""
        at, up, down = values.split([1, size, size])
        return torch.cat([at, (up - down) / (2 * reach)])

    return BentMap(
        origin=following.origin,
        units=deviations.reciprocal().diag(),
        slope=((above - below) / (2 * deviations.unsqueeze(-1))).mT,
        bend=bend.movedim(-1, 0) / reach**2,
        log_diagonal=polynomial(logs).movedim(0, -1),
        strict=polynomial(strict).transpose(0, 1).contiguous(),
        centre=centre.view_as(following.linear),
    )
