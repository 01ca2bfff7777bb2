"""``sample``: the only loop over draws; progress, checkpoints, interruption, warnings."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch.models
import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.calls.beginning import begun_at, draws_for_engines
from torchgpmc.calls.candidate import Candidate
from torchgpmc.calls.default_call import Rule, sample_by_default
from torchgpmc.calls.interruption import before_draws, nothing_kept
from torchgpmc.calls.isolation import warn_of_isolated_data
from torchgpmc.calls.recommend import WANTED, candidates, warn_of_time
from torchgpmc.checks import check_count, check_object, warn
from torchgpmc.methods import NUTS
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.random import derived_seed, make_generator
from torchgpmc.numerics.threads import num_cores, one_torch_thread
from torchgpmc.posterior import Posterior
from torchgpmc.runs.run import Method, Run, Settings, chain_settings
from torchgpmc.storage.checkpoint import Checkpoint, CheckpointFile, as_checkpoint, saved_seed
from torchgpmc.storage.draws import Draws, DrawStore
from torchgpmc.storage.fingerprint import Fingerprint, model_fingerprint
from torchgpmc.trees import unpack
from torchgpmc.variational import Start

_SECONDS_BETWEEN_DISPLAYS = 0.2
_DRAWS = 1000  # kept a chain

Found = tuple[Draws, dict[str, Tensor], dict[str, Any]]  # draws, their statistics ``(C, S)``, and what was run


def sample(
    model: GPModel,
    method: Method | None = None,
    *,
    num_samples: int | None = None,
    warmup_steps: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    chain_chunk: int | None = None,
    start: Start | Posterior | None = None,
) -> Posterior:
    """Draws hyperparameters and latent function from the exact posterior of a GP model.

    The same seed, device, versions and number of threads give the same draws; progress and checkpoints never change them, and no
    global random generator is touched. Ctrl-C keeps the draws made so far. On CPU, torch's operations run on one thread each while
    this runs, and what is large enough is shared by as many threads as torch had (``posterior.info["threads"]``).

    Args:
        model: a :class:`GP`, :class:`SparseGP` or :class:`GPRegression`.
        method: for instance ``NUTS()``. Without one, engines that suit the model are tried in turn (:func:`torchgpmc.explain` names
            them), each until its draws are good: no complaints, and ``num_samples`` effective draws of every hyperparameter, ``lp``
            and latent, or until what it may spend is spent; ``posterior.info["tried"]`` lists them. Engines with chains alone, if
            ``num_chains``, ``warmup_steps`` or ``chain_chunk`` is given.
        num_samples: with a method, kept draws a chain, 1000 by default; without one, effective draws wanted, 400 by default.
        warmup_steps: steps before the first kept draw, in which the method tunes itself; ``num_samples`` by default.
        num_chains: chains run together as one batch; 4 by default.
        seed: of all randomness; ``None`` takes that of the checkpoint, or draws one; ``posterior.info["seed"]`` records it.
        progress: whether to show a bar with acceptance, step size, tree depth, gradients a second and divergences.
        checkpoint: a path (or :class:`Checkpoint`): a run killed half-way resumes from it to the same bits; a finished one is
            returned, or, of chains with ``warmup_steps``, goes on to a larger ``num_samples``; other settings are an error.
            Without a method, the second engine's file has ".2" after it, and so on.
        chain_chunk: evaluate at most this many chains at once, to bound memory. The random numbers stay the same; other batches
            round differently, which warm-up amplifies, so that after many steps draws may differ.
        start: a fit from :func:`torchgpmc.initialize` of this very model (``start.model``): chains of ``NUTS()``, the default then,
            or ``HMC()`` begin around it, in coordinates that are white under it, some around each other optimum that it has found
            to matter (``posterior.info["begun"]``). What is sampled is the same, sooner.
            Or, of methods on theta alone and without a method, a posterior of this very model, weighted or not: chains begin around
            its draws, their covariance is the mass matrix, and the first proposals of ``AMIS()`` are fitted to them.

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
        remedy = " Convert it: torchgpmc.from_gpytorch(model, likelihood, x, y)." if isinstance(model, gpytorch.models.GP) else ""
        raise TypeError(f"model is {type(model).__name__}. Expected a torchgpmc.GP, SparseGP or GPRegression.{remedy}")
    if method is not None:
        check_object("method", method, "prepare", "a method object, for instance torchgpmc.NUTS() or torchgpmc.HMC(num_steps=20)")
    earlier = start if method is None and isinstance(start, Posterior) else None
    if method is None and (start is not earlier or model.targets.one_a_chain):
        method = NUTS()  # where every chain has a posterior of its own, there is nothing to judge draws by
    if num_samples is None:
        num_samples = WANTED if method is None else _DRAWS
    with one_torch_thread(), torch.inference_mode(False):
        model.refresh()
        settings = check_settings(num_samples, warmup_steps, num_chains, chain_chunk)
        file = as_checkpoint(checkpoint)
        order = Order(method, settings, checked_seed(seed, file), model.train_x.device, file, progress)
        if method is None:
            posterior = _sample_by_default(model, order, earlier)
            warn_of_isolated_data(posterior)
            return posterior
        _check_one_data_set_a_chain(model, settings)
        if start is not None:
            with before_draws(file):
                order = order._replace(settings=begun_at(start, model, method, settings))
        posterior = Posterior(model, *order.on_model(model))
        found = posterior.complaints()
        warn_of_isolated_data(posterior)
    for complaint in found:
        warn(complaint)
    return posterior


def _sample_by_default(model: GPModel, order: Order, start: Posterior | None) -> Posterior:
    """Engines in turn; ``order.settings`` are the user's, of whom ``num_samples`` are effective draws.

    With ``start`` those that can begin at its draws.
    """
    wanted, warmup_steps, num_chains, chain_chunk, *_ = order.settings
    with before_draws(order.checkpoint):
        engines = candidates(model, wanted)
        if not (warmup_steps is num_chains is chain_chunk is None):
            engines = [engine.with_chains(num_chains, warmup_steps) for engine in engines if engine.num_chains is not None]
        draws = None if start is None else draws_for_engines(start, model, [engine.method for engine in engines])
        warn_of_time(model, engines[0])

    def run(number: int, engine: Candidate, rule: Rule) -> Posterior:
        method = None if draws is None else engine.method.at_draws(model)
        with before_draws(order.checkpoint):
            begin = (engine.start(), None) if method is None else (None, draws)
        settings = Settings(engine.most, engine.warmup_steps, engine.num_chains, chain_chunk, *begin)
        trial = order._replace(method=method or engine.method, settings=settings, wanted=wanted, number=number)
        if order.checkpoint is not None and number:
            path = f"{os.fspath(order.checkpoint.path)}.{number + 1}"
            trial = trial._replace(checkpoint=order.checkpoint._replace(path=path))

        def enough(num_kept: int, num_evaluations: float, so_far: Callable[[], Found]) -> bool:
            return rule(num_kept, num_evaluations, lambda: Posterior(model, *so_far()))

        return Posterior(model, *trial.on_model(model, enough))

    return sample_by_default(engines, wanted, run)


def check_settings(num_samples: int, warmup_steps: int | None, num_chains: int | None, chain_chunk: int | None) -> Settings:
    """Raises a ``ValueError`` for a number out of range."""
    check_count("num_samples", num_samples)
    return Settings(
        int(num_samples),
        _checked_count("warmup_steps", warmup_steps, 0),
        _checked_count("num_chains", num_chains),
        _checked_count("chain_chunk", chain_chunk),
    )


def _checked_count(name: str, count: int | None, least: int = 1) -> int | None:
    if count is None:
        return None
    check_count(name, count, least)
    return int(count)  # numpy's whole numbers are neither torch's nor a file's


def checked_seed(seed: int | None, checkpoint: Checkpoint | None) -> int:
    """The seed; where the user gave none, that of the run which the checkpoint is of, or one that is drawn."""
    if seed is None:
        seed = saved_seed(checkpoint)
    if seed is None:
        seed = secrets.randbits(62)
    check_count("seed", seed, 0)
    return int(seed)


def _check_one_data_set_a_chain(model: GPModel, settings: Settings) -> None:
    if model.targets.one_a_chain and model.targets.num_data_sets != chain_settings(settings)[1]:
        raise ValueError(
            f"the model has targets for {model.targets.num_data_sets} chains and num_chains is {settings.num_chains}. "
            f"Expected num_chains={model.targets.num_data_sets}, one data set a chain; or train_y of shape "
            f"{tuple(model.targets.values.shape[1:])}, one data set for all chains."
        )


# Whether a run may end before its full length: of draws kept a chain, evaluations, and the draws so far on demand.
Enough = Callable[[int, float, Callable[[], Found]], bool]


class Order(NamedTuple):
    """One run, to be carried out on a model: everything that was asked for except the model."""

    method: Any
    settings: Settings  # its counts of draws and chains, and its start
    seed: int
    device: torch.device
    checkpoint: Checkpoint | None
    progress: bool
    wanted: int | None = None  # effective draws, of a run that ends with them
    number: int = 0  # of an engine among those of a call, each of which has random numbers of its own

    def on_model(self, model: GPModel, enough: Enough | None = None) -> Found:
        """All draws of the method's run on ``model``."""
        with before_draws(self.checkpoint):
            run = self.method.prepare(model, self.settings)
        return self.carry_out(run, (model.layout.size, model.latent_size), lambda: model_fingerprint(model), enough)

    def carry_out(
        self, run: Run, widths: tuple[int, int], identity: Callable[[], Fingerprint], enough: Enough | None = None
    ) -> Found:
        """All draws of ``run``, their statistics ``(C, S)``, and what was run.

        Args:
            run: from its start, or from the checkpoint.
            widths: numbers of hyperparameters and of latents in a draw.
            identity: what is sampled, for checkpoints.
            enough: whether the run may end before its full length.
        """
        seed = derived_seed(self.seed, self.number) if self.number else self.seed
        loop = _Loop(run, self.device, make_generator(seed, self.device), self._file(run, widths, identity))
        loop.to_the_end({**self._description(), "target": run.label, "threads": num_cores()}, self.progress, enough)
        return loop.found()

    def _description(self) -> dict[str, Any]:
        number = self.settings.num_samples if self.wanted is None else self.wanted
        described = {"method": repr(self.method), "num_samples": number, "seed": self.seed, "torch": str(torch.__version__)}
        start = self.settings.start or self.settings.draws
        return described if start is None else {**described, "start": repr(start)}

    def _file(self, run: Run, widths: tuple[int, int], identity: Callable[[], Fingerprint]) -> CheckpointFile | None:
        if self.checkpoint is None:
            return None
        settings: Fingerprint = {key: str(value) for key, value in self._description().items()}
        settings |= {key: str(value) for key, value in self.settings._asdict().items() if key not in ("start", "draws")}
        settings["effective draws wanted"] = str(self.wanted)
        # By default warm-up is as long as the run; the draws of a call without a method are not those that it asks for.
        longer = run.may_be_longer and self.settings.warmup_steps is not None and self.wanted is None
        return CheckpointFile(self.checkpoint, settings | {"device": str(self.device)} | identity(), widths, longer)


class _Loop:
    """Advances a run to its end, or to an interruption; what is kept is in ``store``."""

    def __init__(self, run: Run, device: torch.device, generator: torch.Generator, file: CheckpointFile | None):
        self.run = run
        self.device = device
        self.generator = generator
        self.file = file
        self.store = DrawStore()
        self.state: Any = None
        self.info: dict[str, Any] = {}
        self.totals: dict[str, Any] = {"seconds": 0.0, "warmup_seconds": 0.0, "num_evaluations": 0.0, "interrupted": False}

    def found(self) -> Found:
        """The draws made so far."""
        draw, stats = self.store.joined()
        draws = self.run.finish(self.state, draw)
        stats = {name: value[:, : draws.theta.shape[1]] for name, value in stats.items()}
        # Engines without trajectories make one estimate a draw.
        evaluations = self.totals["num_evaluations"] or float(stats["lp"].numel())
        return draws, stats, {**self.info, **self.totals, "num_evaluations": evaluations, **draws.info}

    def to_the_end(self, info: dict[str, Any], progress: bool, enough: Enough | None = None) -> None:
        """Runs to the end, or until ``enough`` says so.

        Raises:
            KeyboardInterrupt: interrupted before the first draw was kept.
            ValueError: ``enough`` ended the run before that.
        """
        self.info = info
        with before_draws(None if self.file is None else self.file.checkpoint):
            state, done = self._start()
        self.state = state
        total = self.run.num_advances()
        generator_state = self.generator.get_state()
        bar = tqdm(total=total, initial=done, disable=not progress, desc="sampling", unit="step", dynamic_ncols=True)
        display = _Display(bar)
        last_saved = done
        try:
            ended = self._has_ended(state, enough)
            while not ended:
                began, before = time.perf_counter(), self._steps(done)
                state, draw, stats = self.run.advance(state, self.generator)
                if draw is not None:
                    self.store.append(draw, stats)
                done += 1
                self.state = state
                self._count(stats, draw is None, time.perf_counter() - began)
                ended = self._has_ended(state, enough)
                if self.file is not None:
                    generator_state = self.generator.get_state()
                    if self.file.is_due(before, self._steps(done)) or ended:
                        self.file.save(state, generator_state, done, {**info, **self.totals}, self.store)
                        last_saved = done
                display.show(stats, draw is None)
        except KeyboardInterrupt:
            if self.file is not None and done > last_saved:
                self.file.save(state, generator_state, done, {**info, **self.totals}, self.store)
            if not len(self.store):
                raise KeyboardInterrupt(nothing_kept(done, total, None if self.file is None else self.file.checkpoint)) from None
            self.totals["interrupted"] = True
            warn(f"interrupted: {len(self.store)} draws a chain are kept; the rest was not sampled.")
        finally:
            bar.close()
        self._check_for_draws()

    def _steps(self, done: int) -> int:
        """Of a run that has advanced ``done`` times: a batch of weighted draws may take minutes, and is as many steps."""
        return max(done, len(self.store))

    def _has_ended(self, state: Any, enough: Enough | None) -> bool:
        if self.run.is_finished(state):
            return True
        return enough is not None and enough(len(self.store), self.totals["num_evaluations"], self.found)

    def _check_for_draws(self) -> None:
        if not len(self.store):
            raise ValueError(
                f"warm-up took more than the {self.totals['num_evaluations']:.0f} evaluations that the whole run may, and no draws "
                f"were kept. Expected fewer; use fewer chains, a model of fewer data, or stronger priors."
            )

    def _start(self) -> tuple[Any, int]:
        template = self.run.init(self.generator)
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
        self.gradients: Tensor | None = None  # since the last display
        self.shown = time.monotonic()
        self.pending = 0

    def show(self, stats: dict[str, Tensor], warming_up: bool) -> None:
        """One more advance, with its statistics."""
        if self.bar.disable:
            return
        self.pending += 1
        if "diverging" in stats and not warming_up:
            now = stats["diverging"].sum()
            self.divergences = now if self.divergences is None else self.divergences + now
        if "n_steps" in stats:
            now = stats["n_steps"].sum()
            self.gradients = now if self.gradients is None else self.gradients + now
        waited = time.monotonic() - self.shown
        if waited < _SECONDS_BETWEEN_DISPLAYS and self.bar.n + self.pending < self.bar.total:
            return
        numbers = {"accept": f"{float(stats['acceptance_rate'].mean()):.2f}"} if "acceptance_rate" in stats else {}
        if "step_size" in stats:
            numbers["step"] = f"{float(stats['step_size'].mean()):.2g}"
        if self.gradients is not None:
            numbers["depth"] = f"{math.log2(float(stats['n_steps'].mean()) + 1):.1f}"
            numbers["gradients/s"] = f"{float(self.gradients) / waited:.3g}"
            self.gradients = None
        if self.divergences is not None:
            numbers["divergences"] = str(int(self.divergences))
        if "n_failures" in stats and float(stats["n_failures"].sum()):
            numbers["failures"] = str(int(stats["n_failures"].sum()))
        self.bar.set_description("warm-up" if warming_up else "sampling", refresh=False)
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(self.pending)
        self.pending, self.shown = 0, time.monotonic()
