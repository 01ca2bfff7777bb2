"""Mixtures of normal or Student t densities to draw importance samples from."""

from __future__ import annotations

import math
from typing import NamedTuple

import scipy.special
import torch
from torch import Tensor

from torchgpmc.numerics.linalg import cholesky, identity_matrix, inverse_lower, triangular_log_determinant
from torchgpmc.numerics.random import sobol_points


class Proposal(NamedTuple):
    """A mixture with components of given mean and covariance; Student t components are scaled to have that covariance.

    Example:
        >>> import math, torch
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> proposal = Proposal(half, torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.tensor(math.inf))  # two normals
        >>> draws = draw_from(proposal, 1024, torch.Generator().manual_seed(0))
        >>> draws.shape, (draws > 0).double().mean().round(decimals=2)
        (torch.Size([1024, 1]), tensor(0.5000, dtype=torch.float64))
    """

    log_share: Tensor  # (components,)
    mean: Tensor  # (components, D)
    factor: Tensor  # (components, D, D), lower Cholesky factors of the covariances
    degrees_of_freedom: Tensor  # (), whole and above 2; infinite for normal components


def _scale(degrees: float) -> float:
    """Square root of (nu - 2) / nu, which gives a Student t the covariance that its factor says."""
    return 1.0 if math.isinf(degrees) else math.sqrt(1 - 2 / degrees)


def draw_from(proposal: Proposal, num_draws: int, generator: torch.Generator) -> Tensor:
    """Draws ``(num_draws, D)`` that fill space more evenly than independent ones: from a randomised Sobol net.

    Each draw alone has the proposal's density, so estimates from fixed proposals are unbiased; together they are negatively
    dependent, and errors computed as for independent draws are too large, if anything (Owen 1997, "Scrambled net variance").

    Args:
        proposal: of D dimensions.
        num_draws: S.
        generator: for the net's randomisation.

    Example:
        >>> import math, torch
        >>> unit = from_modes(torch.zeros(1, 2), torch.eye(2)[None], torch.zeros(1), math.inf)  # N(0, I)
        >>> draws = draw_from(unit, 1024, torch.Generator().manual_seed(0))
        >>> (draws.mean(0).abs() < 0.002).all(), 1024**-0.5  # of independent draws the error would be
        (tensor(True), 0.03125)
    """
    dimension = proposal.mean.shape[-1]
    degrees = float(proposal.degrees_of_freedom)
    # One more coordinate for the length of a Student t, and the last for the component.
    uniforms = next(sobol_points(num_draws, dimension + 1 + math.isfinite(degrees), 1, 1, generator)).T
    noise = torch.special.ndtri(uniforms[:, :dimension])
    if math.isfinite(degrees):
        chi_square = torch.as_tensor(scipy.special.chdtri(degrees, uniforms[:, dimension].cpu().numpy())).to(noise)
        noise = noise * ((degrees - 2) / chi_square).sqrt().unsqueeze(-1)
    ends = proposal.log_share.exp().cumsum(0)
    component = torch.searchsorted(ends / ends[-1], uniforms[:, -1].to(ends).contiguous()).clamp_max(len(ends) - 1)
    return proposal.mean[component] + (proposal.factor[component] @ noise.to(proposal.mean).unsqueeze(-1)).squeeze(-1)


def log_density_of(proposal: Proposal, position: Tensor) -> Tensor:
    """Log density of the mixture at positions ``(S, D)``, normalised: ``(S,)``.

    Example:
        >>> import math, torch
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> proposal = Proposal(half, torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.tensor(math.inf))
        >>> log_density_of(proposal, torch.tensor([[0.0]])).exp() * (2 * math.pi) ** 0.5  # both have exp(-9 / 2)
        tensor([0.0111])
    """
    return torch.logsumexp(log_parts_of(proposal, position), 0)


def log_parts_of(proposal: Proposal, position: Tensor) -> Tensor:
    """Logs of what each component adds to the mixture's density at positions ``(S, D)``, its share included: ``(components, S)``.

    Example:
        >>> import math, torch
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> proposal = Proposal(half, torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.tensor(math.inf))
        >>> log_parts_of(proposal, torch.tensor([[3.0]])).exp() * (2 * math.pi) ** 0.5
        tensor([[7.6150e-09],
                [5.0000e-01]])
    """
    dimension, degrees = position.shape[-1], float(proposal.degrees_of_freedom)
    # One product for all: of thousands of positions solves took three times as long.
    inverse = inverse_lower(proposal.factor)
    white = (inverse.flatten(0, 1) @ position.mT).view(len(inverse), dimension, -1).sub_(inverse @ proposal.mean.unsqueeze(-1))
    square = white.square().sum(1) / _scale(degrees) ** 2
    log_scale = triangular_log_determinant(proposal.factor) + dimension * math.log(_scale(degrees))
    if math.isinf(degrees):
        log_kernel = -0.5 * (square + dimension * math.log(2 * math.pi))
    else:
        half = 0.5 * (degrees + dimension)
        constant = math.lgamma(half) - math.lgamma(0.5 * degrees) - 0.5 * dimension * math.log(degrees * math.pi)
        log_kernel = constant - half * torch.log1p(square / degrees)
    return log_kernel + (proposal.log_share - log_scale).unsqueeze(-1)


def from_modes(mean: Tensor, covariance: Tensor, log_share: Tensor, degrees_of_freedom: float) -> Proposal:
    """A component a mode.

    Args:
        mean: ``(components, D)``.
        covariance: ``(components, D, D)``, positive definite.
        log_share: unnormalised log shares ``(components,)``.
        degrees_of_freedom: a whole number above 2, or infinity for normal components.

    Raises:
        ValueError: a covariance that is not positive definite.

    Example:
        >>> import torch
        >>> proposal = from_modes(torch.zeros(2, 1), torch.tensor([[[4.0]], [[9.0]]]), torch.tensor([5.0, 5.0]), 5)
        >>> proposal.factor.flatten(), proposal.log_share.exp()  # deviations; shares add up to one
        (tensor([2., 3.]), tensor([0.5000, 0.5000]))
    """
    factor, ok = cholesky(covariance)
    if not bool(ok.all()):
        raise ValueError("a component's covariance is not positive definite. Expected it to be; widen it or use prior draws.")
    degrees = torch.tensor(degrees_of_freedom, dtype=mean.dtype, device=mean.device)
    return Proposal(torch.log_softmax(log_share, 0), mean, factor, degrees)


def with_defence(proposal: Proposal, mean: Tensor, factor: Tensor, share: float) -> Proposal:
    """The same with one more component, last, of the given share.

    Args:
        proposal: what keeps the rest, 1 - ``share``.
        mean: of the new component ``(D,)``.
        factor: lower Cholesky factor of its covariance ``(D, D)``.
        share: in (0, 1).

    Source: Hesterberg 1995, who bounds weights so.

    Example:
        >>> import math, torch
        >>> narrow = from_modes(torch.zeros(1, 1), torch.tensor([[[0.01]]]), torch.zeros(1), math.inf)
        >>> defended = with_defence(narrow, torch.zeros(1), torch.eye(1), 0.1)
        >>> far = torch.tensor([[3.0]])
        >>> target = torch.distributions.Normal(0.0, 1.0).log_prob(far).sum(-1)
        >>> (target - log_density_of(defended, far)).exp().round(), (target - log_density_of(narrow, far)).exp() > 1e30
        (tensor([10.]), tensor([True]))
    """
    log_share = torch.cat([proposal.log_share + math.log1p(-share), proposal.log_share.new_tensor([math.log(share)])])
    means, factors = torch.cat([proposal.mean, mean[None]]), torch.cat([proposal.factor, factor[None]])
    return Proposal(log_share, means, factors, proposal.degrees_of_freedom)


def along_axes(size: int, out: float, deviation: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``(2 size, size)`` and covariances of standard normal densities but for one coordinate each, narrow and far out.

    Args:
        size: D.
        out: how far, in either direction.
        deviation: along that coordinate.
        like: of the dtype and on the device wanted.

    Example:
        >>> mean, covariance = along_axes(2, 2.0, 0.5, torch.zeros(()))
        >>> mean.tolist(), covariance[0].tolist()
        ([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]], [[0.25, 0.0], [0.0, 1.0]])
    """
    unit = identity_matrix(size, like)
    covariance = unit - (1 - deviation**2) * torch.diag_embed(unit)
    return out * torch.cat([unit, 0.0 - unit]), covariance.repeat(2, 1, 1)
