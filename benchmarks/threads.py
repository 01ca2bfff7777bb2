"""Gradients on torch's own threads, on one, and shared by chains, beside busy processes: why sampling holds torch to one thread.

    python benchmarks/threads.py [--busy 0 1 2] [--output docs/results/threads.md]
    python benchmarks/threads.py --predictions

Medians of wall time. "As sampled" is what ``sample`` does: one torch thread, rows shared by Python threads where each has enough
to do. With ``--predictions``: of 880 draws at 171 test inputs, with torch's threads as they are, and with one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from pathlib import Path

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, HalfNormalPrior
from sklearn.datasets import load_breast_cancer

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.runs.chain_targets import shared

CASES = [  # model, N, D, M, chains
    ("GP", 50, 2, None, 16),
    ("GP", 200, 2, None, 4),
    ("GP", 200, 2, None, 16),
    ("GP", 500, 2, None, 4),
    ("SparseGP", 569, 30, 30, 4),
    ("SparseGP", 7000, 8, 100, 1),
    ("SparseGP", 7000, 8, 100, 4),
    ("GPRegression", 11, 1, None, 4),
    ("GPRegression", 50, 20, None, 8),
    ("GPRegression", 500, 8, None, 4),
]


def problem(kind: str, num_data: int, dimension: int, num_inducing: int | None, chains: int, device: torch.device | str = "cpu"):
    """The model, the density that chains of the default priors sample, and positions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_data, dimension, generator=generator, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    labels = (x.sum(-1) > dimension / 2).double()
    if kind == "GPRegression":
        noise = gpytorch.likelihoods.GaussianLikelihood(noise_prior=HalfNormalPrior(1.0))
        model = tg.GPRegression(x, x.sin().sum(-1), kernel, noise)
        position = model.layout.starting_points(chains, generator)
        model.to(device)
        return model, ApproximateMarginal(model, Conjugate()), position.to(device)
    likelihood = tg.likelihoods.Bernoulli()
    if kind == "GP":
        model = tg.GP(x, labels, kernel, likelihood)
    else:
        model = tg.SparseGP(x, labels, kernel, likelihood, inducing_points=x[:num_inducing])
    position = 0.3 * torch.randn(chains, model.layout.size + model.latent_size, generator=generator, dtype=torch.float64)
    model.to(device)
    return model, tg.joint_log_density(model), position.to(device)


def milliseconds(function) -> float:
    """Median of enough repeats to fill a second or so, after one that warms up."""
    function()
    times, end = [], time.perf_counter() + 1.0
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def spin() -> None:
    """A busy process."""
    while True:
        pass


def row(case) -> str:
    """One line of the table."""
    model, density, position = problem(*case)
    sampled = shared(density, model)

    torchs = milliseconds(lambda: density.value_and_grad(position))
    with one_torch_thread():
        one, ours = (milliseconds(lambda density=of: density.value_and_grad(position)) for of in (density, sampled))
    kind, num_data, dimension, num_inducing, chains = case
    name = f"{kind} N={num_data} D={dimension}" + (f" M={num_inducing}" if num_inducing else "") + f", {chains} chains"
    return f"| {name} | {torchs:.2f} | {one:.2f} | {ours:.2f} | {torchs / ours:.2f} |"


def predictions(busy: int) -> str:
    """Milliseconds of ``predict``, ``probs`` and ``log_prob`` beside so many busy processes."""
    x, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 1.0)), outputscale_prior=GammaPrior(2.0, 0.5))
    z = tg.kmeans_inducing_points(x[:398], 40)
    model = tg.SparseGP(x[:398], y[:398], kernel, tg.likelihoods.Bernoulli(), inducing_points=z)
    posterior = tg.sample(model, tg.AMIS(num_importance=4), num_samples=880, seed=0, progress=False)

    def predict():
        prediction = posterior.predict(x[398:])
        return prediction.probs, prediction.log_prob(y[398:])

    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
    for other in others:
        other.start()
    threads, usual = torch.get_num_threads(), milliseconds(predict)
    torch.set_num_threads(1)
    one = milliseconds(predict)
    torch.set_num_threads(threads)
    for other in others:
        other.terminate()
    return f"| {busy} | {usual:.0f} | {one:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--predictions", action="store_true")
    options = parser.parse_args()
    if options.predictions:
        print(*map(predictions, options.busy), sep="\n")
        return
    threads = torch.get_num_threads()
    lines = ["# Threads", "", "Command: `python benchmarks/threads.py`", ""]
    lines += [f"torch {torch.__version__}, {threads} threads, {platform.machine()}; milliseconds a gradient of all chains.", ""]
    for busy in options.busy:
        others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        lines += [f"## Beside {busy} busy processes", "", f"| model | {threads} torch threads | one | as sampled | ratio |"]
        lines += ["|---|---|---|---|---|"]
        for case in CASES:
            lines.append(row(case))
            print(lines[-1], flush=True)
        for other in others:
            other.terminate()
        lines.append("")
    if options.output:
        options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
