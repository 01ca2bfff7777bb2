"""Pyro models under our NUTS and under Pyro's: milliseconds of CPU time per effective draw of the worst quantity.

    python benchmarks/pyro_bridge.py

Eight schools, logistic regression (200 x 10), a GP classifier written in Pyro (n=50) and the same through our GP site, and
Dirichlet with LKJ. Fresh processes of one thread; warm-up inside the time of both. Ours runs 16 chains as one batch. Pyro's chains
are processes of equal cost, so one stands for all: more cost, and yield, as many times more. Target: at least 10 times better.
"""

import argparse
import json
import sys
import time

from processes import measure, median

CHAINS = 16
SIDES = "ours", "Pyro's"


def problem(name):
    """The model and its arguments."""
    from tests.integrations import pyro_models

    x, y = pyro_models.binary_data(50)
    return {
        "eight schools": lambda: (pyro_models.eight_schools, pyro_models.SCHOOLS),
        "logistic regression": lambda: (pyro_models.logistic, pyro_models.binary_data(200, 10)),
        "GP classifier": lambda: (pyro_models.written_out_gp, (x, y)),
        "GP classifier, our site": lambda: (pyro_models.gp_model(pyro_models.gp_of(x, pyro_models.one_lengthscale())), (y,)),
        "Dirichlet and LKJ": lambda: (pyro_models.shares_and_correlations, pyro_models.SHARES),
    }[name]()


NAMES = "eight schools", "logistic regression", "GP classifier", "GP classifier, our site", "Dirichlet and LKJ"


def worker(name, side, warmup_steps, num_samples, seed):
    import pyro
    import torch

    from torchgpmc.diagnostics.summaries import summarise
    from torchgpmc.integrations.pyro import MCMC, NUTS

    torch.set_num_threads(1)
    model, args = problem(name)
    pyro.set_rng_seed(seed)
    began = time.process_time()
    options = {"num_samples": num_samples, "warmup_steps": warmup_steps, "disable_progbar": True}
    ours, theirs = (MCMC, NUTS, CHAINS), (pyro.infer.MCMC, pyro.infer.NUTS, 1)
    loop, kernel, chains = ours if side == "ours" else theirs
    mcmc = loop(kernel(model), **options, num_chains=chains)
    mcmc.run(*args)
    seconds = time.process_time() - began
    # Corners of a correlation's factor are constants, which have no effective size.
    rows = [row for row in summarise(mcmc.get_samples(group_by_chain=True)).rows if row.ess_bulk == row.ess_bulk and row.sd > 1e-9]
    ess = min(row.ess_bulk for row in rows)
    route = mcmc.draws.info["evaluated"] if side == "ours" else "one chain"
    print(json.dumps({"ess": ess, "seconds": seconds, "ms": 1e3 * seconds / ess, "route": route}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", nargs=2, type=int, default=[300, 500], help="warm-up and draws")
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    options = parser.parse_args()
    if options.worker:
        name, side, *numbers = options.worker
        worker(name, side, *map(int, numbers))
        return
    print("| model | sampler | chains | steps | worst effective size | CPU seconds | ms per effective draw | times better |")
    print("|---|---|---|---|---|---|---|---|")
    steps = " + ".join(map(str, options.steps))
    for name in options.models:
        found = {side: [] for side in SIDES}
        for seed in range(options.runs):
            for side in SIDES:
                found[side].append(measure(sys.executable, "pyro_bridge.py", "--worker", name, side, *options.steps, seed))
        ratio = median(found[SIDES[1]], "ms") / median(found[SIDES[0]], "ms")
        for side, results in found.items():
            numbers = f"{median(results, 'ess'):.0f} | {median(results, 'seconds'):.1f} | {median(results, 'ms'):.1f}"
            chains, better = (CHAINS, f"{ratio:.0f}") if side == "ours" else (1, "")
            print(f"| {name} | {side} | {chains} | {steps} | {numbers} | {better} |", flush=True)


if __name__ == "__main__":
    main()
