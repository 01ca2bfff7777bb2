"""Pyro's ``MCMC`` with all chains in one batch, one process and one warm-up."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.mcmc.api import AbstractMCMC
from pyro.infer.mcmc.util import diagnostics, print_summary, select_samples
from torch import Tensor

from torchgpmc.calls.density_sampling import DensityDraws, sample_density
from torchgpmc.checks import check_count
from torchgpmc.diagnostics.chain_statistics import as_datatree
from torchgpmc.integrations.pyro.transitions import GradientKernel, seed_from_global
from torchgpmc.storage.checkpoint import Checkpoint


class MCMC(AbstractMCMC):  # type: ignore[misc]  # Pyro's classes are untyped
    """``pyro.infer.MCMC`` for :class:`NUTS` and :class:`HMC` of this module: chains are rows of one batch.

    The model is evaluated for all chains at once by ``vmap`` where that reproduces Pyro's own potential and gradient, which is
    tried at two positions as a run begins, and chain by chain elsewhere (discrete latents, control flow that looks at values).
    Where operations depend on no value they are recorded once and played back, which leaves the model's own Python out. Chains
    share one warm-up. Other kernels, ``hook_fn`` and processes are for ``pyro.infer.MCMC``, which takes the kernels of this module
    too.

    Args:
        kernel: :class:`NUTS` or :class:`HMC` of this module.
        num_samples: kept draws a chain.
        warmup_steps: steps before the first kept draw; ``num_samples`` by default.
        initial_params: unconstrained starts ``{name: (C, *shape)}``; without the first dimension for one chain.
        num_chains: C.
        hook_fn: ``None``.
        mp_context: without effect, as there are no processes.
        disable_progbar: whether to show no progress.
        disable_validation: whether Pyro's checks of distributions are off while chains run; ``None`` leaves them as they are.
        transforms: of sites, from constrained to unconstrained values, for the draws; by default the kernel's.
        save_params: sites to keep; all by default.
        seed: of all randomness. By default torch's global generator decides, as in Pyro; with a seed it is left as it was.
        checkpoint: as in :func:`torchgpmc.sample_density`; starts must repeat for it, so give a ``seed``.

    Attributes:
        transforms: of the sites.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from torchgpmc.integrations.pyro import MCMC, NUTS
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=100, num_chains=4, disable_progbar=True, seed=0)
        >>> mcmc.run(x, 0.5 * x + 0.1 * torch.cos(20 * x))
        >>> mcmc.get_samples(group_by_chain=True)["slope"].shape
        torch.Size([4, 500])
        >>> pyro.infer.Predictive(model, mcmc.get_samples(20))(x)["y"].shape
        torch.Size([20, 20])
        >>> mcmc.draws.complaints(), mcmc.diagnostics()["divergences"]["chain 0"], mcmc.to_arviz().posterior["slope"].shape
        ([], [], (4, 500))
        >>> mcmc.summary()
        <BLANKLINE>
                  mean ...
             slope 0.5...
        <BLANKLINE>
        Number of divergences: 0
    """

    def __init__(
        self,
        kernel: GradientKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Mapping[str, Tensor] | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        mp_context: str | None = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        transforms: dict[str, Any] | None = None,
        save_params: Sequence[str] | None = None,
        *,
        seed: int | None = None,
        checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    ):
        if not isinstance(kernel, GradientKernel):
            raise TypeError(
                f"kernel is {type(kernel).__module__}.{type(kernel).__name__}. Expected torchgpmc.integrations.pyro.NUTS(model) or "
                f"HMC(model); other kernels run in pyro.infer.MCMC."
            )
        if hook_fn is not None:
            raise ValueError("hook_fn is called a draw and a chain at a time. Expected None, or pyro.infer.MCMC with this kernel.")
        check_count("num_chains", num_chains)
        super().__init__(kernel, num_chains, transforms)
        if initial_params:
            if num_chains == 1:
                initial_params = {name: value.unsqueeze(0) for name, value in initial_params.items()}
            self._validate_initial_params(initial_params)
        self.num_samples = num_samples
        self.warmup_steps = num_samples if warmup_steps is None else warmup_steps
        self.disable_validation = disable_validation
        self._initial_params = initial_params or None
        self._progress = not disable_progbar
        self._save_params = save_params
        self._seed = seed
        self._checkpoint = checkpoint
        self._samples: dict[str, Tensor] | None = None
        self._draws: DensityDraws | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Samples the model at these arguments, from the start. Warns in plain words if the draws are not to be trusted."""
        keep = self.disable_validation is None
        seed = seed_from_global() if self._seed is None else self._seed
        with poutine.block(), nullcontext() if keep else pyro.validation_enabled(not self.disable_validation):
            with torch.random.fork_rng():  # starts, and what models draw, come from the global generator
                torch.manual_seed(seed)
                target = self.kernel.unconstrained(self.num_chains, args, kwargs, self._initial_params)
            self._draws = sample_density(
                target.density,
                target.start,
                self.kernel.method,
                num_samples=self.num_samples,
                warmup_steps=self.warmup_steps,
                seed=seed,
                progress=self._progress,
                checkpoint=self._checkpoint,
                parts=target.sites.values,
            )
        self._draws.info["evaluated"] = target.density.route
        if self.transforms is None:
            self.transforms = target.transforms
        samples = target.constrained(self._draws.position, self.transforms)
        self._samples = {name: value for name, value in samples.items() if self._save_params is None or name in self._save_params}

    @property
    def draws(self) -> DensityDraws:
        """The draws on the unconstrained scale, with ``stats`` and ``complaints()``; ``info["evaluated"]`` names the route.

        Raises:
            RuntimeError: before :meth:`run`.
        """
        return self._finished()[1]

    def _finished(self) -> tuple[dict[str, Tensor], DensityDraws]:
        if self._samples is None or self._draws is None:
            raise RuntimeError("there are no draws yet. Expected run(...) first.")
        return self._samples, self._draws

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> dict[str, Tensor]:
        """Draws ``{name: (C * S, *shape)}``, constrained; ``(C, S, *shape)`` by chain; ``num_samples`` of them with replacement."""
        samples: dict[str, Tensor] = select_samples(self._finished()[0], num_samples, group_by_chain)
        return samples

    def diagnostics(self) -> dict[str, Any]:
        """As Pyro's: effective size and split R-hat of each site, divergences and mean acceptance of each chain."""
        samples, draws = self._finished()
        found: dict[str, Any] = diagnostics(samples)
        diverging, rate = draws.stats.get("diverging"), draws.stats["acceptance_rate"].mean(1)
        if diverging is not None:
            found["divergences"] = {f"chain {chain}": row.nonzero().flatten().tolist() for chain, row in enumerate(diverging)}
        found["acceptance rate"] = {f"chain {chain}": float(value) for chain, value in enumerate(rate)}
        return found

    def summary(self, prob: float = 0.9) -> None:
        """Prints Pyro's table: mean, sd, median, an interval of probability ``prob``, effective size and split R-hat."""
        samples, draws = self._finished()
        print_summary(samples, prob=prob)
        print(f"Number of divergences: {int(draws.stats['diverging'].sum())}")

    def to_arviz(self) -> Any:
        """An ArviZ ``DataTree`` with groups ``posterior`` and ``sample_stats``; needs the extra ``arviz``."""
        samples, draws = self._finished()
        posterior = {name: value.detach().cpu().numpy() for name, value in samples.items()}
        return as_datatree({"posterior": posterior, "sample_stats": {name: value.numpy() for name, value in draws.stats.items()}})
