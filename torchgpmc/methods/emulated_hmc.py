"""Hamiltonian Monte Carlo of theta on an emulator of the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchgpmc.approximations import EP, Approximation
from torchgpmc.approximations.gaussian_form import check_approximation, check_model
from torchgpmc.checks import check_count, check_flag, is_number
from torchgpmc.evidence import Evidence
from torchgpmc.importance import Proposal, along_axes, from_modes, with_defence
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator
from torchgpmc.parameters.layout import Layout
from torchgpmc.parameters.normal_scale import CentredScale, NormalScale, normal_scale
from torchgpmc.runs.beginnings import ARM, AtModes, AtPrior
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import ChainTarget, check_has_hyperparameters, estimator_for, suited_approximation
from torchgpmc.runs.drawn_start import DrawnStart
from torchgpmc.runs.emulated import EmulatedChains, EmulatedWarmUp, Known
from torchgpmc.runs.on_normal_scale import searched_marginal
from torchgpmc.runs.quick_evidence import QuickEvidence
from torchgpmc.runs.run import MethodOptions, Settings, chain_settings
from torchgpmc.runs.starts import posterior_modes

_SEED = 0  # of the search for modes, which a run that is resumed makes again
_POINTS_A_HYPERPARAMETER, _LEAST_POINTS = 5, 128  # that are spread before anything is learned
_DRAWS_AROUND = 64
_WIDER = 1.3  # of the scale than the draws it is taken from: what falls off as a normal density does is to outlast the posterior
_NEAR = 30.0  # nats below the best, and as many more as hyperparameters, within which draws teach: the posterior is there
_SPREAD = 1.5  # of points around those, in deviations of the scale
_LABEL = "an emulator of the posterior: weighted to the exact posterior"


@dataclass(frozen=True)
class EmulatedHMC(MethodOptions):
    r"""Hamiltonian Monte Carlo of theta on a Gaussian process that has learned the evidence, weighted: for many hyperparameters.

    An estimate of p(y | theta) takes a factorisation and more, and a trajectory dozens of them. Here trajectories follow
    :math:`p(\theta) \, S(\theta)`, S being an emulator of the evidence (:mod:`torchgpmc.importance.emulator`) on the scale on which
    each prior is standard normal, and the evidence is estimated once a draw, at the end of a dozen of them: during warm-up to learn
    from, then for the weight :math:`\hat p(y | \theta) / S(\theta)` that makes the draw exact (Rasmussen 2003, "Gaussian processes
    to speed up hybrid Monte Carlo for expensive Bayesian integrals", whose draws stay the emulator's or take a Metropolis test).
    Here such a test is for weights of less than e^-2 alone, and what it leaves stays a weight: few draws are refused, no heavy one
    is held, and chains do not stay where the emulator, far from all that it knows, has mass that is not there. Every theta comes
    with a latent vector chosen by its importance weight.

    Some thousand estimates teach a posterior of thirty lengthscales well enough for weights worth half their number. No gradient is
    asked for. At most ``warmup_steps`` times ``num_chains`` thetas are learned from, the first of them spread over the modes and
    the prior; besides them from the draws that a run begins at, if these come with p(y | theta) and do not set the scale.

    Args:
        approximation: :class:`Laplace`, :class:`EP` or ``approximations.ClassEP()``, from which latents are drawn. Of a
            :class:`SparseGP` it is ``approximations.Variational()``, whatever is given.
        num_importance: latent vectors an estimate of the evidence.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        evidence: another unbiased estimate in place of importance sampling: ``torchgpmc.evidence.SmoothProbit()`` or ``Orthant()``.
        num_trajectories: on the emulator between two draws.
        begin: around what half of the first points are spread, the others being draws from the prior: :class:`AtModes`, those of an
            approximate posterior, or :class:`AtPrior`, far out along each hyperparameter with ``arms``. Of no use to a run that
            starts from draws.
        scaled_to_draws: move on a scale on which draws that the run begins at have mean zero and deviation one, nearly, and spread
            the first points there, not over the prior. An evidence that rules out most of the prior, as a regression's of some
            hundred data does, falls by thousands of nats over it, which no emulator follows; near draws it is all but normal. Of
            no use to a run that begins at none.
        enough: share of their number, from 0 to 1, that the latest 64 thetas must be worth by their weights for learning to end
            before warm-up does; 1: never.
        most_noise: relative variance of estimates that ends learning, where half of the latest 64 have more: for runs that have
            a use for draws all the same, as a default call that goes on from them with better estimates.
        taught_by: an approximation whose evidence is learned in place of estimates, :class:`EP` with a tolerance of some tenths for
            instance, where that is much cheaper. What it is off by makes weights uneven, and nothing else. Draws that the run
            begins at then teach it nothing, and ``warmup_steps`` are at least 3.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
        >>> kernel = RBFKernel(ard_num_dims=2, lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, x[:, 0] > 0.5, kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.EmulatedHMC(), num_samples=100, warmup_steps=40, num_chains=8, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.log_weights.shape
        (torch.Size([8, 100, 1, 2]), torch.Size([8, 100]))
    """

    takes_draws: ClassVar[bool] = True

    approximation: Approximation = EP()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 64
    antithetic: bool | None = None
    evidence: Evidence | None = None
    num_trajectories: int = 12
    begin: AtModes | AtPrior = AtModes()  # noqa: RUF009  (frozen, so it may be shared)
    scaled_to_draws: bool = False
    enough: float = 1.0
    most_noise: float = math.inf
    taught_by: Approximation | None = None

    def at_draws(self, model: GPModel) -> EmulatedHMC:
        """Itself: half of the first points are around them."""
        return self

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, no warm-up, or a model that cannot be served.
        """
        check_has_hyperparameters(model, "EmulatedHMC")
        self._check_options()
        self._check_model(model)
        warmup, num_chains = chain_settings(settings)
        estimator = estimator_for(
            model, suited_approximation(model, self.approximation), self.num_importance, self.antithetic, self.evidence
        )
        scale = _scale(model.layout, settings.draws if self.scaled_to_draws else None)
        spread = self._spread(model, scale, settings.draws)
        # What draws tell has the level of estimates.
        tell = not self.scaled_to_draws and self.taught_by is None
        known = _known(model.layout, scale, settings.draws) if tell else None
        spread_steps = self._spread_steps(model.layout.size, warmup, num_chains)
        teacher = None if self.taught_by is None else QuickEvidence(model, self.taught_by)
        chains = EmulatedChains(model, estimator, scale, spread, self.num_trajectories, settings.chain_chunk, teacher)
        size = scale.size

        def start(generator: torch.Generator) -> tuple[Tensor, None]:
            return chains.start(num_chains, generator), None

        target = ChainTarget(None, size, size, start, chains.read, _LABEL)
        warm_up = EmulatedWarmUp(warmup, spread_steps, chains, self.enough, self.most_noise, known)
        return ChainRun(target, chains.kernel, warm_up, warmup, settings.num_samples, 1)

    def _check_options(self) -> None:
        check_count("num_importance", self.num_importance)
        check_count("num_trajectories", self.num_trajectories)
        check_flag("scaled_to_draws", self.scaled_to_draws)
        if not is_number(self.enough) or not 0 < self.enough <= 1:
            raise ValueError(f"enough is {self.enough!r}. Expected a share above 0 and at most 1, for instance 0.5.")
        if not is_number(self.most_noise) or not self.most_noise > 0:
            raise ValueError(f"most_noise is {self.most_noise!r}. Expected a variance above 0, for instance 0.1, or math.inf.")
        check_approximation("approximation", self.approximation)
        if self.taught_by is not None:
            check_approximation("taught_by", self.taught_by)
        if not isinstance(self.begin, AtModes | AtPrior):
            raise TypeError(f"begin is {self.begin!r}. Expected torchgpmc.AtModes() or torchgpmc.AtPrior().")
        self.begin.check()

    def _check_model(self, model: GPModel) -> None:
        if model.targets.one_a_chain:
            raise ValueError(
                "the model has several data sets and EmulatedHMC learns the evidence of one. Expected train_y of shape (N,)."
            )
        if self.taught_by is not None:
            if model.collapses or model.is_conjugate:
                raise ValueError("the model's evidence is exact, and nothing is quicker. Expected taught_by=None.")
            check_model(model, "EmulatedHMC", self.taught_by)
        if model.collapses:
            return
        needed = [] if self.evidence is not None and isinstance(self.begin, AtPrior) else [self.approximation]
        needed += [self.begin.approximation] if isinstance(self.begin, AtModes) else []
        for approximation in needed:
            check_model(model, type(self).__name__, suited_approximation(model, approximation))

    def _spread_steps(self, size: int, warmup: int, num_chains: int) -> int:
        """Iterations of warm-up that spread points: half of a short one.

        Raises:
            ValueError: there is none to learn in.
        """
        least = 2 if self.taught_by is None else 3  # the last is then of estimates
        if warmup < least:
            raise ValueError(
                f"warmup_steps is {warmup}, and warm-up is when the evidence is learned. Expected at least {least}; warmup_steps "
                f"times num_chains thetas are learned from, of which some hundreds serve thirty hyperparameters."
            )
        return min(math.ceil(max(_LEAST_POINTS, _POINTS_A_HYPERPARAMETER * size) / num_chains), warmup // 2)

    def _spread(self, model: GPModel, scale: NormalScale | CentredScale, draws: DrawnStart | None) -> Proposal:
        """Half what is known of where the posterior lies, half the prior or, on a scale of draws, somewhat wider than these."""
        unit = identity_matrix(scale.size, model.train_x)
        wide = unit if isinstance(scale, NormalScale) else _SPREAD * unit
        if draws is not None:
            known = _around(draws, scale)
        elif isinstance(self.begin, AtModes):
            assert isinstance(scale, NormalScale)  # draws alone make another
            marginal = searched_marginal(model, suited_approximation(model, self.begin.approximation))
            modes = posterior_modes(marginal, self.begin.count, make_generator(_SEED, model.train_x.device), scale)
            known = [(mode.position, mode.covariance) for mode in modes]
        else:
            known = list(zip(*along_axes(scale.size, *ARM, unit), strict=True)) if self.begin.arms else []
        if not known:
            known = [(0 * unit[0], unit)]
        means, covariances = (torch.stack(part).detach() for part in zip(*known, strict=True))
        return with_defence(from_modes(means, covariances, torch.zeros_like(means[:, 0]), math.inf), 0 * unit[0], wide, 0.5)


def _scale(layout: Layout, draws: DrawnStart | None) -> NormalScale | CentredScale:
    """The prior's, or that of draws."""
    scale = normal_scale(layout)
    if draws is None:
        return scale
    on_scale = draws._replace(theta=scale.z(draws.theta))
    centre = torch.softmax(draws.log_weights, 0) @ on_scale.theta
    return CentredScale(scale, centre, _WIDER * on_scale.covariance().diagonal().sqrt())


def _known(layout: Layout, scale: NormalScale | CentredScale, draws: DrawnStart | None) -> Known | None:
    """What draws teach: those near the best of them."""
    if draws is None or draws.log_evidence is None:
        return None
    z = scale.z(draws.theta)
    log_target = layout.log_prior(draws.theta).detach() + scale.theta(z)[1] + draws.log_evidence
    near = torch.isfinite(log_target) & torch.isfinite(z).all(-1)
    if not bool(near.any()):
        return None
    near &= log_target >= log_target[near].max() - (_NEAR + scale.size)
    return Known(z[near], log_target[near])


def _around(draws: DrawnStart, scale: NormalScale | CentredScale) -> list[tuple[Tensor, Tensor]]:
    """Normal densities around some draws, chosen by weight, a third as wide as all of them."""
    on_scale = draws._replace(theta=scale.z(draws.theta))
    narrow = on_scale.covariance() / 9
    ends = torch.softmax(on_scale.log_weights, 0).cumsum(0)
    places = (torch.arange(_DRAWS_AROUND, device=ends.device) + 0.5) / _DRAWS_AROUND
    chosen = torch.searchsorted(ends, places.to(ends)).clamp_max(len(ends) - 1)
    return [(position, narrow) for position in on_scale.theta[chosen.unique()]]
