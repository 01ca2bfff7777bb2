r"""What hyperparameters are sampled given: the latents f, the whitened latents v, what a fit leaves open of v, or noisy latents g.

A parameterisation is a coordinate c in place of v, and [theta, c] has the density of [theta, v] times the volume,

.. math:: \log p(\theta, v(\theta, c), y) + \log |dv / dc|

As a function of theta with c held it is p(theta | c, y), which any sampler takes; it then leaves [theta, v] at v(theta', c).
Where f and theta are strongly dependent a posteriori, how far theta can go is up to c (Murray & Adams 2010; Yu & Meng 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation
from torchgpmc.checks import check_positive
from torchgpmc.density import AutogradDensity, mask_value
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.models.whitening import GaussianSites, undo_whitening, whiten_under_sites
from torchgpmc.numerics.linalg import factor_with_gradient, triangular_log_determinant
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.runs.blocks import JointWithPrior, KeptPrior, LatentsGivenTheta, kept_prior
from torchgpmc.runs.run import in_chunks
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.samplers.sweep import Block, BlockStep, Conditional, SweepState, Update, given_the_rest
from torchgpmc.trees import take
from torchgpmc.types import Sampler, WarmUp

# A site's precision in units of the prior's, 1 / K_nn.
_LEAST_PRECISION, _MOST_PRECISION = 1e-6, 1e8


class ThetaBlock(NamedTuple):
    """What a parameterisation needs to make its part of a sweep."""

    joint: JointLogDensity
    kernel: Callable[[Any], Sampler]
    steps: int
    num_chains: int
    chain_chunk: int | None
    num_columns: int | None = None  # of theta that are moved, its first ones; all by default

    @property
    def columns(self) -> range:
        """Of theta."""
        return range(self.joint.model.layout.size if self.num_columns is None else self.num_columns)

    @property
    def moves_likelihood(self) -> bool:
        """Whether parameters of the likelihood are among them."""
        layout = self.joint.model.layout
        return bool(layout.sampled_names("likelihood")) and self.columns.stop > layout.columns("likelihood").start


@dataclass(frozen=True)
class Parameterization:
    """Base of the options; see the module's docstring."""

    @property
    def moves_everything(self) -> bool:
        """Whether the parameters of a likelihood's parts, which a sweep would move given f, are moved with the rest of theta."""
        return False

    def parts(self, model: GPModel) -> tuple[Parameterization, ...]:
        """The parameterisations that a sweep goes through, each with a tuning of its own."""
        return (self,)

    def check(self, model: GPModel) -> None:
        """Whether it can serve this model.

        Raises:
            ValueError: it cannot.
        """

    def warm_up(self, own: WarmUp) -> WarmUp:
        """How the sampler of theta is tuned, beginning from its ``own`` warm-up."""
        return own

    def update(self, block: ThetaBlock) -> Update:
        """The part of a sweep that moves theta, c held."""
        raise NotImplementedError(f"{type(self).__name__} must define update(block)")


@dataclass(frozen=True)
class Ancillary(Parameterization):
    """Theta given the whitened latents v, "AA": for data that say little of f, which then follows theta (c = v).

    One factorisation for each theta that is tried.

    Example:
        >>> import torchgpmc as tg
        >>> tg.Gibbs(parameterization=tg.Ancillary()).parameterization
        Ancillary()
    """

    def update(self, block: ThetaBlock) -> Update:
        """The conditional is that of [theta, v] with v where it is."""
        joint, columns = block.joint, block.columns
        moves_likelihood = block.moves_likelihood

        def conditional(position: Tensor, kept: KeptPrior) -> Conditional:
            density = JointWithPrior(joint, None if moves_likelihood else kept.likelihood)
            return given_the_rest(in_chunks(density, block.num_chains, block.chain_chunk), columns)(position, kept)

        return Block(columns, conditional, block.kernel, block.steps, work=1)


@dataclass(frozen=True)
class Recoordinated(Parameterization):
    """Parameterisations in which v changes with theta."""

    work = 1  # factorisations for each theta that is tried
    first_work = 0  # and for the coordinates of where the chains are

    def given(
        self, joint: JointLogDensity, theta: Tensor, at: LatentsAt, v: Tensor, generator: torch.Generator
    ) -> tuple[Any, Tensor]:
        """log p(theta, c, y) as a function of theta, with :class:`Moved` as payload; and what is in it beside that of [theta, v].

        Both are of the c ``(C, ...)`` that goes with ``theta`` and ``v``.
        """
        raise NotImplementedError

    def update(self, block: ThetaBlock) -> Update:
        return _ThetaUpdate(self, block)


@dataclass(frozen=True)
class _Held(Recoordinated):
    """Those whose coordinate is worked out from f."""

    def given(
        self, joint: JointLogDensity, theta: Tensor, at: LatentsAt, v: Tensor, generator: torch.Generator
    ) -> tuple[Any, Tensor]:
        held, log_volume = self.hold(joint.model, at, v, joint.targets, generator)
        return ThetaGiven(joint, self, held), log_volume

    def hold(self, model: GPModel, at: LatentsAt, v: Tensor, targets: Targets, generator: torch.Generator) -> tuple[Any, Tensor]:
        """c, tensors ``(C, ...)``, from v ``(C, V)``; and what :meth:`latents` would give along with v there."""
        raise NotImplementedError

    def latents(self, model: GPModel, at: LatentsAt, held: Any, targets: Targets) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` at other thetas, and log |dv / dc| ``(C,)`` with the density of what was drawn for c; differentiable."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sufficient(_Held):
    """Theta given the latents f, "SA": for data that pin f down, so that they say nothing more of theta (c = f).

    Of a SparseGP, given the inducing values. One factorisation for each theta that is tried.

    Example:
        >>> import torchgpmc as tg
        >>> tg.Gibbs(parameterization=tg.Sufficient()).parameterization
        Sufficient()
    """

    def hold(self, model: GPModel, at: LatentsAt, v: Tensor, targets: Targets, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """f at the latent inputs."""
        return model.latents(at.prior, v), self._log_volume(model, at)

    def latents(self, model: GPModel, at: LatentsAt, held: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """v = L^-1 (f - m)."""
        return model.whiten(at.prior, held), self._log_volume(model, at)

    def _log_volume(self, model: GPModel, at: LatentsAt) -> Tensor:
        """log |dv / df| = -K log |L|."""
        factor = factor_with_gradient(at.prior.covariance, at.prior.factor)
        return -model.num_latents * triangular_log_determinant(factor)


class _Noisy(NamedTuple):
    """What the surrogate parameterisation holds."""

    noisy: Tensor  # g, (C, N)
    white: Tensor  # eta, (C, V)


@dataclass(frozen=True)
class Surrogate(_Held):
    r"""Theta given noisy latents g ~ N(f, S) and the rest of f, "SURR" (Murray & Adams 2010, section 3; paper A, section 3.2).

    g is drawn anew in every sweep, and eta is white under p(f | g, theta): theta may go as far as g, which knows of f about what
    the data know, lets it. S is diagonal, such that N(g_n | f_n, S_n) leaves of the prior's variance of f_n what the n-th datum
    alone leaves. Gradients leave out that S changes with theta, which is exact all the same: leapfrog steps may follow any force.

    Two factorisations for each theta that is tried, where paper A counts three, as f is never needed but through v; and one a
    sweep. For likelihoods of one latent function that factorise over data.

    With ``whitening`` g and S are not drawn and matched but those of an approximation's sites, and stay: eta is then nearly
    independent of theta, which may go nearly as far in a sweep as its posterior does.

    With ``precision`` S is 1 / precision at every point, for likelihoods of one latent function that do not factorise too: g then
    holds of f what lies above that noise. Any is exact; where n points vary together, what data leave of f's variance, times n,
    serves for S.

    Args:
        whitening: :class:`Laplace` or :class:`EP`, whose sites at the mode of theta are g and S; as of ``NUTS(whitening=)``.
        precision: of g given f; ``None`` matches it to single data.

    Example:
        >>> import torchgpmc as tg
        >>> tg.Gibbs(parameterization=tg.Surrogate()).parameterization
        Surrogate(whitening=None, precision=None)
    """

    whitening: Approximation | None = None
    precision: float | None = None

    work = 2
    first_work = 1

    def parts(self, model: GPModel) -> tuple[Parameterization, ...]:
        """This, or what holds latents that are white under the sites."""
        return (self,) if self.whitening is None else (_WhiteUnderSites(posterior_sites(model, self.whitening)),)

    def check(self, model: GPModel) -> None:
        """As the class's docstring says."""
        if self.precision is not None:
            check_positive("precision", self.precision)
            if self.whitening is not None:
                raise ValueError(
                    f"precision is {self.precision!r} and whitening {self.whitening!r}, whose sites have precisions of their own. "
                    f"Expected one of them."
                )
        if model.num_latents != 1 or not (model.factorises or self.precision):
            raise ValueError(
                f"Surrogate() matches posteriors of single latents, and {type(model.likelihood).__name__} has several latents a "
                f"datum or does not factorise over data. Expected parameterization=Interwoven(), Ancillary() or Sufficient()."
            )

    def hold(self, model: GPModel, at: LatentsAt, v: Tensor, targets: Targets, generator: torch.Generator) -> tuple[_Noisy, Tensor]:
        """A fresh g, and eta."""
        precision = self._precision_at(model, at, targets)
        f = model.marginals(at, v).mean.squeeze(1)
        noise = precision.rsqrt() * normal_like(f, generator)
        sites = GaussianSites(precision, precision * (f + noise))
        white, log_volume = whiten_under_sites(at.projection.mT, at.mean, sites, v)
        return _Noisy(f + noise, white), log_volume + _log_noise(noise, precision)

    def latents(self, model: GPModel, at: LatentsAt, held: _Noisy, targets: Targets) -> tuple[Tensor, Tensor]:
        """v, and ``log |dv / d eta| + log N(g | f, S)``."""
        precision = self._precision_at(model, at, targets)
        sites = GaussianSites(precision, precision * held.noisy)
        v, log_volume = undo_whitening(at.projection.mT, at.mean, sites, held.white)
        return v, log_volume + _log_noise(held.noisy - model.marginals(at, v).mean.squeeze(1), precision)

    def _precision_at(self, model: GPModel, at: LatentsAt, targets: Targets) -> Tensor:
        """1 / S ``(C, N)``."""
        return _single_site_precision(model, at, targets) if self.precision is None else torch.full_like(at.mean, self.precision)


class _White(NamedTuple):
    """What is held in coordinates that are white under sites."""

    sites: GaussianSites  # of each chain, (C, N)
    white: Tensor  # w, (C, V)


@dataclass(frozen=True)
class _WhiteUnderSites(_Held):
    """Theta given latents that are white under the posterior which fixed Gaussian sites give (c = w)."""

    sites: GaussianSites
    work = 2
    first_work = 1

    def hold(self, model: GPModel, at: LatentsAt, v: Tensor, targets: Targets, generator: torch.Generator) -> tuple[_White, Tensor]:
        """w."""
        sites = GaussianSites(*(part.expand(len(v), -1) for part in self.sites))
        white, log_volume = whiten_under_sites(at.projection.mT, at.mean, sites, v)
        return _White(sites, white), log_volume

    def latents(self, model: GPModel, at: LatentsAt, held: _White, targets: Targets) -> tuple[Tensor, Tensor]:
        """v, and log |dv / dw|."""
        return undo_whitening(at.projection.mT, at.mean, held.sites, held.white)


def _log_noise(noise: Tensor, precision: Tensor) -> Tensor:
    """log N(noise | 0, 1 / precision) ``(C,)``, up to a constant."""
    return 0.5 * (precision.log() - precision * noise.square()).sum(-1)


def _single_site_precision(model: GPModel, at: LatentsAt, targets: Targets) -> Tensor:
    """1 / S ``(C, N)``: what a datum adds to the precision of its own f_n, if there were no others; a constant to autograd."""
    with torch.no_grad():
        variance = at.projection.square().sum(-2) + at.variance
        tilted = model.likelihood_function(
            likelihood_values(at.prior), lambda likelihood: likelihood.tilted_moments(at.mean, variance, targets.values)
        )
        added = torch.nan_to_num(variance / tilted.variance - 1, nan=0.0, posinf=0.0)
        return added.clamp(_LEAST_PRECISION, _MOST_PRECISION) / variance


@dataclass(frozen=True)
class Interwoven(Parameterization):
    """Theta moved twice a sweep, given v and then given f ("ASIS", Yu & Meng 2011): good wherever either is.

    Args:
        first: a parameterisation.
        second: another, whose weakness is the first's strength.

    Example:
        >>> import torchgpmc as tg
        >>> tg.Gibbs(parameterization=tg.Interwoven()).parameterization
        Interwoven(first=Ancillary(), second=Sufficient())
    """

    first: Parameterization = Ancillary()
    second: Parameterization = Sufficient()

    def parts(self, model: GPModel) -> tuple[Parameterization, ...]:
        """Both."""
        return (*self.first.parts(model), *self.second.parts(model))

    @property
    def moves_everything(self) -> bool:
        """If one of them does, both do."""
        return self.first.moves_everything or self.second.moves_everything

    def check(self, model: GPModel) -> None:
        """Where both serve."""
        self.first.check(model)
        self.second.check(model)


class Moved(NamedTuple):
    """What the density of theta given c hands out."""

    kept: KeptPrior
    v: Tensor
    log_density: Tensor  # of [theta, v] (C,)


class ThetaGiven(AutogradDensity):
    """log p(theta, c, y) as a function of theta ``(C, P)``, with v and p(f | theta) as payload."""

    def __init__(self, joint: JointLogDensity, parameterization: _Held, held: Any):
        self.joint = joint
        self.parameterization = parameterization
        self.held = held
        super().__init__(self._value)

    def _value(self, theta: Tensor) -> Tensor:
        model, targets = self.joint.model, self.joint.targets
        at, log_prior = self._at(theta)
        v, log_volume = self.parameterization.latents(model, at, self.held, targets)
        log_density = log_prior + log_standard_normal(v) + model.log_likelihood(at, v, targets)
        return torch.where(at.prior.ok, log_density + log_volume, torch.nan)

    def _at(self, theta: Tensor) -> tuple[LatentsAt, Tensor]:
        """f at the data, and log p(theta)."""
        hyperparameters, log_prior = self.joint.model.layout.raw_values_and_log_prior(theta)
        return self.joint.model.at_data(hyperparameters), log_prior

    def draw(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, Moved]:
        model = self.joint.model
        with torch.no_grad():
            at, log_prior = self._at(theta)
            kept = kept_prior(model, at, log_prior)
            v, log_volume = self.parameterization.latents(model, at, self.held, self.joint.targets)
            log_density = LatentsGivenTheta(self.joint, kept)(v)
        return mask_value(log_density + log_volume), Moved(kept, v, log_density)

    def select(self, rows: Tensor) -> ThetaGiven:
        return ThetaGiven(self.joint.select(rows), self.parameterization, take(self.held, rows))


class _ThetaUpdate(NamedTuple):
    """The part of a sweep that moves theta, and v with it."""

    parameterization: Recoordinated
    block: ThetaBlock

    def update(self, density: Any, state: SweepState, generator: torch.Generator) -> tuple[SweepState, BlockStep]:
        """The kernel's steps on theta, c being drawn or worked out where the chains are."""
        options, (joint, kernel, steps, num_chains, chain_chunk, _) = self.parameterization, self.block
        model, kept, columns = joint.model, state.payload, self.block.columns
        theta, v = state.position.split([model.layout.size, model.latent_size], -1)
        with torch.no_grad():
            given, log_volume = options.given(joint, theta, kept.at, v, generator)
        given = in_chunks(given, num_chains, chain_chunk)
        of_columns = given_the_rest(given, columns)(theta, Moved(kept, v, state.log_density))
        conditional = of_columns._replace(log_density=state.log_density + log_volume)
        inner = Block(columns, lambda *_: conditional, kernel, steps, work=options.work, first_work=options.first_work)
        step, moved = inner.moved(conditional, theta[:, : columns.stop], state.log_density, generator)
        position = torch.cat([step.state.position, theta[:, columns.stop :], moved.v], -1)
        return SweepState(position, moved.log_density, moved.kept), step
