"""Pine saplings (Hensman et al. 2015, section 5.2): a Cox process with and without inducing points, and one whose field is known.

    python benchmarks/pines.py --data DATA --record FOLDER --parts full grid placed more fine quadrature field

126 saplings in a square of 10 m, counted in 32 x 32 cells (``fine``: 64 x 64); RBF kernel, lengthscale Gamma(1.75, 1), variance
Gamma(1.2, 1). Both models are sampled by adaptive importance sampling: two hyperparameters, the latents integrated out. Sparse ones
have 225 inducing points on a 15 x 15 grid (``grid``), or where a Gaussian fit has moved them from there, as in the paper
(``placed``; ``more``: 400). ``quadrature`` has no Monte Carlo error. ``field`` is the simulated process of ``lgcp64.npz``, 64 x 64
cells, with the hyperparameters of its simulation: how many cells hold the true log intensity in their central bands. Each part
leaves its numbers in the folder; the tables and docs/results/pines.png are of all parts that are there. Processor seconds.
"""

import argparse
import itertools
import json
import math
import pathlib
import time

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import quiet, worst
from latent_samplers import cox_process
from matplotlib.figure import Figure
from real_data import OUTPUT, table

import torchgpmc as tg

WINDOW = [[-5.0, 5.0], [-8.0, 2.0]]
LENGTHSCALES = [0.17 * 1.195**step for step in range(10)]  # to 0.84 m
VARIANCES = [0.4 * 1.436**step for step in range(5)]  # to 1.7
LEVELS = [0.5, 0.8, 0.95]


def trees(arguments):
    return torch.as_tensor(table(arguments.data, "pines"))[:, :2]


def parts(binned):
    """Inputs, counts, kernel and likelihood."""
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(1.75, 1.0)), outputscale_prior=GammaPrior(1.2, 1.0))
    return binned.centres, binned.counts, kernel, tg.likelihoods.Poisson(exposure=binned.area)


def sparse(arguments, cells, side, *, moves):
    """With ``side``^2 inducing points on a grid, which a Gaussian fit moves if they are to."""
    points = trees(arguments)
    binned = tg.bin_events(points, WINDOW, cells)
    began = time.process_time()
    model = tg.SparseGP(*parts(binned), inducing_points=tg.bin_events(points, WINDOW, side).centres)
    if moves:
        model = tg.initialize(model, progress=False).model
    posterior = tg.sample(model, tg.AMIS(), num_samples=arguments.draws, seed=0, progress=False)
    seconds = time.process_time() - began
    return summarised(posterior, seconds, posterior.predict(binned.centres).intensity.mean)


def full(arguments):
    """EP follows counts of mostly 0 and 1 far closer than Laplace's approximation, and estimates from it vary less."""
    binned = tg.bin_events(trees(arguments), WINDOW, 32)
    began = time.process_time()
    model = tg.GP(*parts(binned))
    posterior = tg.sample(model, tg.AMIS(approximation=tg.EP()), num_samples=arguments.draws, seed=0, progress=False)
    return summarised(posterior, time.process_time() - began, posterior.fitted().mean / binned.area)


def summarised(posterior, seconds, intensity):
    _, effective = worst(posterior)
    theta = {row.name: (row.mean, row.sd) for row in posterior.summary().rows if row.name != "lp"}
    return {"effective": effective, "seconds": seconds, "theta": theta, "intensity": intensity.tolist()}


def theta_by_theta(arguments):
    """Lengthscale and mean intensities by quadrature over 50 thetas, without chance: what more inducing points would change.

    Latents and evidence are EP's for the full model, and those of the Gaussian fit, with its bound, for sparse ones.
    """
    points = trees(arguments)
    binned = tg.bin_events(points, WINDOW, 32)
    grids = {side: tg.bin_events(points, WINDOW, side).centres for side in (15, 20, 25)}
    placed = {
        side: tg.initialize(tg.SparseGP(*parts(binned), inducing_points=grids[side]), progress=False).model.inducing_points
        for side in (15, 20)
    }
    rows = {"full": averaged(binned, None)}
    rows |= {f"{side**2} on a grid": averaged(binned, z) for side, z in grids.items()}
    rows |= {f"{side**2} placed": averaged(binned, z) for side, z in placed.items()}
    return rows


def averaged(binned, inducing_points):
    """Mean and deviation of the lengthscale, and mean intensities."""
    logs, lengthscales, intensities = [], [], []
    for variance, lengthscale in itertools.product(VARIANCES, LENGTHSCALES):
        x, counts, kernel, likelihood = parts(binned)
        kernel.outputscale, kernel.base_kernel.lengthscale = variance, lengthscale
        priors = (
            (kernel.outputscale_prior, kernel.outputscale),
            (kernel.base_kernel.lengthscale_prior, kernel.base_kernel.lengthscale),
        )
        # The grid is even in logarithms.
        log_prior = sum(float(prior.log_prob(value) + value.log()) for prior, value in priors)
        kernel.requires_grad_(False)
        if inducing_points is None:
            model = tg.GP(x, counts, kernel, likelihood)
            theta = model.layout.present(model)
            evidence = float(tg.approximations.expectation_propagation(model, theta).log_evidence)
            fit = tg.approximations.predict(model, theta, tg.EP(), x)
        else:
            start = tg.initialize(
                tg.SparseGP(x, counts, kernel, likelihood, inducing_points=inducing_points),
                progress=False,
                optimize_inducing_points=False,
            )
            evidence, fit = start.elbo, start.predict(x)
        logs.append(log_prior + evidence)
        lengthscales.append(lengthscale)
        intensities.append(fit.intensity.mean)
    weights = torch.tensor(logs).softmax(0)
    lengthscales = torch.tensor(lengthscales)
    mean = float(weights @ lengthscales)
    deviation = float((weights @ (lengthscales - mean).square()).sqrt())
    return mean, deviation, (weights.double() @ torch.stack(intensities)).tolist()


def field(arguments):
    """Coverage of the true field, and of draws from the posterior in its place: what a field that is right would have.

    A step is a few products with 4096 x 4096 matrices, which are read from memory: sixteen chains take hardly longer than four.
    """
    model = cox_process(arguments.data, 64)
    truth = np.load(arguments.data / "lgcp64.npz")["f"].reshape(64, 64, order="F")
    truth = torch.as_tensor(truth.reshape(-1), dtype=torch.float64)
    settings = {"num_samples": arguments.field_draws, "warmup_steps": 300, "num_chains": 16}
    began = time.process_time()
    posterior = tg.sample(model, tg.AuxiliaryGradient(thinning=5), seed=0, progress=False, **settings)
    seconds = time.process_time() - began
    worst_rhat = tg.diagnostics.worst_latent(posterior.latents)[1]
    sizes = [tg.diagnostics.summaries.effective_sizes(posterior.latents[..., cell])[0] for cell in range(0, 4096, 64)]
    draws = posterior.latents.flatten(0, 1)
    rows = {}
    for level in LEVELS:
        lower, upper = draws.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=draws.dtype), 0)
        inside = ((draws > lower) & (draws < upper)).double().mean(-1)
        covered = float(((truth > lower) & (truth < upper)).double().mean())
        rows[level] = (covered, float(inside.mean()), float(inside.std()))
    return {"seconds": seconds, "draws": len(draws), "rhat": worst_rhat, "sizes": sorted(sizes), "coverage": rows}


PARTS = {
    "full": full,
    "grid": lambda arguments: sparse(arguments, 32, 15, moves=False),
    "placed": lambda arguments: sparse(arguments, 32, 15, moves=True),
    "more": lambda arguments: sparse(arguments, 32, 20, moves=True),
    "fine": lambda arguments: sparse(arguments, 64, 15, moves=True),
    "quadrature": theta_by_theta,
    "field": field,
}
MODELS = {  # name: cells, M, the paper's seconds an effective draw
    "full": ("32 x 32", "", "554"),
    "grid": ("32 x 32", "225 on a grid", "3.4"),
    "placed": ("32 x 32", "225 placed", "3.4"),
    "more": ("32 x 32", "400 placed", ""),
    "fine": ("64 x 64", "225 placed", "4.7"),
}


def report(found):
    full = found.get("full", {}).get("intensity")
    print("| model | cells | M | lengthscale, m (sd) | variance (sd) | correlation with full | effective | CPU s |", end="")
    print(" CPU s an effective draw | the paper's |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (cells, points, seconds) in MODELS.items():
        if name in found:
            row = found[name]
            variance, lengthscale = (f"{mean:.3f} ({sd:.3f})" for mean, sd in row["theta"].values())
            with_full = correlation(row["intensity"], full) if full and cells == "32 x 32" and name != "full" else ""
            print(
                f"| {name} | {cells} | {points} | {lengthscale} | {variance} | {with_full} | {row['effective']:.0f} | "
                f"{row['seconds']:.0f} | {row['seconds'] / row['effective']:.2f} | {seconds} |"
            )
    if "quadrature" in found:
        print("\n| M | lengthscale, m (sd) | correlation with full |")
        print("|---|---|---|")
        for name, (mean, deviation, intensity) in found["quadrature"].items():
            print(f"| {name} | {mean:.3f} ({deviation:.3f}) | {correlation(intensity, found['quadrature']['full'][-1])} |")
        if full:
            print(f"\nThe full model's draws against its quadrature: {correlation(full, found['quadrature']['full'][-1])}.")
    if "field" in found:
        row = found["field"]
        least, *_, most = row["sizes"]
        print(f"\n{row['draws']} draws, R-hat of the worst cell {row['rhat']:.3f}, {row['seconds']:.0f} CPU s.", end="")
        print(f" Effective draws of 64 of the cells: {least:.0f} to {most:.0f}.")
        print("\n| band | cells that hold the true field | of draws from the posterior, mean (sd) |")
        print("|---|---|---|")
        for level, (covered, mean, deviation) in row["coverage"].items():
            print(f"| {level} | {covered:.3f} | {mean:.3f} ({deviation:.3f}) |")


def correlation(one, other):
    return f"{np.corrcoef(one, other)[0, 1]:.4f}"


def draw(found, points):
    shown = [name for name in MODELS if name in found]
    figure = Figure(figsize=(3.0 * (len(shown) + 1), 3.2), layout="constrained")
    first, *panels = figure.subplots(1, len(shown) + 1)
    extent = [end for ends in WINDOW for end in ends]
    first.scatter(*points.T, s=8, color="black")
    first.set(title="saplings", aspect="equal", xlim=WINDOW[0], ylim=WINDOW[1])
    highest = max(max(found[name]["intensity"]) for name in shown)
    for panel, name in zip(panels, shown, strict=True):
        cells, points_used, _ = MODELS[name]
        side = math.isqrt(len(found[name]["intensity"]))
        grid = np.reshape(found[name]["intensity"], (side, side)).T
        image = panel.imshow(grid, origin="lower", extent=extent, vmin=0.0, vmax=highest)
        panel.set(title=f"{cells}, {points_used or 'full'}")
    figure.colorbar(image, ax=panels, label="mean intensity, a square metre")
    figure.savefig(OUTPUT / "pines.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--record", type=pathlib.Path, required=True, help="folder of what is done")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--draws", type=int, default=400, help="weighted draws of theta")
    parser.add_argument("--field-draws", type=int, default=200, help="a chain of sixteen, each of five steps")
    arguments = parser.parse_args()
    quiet()
    arguments.record.mkdir(parents=True, exist_ok=True)
    for name in arguments.parts:
        path = arguments.record / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(PARTS[name](arguments)))
    found = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.record.glob("*.json"))}
    report(found)
    if MODELS.keys() & found.keys():
        draw(found, trees(arguments))


if __name__ == "__main__":
    main()
