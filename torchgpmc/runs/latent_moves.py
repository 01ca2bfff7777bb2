"""Moves of the latents given theta: chains of their own at fixed hyperparameters, and the latent block of Gibbs sampling.

One option set in ``methods/`` is a :class:`LatentMove`, and a method by :func:`latent_run`. All share one coordinate, the whitened
latents v ``(C, V)`` of all latent functions, N(0, I) a priori.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpmc.checks import check_count
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.remedies import what_samples
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, latent_target
from torchgpmc.runs.run import Settings, chain_settings
from torchgpmc.types import Sampler, WarmUp


class Move(NamedTuple):
    """A kernel with its warm-up.

    The density that ``kernel`` gets is a :class:`torchgpmc.runs.blocks.LatentsGivenTheta` or stands for one: of v ``(C, V)``, with
    ``value_and_grad`` and ``select``, ``joint.model`` and ``joint.targets``, and p(f | theta) as ``kept.at``, whose tensors
    have a first dimension of C, or of 1 where one theta serves all chains. ``kernel`` is called for each sweep and each advance:
    what takes long and depends on theta alone belongs into the kernel's ``init``, and its state.
    """

    kernel: Callable[[Any, Any], Sampler]  # from the density of v and a tuning; its state's ``position`` is v
    warm_up: WarmUp
    needs_prior_density: bool = False  # whether the density is to hold log N(v | 0, I), or is the likelihood alone
    num_factorizations: int = 0  # that ``init`` makes
    start: Callable[[Any, Tensor], Tensor] | None = None  # v where chains start, from the density and standard normals ``(C, V)``


class LatentMove(Protocol):
    """Options of a move of the latents."""

    def check(self, model: GPModel) -> None:
        """Whether it can serve this model, hyperparameters free or not.

        Raises:
            ValueError: it cannot.
        """
        ...

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The kernel, tuned in ``warmup_steps`` iterations."""
        ...


def started_by(move: Move, target: ChainTarget, given: Callable[[Tensor, torch.Generator], Any]) -> ChainTarget:
    """``target``, with latents at the start where the move has them.

    Args:
        move: of the latents.
        target: of [theta, v], with v small or normal at the start; of v alone if it has no hyperparameters.
        given: the density that the move gets, of v at the theta of each position.
    """
    of_normals = move.start
    if of_normals is None:
        return target

    def start(generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        position, covariance = target.start(generator)
        theta, normals = position.tensor_split([target.num_hyperparameters], -1)
        return torch.cat([theta, of_normals(given(position, generator), normals)], -1), covariance

    return target._replace(start=start)


def latent_run(method: LatentMove, model: GPModel, settings: Settings, thinning: int) -> ChainRun:
    """Chains of v at fixed hyperparameters; K is factorised once.

    Raises:
        ValueError: free hyperparameters, options out of range, or a model that the move cannot serve.
    """
    check_count("thinning", thinning)
    name = type(method).__name__
    method.check(model)
    if model.layout.size:
        raise ValueError(
            f"{name} samples latents alone, but {model.layout.names} have priors. Expected every hyperparameter fixed; fix them "
            f"with .requires_grad_(False), or sample both with Gibbs(latent={name}()), or together with {what_samples(model)}."
        )
    warmup, _ = chain_settings(settings)
    move = method.move(model, warmup)
    target = latent_target(model, settings, with_prior=move.needs_prior_density)
    target = started_by(move, target, lambda position, generator: target.density)
    return ChainRun(target, partial(move.kernel, target.density), move.warm_up, warmup, settings.num_samples, thinning)
