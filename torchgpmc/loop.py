"""``sample``: the only loop over draws; progress, checkpoints, interruption, warnings."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.checks import check_count, warn
from torchgpmc.methods import NUTS
from torchgpmc.methods.amis import AMIS
from torchgpmc.models.base import GPModel
from torchgpmc.posterior import Posterior
from torchgpmc.random import make_generator
from torchgpmc.recommend import recommend
from torchgpmc.runs.base import Method, Run, Settings, chain_settings
from torchgpmc.storage.checkpoint import Checkpoint, CheckpointFile
from torchgpmc.storage.draws import Draws, DrawStore
from torchgpmc.storage.fingerprint import Fingerprint, model_fingerprint
from torchgpmc.threads import num_cores, one_torch_thread
from torchgpmc.trees import unpack

_SECONDS_BETWEEN_DISPLAYS = 0.2


def sample(
    model: GPModel,
    method: Method | None = None,
    *,
    num_samples: int = 1000,
    warmup_steps: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    chain_chunk: int | None = None,
) -> Posterior:
    """Draws hyperparameters and latent function from the exact posterior of a GP model.

    The same seed, device, versions and number of threads give the same draws; progress and checkpoints never change them, and no
    global random generator is touched. Ctrl-C keeps the draws made so far. On CPU, torch's operations run on one thread each while
    this runs, and what is large enough is shared by as many threads as torch had (``posterior.info["threads"]``).

    Args:
        model: a :class:`GP`, :class:`SparseGP` or :class:`GPRegression`.
        method: for instance ``NUTS()``; :func:`torchgpmc.recommend` chooses by default, among chains alone if ``num_chains``,
            ``warmup_steps`` or ``chain_chunk`` is given.
        num_samples: kept draws a chain.
        warmup_steps: steps before the first kept draw, in which the method tunes itself; ``num_samples`` by default.
        num_chains: chains run together as one batch; 4 by default.
        seed: of all randomness; ``None`` draws one and records it in ``posterior.info["seed"]``.
        progress: whether to show a bar with acceptance, step size and divergences.
        checkpoint: a path (or :class:`Checkpoint`): a run killed half-way resumes from it to the same bits; a finished one is
            returned; one with other settings is an error.
        chain_chunk: evaluate at most this many chains at once, to bound memory. The random numbers stay the same; other batches
            round differently, which warm-up amplifies, so that after many steps draws may differ.

    Returns:
        The posterior draws. Warns (:class:`SamplingWarning`) in plain words if they are not to be trusted.

    Raises:
        TypeError: ``model`` or ``method`` is of the wrong kind.
        ValueError: a number out of range, or a model the method cannot sample; before any sampling.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 10)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, seed=0, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape
        torch.Size([1, 1000, 1, 1])
    """
    if not isinstance(model, GPModel):
        raise TypeError(f"model is {type(model).__name__}. Expected a torchgpmc.GP or torchgpmc.SparseGP.")
    chains_wanted = not (warmup_steps is num_chains is chain_chunk is None)
    method = _default_method(model, chains_wanted) if method is None else method
    if isinstance(method, type) or not hasattr(method, "prepare"):
        raise TypeError(
            f"method is {method!r}. Expected a method object, for instance torchgpmc.NUTS() or torchgpmc.HMC(num_steps=20)."
        )
    with one_torch_thread():
        model.refresh()
        settings = check_settings(num_samples, warmup_steps, num_chains, chain_chunk)
        _check_one_data_set_a_chain(model, settings)
        order = Order(method, settings, checked_seed(seed), model.train_x.device, checkpoint, progress)
        run = method.prepare(model, settings)
        widths = model.layout.size, model.latent_size
        posterior = Posterior(model, *order.carry_out(run, widths, lambda: model_fingerprint(model)))
        found = posterior.complaints()
    for complaint in found:
        warn(complaint)
    return posterior


def _default_method(model: GPModel, chains_wanted: bool) -> Method:
    method = recommend(model)
    return NUTS() if isinstance(method, AMIS) and (chains_wanted or model.targets.one_a_chain) else method


def check_settings(num_samples: int, warmup_steps: int | None, num_chains: int | None, chain_chunk: int | None) -> Settings:
    """Raises a ``ValueError`` for a number out of range."""
    check_count("num_samples", num_samples)
    if warmup_steps is not None:
        check_count("warmup_steps", warmup_steps, 0)
    if num_chains is not None:
        check_count("num_chains", num_chains)
    if chain_chunk is not None:
        check_count("chain_chunk", chain_chunk)
    return Settings(num_samples, warmup_steps, num_chains, chain_chunk)


def checked_seed(seed: int | None) -> int:
    """The seed, drawn where the user gave none."""
    if seed is None:
        seed = secrets.randbits(62)
    check_count("seed", seed, 0)
    return seed


def _check_one_data_set_a_chain(model: GPModel, settings: Settings) -> None:
    if model.targets.one_a_chain and model.targets.num_data_sets != chain_settings(settings)[1]:
        raise ValueError(
            f"the model has targets for {model.targets.num_data_sets} chains and num_chains is {settings.num_chains}. "
            f"Expected num_chains={model.targets.num_data_sets}: one data set a chain."
        )


class Order(NamedTuple):
    """What was asked for, beside what is sampled."""

    method: Any
    settings: Settings
    seed: int
    device: torch.device
    checkpoint: str | os.PathLike[str] | Checkpoint | None
    progress: bool

    def carry_out(
        self, run: Run, widths: tuple[int, int], identity: Callable[[], Fingerprint]
    ) -> tuple[Draws, dict[str, Tensor], dict[str, Any]]:
        """All draws of ``run``, their statistics ``(C, S)``, and what was run.

        Args:
            run: from its start, or from the checkpoint.
            widths: numbers of hyperparameters and of latents in a draw.
            identity: what is sampled, for checkpoints.
        """
        loop = _Loop(run, self.device, make_generator(self.seed, self.device), self._file(widths, identity))
        info = loop.run({**self._description(), "target": run.label, "threads": num_cores()}, self.progress)
        draw, stats = loop.store.joined()
        draws = run.finish(loop.state, draw)
        stats = {name: value[:, : draws.theta.shape[1]] for name, value in stats.items()}
        return draws, stats, {**info, **draws.info}

    def _description(self) -> dict[str, Any]:
        number = self.settings.num_samples
        return {"method": repr(self.method), "num_samples": number, "seed": self.seed, "torch": str(torch.__version__)}

    def _file(self, widths: tuple[int, int], identity: Callable[[], Fingerprint]) -> CheckpointFile | None:
        if self.checkpoint is None:
            return None
        checkpoint = self.checkpoint if isinstance(self.checkpoint, Checkpoint) else Checkpoint(self.checkpoint)
        check_count("checkpoint.every", checkpoint.every)
        settings: Fingerprint = {key: str(value) for key, value in self._description().items()}
        settings |= {key: str(value) for key, value in self.settings._asdict().items()}
        return CheckpointFile(checkpoint, settings | {"device": str(self.device)} | identity(), widths)


class _Loop:
    """Advances a run to its end, or to an interruption; what is kept is in ``store``."""

    def __init__(self, run: Run, device: torch.device, generator: torch.Generator, file: CheckpointFile | None):
        self.run_ = run
        self.device = device
        self.generator = generator
        self.file = file
        self.store = DrawStore()
        self.state: Any = None
        self.totals: dict[str, Any] = {"seconds": 0.0, "warmup_seconds": 0.0, "num_evaluations": 0.0, "interrupted": False}

    def run(self, info: dict[str, Any], progress: bool) -> dict[str, Any]:
        """The finished run's description, totals included.

        Raises:
            KeyboardInterrupt: interrupted before the first draw was kept.
        """
        state, done = self._start()
        self.state = state
        total = self.run_.num_advances()
        generator_state = self.generator.get_state()
        bar = tqdm(total=total, initial=done, disable=not progress, desc="sampling", unit="step", dynamic_ncols=True)
        display = _Display(bar)
        last_saved = done
        try:
            while not self.run_.is_finished(state):
                began = time.perf_counter()
                state, draw, stats = self.run_.advance(state, self.generator)
                if draw is not None:
                    self.store.append(draw, stats)
                done += 1
                self.state = state
                self._count(stats, draw is None, time.perf_counter() - began)
                if self.file is not None:
                    generator_state = self.generator.get_state()
                    if self.file.is_due(done) or self.run_.is_finished(state):
                        self.file.save(state, generator_state, done, {**info, **self.totals}, self.store)
                        last_saved = done
                display.show(stats, draw is None)
        except KeyboardInterrupt:
            if self.file is not None and done > last_saved:
                self.file.save(state, generator_state, done, {**info, **self.totals}, self.store)
            if not len(self.store):
                raise
            self.totals["interrupted"] = True
            warn(
                f"interrupted: {len(self.store)} draws a chain are kept; the rest was not sampled.",
            )
        finally:
            bar.close()
        return {**info, **self.totals}

    def _start(self) -> tuple[Any, int]:
        template = self.run_.init(self.generator)
        saved = None if self.file is None else self.file.restore()
        if saved is None:
            return template, 0
        self.generator.set_state(saved.generator_state)
        self.store = saved.store
        self.totals = {name: saved.info[name] for name in self.totals} | {"interrupted": False}
        return unpack(template, saved.state, self.device), saved.num_done

    def _count(self, stats: dict[str, Tensor], warming_up: bool, seconds: float) -> None:
        self.totals["seconds"] += seconds
        if warming_up:
            self.totals["warmup_seconds"] += seconds
        if "n_steps" in stats:
            self.totals["num_evaluations"] += float(stats["n_steps"].sum())


class _Display:
    """The progress bar's numbers, read off the device a few times a second."""

    def __init__(self, bar: Any):
        self.bar = bar
        self.divergences: Tensor | None = None
        self.shown = 0.0
        self.pending = 0

    def show(self, stats: dict[str, Tensor], warming_up: bool) -> None:
        """One more advance, with its statistics."""
        if self.bar.disable:
            return
        self.pending += 1
        if "diverging" in stats and not warming_up:
            now = stats["diverging"].sum()
            self.divergences = now if self.divergences is None else self.divergences + now
        if time.monotonic() - self.shown < _SECONDS_BETWEEN_DISPLAYS and self.bar.n + self.pending < self.bar.total:
            return
        numbers = {"accept": f"{float(stats['acceptance_rate'].mean()):.2f}"} if "acceptance_rate" in stats else {}
        if "step_size" in stats:
            numbers["step"] = f"{float(stats['step_size'].mean()):.2g}"
        if self.divergences is not None:
            numbers["divergences"] = str(int(self.divergences))
        if "n_failures" in stats and float(stats["n_failures"].sum()):
            numbers["failures"] = str(int(stats["n_failures"].sum()))
        self.bar.set_description("warm-up" if warming_up else "sampling", refresh=False)
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(self.pending)
        self.pending, self.shown = 0, time.monotonic()
