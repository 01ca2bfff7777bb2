"""Bayesian optimisation of Branin's function under BoTorch's fully Bayesian model, with our draws and with BoTorch's own.

    python benchmarks/bayesian_optimisation.py

Six Sobol points, then four rounds of three points each by qLogExpectedImprovement under a `FullyBayesianSingleTaskGP`; only the
import line differs between the two sides, which get the same options (`FIT`) and, seed by seed, the same first points. Branin's
function on the unit square; its least value is 0.397887, and what is shown is how far above it the best value found is. One process
of one thread a side, which serves all seeds, so that JAX compiles once for each number of data; CPU time. BoTorch and JAX live in
an environment of their own (`--botorch PYTHON` names one that is there already). Seeds in the file of `--record` are not run again.
"""

import argparse
import json
import math
import pathlib
import time
import warnings

from botorch_against_numpyro import REQUIREMENTS
from processes import objects, peer_python

LEAST = 0.397887
STARTS, ROUNDS, AT_ONCE = 6, 4, 3
FIT = {"warmup_steps": 128, "num_samples": 128, "thinning": 8, "disable_progbar": True}


def branin(x):
    """Of points ``(N, 2)`` in the unit square: ``(N, 1)``."""
    a, b = 15 * x[:, :1] - 5, 15 * x[:, 1:]
    curve = b - 5.1 / (4 * math.pi**2) * a.square() + 5 / math.pi * a - 6
    return curve.square() + 10 * (1 - 1 / (8 * math.pi)) * a.cos() + 10


def optimised(seed, models, fit):
    """Gaps between the best value found and the least, before the first round and after each, and CPU seconds of the fits."""
    import torch
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.models.transforms import Standardize
    from botorch.optim import optimize_acqf

    torch.manual_seed(seed)  # of BoTorch's searches and their base samples
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    x = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(STARTS).double()
    gaps, seconds = [float(branin(x).min()) - LEAST], 0.0
    for round_ in range(ROUNDS):
        y = -branin(x)
        model = models.FullyBayesianSingleTaskGP(x, y, outcome_transform=Standardize(1))
        began = time.process_time()
        fit(model, seed=100 * seed + round_, **FIT)
        seconds += time.process_time() - began
        acquisition = qLogExpectedImprovement(model, best_f=float(y.max()))
        found, _ = optimize_acqf(acquisition, bounds, q=AT_ONCE, num_restarts=4, raw_samples=64, options={"maxiter": 40})
        x = torch.cat([x, found])
        gaps.append(float(branin(x).min()) - LEAST)
    return {"gaps": gaps, "seconds": seconds}


def worker(side, seeds):
    """One line of JSON a seed, as soon as it is there."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if side == "ours":
        from torchgpmc.integrations import botorch as models

        fit = models.fit_fully_bayesian_model_nuts
    else:
        import botorch.fit
        from botorch.models import fully_bayesian as models

        fit = botorch.fit.fit_fully_bayesian_model_nuts
    for seed in seeds:
        print(json.dumps({"side": side, "seed": seed, **optimised(seed, models, fit)}), flush=True)


def quartiles(values):
    import numpy as np

    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(results):
    """Medians and quartiles over seeds, and how the sides differ at the end, seed by seed."""
    import numpy as np

    budgets = [f"{STARTS + AT_ONCE * round_} values" for round_ in range(ROUNDS + 1)]
    print(f"| draws | seeds | {' | '.join(budgets)} | CPU seconds of fits a seed |")
    print("|---|---|" + "---|" * (ROUNDS + 2))
    for side, found in results.items():
        gaps = np.array([result["gaps"] for result in found.values()]).T
        seconds = np.mean([result["seconds"] for result in found.values()])
        print(f"| {side} | {len(found)} | {' | '.join(map(quartiles, gaps))} | {seconds:.1f} |")
    ours, theirs = results.values()
    both = sorted(ours.keys() & theirs.keys())
    logs = np.log10([[side[seed]["gaps"][-1] for seed in both] for side in (ours, theirs)])
    difference = logs[0] - logs[1]
    print(
        f"\nlog10 of the last gap, ours less BoTorch's, over {len(both)} seeds: {difference.mean():+.2f} +- "
        f"{difference.std(ddof=1) / len(both) ** 0.5:.2f}; over seeds its standard deviation is {logs[0].std(ddof=1):.2f} with our "
        f"draws and {logs[1].std(ddof=1):.2f} with BoTorch's."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--botorch", help="interpreter of an environment with BoTorch, NumPyro and JAX")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--record", type=pathlib.Path, default=pathlib.Path("bayesian_optimisation.jsonl"))
    options = parser.parse_args()
    if options.worker:
        side, *seeds = options.worker
        worker(side, map(int, seeds))
        return
    python = options.botorch or peer_python("botorch", REQUIREMENTS)
    results = {"ours": {}, "BoTorch's": {}}
    for line in options.record.read_text().splitlines() if options.record.exists() else []:
        kept = json.loads(line)
        results[kept["side"]][kept["seed"]] = kept
    for side, found in results.items():
        missing = [seed for seed in range(options.seeds) if seed not in found]
        for result in objects(python, "bayesian_optimisation.py", "--worker", side, *missing) if missing else ():
            found[result["seed"]] = result
            with options.record.open("a") as file:
                print(json.dumps(result), file=file)
    table(results)


if __name__ == "__main__":
    main()
