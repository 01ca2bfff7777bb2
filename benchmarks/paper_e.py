"""What both figures of paper E share: kernels, estimates of E||theta|| at growing budgets, their spread, and the table.

theta are the logs of all hyperparameters. Budgets count n^3 operations; the search for the mode and tuning count.
"""

import time
import warnings

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from real_data import OUTPUT

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.importance import add_draws, streamed_log_weights
from torchgpmc.numerics.random import make_generator
from torchgpmc.runs.run import Settings
from torchgpmc.runs.starts import posterior_modes

GRADIENT = 3  # operations: a factorisation, and two for the inverse


def kernel_of(columns, ard):
    base = RBFKernel(ard_num_dims=columns if ard else None, lengthscale_prior=GammaPrior(1.0, 1 / columns**0.5))
    return ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 0.1))


class _Counting(ApproximateMarginal):
    """Counts the thetas at which it, or its gradient, is evaluated."""

    gradients = values = 0

    def value_and_grad(self, position):
        self.gradients += len(position)
        return super().value_and_grad(position)


def mode_search_cost(model, approximation, operations_a_gradient, starts=4, candidates=32):
    """Operations of one search for the modes, as every sampler makes it: rough values of many draws, then L-BFGS from the best."""
    density = _Counting(model, approximation)
    posterior_modes(density, starts, make_generator(0))
    return candidates * operations_a_gradient / GRADIENT + density.gradients * operations_a_gradient


def norms(values):
    """||theta|| of every draw ``(C, S)``, from samples by name."""
    logs = [value.log().flatten(2) if value.dim() > 2 else value.log().unsqueeze(-1) for value in values.values()]
    return torch.cat(logs, -1).norm(dim=-1)


def of_chains(posterior, work, tuning, budgets):
    """Estimates ``(budgets, chains)``, NaN where a budget is outside the run; ``work`` ``(C, S)`` are operations of each draw."""
    value, spent = norms(posterior.samples), work.cumsum(-1) + tuning
    means = value.cumsum(-1) / torch.arange(1, value.shape[1] + 1)
    rows = []
    for budget in budgets:
        done = (spent <= budget).sum(-1)
        reached = means.gather(-1, (done - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
        rows.append(torch.where((done > 0) & (spent[:, -1] >= budget), reached, torch.nan))
    return torch.stack(rows)


def of_weighted(model, method, tuning, budgets, replicates, operations):
    """The same of importance samplers, run by run; ``operations(stats)`` ``(S,)`` of each draw."""
    rows = torch.full((len(budgets), replicates), torch.nan)
    for seed in range(replicates):
        generator = make_generator(seed)
        run = method.prepare(model, Settings(2 * budgets[-1], None, None, None))
        state, spent, norm = run.init(generator), torch.full((1,), float(tuning)), []
        for _ in range(run.num_advances()):
            before, earlier = spent[-1], state.streams
            state, draw, stats = run.advance(state, generator)
            spent = before + operations(stats).cumsum(-1)
            norm.append(norms({name: value[None] for name, value in model.layout.constrain(draw.theta[0]).items()})[0])
            for index, budget in enumerate(budgets):
                done = int((spent <= budget).sum())
                if done:  # a budget that ends within a batch counts its first draws, as a smaller batch
                    log_weights = streamed_log_weights(begun_batch(earlier, state.streams, done))
                    rows[index, seed] = torch.softmax(log_weights, 0) @ torch.cat(norm)[: len(log_weights)]
            if spent[-1] > budgets[-1]:
                break
    return rows


def begun_batch(before, after, count):
    """Streams of draws with the first ``count`` draws of the batch that lies between ``before`` and ``after``."""
    begun = []
    for stream, whole in zip(before, after, strict=True):
        new = slice(len(stream.position), len(stream.position) + count)
        begun.append(add_draws(stream, whole.position[new], whole.log_target[new]))
        count = max(0, count - (len(whole.position) - len(stream.position)))
    return tuple(begun)


def spread(values):
    """Interquartile range, NaN if fewer than half of the replicates got there."""
    good = values[torch.isfinite(values)]
    return float(good.quantile(0.75) - good.quantile(0.25)) if len(good) >= max(4, len(values) // 2) else float("nan")


def draw(rows, file):
    """One panel of curves a data set and kernel; ``rows`` are ``(set, kernel, sampler, budgets, ranges)``."""
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(row[:2] for row in rows))
    columns = min(3, len(keys))
    lines = -(-len(keys) // columns)
    figure = Figure(figsize=(5 * columns, 4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(keys) :]:
        panel.set_axis_off()
    for key, panel in zip(keys, panels, strict=False):
        for *found, sampler, budgets, ranges in rows:
            if tuple(found) == key:
                panel.loglog(budgets, ranges, marker="o", label=sampler)
        panel.set(title=", ".join(key), xlabel="n^3 operations", ylabel="IQR of E||theta||")
        panel.legend(fontsize=5)
    figure.savefig(OUTPUT / file, dpi=110)


class Report:
    """Rows of the table as they come, and their figure."""

    def __init__(self, operations):
        warnings.simplefilter("ignore", tg.SamplingWarning)
        self.operations = operations
        self.rows = []
        heads = " | ".join(f"IQR at {budget}" for budget in operations)
        print(f"| set | kernel | n | hyperparameters | sampler | {heads} | mean at the end | before the first draw | s |")
        print("|---" * (len(operations) + 8) + "|")

    def add(self, name, kernel, model, sampler, make):
        """Runs ``make() -> (estimates, operations before the first draw)`` and prints its row."""
        began = time.perf_counter()
        values, tuning = make()
        ranges = [spread(part) for part in values]
        last = next((part for part in reversed(values) if bool(torch.isfinite(part).any())), values[-1])
        cells = " | ".join("" if np.isnan(value) else f"{value:.3f}" for value in ranges)
        sizes = f"{len(model.train_x)} | {model.layout.size}"
        print(
            f"| {name} | {kernel} | {sizes} | {sampler} | {cells} | {float(last.nanmean()):.2f} | "
            f"{tuning:.0f} | {time.perf_counter() - began:.0f} |",
            flush=True,
        )
        self.rows.append((name, kernel, sampler, self.operations, ranges))
