"""The table behind `torchgpmc.recommend`: AMIS and NUTS as hyperparameters multiply.

    python benchmarks/recommend.py

Probit GPs with an ARD kernel of d lengthscales and an output scale, n data, paper A's priors. Effective draws a second of the worst
hyperparameter; for weighted draws the smaller of Kish's size and that of each mean. Warm-up and mode search inside the times.
"""

import argparse
import time
import warnings

from problems import probit_model

import torchgpmc as tg

CASES = ((50, 1), (50, 4), (50, 9), (50, 15))  # data, lengthscales


def weighted(model, num_samples):
    began = time.perf_counter()
    posterior = tg.sample(model, tg.AMIS(), num_samples=num_samples, seed=1, progress=False)
    seconds = time.perf_counter() - began
    kish = tg.diagnostics.kish_effective_size(posterior.log_weights)
    size = min([kish, *(row.ess_bulk for row in posterior.summary().rows if row.name != "lp")])
    return size, seconds, tg.diagnostics.pareto_khat(posterior.log_weights)


def chains(model, num_samples):
    began = time.perf_counter()
    posterior = tg.sample(model, tg.NUTS(), num_samples=num_samples, warmup_steps=200, num_chains=8, seed=1, progress=False)
    seconds = time.perf_counter() - began
    rows = [row for row in posterior.summary().rows if row.name != "lp"]
    return min(row.ess_bulk for row in rows), seconds, max(row.rhat for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weighted-draws", type=int, default=6000)
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    print("| n | hyperparameters | AMIS: effective of drawn | a second | k-hat | NUTS: effective | a second | R-hat | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_data, num_columns in CASES:
        model = probit_model(num_data, num_columns, ard=True)
        size, seconds, khat = weighted(model, options.weighted_draws)
        other, other_seconds, rhat = chains(model, options.draws)
        print(
            f"| {num_data} | {model.layout.size} | {size:.0f} of {options.weighted_draws} | {size / seconds:.1f} | {khat:.2f} | "
            f"{other:.0f} | {other / other_seconds:.1f} | {rhat:.3f} | {size / seconds / (other / other_seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
