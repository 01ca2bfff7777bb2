"""Paper A, figures 3 and 4, the pseudo-marginal lines: trace, autocorrelation and R-hat of the log lengthscale on real data.

    python benchmarks/paper_a_figures3_4.py --data ../shared/data --sets breast pima
    python benchmarks/paper_a_figures3_4.py --data ../shared/data --sets abalone --chains 2 --warmup 50 --draws 100

Isotropic probit GP, importance samples from Laplace's approximation, N_imp = 1, chains from the prior. The paper ran ten chains of
2,000 + 10,000 iterations and shows curves, no numbers.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np
from arviz_stats.base import array_stats
from real_data import OUTPUT, classification_set, isotropic_probit

import torchgpmc as tg


def rhats(values):
    """R-hat of growing parts of the chains, at 20 lengths."""
    lengths = np.linspace(values.shape[1] / 20, values.shape[1], 20).astype(int)
    return lengths, [float(array_stats.rhat(values[:, :length])) for length in lengths]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["breast", "pima", "abalone"])
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--num-importance", type=int, default=1)
    parser.add_argument("--figure", default="paper_a_figures3_4.png")
    options = parser.parse_args()
    from matplotlib.figure import Figure

    warnings.simplefilter("ignore", tg.SamplingWarning)
    figure = Figure(figsize=(12, 3 * len(options.sets)), layout="constrained")
    panels = figure.subplots(len(options.sets), 3, squeeze=False)
    print(
        "| set | n | chains x (warm-up + draws) | effective draws | R-hat, half | all | acceptance, % | autocorrelation at 50 | s |"
    )
    print("|---" * 9 + "|")
    for row, name in zip(panels, options.sets, strict=True):
        model = isotropic_probit(*classification_set(options.data, name))
        began = time.perf_counter()
        posterior = tg.sample(
            model, tg.PseudoMarginal(num_importance=options.num_importance), num_samples=options.draws,
            warmup_steps=options.warmup, num_chains=options.chains, seed=0, progress=False,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        values = np.log(posterior.samples["kernel.base_kernel.lengthscale"].flatten(2).squeeze(-1).numpy())
        correlation = array_stats.autocorr(values).mean(0)
        lengths, curve = rhats(values)
        row[0].plot(values[0], linewidth=0.6)
        row[1].plot(correlation[: len(correlation) // 2])
        row[2].plot(lengths, curve)
        for panel, title in zip(row, ("trace of one chain", "autocorrelation, mean over chains", "R-hat"), strict=True):
            panel.set(title=f"{name}: {title}", xlabel="iteration after warm-up")
        steps = f"{options.chains} x ({options.warmup} + {options.draws})"
        size = float(array_stats.ess(values))
        acceptance = 100 * float(posterior.stats["acceptance_rate"].mean())
        print(
            f"| {name} | {len(model.train_x)} | {steps} | {size:.0f} | {curve[9]:.3f} | {curve[-1]:.3f} | "
            f"{acceptance:.0f} | {correlation[min(50, len(correlation) - 1)]:.2f} | {seconds:.0f} |",
            flush=True,
        )
        figure.savefig(OUTPUT / options.figure, dpi=100)


if __name__ == "__main__":
    main()
