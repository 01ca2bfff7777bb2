"""Paper E, figure 1 and appendices A-B: convergence of E||theta|| against n^3 operations, GP regression.

    python benchmarks/paper_e_figure1.py --data ../shared/data --sets parkinsons --kernels rbf ard

Interquartile range over replicates of the estimate of E||theta||, theta the logs of all hyperparameters, at growing budgets. One
operation an evaluation of the marginal likelihood, two more for its gradient (the paper's count); mode search and warm-up count.
AMIS is run anew for every budget; the chains of one call are the replicates of an MCMC method, so that they share their tuning,
which is cheaper than the paper's (one pilot a chain) and is charged to each chain. The paper has 100 replicates.
"""

import argparse
import gzip
import pathlib
import time
import warnings

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from torchgpmc.samplers import MassMatrix

OUTPUT = pathlib.Path(__file__).parent.parent / "docs" / "results"
GRADIENT = 3  # operations
MODE_SEARCH = 4 * 30 * GRADIENT  # four starts of L-BFGS, about 30 gradients each
WARMUP = {"MH": 400, "HMC": 100, "NUTSDA": 100, "SS": 20}  # transitions
MATRICES = {"I": MassMatrix.IDENTITY, "D": MassMatrix.DIAGONAL, "H": MassMatrix.DENSE}
CHAINS = {
    **{f"MH-{letter}": (lambda m=matrix: tg.AdaptiveMH(mass_matrix=m), 1) for letter, matrix in MATRICES.items()},
    **{f"HMC-{letter}": (lambda m=matrix: tg.HMC(num_steps=10, mass_matrix=m), GRADIENT) for letter, matrix in MATRICES.items()},
    **{f"NUTSDA-{letter}": (lambda m=matrix: tg.NUTS(mass_matrix=m), GRADIENT) for letter, matrix in MATRICES.items()},
    "SS": (tg.Slice, 1),
}
WEIGHTED = {
    "AMIS": lambda: tg.AMIS(),
    "AMIS-D": lambda: tg.AMIS(diagonal=True),
    "MAMIS": lambda: tg.MAMIS(),
}


def regression_set(folder, name, seed=0):
    """Standardised inputs and response; of Parkinsons four records for each patient, drawn at random as in the paper."""
    with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1)
    if name == "parkinsons":
        generator = np.random.default_rng(seed)
        records = [generator.choice(np.flatnonzero(table[:, 0] == who), 4, replace=False) for who in np.unique(table[:, 0])]
        # The first column is the patient and the last but one another response; the paper has one column more.
        table = np.delete(table[np.concatenate(records)], [0, table.shape[1] - 2], axis=1)
    x, y = table[:, :-1], table[:, -1]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def model_of(x, y, ard):
    columns = x.shape[1]
    base = RBFKernel(ard_num_dims=columns if ard else None, lengthscale_prior=GammaPrior(1.0, 1 / columns**0.5))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 0.1))
    likelihood = GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.1))
    return tg.GPRegression(torch.as_tensor(x), torch.as_tensor(y), kernel, likelihood)


def norms(posterior):
    """||theta|| of every draw ``(C, S)``."""
    logs = [value.log().flatten(2) if value.dim() > 2 else value.log().unsqueeze(-1) for value in posterior.samples.values()]
    return torch.cat(logs, -1).norm(dim=-1)


def of_chains(model, method, cost, warmup, budgets, replicates):
    """Estimates ``(budgets, replicates)``, NaN where a budget does not outlast warm-up, and the cost of warm-up a chain."""
    steps = max(20, budgets[-1] // cost // (1 if warmup == WARMUP["MH"] else 8))  # the others take many evaluations a transition
    posterior = tg.sample(model, method, num_samples=steps, warmup_steps=warmup, num_chains=replicates, seed=1, progress=False)
    value = norms(posterior)
    work = cost * posterior.stats["n_steps"].cumsum(-1)
    tuning = cost * (posterior.info["num_evaluations"] - float(posterior.stats["n_steps"].sum())) / replicates
    means = value.cumsum(-1) / torch.arange(1, value.shape[1] + 1)
    rows = []
    for budget in budgets:
        done = (work + tuning <= budget).sum(-1)
        reached = means.gather(-1, (done - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
        rows.append(torch.where((done > 0) & (done < value.shape[1]), reached, torch.nan))
    return torch.stack(rows), tuning


def of_weighted(model, method, budgets, replicates):
    rows = []
    for budget in budgets:
        draws = budget - MODE_SEARCH
        if draws < 100:
            rows.append(torch.full((replicates,), torch.nan))
            continue
        found = []
        for seed in range(replicates):
            posterior = tg.sample(model, method, num_samples=draws, seed=seed, progress=False)
            found.append((torch.softmax(posterior.log_weights.flatten(), 0) * norms(posterior).flatten()).sum())
        rows.append(torch.stack(found))
    return torch.stack(rows), MODE_SEARCH


def spread(values):
    """Interquartile range, NaN if fewer than half of the replicates got there."""
    good = values[torch.isfinite(values)]
    return float(good.quantile(0.75) - good.quantile(0.25)) if len(good) >= max(4, len(values) // 2) else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["parkinsons", "housing", "concrete"])
    parser.add_argument("--kernels", nargs="+", choices=["rbf", "ard"], default=["rbf", "ard"])
    parser.add_argument("--operations", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--replicates", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", choices=[*WEIGHTED, *CHAINS], default=[*WEIGHTED, *CHAINS])
    options = parser.parse_args()
    from matplotlib.figure import Figure

    warnings.simplefilter("ignore", tg.SamplingWarning)
    figure = Figure(figsize=(5 * len(options.sets), 4 * len(options.kernels)), layout="constrained")
    axes = figure.subplots(len(options.kernels), len(options.sets), squeeze=False)
    heads = " | ".join(f"IQR at {budget}" for budget in options.operations)
    print(f"| set | kernel | n | hyperparameters | sampler | {heads} | mean at the end | tuning, operations | s |")
    print("|---" * (len(options.operations) + 8) + "|")
    for column, name in enumerate(options.sets):
        x, y = regression_set(options.data, name)
        for row, kernel in enumerate(options.kernels):
            model = model_of(x, y, kernel == "ard")
            for sampler in options.samplers:
                began = time.perf_counter()
                if sampler in WEIGHTED:
                    values, tuning = of_weighted(model, WEIGHTED[sampler](), options.operations, options.replicates)
                else:
                    make, cost = CHAINS[sampler]
                    warmup = WARMUP[sampler.split("-")[0]]
                    values, tuning = of_chains(model, make(), cost, warmup, options.operations, options.replicates)
                ranges = [spread(part) for part in values]
                last = next((part for part in reversed(values) if bool(torch.isfinite(part).any())), values[-1])
                print(
                    f"| {name} | {kernel} | {len(x)} | {model.layout.size} | {sampler} | "
                    + " | ".join(f"{value:.3f}" for value in ranges)
                    + f" | {float(last.nanmean()):.2f} | {tuning:.0f} | {time.perf_counter() - began:.0f} |",
                    flush=True,
                )
                axes[row][column].loglog(options.operations, ranges, marker="o", label=sampler)
            axes[row][column].set(title=f"{name}, {kernel}", xlabel="n^3 operations", ylabel="IQR of E||theta||")
    axes[0][0].legend(fontsize=6)
    figure.savefig(OUTPUT / "paper_e_figure1.png", dpi=110)


if __name__ == "__main__":
    main()
