"""BoTorch's fully Bayesian models with our draws and with its own: do they agree, and what does each cost?

    python benchmarks/botorch_against_numpyro.py

SAAS on n=50, d=20, and Matern-5/2 on n=30, d=4. Cost: each side's default fit, by turns, in a process of its own that lives on, so
that JAX compiles for the first alone. Agreement: longer runs (`LONG`) of two seeds a side, BoTorch's in float32 as ever; means and
quantiles of log lengthscales, log noise and log outputscale, over seeds, and their differences in standard errors that arviz-stats
takes from the effective size of each mean and quantile. Of many such z-scores one in twenty is beyond 2. BoTorch and JAX live in an
environment of their own (`--botorch PYTHON` names one that is there already), which serves both sides; one thread, CPU time.
"""

import argparse
import itertools
import json
import math
import statistics
import time
import warnings

from processes import Worker, measure, peer_python, serve

REQUIREMENTS = ["botorch==0.18.*", "numpyro==0.22.*", "jax", "pyro-ppl", "scikit-learn", "arviz-stats", "threadpoolctl", "tqdm"]
PROBLEMS = {"SAAS, n=50, d=20": ("saas", 50, 20), "Matern, n=30, d=4": ("matern", 30, 4)}
SIDES = "ours", "BoTorch's"
CHAINS = {"ours": 8, "BoTorch's": 1}
LONG = {"ours": {"warmup_steps": 300, "num_samples": 2400}, "BoTorch's": {"warmup_steps": 512, "num_samples": 2000}}
LEVELS = 0.1, 0.5, 0.9
LEAST_NOISE = 1e-4  # of BoTorch's likelihood, left out of the draws that it hands on


def data(count, columns):
    """Two inputs matter, one a little."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, columns, generator=generator, dtype=torch.float64)
    y = (6 * x[:, 0]).sin() + 2 * (x[:, 1] - 0.5).square() + 0.3 * x[:, 2]
    y = y + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return x, ((y - y.mean()) / y.std()).unsqueeze(-1)


def logs(samples):
    """Name -> logs of what both sides draw, ``(chains, draws)``."""
    found = {f"lengthscale {column}": value for column, value in enumerate(samples["lengthscale"].unbind(-1))}
    found |= {name: samples[name].squeeze(-1) for name in ("noise", "outputscale") if name in samples}
    return {name: value.log() for name, value in found.items()}


def estimates(samples):
    """Means and quantiles of the logs of draws: label -> value, standard error, effective size."""
    import numpy as np
    from arviz_stats.base import array_stats

    table = {}
    for name, draws in logs(samples).items():
        chains = draws.double().numpy()
        measures = {"mean": (chains.mean(), {"method": "mean"})}
        measures |= {f"{p:.0%}": (np.quantile(chains, p), {"method": "quantile", "prob": p}) for p in LEVELS}
        for label, (value, how) in measures.items():
            numbers = value, array_stats.mcse(chains, **how), array_stats.ess(chains, **how)
            table[f"{label} of log {name}"] = [float(number) for number in numbers]
    return table


def fitter(problem, side):
    """A function of options that fits the problem's model and returns it with all draws, as they come."""
    kind, *size = PROBLEMS[problem]
    if side == "ours":
        from torchgpmc.integrations import botorch as models

        fit = models.fit_fully_bayesian_model_nuts
    else:
        import botorch.fit
        from botorch.models import fully_bayesian as models

        fit = botorch.fit.fit_fully_bayesian_model_nuts
    build = {"saas": models.SaasFullyBayesianSingleTaskGP, "matern": models.FullyBayesianSingleTaskGP}[kind]

    def fitted(**options):
        model, loaded = build(*data(*size)), {}
        load = model.load_mcmc_samples

        def keep(samples):
            loaded.update(samples)
            load(samples)

        model.load_mcmc_samples = keep
        fit(model, disable_progbar=True, **options)
        return loaded

    return fitted


def quiet():
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def long_run(problem, side, seed):
    quiet()
    began = time.process_time()
    loaded = fitter(problem, side)(thinning=1, seed=seed, **LONG[side])
    seconds = time.process_time() - began
    if side != "ours":
        loaded["noise"] = loaded["noise"] + LEAST_NOISE
    draws = {name: value.detach().unflatten(0, (CHAINS[side], -1)) for name, value in loaded.items()}
    print(json.dumps({"estimates": estimates(draws), "seconds": seconds}))


def default_fits(problem, side):
    quiet()
    fit, seeds = fitter(problem, side), itertools.count()
    serve(lambda: fit(seed=next(seeds)))


def cost(python, problem, turns):
    workers = {side: Worker(python, "botorch_against_numpyro.py", "--fits", problem, side) for side in SIDES}
    times = {side: [] for side in SIDES}
    for _ in range(turns):
        for side, worker in workers.items():
            times[side] += worker.ask(0.0)
    for side, worker in workers.items():
        worker.stop()
        spread = f"{statistics.median(times[side]):.1f} ({min(times[side]):.1f} to {max(times[side]):.1f})"
        print(f"| {problem} | {side} | {worker.first[0]:.1f} | {spread} |", flush=True)


def over_seeds(runs):
    """Label -> mean over seeds of an estimate, and its standard error."""
    values = {label: [run["estimates"][label] for run in runs] for label in runs[0]["estimates"]}
    return {
        label: (statistics.fmean(value for value, *_ in found), math.hypot(*(error for _, error, _ in found)) / len(found))
        for label, found in values.items()
    }


def agreement(python, problem, seeds):
    runs = {
        side: [measure(python, "botorch_against_numpyro.py", "--long", problem, side, seed) for seed in range(seeds)]
        for side in SIDES
    }
    ours, theirs = map(over_seeds, runs.values())
    scores = {label: (ours[label][0] - theirs[label][0]) / math.hypot(ours[label][1], theirs[label][1]) for label in ours}
    least = [min(size for run in found for *_, size in run["estimates"].values()) for found in runs.values()]
    worst = max(scores, key=lambda label: abs(scores[label]))
    root = math.sqrt(statistics.fmean(z**2 for z in scores.values()))
    beyond = sum(abs(z) > 2 for z in scores.values())
    print(
        f"| {problem} | {least[0]:.0f}, {least[1]:.0f} | {len(scores)} | {beyond} | {root:.2f} | {scores[worst]:.1f} ({worst}) |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--fits", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--botorch", help="interpreter of an environment with BoTorch, NumPyro and JAX")
    parser.add_argument("--seeds", type=int, default=2, help="long runs a side")
    parser.add_argument("--turns", type=int, default=3, help="default fits a side, after the first")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    options = parser.parse_args()
    if options.long:
        problem, side, seed = options.long
        long_run(problem, side, int(seed))
        return
    if options.fits:
        default_fits(*options.fits)
        return
    python = options.botorch or peer_python("botorch", REQUIREMENTS)
    print("| problem | sampler | CPU seconds, first fit | later fits: median (least to most) |")
    print("|---|---|---|---|")
    for problem in options.problems:
        cost(python, problem, options.turns)
    print("\n| problem | least effective size, ours and BoTorch's | z-scores | beyond 2 | root mean square | largest |")
    print("|---|---|---|---|---|---|")
    for problem in options.problems:
        agreement(python, problem, options.seeds)


if __name__ == "__main__":
    main()
