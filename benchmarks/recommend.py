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
    kish = tg.diagnostics.weights.kish_effective_size(posterior.log_weights)
    size = min([kish, *(row.ess_bulk for row in posterior.summary().rows if row.name != "lp")])
    return size, seconds, tg.diagnostics.weights.pareto_khat(posterior.log_weights)


def chains(model, method, num_samples):
    began = time.perf_counter()
    posterior = tg.sample(model, method, num_samples=num_samples, warmup_steps=200, num_chains=8, seed=1, progress=False)
    seconds = time.perf_counter() - began
    rows = [row for row in posterior.summary().rows if row.name != "lp"]
    return min(row.ess_bulk for row in rows), seconds, max(row.rhat for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weighted-draws", type=int, default=6000)
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    print("| n | hyperparameters | method | effective draws | a second | k-hat or R-hat | over NUTS() |")
    print("|---|---|---|---|---|---|---|")
    for num_data, num_columns in CASES:
        model = probit_model(num_data, num_columns, ard=True)
        rows = {
            "NUTS()": chains(model, tg.NUTS(), options.draws),
            "NUTS(whitening=Laplace())": chains(model, tg.NUTS(whitening=tg.Laplace()), options.draws),
            f"AMIS(), {options.weighted_draws} draws": weighted(model, options.weighted_draws),
        }
        plain = rows["NUTS()"][0] / rows["NUTS()"][1]
        for name, (size, seconds, verdict) in rows.items():
            print(
                f"| {num_data} | {model.layout.size} | {name} | {size:.0f} | {size / seconds:.1f} | {verdict:.3f} | "
                f"{size / seconds / plain:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
