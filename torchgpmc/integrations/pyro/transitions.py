"""HMC and NUTS with Pyro's arguments: for our ``MCMC``, where all chains are one batch, and for Pyro's own, chain by chain."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from torchgpmc import methods
from torchgpmc.checks import check_positive
from torchgpmc.integrations.pyro.log_joint import Potential, Unconstrained, unconstrained_model, unconstrained_potential
from torchgpmc.methods.density_options import DensityOptions
from torchgpmc.numerics.random import make_generator
from torchgpmc.runs.chain import ChainRun, ChainState
from torchgpmc.runs.chain_targets import density_target
from torchgpmc.runs.run import Settings
from torchgpmc.samplers import MassMatrix, hmc
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.types import LogDensity, Sampler

_MOST_STEPS = 1024  # of a trajectory, while warm-up still tries tiny steps


def seed_from_global() -> int:
    """A seed from torch's global generator, so that ``pyro.set_rng_seed`` decides, as everywhere in Pyro."""
    return int(torch.randint(2**62, ()))


@dataclass(frozen=True)
class _FixedLength(methods.HMC):
    """HMC whose trajectories keep their length while warm-up changes the step size, as Pyro's do."""

    trajectory_length: float = 2 * math.pi

    def check_options(self) -> None:
        super().check_options()
        check_positive("trajectory_length", self.trajectory_length)

    def _kernel(self, density: LogDensity, tuning: Tuning) -> Sampler:
        num_steps = min(_MOST_STEPS, max(1, int(self.trajectory_length / float(tuning.step_size))))
        step_size, preconditioner = tuning.step_size, tuning.preconditioner
        return hmc(density, step_size=step_size, preconditioner=preconditioner, num_steps=num_steps, random_length=False)


class GradientKernel(MCMCKernel):  # type: ignore[misc]  # Pyro's classes are untyped
    """What :class:`HMC` and :class:`NUTS` share: a model or a potential, and one chain of it for Pyro's own ``MCMC``.

    Args:
        model: with Pyro primitives; or else
        potential_fn: minus a log density of unconstrained values ``{name: tensor}``.
        method: how it is sampled.
        transforms: of sites, from constrained to unconstrained values; by default those of their supports.
        max_plate_nesting: of models with discrete sites; guessed by default.
        init_strategy: where chains start, one site at a time.
    """

    def __init__(
        self,
        model: Callable[..., Any] | None,
        potential_fn: Potential | None,
        method: DensityOptions,
        transforms: dict[str, Any] | None,
        max_plate_nesting: int | None,
        init_strategy: Callable[..., Any],
    ):
        if (model is None) == (potential_fn is None):
            raise ValueError("model and potential_fn are both given, or both missing. Expected one of them.")
        method.check_options()
        self.model = model
        self.potential_fn = potential_fn
        self.transforms = transforms
        self.method = method
        self._max_plate_nesting = max_plate_nesting
        self._init_strategy = init_strategy
        self._given_transforms = transforms
        self._forget()

    def unconstrained(
        self, num_chains: int, args: Sequence[Any], kwargs: Mapping[str, Any], initial_params: Mapping[str, Tensor] | None
    ) -> Unconstrained:
        """What ``num_chains`` chains sample, given unconstrained starts ``{name: (C, *shape)}`` or none."""
        if self.model is None:
            assert self.potential_fn is not None
            return unconstrained_potential(self.potential_fn, initial_params, self._given_transforms)
        return unconstrained_model(
            self.model,
            args,
            kwargs,
            num_chains,
            init_strategy=self._init_strategy,
            initial_params=initial_params,
            transforms=self._given_transforms,
            max_plate_nesting=self._max_plate_nesting,
        )

    # --- a chain in Pyro's own MCMC ---------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._initial_params: dict[str, Tensor] | None = None
        self._posed: Unconstrained | None = None
        self._run: ChainRun | None = None
        self._generator: torch.Generator | None = None
        self._state: ChainState | None = None
        self._acceptance: list[float] = []
        self._divergences: list[int] = []

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Prepares one chain, as Pyro's ``MCMC`` asks for it."""
        given = self._initial_params
        self._posed = self.unconstrained(1, args, kwargs, given and {name: value.unsqueeze(0) for name, value in given.items()})
        self.transforms = self._posed.transforms
        target = density_target(self._posed.density, self._posed.start)
        self._initial_params = {name: value[0] for name, value in self._posed.sites.values(self._posed.start).items()}
        self._run = self.method.prepare_density(target, Settings(1, warmup_steps, 1, None))
        self._generator = make_generator(seed_from_global(), self._posed.start.device)
        self._state = None
        self._acceptance, self._divergences = [], []

    def cleanup(self) -> None:
        """Forgets the chain."""
        self._forget()

    @property
    def initial_params(self) -> dict[str, Tensor] | None:
        """Unconstrained values at which the chain starts."""
        return self._initial_params

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        self._initial_params = params

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The next state of the chain that :meth:`setup` prepared; ``params`` is where it already is."""
        assert self._run is not None and self._posed is not None and self._generator is not None
        if self._state is None:
            self._state = self._run.init(self._generator)
        self._state, draw, stats = self._run.advance(self._state, self._generator)
        if draw is not None:
            if bool(stats["diverging"]):
                self._divergences.append(len(self._acceptance))
            self._acceptance.append(float(stats["acceptance_rate"]))
        return {name: value[0] for name, value in self._posed.sites.values(self._state.chain.position).items()}

    def logging(self) -> OrderedDict[str, str]:
        """Step size and mean acceptance, for Pyro's progress bar."""
        shown = OrderedDict()
        if self._state is not None:
            shown["step size"] = f"{float(self._state.tuning.step_size):.2e}"
        if self._acceptance:
            shown["acc. prob"] = f"{sum(self._acceptance) / len(self._acceptance):.3f}"
        return shown

    def diagnostics(self) -> dict[str, Any]:
        """As Pyro's kernels: the draws that diverged, and the mean acceptance."""
        return {"divergences": self._divergences, "acceptance rate": sum(self._acceptance) / max(1, len(self._acceptance))}


class NUTS(GradientKernel):
    """The no-U-turn sampler with the arguments of ``pyro.infer.NUTS``, for :class:`MCMC` here or Pyro's own.

    Args:
        model: with Pyro primitives; or else
        potential_fn: minus a log density of unconstrained values ``{name: tensor}``; then ``MCMC`` needs ``initial_params``.
        step_size: where the search for a step size begins; kept if ``adapt_step_size`` is false.
        adapt_step_size: whether warm-up tunes the step size.
        adapt_mass_matrix: whether warm-up learns a mass matrix.
        full_mass: a dense mass matrix in place of a diagonal one.
        use_multinomial_sampling: true, as trajectories are always sampled so here.
        transforms: of sites, from constrained to unconstrained values; by default those of their supports.
        max_plate_nesting: of models with discrete sites; guessed by default.
        jit_compile: accepted for Pyro's sake, and without effect: chains share every evaluation instead.
        jit_options: the same.
        ignore_jit_warnings: the same.
        target_accept_prob: mean acceptance that warm-up steers the step size to.
        max_tree_depth: at most ``2 ** max_tree_depth - 1`` gradients a transition.
        init_strategy: where chains start, one site at a time.

    Raises:
        ValueError: both or neither of ``model`` and ``potential_fn``; a number out of range; ``full_mass`` with a list of blocks.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        >>> pyro.set_rng_seed(0)
        >>> mcmc = pyro.infer.MCMC(NUTS(model), num_samples=200, warmup_steps=50, disable_progbar=True)  # Pyro's own loop
        >>> mcmc.run(torch.tensor([0.9, 1.1, 1.0]))
        >>> 0.8 < mcmc.get_samples()["mean"].mean() < 1.2
        tensor(True)
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Potential | None = None,
        step_size: float = 1.0,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        full_mass: bool = False,
        use_multinomial_sampling: bool = True,
        transforms: dict[str, Any] | None = None,
        max_plate_nesting: int | None = None,
        jit_compile: bool = False,
        jit_options: Mapping[str, Any] | None = None,
        ignore_jit_warnings: bool = False,
        target_accept_prob: float = 0.8,
        max_tree_depth: int = 10,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ):
        if not use_multinomial_sampling:
            raise ValueError(
                "use_multinomial_sampling is False. Expected True; slice sampling of trajectories is pyro.infer.NUTS's."
            )
        method = methods.NUTS(
            max_tree_depth=max_tree_depth,
            target_accept_prob=target_accept_prob,
            step_size=step_size,
            adapt_step_size=adapt_step_size,
            mass_matrix=_mass_matrix(adapt_mass_matrix, full_mass),
        )
        super().__init__(model, potential_fn, method, transforms, max_plate_nesting, init_strategy)


class HMC(GradientKernel):
    """Hamiltonian Monte Carlo with the arguments of ``pyro.infer.HMC``, for :class:`MCMC` here or Pyro's own.

    Args:
        model: as for :class:`NUTS`.
        potential_fn: as for :class:`NUTS`.
        step_size: where the search for a step size begins; kept if ``adapt_step_size`` is false.
        trajectory_length: step size times number of steps, kept while the step size is tuned; 2 pi by default. At most 1024 steps.
        num_steps: if there is no ``trajectory_length``, that times ``step_size`` is the length.
        adapt_step_size: whether warm-up tunes the step size.
        adapt_mass_matrix: whether warm-up learns a mass matrix.
        full_mass: a dense mass matrix in place of a diagonal one.
        transforms: as for :class:`NUTS`.
        max_plate_nesting: as for :class:`NUTS`.
        jit_compile: accepted for Pyro's sake, and without effect.
        jit_options: the same.
        ignore_jit_warnings: the same.
        target_accept_prob: mean acceptance that warm-up steers the step size to.
        init_strategy: where chains start, one site at a time.

    Raises:
        ValueError: as for :class:`NUTS`.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> def model():
        ...     pyro.sample("x", dist.Gamma(3.0, 1.0))
        >>> from torchgpmc.integrations.pyro import MCMC
        >>> mcmc = MCMC(HMC(model, num_steps=2), num_samples=400, warmup_steps=100, num_chains=4, disable_progbar=True, seed=0)
        >>> mcmc.run()
        >>> 2.5 < mcmc.get_samples()["x"].mean() < 3.5
        tensor(True)
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Potential | None = None,
        step_size: float = 1.0,
        trajectory_length: float | None = None,
        num_steps: int | None = None,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        full_mass: bool = False,
        transforms: dict[str, Any] | None = None,
        max_plate_nesting: int | None = None,
        jit_compile: bool = False,
        jit_options: Mapping[str, Any] | None = None,
        ignore_jit_warnings: bool = False,
        target_accept_prob: float = 0.8,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ):
        if trajectory_length is None:
            trajectory_length = 2 * math.pi if num_steps is None else step_size * num_steps
        method = _FixedLength(
            trajectory_length=trajectory_length,
            target_accept_prob=target_accept_prob,
            step_size=step_size,
            adapt_step_size=adapt_step_size,
            mass_matrix=_mass_matrix(adapt_mass_matrix, full_mass),
        )
        super().__init__(model, potential_fn, method, transforms, max_plate_nesting, init_strategy)


def _mass_matrix(adapt: bool, full: bool) -> MassMatrix:
    if not isinstance(full, bool):
        raise ValueError(f"full_mass is {full!r}. Expected True or False: blocks of sites are not told apart here.")
    if not adapt:
        return MassMatrix.IDENTITY
    return MassMatrix.DENSE if full else MassMatrix.DIAGONAL
