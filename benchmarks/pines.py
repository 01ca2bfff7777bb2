"""Pine saplings (Hensman et al. 2015, section 5.2): a Cox process with and without inducing points, and one whose field is known.

    python benchmarks/pines.py --data DATA --record FOLDER --parts sparse full fine field

126 saplings in a square of 10 m, counted in 32 x 32 cells (``fine``: 64 x 64); RBF kernel, lengthscale Gamma(1.75, 1), variance
Gamma(1.2, 1); the sparse model has M = 225 inducing points on a 15 x 15 grid. The full model is sampled by adaptive importance
sampling: two hyperparameters, the latents integrated out. ``field`` is the simulated process of ``lgcp64.npz``, 64 x 64 cells,
with the hyperparameters of its simulation: how many cells hold the true log intensity in their central bands. Each part leaves
its numbers in the folder; the tables and docs/results/pines.png are of all parts that are there. Processor seconds.
"""

import argparse
import json
import math
import pathlib
import time

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import CHAINS, quiet, worst
from latent_samplers import cox_process
from matplotlib.figure import Figure
from real_data import OUTPUT, table

import torchgpmc as tg

WINDOW = [[-5.0, 5.0], [-8.0, 2.0]]
INDUCING = 15  # along each side
LEVELS = [0.5, 0.8, 0.95]
PAPER = {"sparse": "3.4", "full": "554", "fine": "4.7"}  # seconds an effective draw


def trees(arguments):
    return torch.as_tensor(table(arguments.data, "pines"))[:, :2]


def parts(binned):
    """Inputs, counts, kernel and likelihood."""
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(1.75, 1.0)), outputscale_prior=GammaPrior(1.2, 1.0))
    return binned.centres, binned.counts, kernel, tg.likelihoods.Poisson(exposure=binned.area)


def sparse(arguments, cells):
    points = trees(arguments)
    binned = tg.bin_events(points, WINDOW, cells)
    model = tg.SparseGP(*parts(binned), inducing_points=tg.bin_events(points, WINDOW, INDUCING).centres)
    settings = {"num_samples": arguments.draws, "warmup_steps": arguments.warmup, "num_chains": CHAINS}
    return intensity(model, tg.NUTS(whitening=tg.Laplace()), binned, settings)


def full(arguments):
    binned = tg.bin_events(trees(arguments), WINDOW, 32)
    return intensity(tg.GP(*parts(binned)), tg.AMIS(), binned, {"num_samples": arguments.weighted})


def intensity(model, method, binned, settings):
    began = time.process_time()
    posterior = tg.sample(model, method, seed=0, progress=False, **settings)
    seconds = time.process_time() - began
    rhat, effective = worst(posterior)
    mean = posterior.predict(binned.centres, num_draws=400).intensity.mean
    theta = {row.name: (row.mean, row.sd) for row in posterior.summary().rows if row.name != "lp"}
    return {"rhat": rhat, "effective": effective, "seconds": seconds, "theta": theta, "intensity": mean.tolist()}


def field(arguments):
    """Coverage of the true field, and of draws from the posterior in its place: what a field that is right would have."""
    model = cox_process(arguments.data, 64)
    truth = np.load(arguments.data / "lgcp64.npz")["f"].reshape(64, 64, order="F")
    truth = torch.as_tensor(truth.reshape(-1), dtype=torch.float64)
    began = time.process_time()
    posterior = tg.sample(
        model,
        tg.AuxiliaryGradient(thinning=5),
        num_samples=arguments.field_draws,
        warmup_steps=arguments.field_draws,
        num_chains=CHAINS,
        seed=0,
        progress=False,
    )
    seconds = time.process_time() - began
    draws = posterior.latents.flatten(0, 1)
    rows = {}
    for level in LEVELS:
        lower, upper = draws.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=draws.dtype), 0)
        inside = ((draws > lower) & (draws < upper)).double().mean(-1)
        covered = float(((truth > lower) & (truth < upper)).double().mean())
        rows[level] = (covered, float(inside.mean()), float(inside.std()))
    return {"seconds": seconds, "draws": len(draws), "coverage": rows}


PARTS = {
    "sparse": lambda arguments: sparse(arguments, 32),
    "full": full,
    "fine": lambda arguments: sparse(arguments, 64),
    "field": field,
}


def report(found):
    print("| part | N | M | effective draws | R-hat | CPU s | CPU s an effective draw | the paper's s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, cells, points in (("sparse", 32, INDUCING**2), ("full", 32, "-"), ("fine", 64, INDUCING**2)):
        if name in found:
            row = found[name]
            print(
                f"| {name} | {cells**2} | {points} | {row['effective']:.0f} | {row['rhat']:.3f} | {row['seconds']:.0f} | "
                f"{row['seconds'] / row['effective']:.2f} | {PAPER[name]} |"
            )
    for name, row in found.items():
        if "theta" in row:
            print(
                f"\n{name}: " + ", ".join(f"{key.rsplit('.', 1)[-1]} {m:.3f} (sd {s:.3f})" for key, (m, s) in row["theta"].items())
            )
    if {"sparse", "full"} <= found.keys():
        correlation = np.corrcoef(found["sparse"]["intensity"], found["full"]["intensity"])[0, 1]
        print(f"\nMean intensities of the 1024 cells, sparse against full: correlation {correlation:.5f}.")
    if "field" in found:
        print("\n| band | cells that hold the true field | of draws from the posterior, mean (sd) |")
        print("|---|---|---|")
        for level, (covered, mean, deviation) in found["field"]["coverage"].items():
            print(f"| {level} | {covered:.3f} | {mean:.3f} ({deviation:.3f}) |")


def draw(found, points):
    shown = [name for name in ("full", "sparse", "fine") if name in found]
    figure = Figure(figsize=(3.2 * (len(shown) + 1), 3.4), layout="constrained")
    first, *panels = figure.subplots(1, len(shown) + 1)
    extent = [end for ends in WINDOW for end in ends]
    first.scatter(*points.T, s=8, color="black")
    first.set(title="saplings", aspect="equal", xlim=WINDOW[0], ylim=WINDOW[1])
    highest = max(max(found[name]["intensity"]) for name in shown)
    for panel, name in zip(panels, shown, strict=True):
        cells = math.isqrt(len(found[name]["intensity"]))
        grid = np.reshape(found[name]["intensity"], (cells, cells)).T
        image = panel.imshow(grid, origin="lower", extent=extent, vmin=0.0, vmax=highest)
        panel.set(title=f"{name}, {cells} x {cells}")
    figure.colorbar(image, ax=panels, label="mean intensity, a square metre")
    figure.savefig(OUTPUT / "pines.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--record", type=pathlib.Path, required=True, help="folder of what is done")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--draws", type=int, default=250, help=f"of the sparse models, a chain of {CHAINS}")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weighted", type=int, default=400, help="weighted draws of the full model")
    parser.add_argument("--field-draws", type=int, default=1000, help="a chain, each of five steps, after as many of warm-up")
    arguments = parser.parse_args()
    quiet()
    arguments.record.mkdir(parents=True, exist_ok=True)
    for name in arguments.parts:
        path = arguments.record / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(PARTS[name](arguments)))
    found = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.record.glob("*.json"))}
    report(found)
    if "sparse" in found:
        draw(found, trees(arguments))


if __name__ == "__main__":
    main()
