"""NUTS on a probit GP, d=2 isotropic: effective draws a second of the worst hyperparameter, ours over NumPyro's.

    python benchmarks/nuts_against_numpyro.py

Three rows of ours: NUTS with its defaults, with coordinates that are white under Laplace's sites, and the default call, whose
number of draws is its own. Same data and priors, fresh processes in turn; warm-up and adaptation inside the time of both sides,
NumPyro's compile time listed apart and left out of its time. n=200 with 4 chains, n=50 with 16; NumPyro's chains sequential and
vectorised, the better counts. A run whose worst hyperparameter has fewer than 200 effective draws is refused. Target: at least 1.5
by NUTS, at n=50 20 by the default call.
"""

import argparse
import json
import sys

from processes import measure, median, peer_python

CASES = (50, 16, 300, 500), (200, 4, 200, 250)  # data, chains, warm-up, draws
_DEFAULT = "torchgpmc, default call"
OURS = {"torchgpmc": "tg.NUTS()", "torchgpmc, white under sites": "tg.NUTS(whitening=tg.Laplace())", _DEFAULT: "None"}


def worker(num_data, num_chains, warmup_steps, num_samples, seed, which):
    from problems import probit_model
    from timed_run import timed_run

    model = probit_model(num_data, 2, ard=False)
    method = list(OURS.values())[which]
    chains = {"num_samples": num_samples, "warmup_steps": warmup_steps, "num_chains": num_chains}
    posterior, row = timed_run(model, method, seed=seed, **(chains if method != "None" else {}))
    print(json.dumps(row | {"gradients_a_second": posterior.info["num_evaluations"] / row["seconds"]}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=6, type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=[case[0] for case in CASES])
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    numpyro_python = peer_python("numpyro", ["numpyro==0.22.*", "jax", "jaxlib", "arviz-stats", "scipy"])
    print("| n | chains | sampler | steps | effective draws | seconds | effective a second | gradients a second | compile (s) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_data, num_chains, warmup_steps, num_samples in [case for case in CASES if case[0] in options.sizes]:
        arguments = (num_data, num_chains, warmup_steps, num_samples)
        rows = {**{name: [] for name in OURS}, "NumPyro, sequential": [], "NumPyro, vectorised": []}
        for seed in range(options.runs):
            for which, name in enumerate(OURS):
                rows[name].append(measure(sys.executable, "nuts_against_numpyro.py", "--worker", *arguments, seed, which))
            for way in ("sequential", "vectorized"):
                name = f"NumPyro, {way.replace('z', 's')}"
                rows[name].append(measure(numpyro_python, "peers/numpyro_nuts.py", *arguments, seed, way))
        for name, results in rows.items():
            least = min(result["ess"] for result in results)
            steps = "-" if name == _DEFAULT else f"{warmup_steps} + {num_samples}"
            note = "" if least >= 200 else " (under 200: not to be quoted)"
            print(
                f"| {num_data} | {num_chains} | {name} | {steps} | {median(results, 'ess'):.0f}{note} | "
                f"{median(results, 'seconds'):.0f} | {median(results, 'ess_a_second'):.2f} | "
                f"{median(results, 'gradients_a_second'):.0f} | {median(results, 'compile'):.1f} |",
                flush=True,
            )
        best = max(median(results, "ess_a_second") for name, results in rows.items() if name not in OURS)
        ratios = [f"{name} {median(rows[name], 'ess_a_second') / best:.2f}" for name in OURS]
        print(f"\nn={num_data}, times the better NumPyro: {', '.join(ratios)}\n", flush=True)


if __name__ == "__main__":
    main()
