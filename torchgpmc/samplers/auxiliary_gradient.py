"""The marginal auxiliary gradient sampler for whitened latents on C chains at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.numerics.linalg import times_blocks
from torchgpmc.numerics.random import log_uniform, normal_like
from torchgpmc.samplers.metropolis import Attempt, MetropolisInfo, accept
from torchgpmc.types import LogDensity, Sampler


class Axes(NamedTuple):
    """Eigenvectors and eigenvalues of L' L, of C matrices or of one for all chains."""

    vectors: Tensor  # W, (C, M, M), or (1, M, M)
    values: Tensor  # d, (C, M), or (1, M)


class AuxiliaryGradientState(NamedTuple):
    """Position v ``(C, V)`` and its log likelihood ``(C,)``; position and gradient along the axes."""

    position: Tensor
    log_density: Tensor
    along: Tensor  # w = W' v, (C, V)
    slope: Tensor  # gradient in w, (C, V)
    axes: Any  # Axes


def axes_of(gram: Tensor) -> Axes:
    """Of symmetric matrices L' L ``(C, M, M)``; one eigendecomposition each.

    Example:
        >>> import torch
        >>> axes_of(torch.diag(torch.tensor([1.0, 4.0]))[None]).values
        tensor([[1., 4.]])
    """
    values, vectors = torch.linalg.eigh(gram)
    return Axes(vectors, values.clamp_min(torch.finfo(values.dtype).tiny))


def auxiliary_gradient(log_likelihood: LogDensity, *, step_size: Tensor, axes: Callable[[], Axes]) -> Sampler:
    r"""The marginal sampler "mGrad" of Titsias & Papaspiliopoulos (2018, section 3.2), in white coordinates.

    With f = m + L v and gradient g of the log likelihood in f, they add u ~ N(f + (delta / 2) g, (delta / 2) I), draw
    the next f from p(f | u) as if the likelihood were flat, and integrate u out of both. Along the eigenvectors W of L' L, with
    eigenvalues d, this is for each coordinate of w = W' v, with slope s in w,

    .. math:: w' \sim N(\rho w + (1 - \rho) s, 1 - \rho^2), \quad \rho = 2 d / (\delta + 2 d)

    and their acceptance ratio (eq. 11) becomes that of these proposals: coordinates that the data see move in small steps along the
    slope, and those that only the prior knows are drawn anew. Of several latents each has the same axes. Exact for any
    orthonormal W and positive d.

    Args:
        log_likelihood: on ``(C, K M)``; its prior is N(0, I), so latents come whitened.
        step_size: delta ``()``.
        axes: gives them, see :func:`axes_of`; called once, at the start.

    Returns:
        A sampler with :class:`AuxiliaryGradientState` and :class:`MetropolisInfo`.

    Example:
        >>> import torch
        >>> from torchgpmc.density import AutogradDensity
        >>> from torchgpmc.samplers import auxiliary_gradient
        >>> from torchgpmc.samplers.auxiliary_gradient import axes_of
        >>> generator = torch.Generator().manual_seed(0)
        >>> density = AutogradDensity(lambda v: -0.5 * (v - 1).square().sum(-1))  # the posterior is N(1/2, 1/2)
        >>> sampler = auxiliary_gradient(density, step_size=torch.tensor(2.0), axes=lambda: axes_of(torch.ones(1, 1, 1)))
        >>> state = sampler.init(torch.zeros(1000, 1), generator)
        >>> for _ in range(20):
        ...     state, info = sampler.step(state, generator)
        >>> abs(state.position.mean() - 0.5) < 0.11, abs(state.position.var() - 0.5) < 0.11  # five standard errors
        (tensor(True), tensor(True))
    """

    def at(position: Tensor, along: Tensor, own: Axes) -> AuxiliaryGradientState:
        value, gradient = log_likelihood.value_and_grad(position)
        return AuxiliaryGradientState(position, value, along, times_blocks(gradient, own.vectors), own)

    def init(position: Tensor, generator: torch.Generator) -> AuxiliaryGradientState:
        own = axes()
        return at(position, times_blocks(position, own.vectors), own)

    def step(state: AuxiliaryGradientState, generator: torch.Generator) -> tuple[AuxiliaryGradientState, MetropolisInfo]:
        vectors, values = state.axes
        keep = 2 * values / (step_size + 2 * values)
        keep = keep.repeat(1, state.position.shape[-1] // keep.shape[-1])
        noise = (1 - keep.square()).sqrt() * normal_like(state.along, generator)
        there = keep * state.along + (1 - keep) * state.slope + noise
        proposed = at(times_blocks(there, vectors.mT), there, state.axes)

        def log_proposal(end: Tensor, start: AuxiliaryGradientState) -> Tensor:
            """Of ``end`` from ``start``, less that of a flat likelihood, which is the same both ways beside the prior."""
            middle = keep * start.along + 0.5 * (1 - keep) * start.slope
            return ((end - middle) * start.slope / (1 + keep)).sum(-1)

        correction = log_proposal(state.along, proposed) - log_proposal(there, state)
        move = Attempt(there, log_uniform(there.shape[:1], there, generator), correction)
        new, info = accept(move, proposed._replace(axes=()), state._replace(axes=()))  # the axes are those of both
        return new._replace(axes=state.axes), info

    return Sampler(init, step)
