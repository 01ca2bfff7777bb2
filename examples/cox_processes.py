"""Log Gaussian Cox processes: the rate of coal-mining disasters over time, and a forest's density of trees over a square.

Without ``--data`` both patterns are simulated, so that the true intensity is known and shown. With it, the folder holds
``coal.csv.gz`` (column ``date``, years) and ``pines.csv.gz`` (columns ``x1``, ``x2``, metres).
"""

import argparse
import math
import pathlib
import time

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from torchgpmc import plots

COAL_WINDOW = (1851.0, 1963.0)
PINES_WINDOW = [[-5.0, 5.0], [-8.0, 2.0]]


def read(folder, name, columns):
    values = np.genfromtxt(folder / f"{name}.csv.gz", delimiter=",", names=True, encoding="utf-8")
    return torch.as_tensor(np.stack([values[column] for column in columns], -1))


def simulate(window, intensity, highest, seed):
    """Events of a Poisson process by thinning those of a homogeneous one (Lewis & Shedler 1979)."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.as_tensor(window, dtype=torch.float64).view(-1, 2)
    volume = float((ends[:, 1] - ends[:, 0]).prod())
    count = int(torch.poisson(torch.tensor(highest * volume), generator=generator))
    points = ends[:, 0] + (ends[:, 1] - ends[:, 0]) * torch.rand(count, len(ends), generator=generator, dtype=torch.float64)
    keep = torch.rand(count, generator=generator) * highest < intensity(points)
    return points[keep]


def disasters_per_year(year):
    """A rate that falls from three a year to one."""
    return 1 + 2 * torch.sigmoid((1890 - year.squeeze(-1)) / 6)


def trees_per_square_metre(place):
    """Two clumps on a thin ground."""
    at = torch.tensor([[-2.0, -1.0], [2.5, -5.0]], dtype=place.dtype)
    return 0.3 + 4 * torch.exp(-0.5 * (place.unsqueeze(-2) - at).square().sum(-1) / 1.5).sum(-1)


def fit(binned, kernel, num_inducing, arguments):
    """Counts in cells given an intensity exp(f): f's mean about the log of the average intensity."""
    average = math.log(float(binned.counts.mean() / binned.area))
    model = tg.SparseGP(
        binned.centres,
        binned.counts,
        kernel,
        tg.likelihoods.Poisson(exposure=binned.area),
        inducing_points=tg.kmeans_inducing_points(binned.centres, num_inducing),
        mean=ConstantMean(constant_prior=NormalPrior(average, 1.0)),
    )
    options = {"num_samples": arguments.samples, "warmup_steps": arguments.warmup, "num_chains": 4, "seed": arguments.seed}
    return tg.sample(model, tg.NUTS(max_tree_depth=7), **options)


def report(name, posterior, started):
    print(f"\n{name}: {time.perf_counter() - started:.0f} s")
    print(posterior.summary())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=None, help="folder of coal.csv.gz and pines.csv.gz")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("cox-output"))
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--cells", type=int, default=16, help="along each side of the square")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    started = time.perf_counter()
    if arguments.data is None:
        dates = simulate(COAL_WINDOW, disasters_per_year, 3.0, arguments.seed)
    else:
        dates = read(arguments.data, "coal", ["date"])
    binned = tg.bin_events(dates, COAL_WINDOW, 100)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 0.1)), outputscale_prior=GammaPrior(2.0, 2.0))
    posterior = fit(binned, kernel, 30, arguments)
    report(f"{len(dates)} disasters in 100 bins", posterior, started)
    years = torch.linspace(*COAL_WINDOW, 300, dtype=torch.float64)
    figure = plots.plot_intensity(posterior.predict(years).intensity, years, events=dates, binned=binned)
    figure.axes[0].set_ylabel("disasters per year")
    if arguments.data is None:
        figure.axes[0].plot(years, disasters_per_year(years), "k--", linewidth=1, label="true")
        figure.axes[0].legend(fontsize=8)
    figure.savefig(arguments.output / "coal.png", dpi=120)

    started = time.perf_counter()
    if arguments.data is None:
        trees = simulate(PINES_WINDOW, trees_per_square_metre, 4.5, arguments.seed)
    else:
        trees = read(arguments.data, "pines", ["x1", "x2"])
    binned = tg.bin_events(trees, PINES_WINDOW, arguments.cells)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), outputscale_prior=GammaPrior(2.0, 2.0))
    posterior = fit(binned, kernel, 64, arguments)
    report(f"{len(trees)} trees in {arguments.cells} x {arguments.cells} cells", posterior, started)
    prediction = posterior.predict(binned.centres)
    figure = plots.plot_intensity(prediction.intensity, binned.centres, events=trees)
    figure.suptitle("trees per square metre")
    figure.savefig(arguments.output / "pines.png", dpi=120)
    lower, upper = prediction.interval(0.9)
    inside = ((binned.counts >= lower) & (binned.counts <= upper)).double().mean()
    print(f"cells whose count lies in its own 90 % interval: {float(inside):.0%} (intervals of counts hold more than they say)")
    if arguments.data is None:
        lower, upper = prediction.intensity.interval(0.9)
        truth = trees_per_square_metre(binned.centres)
        print(f"cells whose true intensity lies in its 90 % band: {float(((truth > lower) & (truth < upper)).double().mean()):.0%}")


if __name__ == "__main__":
    main()
