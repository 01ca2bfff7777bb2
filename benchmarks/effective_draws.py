"""Effective draws a second of the worst hyperparameter on a probit GP (paper A, section 4.2): every sampler, beside its peers.

    python benchmarks/effective_draws.py
    python benchmarks/effective_draws.py --runs 2 --single-chains --methods "AMIS, Laplace (16)"

n=200, d=2, isotropic RBF, paper A's Gamma priors. Fresh processes, each row's in turn with the others'; warm-up, mode search and
adaptation inside every time, the compile time of NumPyro and GPflow apart. Rows of fewer than 200 effective draws are marked.
Targets: pseudo-marginal 10 times NumPyro's and 100 times Pyro's. Pyro and GPflow alone take ten minutes. NumPyro is fastest on one
thread: ``OMP_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" taskset -c 1``.
"""

import argparse
import collections
import json
import sys

import numpy as np
from arviz_stats.base import array_stats
from processes import measure, median, peer_python

PEER = (200, 4, 200, 400)  # data, chains, warm-up, draws
SINGLE_CHAINS = {"Pyro NUTS": (200, 2000), "GPflow GPMC, NUTS": (300, 2000)}  # warm-up, draws
METHODS = {  # name: (expression, warm-up, draws, chains)
    "PM Laplace (1)": ("tg.PseudoMarginal(num_importance=1)", 300, 600, 16),
    "PM Laplace (16)": ("tg.PseudoMarginal(num_importance=16)", 300, 600, 16),
    "PM Laplace (64)": ("tg.PseudoMarginal(num_importance=64)", 300, 600, 16),
    "PM EP (16)": ("tg.PseudoMarginal(approximation=tg.EP(), num_importance=16)", 300, 600, 16),
    "correlated PM Laplace (1)": ("tg.PseudoMarginal(num_importance=1, correlation=0.95)", 300, 600, 16),
    "PM Laplace (16), nine tenths independent proposals": (
        "tg.PseudoMarginal(num_importance=16, independent_share=0.9)",
        80,
        150,
        64,
    ),
    "PM with delayed acceptance": ("tg.PseudoMarginal(delayed_acceptance=True)", 300, 600, 16),
    "PM slice (2)": ("tg.PseudoMarginalSlice(num_importance=2)", 50, 60, 16),
    "NUTS on Laplace's marginal, weighted (16)": ("tg.NUTS(marginal=tg.Laplace(), importance_weights=16)", 100, 150, 8),
    "AMIS, Laplace (16)": ("tg.AMIS()", None, 4000, None),
    "AMIS, EP (16)": ("tg.AMIS(approximation=tg.EP())", None, 4000, None),
    "MAMIS, EP (16)": ("tg.MAMIS(approximation=tg.EP())", None, 4000, None),
    "Gibbs, white under Laplace's sites, aGrad": (
        "tg.Gibbs(parameterization=tg.Surrogate(whitening=tg.Laplace()), hyper_steps=2, latent_steps=5)",
        80,
        160,
        16,
    ),
    "NUTS on [theta, v]": ("tg.NUTS()", 200, 250, 4),
    "NUTS, white under Laplace's sites": ("tg.NUTS(whitening=tg.Laplace())", 200, 250, 4),
}


def worker(name, num_data, seed):
    from problems import probit_model
    from timed_run import timed_run

    expression, warmup_steps, num_samples, num_chains = METHODS[name]
    model = probit_model(num_data, 2, ard=False)
    options = {"num_samples": num_samples, "warmup_steps": warmup_steps, "num_chains": num_chains, "seed": seed}
    _, row = timed_run(model, expression, **options)
    print(json.dumps(row))


def single_chain(name, seed):
    """A run of Pyro, in our own environment, which has it, or of GPflow, whose draws are assessed here."""
    arguments = (PEER[0], *SINGLE_CHAINS[name], seed)
    if name == "Pyro NUTS":
        return measure(sys.executable, "peers/pyro_nuts.py", *arguments)
    python = peer_python("gpflow", ["gpflow==2.11.*", "tensorflow-cpu", "tf-keras"])
    row = measure(python, "peers/gpflow_nuts.py", *arguments)
    draws = [np.asarray(values)[None] for values in row["draws"]]
    size = min(float(array_stats.ess(values)) for values in draws)
    return row | {"ess": size, "ess_a_second": size / row["seconds"], "means": [values.mean() for values in draws]}


def show(name, steps, rows, best):
    few = "" if min(row["ess"] for row in rows) >= 200 else " (under 200)"
    ratio = f"{median(rows, 'ess_a_second') / best:.1f}" if best else ""
    means = ", ".join(f"{mean:.2f}" for mean in rows[0]["means"])
    if rows[0].get("khat") == rows[0].get("khat") and "khat" in rows[0]:
        means += f" (k-hat {median(rows, 'khat'):.2f})"
    print(
        f"| {name} | {steps} | {median(rows, 'ess'):.0f}{few} | {median(rows, 'seconds'):.0f} | "
        f"{median(rows, 'ess_a_second'):.2f} | {ratio} | {means} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--single-chains", nargs="*", choices=list(SINGLE_CHAINS), default=list(SINGLE_CHAINS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    if options.worker:
        name, num_data, seed = options.worker
        worker(name, int(num_data), int(seed))
        return
    numpyro_python = peer_python("numpyro", ["numpyro==0.22.*", "jax", "jaxlib", "arviz-stats", "scipy"])
    rows = collections.defaultdict(list)
    for seed in range(options.runs):  # in turns, so that none has the quieter hour
        rows["NumPyro"].append(measure(numpyro_python, "peers/numpyro_nuts.py", *PEER, seed, "sequential"))
        for name in options.single_chains:
            rows[name].append(single_chain(name, seed))
        for name in options.methods:
            rows[name].append(measure(sys.executable, "effective_draws.py", "--worker", name, PEER[0], seed))
        print(json.dumps({name: of_name[-1] for name, of_name in rows.items()}), file=sys.stderr, flush=True)
    best = median(rows["NumPyro"], "ess_a_second")
    print("| sampler | chains x (warm-up + draws) | effective draws | seconds | effective a second | over NumPyro | means |")
    print("|---|---|---|---|---|---|---|")
    show("NumPyro NUTS, sequential, compile time left out", f"{PEER[1]} x ({PEER[2]} + {PEER[3]})", rows["NumPyro"], best)
    for name in options.single_chains:
        warmup_steps, num_samples = SINGLE_CHAINS[name]
        show(name, f"1 x ({warmup_steps} + {num_samples})", rows[name], best)
    for name in options.methods:
        _, warmup_steps, num_samples, num_chains = METHODS[name]
        steps = f"{num_chains} x ({warmup_steps} + {num_samples})" if num_chains else f"{num_samples} weighted"
        show(name, steps, rows[name], best)


if __name__ == "__main__":
    main()
