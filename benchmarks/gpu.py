"""Gradients, estimates and default calls on a GPU over the same on the CPU beside it.

    python benchmarks/gpu.py [--data DATA] [--device cuda] [--output docs/results/gpu.md]

Medians of wall time. On the CPU a gradient is as `sample` has it: one torch thread an operation, rows shared by threads. With
``--data`` the last gradient is MNIST's (mnist.py): 60,000 images, 500 inducing points, ten functions. ``--tables threads`` asks how
far more cores help the CPU.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from pathlib import Path

import torch
from mnist import ALL, classifier
from threads import milliseconds, problem

import torchgpmc as tg
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.runs.chain_targets import shared

GRADIENTS = [  # model, N, D, M, chains
    ("GP", 50, 2, None, 16),
    ("GP", 500, 2, None, 4),
    ("GP", 500, 2, None, 64),
    ("GP", 2000, 2, None, 16),
    ("GPRegression", 50, 20, None, 8),
    ("GPRegression", 500, 8, None, 64),
    ("GPRegression", 4000, 8, None, 4),
    ("SparseGP", 7000, 8, 100, 4),
    ("SparseGP", 7000, 8, 100, 64),
    ("SparseGP", 60000, 8, 500, 4),
]
CALLS = [("GP", 200, 2, None), ("GP", 500, 8, None), ("GPRegression", 500, 8, None), ("SparseGP", 7000, 8, 100)]
SETTINGS = [(200, 256), (500, 256), (1000, 64)]  # N, thetas


def waited(function, device):
    """``function``, whose results are there when it returns."""

    def whole():
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return whole


def gradient(case, device):
    """Milliseconds a gradient of all chains."""
    model, density, position = problem(*case, device=device)
    sampled = shared(density, model)
    with one_torch_thread():
        return milliseconds(waited(lambda: sampled.value_and_grad(position), device))


def of_mnist(data, device, chains=2):
    """The same of MNIST's classifier."""
    model = classifier(data, ALL, 500).to(device)
    generator = torch.Generator().manual_seed(0)
    position = 0.1 * torch.randn(chains, model.layout.size + model.latent_size, generator=generator, dtype=torch.float64)
    position[:, : model.layout.size] = model.layout.present(model)
    density = shared(tg.joint_log_density(model), model)
    at = position.to(device)
    with one_torch_thread():
        return milliseconds(waited(lambda: density.value_and_grad(at), device))


ESTIMATORS = {
    "Laplace, 16 draws": lambda model: tg.evidence.importance(model, num_importance=16),
    "EP, white noise out, 64 draws": lambda model: tg.evidence.SmoothProbit(tg.EP(), 64).estimator(model),
    "orthants, 64 points": lambda model: tg.evidence.Orthant(64).estimator(model),
}


def estimate(name, num_data, thetas, device):
    """Milliseconds an estimate of p(y | theta) of so many thetas at once."""
    model = problem("GP", num_data, 2, None, 1, device=device)[0]
    made = ESTIMATORS[name](model)
    estimator = getattr(made, "draw", made)
    generator = torch.Generator(device=device).manual_seed(0)
    theta = model.layout.sample_prior(thetas, generator)
    with one_torch_thread():
        return milliseconds(waited(lambda: estimator(theta, generator), device)) / thetas


def default_call(case, device):
    """Seconds of ``tg.sample(model)``; what it says of itself is printed."""
    model = problem(*case, 1, device=device)[0]
    began = time.perf_counter()
    posterior = tg.sample(model, seed=0, progress=False)
    seconds = time.perf_counter() - began
    print(f"{device}: {posterior.info['tried'][-1]['engine']}; {posterior.verdict()}")
    return seconds


def compared(label, function, devices):
    """One line of a table; nan where memory does not allow it."""
    found = []
    for device in devices:
        try:
            found.append(function(device))
        except torch.OutOfMemoryError as error:
            print(f"{label}: {error}")
            found.append(float("nan"))
    print(line := f"| {label} | {found[0]:.3f} | {found[1]:.3f} | {found[0] / found[1]:.2f} |", flush=True)
    return line


def gradients(devices, data):
    lines = ["| gradient of all chains (ms) | CPU | GPU | ratio |", "|---|---|---|---|"]
    for case in GRADIENTS:
        kind, num_data, dimension, num_inducing, chains = case
        label = f"{kind} N={num_data} D={dimension}" + (f" M={num_inducing}" if num_inducing else "") + f", {chains} chains"
        lines.append(compared(label, lambda device, case=case: gradient(case, device), devices))
    if data:
        lines.append(compared("MNIST, M=500, 2 chains", lambda device: of_mnist(data, device), devices))
    return lines


def estimates(devices, data):
    lines = ["| estimate, ms a theta | CPU | GPU | ratio |", "|---|---|---|---|"]
    for (num_data, thetas), how in [(size, how) for size in SETTINGS for how in ESTIMATORS]:
        label = f"{how}, N={num_data}, {thetas} thetas"
        lines.append(compared(label, lambda device, o=(how, num_data, thetas): estimate(*o, device), devices))
    return lines


def calls(devices, data):
    lines = ["| default call (s) | CPU | GPU | ratio |", "|---|---|---|---|"]
    for case in CALLS:
        label = " ".join(str(part) for part in case if part)
        lines.append(compared(label, lambda device, case=case: default_call(case, device), devices))
    return lines


def threads(devices, data):
    """Of the CPU alone: rows shared by so many threads, then torch's own threads within each operation."""
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= torch.get_num_threads()]
    lines = [
        f"| CPU, threads (ms) | {' | '.join(f'{count}, torch {count}' for count in counts)} |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for case in GRADIENTS[1:3] + GRADIENTS[5:6] + GRADIENTS[7:9]:
        _, density, position = problem(*case)
        cells = []
        for count in counts:
            torch.set_num_threads(count)
            own = milliseconds(lambda density=density, position=position: density.value_and_grad(position))
            cells.append(f"{gradient(case, devices[0]):.1f}, {own:.1f}")
        print(line := f"| {' '.join(str(part) for part in case if part)} chains | {' | '.join(cells)} |", flush=True)
        lines.append(line)
    return lines


TABLES = {"gradients": gradients, "estimates": estimates, "calls": calls, "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    devices = torch.device("cpu"), torch.device(options.device)
    name = torch.cuda.get_device_name() if devices[1].type == "cuda" else options.device
    lines = [f"{name}; {torch.get_num_threads()} cores, {platform.machine()}, torch {torch.__version__}"]
    for table in options.tables:
        lines += ["", *TABLES[table](devices, options.data)]
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
