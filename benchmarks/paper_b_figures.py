"""Paper B, figures 1 and 2: error against time on problem 3 of experiment 2 (N=400, linear kernel).

    python benchmarks/paper_b_figures.py

Class probabilities: orthant integrals (soft count, tilted net), elliptical slice sampling, HMC. Log evidence: the two orthant
methods, annealed importance sampling, and importance sampling from EP. One run a point, where the paper averages ten.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np
import torch
from orthant_problems import linear_model, linear_problem

import torchgpmc as tg
from torchgpmc.orthant import Count, Sequential

OUTPUT = pathlib.Path(__file__).parent.parent / "docs" / "results" / "paper_b_figures.png"
NO_THETA = torch.zeros(1, 0, dtype=torch.float64)


def timed(function):
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        result = function()
    return result, time.perf_counter() - began


def chains(model, tests, engine, draws):
    options = {"num_chains": 8, "warmup_steps": 10 + draws // 4, "seed": 1, "progress": False}
    return tg.sample(model, engine, num_samples=draws, **options).predict(tests, num_draws=min(8 * draws, 4000)).probs


def orthant_rows(model, tests, truth, probabilities):
    """Name, points, seconds and error of class probabilities, and of the log evidence."""
    soft = Sequential(Count.SOFT, num_groups=1)
    first, second = [], []
    both = [("soft count", points, soft) for points in (1000, 10_000, 50_000)]
    both += [("tilted net", points, None) for points in (128, 1024, 8192)]
    for name, points, method in both:
        found, seconds = timed(lambda p=points, m=method: tg.evidence.classify(model, NO_THETA, num_points=p, method=m))
        ours, more = timed(lambda found=found: found.probabilities(tests)[0])
        first.append((name, points, seconds + more, np.abs(ours.numpy() - probabilities).mean()))
        second.append((name, points, seconds, 100 * abs(float(found.log_evidence) - truth) / abs(truth)))
    return first, second


def chain_rows(model, tests, probabilities):
    rows = []
    for name, engine in (("elliptical slice", tg.EllipticalSlice()), ("HMC", tg.HMC(num_steps=10))):
        for draws in (50, 400, 2000):
            ours, seconds = timed(lambda engine=engine, draws=draws: chains(model, tests, engine, draws))
            rows.append((name, 8 * draws, seconds, np.abs(ours.numpy() - probabilities).mean()))
    return rows


def estimator_rows(model, truth):
    rows = []
    for count in (16, 256):
        for name, made in (
            ("importance, EP", tg.evidence.importance(model, tg.EP(), num_importance=count)),
            ("annealed from Laplace", tg.evidence.annealed(model, num_importance=count, num_temperatures=20)),
        ):
            value, seconds = timed(lambda made=made: float(made(NO_THETA, torch.Generator().manual_seed(0)).value))
            rows.append((name, count, seconds, 100 * abs(value - truth) / abs(truth)))
    return rows


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    from matplotlib.figure import Figure

    x, y, tests, truth, probabilities = linear_problem(3)
    model, tests = linear_model(x, y), torch.as_tensor(tests)
    first, second = orthant_rows(model, tests, truth, probabilities)
    first, second = first + chain_rows(model, tests, probabilities), second + estimator_rows(model, truth)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, rows, title in zip(
        figure.subplots(1, 2), (first, second), ("MAE of probabilities", "error of the log evidence, %"), strict=True
    ):
        print(f"| {title} by | points or draws | seconds | error |\n|---|---|---|---|")
        for name in dict.fromkeys(row[0] for row in rows):
            some = [row for row in rows if row[0] == name]
            axis.loglog([row[2] for row in some], [row[3] for row in some], "o-", label=name)
            for _, points, seconds, error in some:
                print(f"| {name} | {points} | {seconds:.2f} | {error:.2g} |", flush=True)
        axis.set(xlabel="seconds", title=title)
        axis.legend()
        print()
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, dpi=90)


if __name__ == "__main__":
    main()
