"""The only loop over draws: one run on a model, with progress, checkpoints and interruption."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.calls.display import Display
from torchgpmc.calls.interruption import before_draws, nothing_kept
from torchgpmc.checks import warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.random import derived_seed, make_generator
from torchgpmc.numerics.threads import num_cores
from torchgpmc.runs.run import Run, Settings
from torchgpmc.storage.checkpoint import Checkpoint, CheckpointFile
from torchgpmc.storage.draws import Draws, DrawStore
from torchgpmc.storage.fingerprint import Fingerprint, model_fingerprint
from torchgpmc.trees import unpack

Found = tuple[Draws, dict[str, Tensor], dict[str, Any]]  # draws, their statistics ``(C, S)``, and what was run


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


class _Reached(NamedTuple):
    """Where a run stands between two advances. Replaced as a whole, so that Ctrl-C finds all that a checkpoint needs."""

    state: Any
    generator_state: Tensor
    done: int  # advances
    totals: dict[str, Any]
    draws: int  # kept a chain


class _Loop:
    """Advances a run to its end, or to an interruption; what is kept is in ``store``."""

    def __init__(self, run: Run, device: torch.device, generator: torch.Generator, file: CheckpointFile | None):
        self.run = run
        self.device = device
        self.generator = generator
        self.file = file
        self.store = DrawStore()
        self.info: dict[str, Any] = {}
        totals = {"seconds": 0.0, "warmup_seconds": 0.0, "num_evaluations": 0.0, "interrupted": False}
        self.reached = _Reached(None, generator.get_state(), 0, totals, 0)

    def found(self) -> Found:
        """The draws made so far."""
        draw, stats = self.store.joined()
        draws = self.run.finish(self.reached.state, draw)
        stats = {name: value[:, : draws.theta.shape[1]] for name, value in stats.items()}
        # Engines without trajectories make one estimate a draw.
        evaluations = self.reached.totals["num_evaluations"] or float(stats["lp"].numel())
        return draws, stats, {**self.info, **self.reached.totals, "num_evaluations": evaluations, **draws.info}

    def to_the_end(self, info: dict[str, Any], progress: bool, enough: Enough | None = None) -> None:
        """Runs to the end, or until ``enough`` says so.

        Raises:
            KeyboardInterrupt: interrupted before the first draw was kept.
            ValueError: ``enough`` ended the run before that.
        """
        self.info = info
        with before_draws(None if self.file is None else self.file.checkpoint):
            self.reached = self._start()
        last_saved = self.reached.done
        total = self.run.num_advances()
        bar = tqdm(total=total, initial=last_saved, disable=not progress, desc="sampling", unit="step", dynamic_ncols=True)
        display = Display(bar)
        try:
            ended = self._has_ended(enough)
            while not ended:
                before = self._steps()
                stats, is_warming_up = self._advance()
                ended = self._has_ended(enough)
                if self.file is not None and (self.file.is_due(before, self._steps()) or ended):
                    self._save(self.file)
                    last_saved = self.reached.done
                display.show(stats, is_warming_up)
        except KeyboardInterrupt:
            self.store.cut(self.reached.draws)
            if self.file is not None and self.reached.done > last_saved:
                self._save(self.file)
            if not len(self.store):
                where = None if self.file is None else self.file.checkpoint
                raise KeyboardInterrupt(nothing_kept(self.reached.done, total, where)) from None
            self.reached.totals["interrupted"] = True
            warn(f"interrupted: {len(self.store)} draws a chain are kept; the rest was not sampled.")
        finally:
            bar.close()
        self._check_for_draws()

    def _advance(self) -> tuple[dict[str, Tensor], bool]:
        """One advance: its statistics, and whether it was of warm-up."""
        began = time.perf_counter()
        state, draw, stats = self.run.advance(self.reached.state, self.generator)
        generator_state = self.generator.get_state()
        if draw is not None:
            self.store.append(draw, stats)
        totals = self._counted(stats, draw is None, time.perf_counter() - began)
        self.reached = _Reached(state, generator_state, self.reached.done + 1, totals, len(self.store))
        return stats, draw is None

    def _save(self, file: CheckpointFile) -> None:
        state, generator_state, done, totals, _ = self.reached
        file.save(state, generator_state, done, {**self.info, **totals}, self.store)

    def _steps(self) -> int:
        """How far the run is: a batch of weighted draws may take minutes, and is as many steps."""
        return max(self.reached.done, self.reached.draws)

    def _has_ended(self, enough: Enough | None) -> bool:
        if self.run.is_finished(self.reached.state):
            return True
        return enough is not None and enough(self.reached.draws, self.reached.totals["num_evaluations"], self.found)

    def _check_for_draws(self) -> None:
        if not len(self.store):
            evaluations = self.reached.totals["num_evaluations"]
            raise ValueError(
                f"warm-up took more than the {evaluations:.0f} evaluations that the whole run may, and no draws were kept. "
                f"Expected fewer; use fewer chains, a model of fewer data, or stronger priors."
            )

    def _start(self) -> _Reached:
        template = self.run.init(self.generator)
        saved = None if self.file is None else self.file.restore()
        if saved is None:
            return self.reached._replace(state=template, generator_state=self.generator.get_state())
        self.generator.set_state(saved.generator_state)
        self.store = saved.store
        totals = {name: saved.info[name] for name in self.reached.totals} | {"interrupted": False}
        state = unpack(template, saved.state, self.device)
        return _Reached(state, saved.generator_state, saved.num_done, totals, len(saved.store))

    def _counted(self, stats: dict[str, Tensor], warming_up: bool, seconds: float) -> dict[str, Any]:
        """The totals after one more advance."""
        totals = self.reached.totals
        totals = {**totals, "seconds": totals["seconds"] + seconds}
        if warming_up:
            totals["warmup_seconds"] += seconds
        if "n_steps" in stats:
            totals["num_evaluations"] += float(stats["n_steps"].sum())
        return totals
