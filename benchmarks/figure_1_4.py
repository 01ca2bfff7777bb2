"""Figure 1.4 of paper C: how far the normal density of the draws is from the exact posterior of a regression, by input dimension.

    python benchmarks/figure_1_4.py [--fraction 1] [--dimensions 1 2 3 4 5 6 7 8 9 10] [--squared-lengthscale 1 0.01]
        [--pooled] [--output docs/results/figure_1_4]

N = 200 inputs in [0, 1]^d, kernel variance 1, noise variance 0.09, hyperparameters at the truth. Burn-in 1e4 sweeps (Gibbs 2e4),
then 3e4 sweeps thinned by 10, of 10 chains on one data set: the repeats, which share what warm-up finds. KL is that of the normal
density of the draws from the exact one, mean and standard deviation over repeats; "exact" is of as many independent draws. The
squared lengthscale of 100 that the paper prints makes one control variable explain 95 % whatever d is; 1 fits its figure.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

import torchgpmc as tg

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {
    "Gibbs": tg.GibbsLike(thinning=10),
    "regions": tg.LocalRegions(thinning=10),
    "control": tg.ControlVariables(thinning=10),
    "aGrad": tg.AuxiliaryGradient(thinning=10),
}
SIZE, NOISE, JITTER = 200, 0.09, 1e-6
BURN_IN, DRAWS, REPEATS = 10_000, 3_000, 10


class Problem(NamedTuple):
    """A regression, and its exact posterior of f."""

    model: tg.GP
    mean: Tensor  # (N,)
    covariance: Tensor  # (N, N)
    correlation: float  # a priori, mean over pairs of inputs


def problem(dimension: int, squared_lengthscale: float) -> Problem:
    """Data from the prior."""
    generator = torch.Generator().manual_seed(dimension)
    x = torch.rand(SIZE, dimension, generator=generator, dtype=torch.float64)
    prior = torch.exp(-0.5 * torch.cdist(x, x).square() / squared_lengthscale)
    correlation = float((prior.sum() - SIZE) / (SIZE * (SIZE - 1)))
    prior = prior + JITTER * torch.eye(SIZE, dtype=torch.float64)
    noise = NOISE**0.5 * torch.randn(SIZE, generator=generator, dtype=torch.float64)
    y = torch.linalg.cholesky(prior) @ torch.randn(SIZE, generator=generator, dtype=torch.float64) + noise
    kernel, likelihood = RBFKernel().double(), tg.likelihoods.Gaussian().double()
    kernel.lengthscale, likelihood.noise = squared_lengthscale**0.5, NOISE
    model = tg.GP(x, y, kernel.requires_grad_(False), likelihood.requires_grad_(False), jitter=JITTER)
    gain = torch.linalg.solve(prior + NOISE * torch.eye(SIZE, dtype=torch.float64), prior).T
    covariance = prior - gain @ prior
    return Problem(model, gain @ y, 0.5 * (covariance + covariance.T), correlation)


def divergence(draws: Tensor, made: Problem) -> Tensor:
    """KL of the normal density with the moments of draws ``(C, S, N)`` from the exact posterior, ``(C,)``."""
    factor = torch.linalg.cholesky(made.covariance)
    white = torch.linalg.solve_triangular(factor, (draws - made.mean).mT, upper=False).mT
    mean = white.mean(1)
    centred = white - mean.unsqueeze(1)
    covariance = centred.mT @ centred / draws.shape[1]
    log_determinant = torch.linalg.slogdet(covariance).logabsdet
    return 0.5 * (covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - SIZE - log_determinant + mean.square().sum(-1))


def exact_draws(made: Problem, count: int) -> Tensor:
    """Independent draws from the posterior ``(C, S, N)``."""
    noise = torch.randn(REPEATS, count, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return made.mean + noise @ torch.linalg.cholesky(made.covariance).mT


def measure(dimension: int, squared_lengthscale: float, fraction: float, pooled: bool) -> tuple[dict, dict[str, list[Tensor]]]:
    """A row of the table, and each method's KL ``(C,)`` after a quarter, a half, three quarters and all of the draws.

    With ``pooled`` it is one KL, of the draws of all chains together, which fewer draws a chain are enough for.
    """
    made = problem(dimension, squared_lengthscale)
    count = int(DRAWS * fraction)
    checked = [count * part // 4 for part in range(1, 5) if count * part // 4 * (REPEATS if pooled else 1) > SIZE]
    row: dict = {"d": dimension, "correlation": made.correlation}
    drawn = {"exact": (exact_draws(made, count), 0.0)}
    for name, method in METHODS.items():
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tg.SamplingWarning)  # the slow ones have not converged: that is the figure
            burn_in = int(BURN_IN * fraction) * (2 if name == "Gibbs" else 1)
            posterior = tg.sample(
                made.model, method, num_samples=count, warmup_steps=burn_in, num_chains=REPEATS, seed=1, progress=False
            )
        drawn[name] = posterior.latents, time.process_time() - begin
        row |= {key: int(posterior.stats[key][0, -1]) for key in ("num_controls", "num_regions") if key in posterior.stats}
    curves = {
        name: [divergence(draws[:, :part].flatten(0, 1)[None] if pooled else draws[:, :part], made) for part in checked]
        for name, (draws, _) in drawn.items()
    }
    return {**row, **{name: (curves[name][-1], seconds) for name, (_, seconds) in drawn.items()}, "checked": checked}, curves


def table(rows: list[dict]) -> str:
    """Markdown."""
    names = ["exact", *METHODS]
    lines = ["| d | correlation | controls | regions | " + " | ".join(f"KL {name}" for name in names) + " | seconds |"]
    lines.append("|" + "---|" * (len(names) + 5))
    for row in rows:
        cells = [f"{row[name][0].mean():.3g}" + (f" ({row[name][0].std():.2g})" if len(row[name][0]) > 1 else "") for name in names]
        seconds = ", ".join(f"{row[name][1]:.0f}" for name in METHODS)
        start = f"| {row['d']} | {row['correlation']:.2f} | {row['num_controls']} | {row['num_regions']} | "
        lines.append(start + " | ".join(cells) + f" | {seconds} |")
    return "\n".join(lines)


def plot(rows: list[dict], curves: dict[int, dict[str, list[Tensor]]], path: Path) -> None:
    """KL against iterations at the dimension nearest five, against the dimension, and the number of control variables."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.5))
    nearest = min(curves, key=lambda dimension: abs(dimension - 5))
    checked = next(row["checked"] for row in rows if row["d"] == nearest)
    dimensions = [row["d"] for row in rows]
    for name in ("exact", *METHODS):
        left.plot([10 * count for count in checked], [float(value.mean()) for value in curves[nearest][name]], "o-", label=name)
        values = [row[name][0] for row in rows]
        middle.errorbar(dimensions, [float(v.mean()) for v in values], [float(v.std(correction=0)) for v in values], label=name)
    left.set(xlabel="sweeps", ylabel="KL", yscale="log", title=f"d = {nearest}")
    middle.set(xlabel="d", ylabel="KL", yscale="log")
    right.plot(dimensions, [row["num_controls"] for row in rows], label="control variables")
    right.twinx().plot(dimensions, [row["correlation"] for row in rows], "k--")
    right.set(xlabel="d", title="control variables; mean prior correlation (dashed)")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the sweeps; at least 0.07, as 200 draws have no full rank")
    parser.add_argument("--dimensions", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--squared-lengthscale", type=float, nargs="+", default=[1.0, 0.01])
    parser.add_argument("--output", type=Path, default=None, help="path without ending, for .md and .png")
    parser.add_argument("--pooled", action="store_true", help="one KL, of all chains' draws; the fraction then at least 0.007")
    options = parser.parse_args()
    about = "of all draws together" if options.pooled else "mean (standard deviation) over chains"
    parts = [
        f"# Figure 1.4 of paper C\n\nFraction {options.fraction:g} of the sweeps; {int(DRAWS * options.fraction)} kept draws of "
        f"each of {REPEATS} chains, and as many exact ones. KL: {about}. CPU seconds of all chains "
        f"together, warm-up included, in the order of the methods. torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, shared machine.\n\n`python benchmarks/figure_1_4.py --fraction {options.fraction:g} "
        f"{'--pooled ' if options.pooled else ''}--dimensions {' '.join(map(str, options.dimensions))} "
        f"--squared-lengthscale {' '.join(f'{value:g}' for value in options.squared_lengthscale)}`\n"
    ]
    for squared_lengthscale in options.squared_lengthscale:
        rows, curves = [], {}
        parts.append("")
        for dimension in options.dimensions:
            row, curves[dimension] = measure(dimension, squared_lengthscale, options.fraction, options.pooled)
            rows.append(row)
            print(table(rows[-1:]), flush=True)
            parts[-1] = f"## Squared lengthscale {squared_lengthscale:g}\n\n{table(rows)}\n"
            if options.output is not None:  # row by row: a run that is stopped leaves what it has
                plot(rows, curves, options.output.with_name(f"{options.output.name}_{squared_lengthscale:g}.png"))
                options.output.with_suffix(".md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
