"""GP regression, n=500, d=8 ARD (10 hyperparameters), exact marginal likelihood: our samplers beside NumPyro's NUTS.

    python benchmarks/regression_against_numpyro.py

The same data and priors, fresh processes in turn; mode search, warm-up and adaptation inside every time, NumPyro's compile apart.
Effective draws are of the worst hyperparameter: of weighted draws the smaller of Kish's size and that of each mean. AMIS also by
its errors across seeds (variance over mean squared error against the longest run). Target: AMIS 10 times NumPyro's NUTS.
"""

import argparse
import json
import sys

import numpy as np
from processes import measure, median, peer_python

SIZE = (500, 8)
PEER = (2, 200, 300)  # chains, warm-up, draws
METHODS = {  # name: (expression, warm-up, draws, chains)
    "AMIS": ("tg.AMIS()", None, 4000, None),
    "MAMIS": ("tg.MAMIS()", None, 4000, None),
    "NUTS": ("tg.NUTS()", 150, 150, 4),
    "Slice": ("tg.Slice()", 30, 60, 8),
}


def worker(name, seed, draws):
    from problems import regression_model
    from timed_run import timed_run

    expression, warmup_steps, num_samples, num_chains = METHODS[name]
    options = {"num_samples": draws or num_samples, "warmup_steps": warmup_steps, "num_chains": num_chains, "seed": seed}
    _, row = timed_run(regression_model(*SIZE), expression, **options)
    print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--without-peer", action="store_true")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), int(options.worker[2]))
        return
    print("| sampler | effective draws | seconds | effective a second | over NumPyro | variance over squared error | k-hat |")
    print("|---|---|---|---|---|---|---|")
    best = None
    if not options.without_peer:
        python = peer_python("numpyro", ["numpyro==0.22.*", "jax", "jaxlib", "arviz-stats", "scipy"])
        peer = measure(python, "peers/numpyro_regression.py", *SIZE, *PEER, 0)
        best = peer["ess_a_second"]
        few = "" if peer["ess"] >= 200 else " (under 200: not to be quoted)"
        name = f"NumPyro NUTS, {PEER[0]} x ({PEER[1]} + {PEER[2]}), without {peer['compile']:.0f} s of compiling"
        print(f"| {name} | {peer['ess']:.0f}{few} | {peer['seconds']:.0f} | {best:.2f} | 1 | | |", flush=True)
    long = measure(sys.executable, "regression_against_numpyro.py", "--worker", "AMIS", 999, 20_000)
    for name in options.methods:
        rows = [
            measure(sys.executable, "regression_against_numpyro.py", "--worker", name, seed, 0) for seed in range(options.seeds)
        ]
        error = np.mean([(np.array(row["means"]) - long["means"]) ** 2 for row in rows], 0)
        by_error = (np.array(long["sds"]) ** 2 / error).min() if options.seeds > 1 else float("nan")
        ratio = f"{median(rows, 'ess_a_second') / best:.1f}" if best else ""
        print(
            f"| {name} | {median(rows, 'ess'):.0f} of {METHODS[name][2]} | {median(rows, 'seconds'):.1f} | "
            f"{median(rows, 'ess_a_second'):.1f} | {ratio} | {by_error:.0f} | {max(row['khat'] for row in rows):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
