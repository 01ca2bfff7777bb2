"""Gibbs sampling and ChEES beside NUTS: effective draws of the worst hyperparameter a CPU second.

    python benchmarks/gibbs_and_chees.py --problem probit
    python benchmarks/gibbs_and_chees.py --problem demo

``probit`` is the GP of n = 200 points, d = 2, with paper A's Gamma priors, on which ``effective_draws.py`` measures NumPyro;
``demo`` the sparse classifier of ``make demo``, 398 x 30 with 40 inducing points, every row in coordinates white under one fit.
Gibbs sweeps are of two steps of theta and five of the latents. Warm-up is in the seconds, the demo's fit is not; one thread. Rows
of fewer than 200 effective draws are marked.
"""

import argparse
import pathlib
import sys
import time
import warnings

import torch
from problems import probit_model

import torchgpmc as tg

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from breast_cancer import load_data, make_kernel

PARAMETERIZATIONS = {
    "Surrogate(whitening=Laplace())": tg.Surrogate(whitening=tg.Laplace()),
    "Interwoven(Ancillary(), Surrogate())": tg.Interwoven(tg.Ancillary(), tg.Surrogate()),
    "Surrogate()": tg.Surrogate(),
}
METHODS = {  # name: (method, chains, warm-up, draws)
    "probit": {
        "NUTS(whitening=Laplace())": (tg.NUTS(whitening=tg.Laplace()), 4, 100, 100),
        "ChEES(whitening=Laplace())": (tg.ChEES(whitening=tg.Laplace()), 64, 50, 20),
        **{
            f"Gibbs(parameterization={name})": (tg.Gibbs(parameterization=given, hyper_steps=2, latent_steps=5), 16, 80, 160)
            for name, given in PARAMETERIZATIONS.items()
        },
    },
    "demo": {"NUTS()": (tg.NUTS(), 4, 100, 250), "ChEES()": (tg.ChEES(), 64, 100, 20)},
}


def demo():
    """The model, and keywords of ``tg.sample``."""
    x, y, _, _ = load_data(0)
    points = tg.kmeans_inducing_points(x, 40, seed=0)
    start = tg.initialize(
        tg.SparseGP(x, y, make_kernel(x.shape[1]), tg.likelihoods.Bernoulli(), inducing_points=points), progress=False
    )
    return start.model, {"start": start}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=list(METHODS), required=True)
    parser.add_argument("--methods", nargs="+", help="rows to run, by name; all by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, begin = (probit_model(200, 2, ard=False), {}) if options.problem == "probit" else demo()
    print("| problem | method | chains x (warm-up + draws) | effective draws | R-hat | CPU s | effective a CPU second | means |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (method, chains, warm_up, draws) in METHODS[options.problem].items():
        if options.methods and name not in options.methods:
            continue
        began = time.process_time()
        posterior = tg.sample(
            model, method, num_samples=draws, warmup_steps=warm_up, num_chains=chains, seed=0, progress=False, **begin
        )
        seconds = time.process_time() - began
        rows = [row for row in posterior.summary().rows if row.name != "lp"]
        size = min(row.ess_bulk for row in rows)
        few = "" if size >= 200 else " (under 200)"
        means, rhat = ", ".join(f"{row.mean:.2f}" for row in rows), max(row.rhat for row in rows)
        print(
            f"| {options.problem} | `{name}` | {chains} x ({warm_up} + {draws}) | {size:.0f}{few} | {rhat:.3f} | {seconds:.0f} | "
            f"{size / seconds:.2f} | {means} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
