"""Gibbs sampling of hyperparameters and latents in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgpmc.checks import check_count, check_object
from torchgpmc.methods.adaptive_metropolis import AdaptiveMH
from torchgpmc.methods.density_options import refuse_in_a_sweep
from torchgpmc.methods.gradient_moves import AuxiliaryGradient
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity, joint_log_density
from torchgpmc.runs.blocks import JointWithPrior, LatentsGivenTheta
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import check_has_hyperparameters, check_smooth, original_target
from torchgpmc.runs.invariance import InvarianceUpdate, direction_of
from torchgpmc.runs.latent_moves import LatentMove, Move, started_by
from torchgpmc.runs.likelihood_parts import PartsUpdate, parts_of
from torchgpmc.runs.parameterizations import Interwoven, Parameterization, Sufficient, ThetaBlock
from torchgpmc.runs.part_coordinates import Parts, PartsTuning, PartsWarmUp, ridges_of_parts
from torchgpmc.runs.run import MethodOptions, Settings, chain_settings, in_chunks
from torchgpmc.samplers.adaptation import BurnIn
from torchgpmc.samplers.sweep import Block, SweepWarmUp, Update, sweep
from torchgpmc.types import Sampler, WarmUp


class _Piece(NamedTuple):
    """A part of a sweep, from a tuning, and how that is learned."""

    columns: range
    warm_up: WarmUp
    update: Callable[[Any], Update]


@dataclass(frozen=True)
class Gibbs(MethodOptions):
    """Theta and the latents in turn: theta by any sampler in a parameterisation, the latents by any of their moves.

    K is factorised for each theta that is tried, and never for the latents; ``stats["n_factorizations"]`` counts. Every part has a
    warm-up of its own. A likelihood's parameters that belong to parts of it, such as the genes of
    :class:`torchgpmc.likelihoods.Transcription`, are moved given f, each part accepted on its own account, all in one batch.

    Args:
        hyper: the sampler of theta: :class:`AdaptiveMH`, :class:`Slice`, :class:`HMC` or :class:`NUTS`; or :class:`PseudoMarginal`,
            for which theta does not wait for the latents: these are integrated out by its estimates, each of which takes
            factorisations of its own, and there is no parameterisation.
        latent: the move of the latents: :class:`AuxiliaryGradient`, :class:`EllipticalSlice`, :class:`PCN`, or :class:`HMC` and its
            kin, on v.
        parameterization: what theta is moved given: the latents (:class:`Sufficient`), the whitened latents (:class:`Ancillary`),
            both in turn (:class:`Interwoven`), noisy latents (:class:`Surrogate`; with ``whitening=`` theta goes furthest), or
            what a fit leaves open of whitened latents (:class:`Regressed`).
        hyper_steps: of ``hyper``, a sweep.
        latent_steps: of ``latent``, a sweep.
        thinning: keep one draw in this many.
        parts: the sampler of parameters of the likelihood's parts, given f, of which a sweep takes one step; ``None`` has them
            moved by ``hyper``.
        invariance_steps: slices a sweep of a number that is added to all of f while parameters of the likelihood take it back, for
            likelihoods with ``levels``, such as :class:`torchgpmc.likelihoods.Transcription`: each part holds the level of f where
            it is, so that it hardly moves otherwise.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.Gibbs(hyper=tg.Slice(), parameterization=tg.Surrogate(), latent_steps=2)
        >>> posterior = tg.sample(model, method, num_samples=300, warmup_steps=60, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape
        (torch.Size([16, 300, 1, 1]), torch.Size([16, 300, 4]))
    """

    takes_start: ClassVar[bool] = True

    hyper: Any = AdaptiveMH()  # noqa: RUF009  (frozen, so it may be shared)
    latent: LatentMove = AuxiliaryGradient()  # noqa: RUF009
    parameterization: Parameterization = Interwoven()  # noqa: RUF009
    hyper_steps: int = 1
    latent_steps: int = 10
    thinning: int = 1
    parts: Any = None
    invariance_steps: int = 0

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v].

        Raises:
            ValueError: nothing to sample, options out of range, or a model that a part cannot serve.
            TypeError: an option of the wrong kind.
        """
        self._check(model)
        warmup, chains = chain_settings(settings)
        target = original_target(model, settings)
        joint = joint_log_density(model)
        density = in_chunks(JointWithPrior(joint), chains, settings.chain_chunk)
        parts = None if self.parameterization.moves_everything else parts_of(model)
        num_columns = target.num_hyperparameters if parts is None else parts.columns.start
        block = partial(ThetaBlock, joint, num_columns=num_columns, num_chains=chains, chain_chunk=settings.chain_chunk)
        pieces = self._of_theta(block, range(num_columns), model, warmup)
        pieces += [] if parts is None else [self._of_parts(joint, parts, warmup)]
        pieces += [self._of_invariance(joint)] if self.invariance_steps else []
        latent = self.latent.move(model, warmup)
        pieces.append(self._of_latents(latent, joint, range(target.num_hyperparameters, target.dimension)))

        def given(position: Tensor, generator: torch.Generator) -> LatentsGivenTheta:
            return LatentsGivenTheta(joint, density.draw(position, generator)[1])

        def kernel(tunings: tuple[Any, ...]) -> Sampler:
            return sweep(density, [piece.update(tuning) for piece, tuning in zip(pieces, tunings, strict=True)])

        warm_up = SweepWarmUp([piece.columns for piece in pieces], [piece.warm_up for piece in pieces])
        target = target if settings.start is not None else started_by(latent, target, given)
        return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, self.thinning)

    def _of_theta(self, block: Callable[..., ThetaBlock], columns: range, model: GPModel, warmup: int) -> list[_Piece]:
        if not columns:
            return []
        move = self.hyper.hyper_move(len(columns), warmup)

        def piece(given: Any) -> _Piece:
            def update(tuning: Any) -> Update:
                made: Update = given.update(block(kernel=partial(_at, move.kernel, tuning), steps=self.hyper_steps))
                return made

            return _Piece(columns, given.warm_up(move.warm_up), update)

        return [piece(given) for given in self.hyper.hyper_parts(self.parameterization, model)]

    def _of_parts(self, joint: JointLogDensity, parts: Parts, warmup: int) -> _Piece:
        hyper, steps = (self.hyper, self.hyper_steps) if self.parts is None else (self.parts, 1)
        move, ridges = hyper.hyper_move(parts.size, warmup), ridges_of_parts(joint.model, parts)

        def update(tuning: PartsTuning) -> Update:
            kernel = partial(_at, move.kernel, tuning.inner)
            return PartsUpdate(joint, parts, kernel, steps, tuning.coordinates, ridges)

        return _Piece(parts.columns, PartsWarmUp(move.warm_up, parts), update)

    def _of_invariance(self, joint: JointLogDensity) -> _Piece:
        update = InvarianceUpdate(joint, direction_of(joint.model), self.invariance_steps)
        return _Piece(range(joint.model.layout.size), BurnIn(), lambda tuning: update)

    def _of_latents(self, move: Move, joint: JointLogDensity, columns: range) -> _Piece:
        density = JointWithPrior(joint)
        conditional = density.latents if move.needs_prior_density else density.latents_likelihood

        def update(tuning: Any) -> Update:
            kernel = partial(_at, move.kernel, tuning)
            return Block(columns, conditional, kernel, self.latent_steps, first_work=move.num_factorizations)

        return _Piece(columns, move.warm_up, update)

    def _check(self, model: GPModel) -> None:
        for option in ("hyper_steps", "latent_steps", "thinning"):
            check_count(option, getattr(self, option))
        check_count("invariance_steps", self.invariance_steps, least=0)
        check_object("hyper", self.hyper, "hyper_move", "AdaptiveMH(), Slice(), HMC(), NUTS() or PseudoMarginal()")
        check_object("latent", self.latent, "move", "AuxiliaryGradient(), EllipticalSlice() or another move of the latents")
        if not isinstance(self.parameterization, Parameterization):
            raise TypeError(
                f"parameterization is {self.parameterization!r}. Expected Sufficient(), Ancillary(), Surrogate(), Interwoven() or "
                f"Regressed(start)."
            )
        check_has_hyperparameters(model, "Gibbs")
        if self.invariance_steps:
            direction_of(model)
        if self.parts is not None:
            check_object("parts", self.parts, "hyper_move", "None, AdaptiveMH(), Slice(), HMC() or NUTS()")
            if self.parameterization.moves_everything or parts_of(model) is None:
                raise ValueError(
                    f"parts is {self.parts!r}, and {type(self.parameterization).__name__}() moves all of theta, or the likelihood "
                    f"has no parts. Expected parts=None."
                )
        refuse_in_a_sweep(self.latent, "the latents alone, given theta", {"thinning": 1})
        self.latent.check(model)
        # Given the latents themselves a step in them is no matter to theta.
        needs_gradients = isinstance(self.hyper, MethodOptions) and self.hyper.needs_gradients
        if needs_gradients and not isinstance(self.parameterization, Sufficient):
            check_smooth(model, type(self.hyper).__name__)
        self.parameterization.check(model)


def _at(kernel: Any, tuning: Any, density: Any) -> Sampler:
    """The kernel of a density, at a tuning."""
    sampler: Sampler = kernel(density, tuning)
    return sampler
