"""BoTorch's fully Bayesian models with our draws and with its own: do they agree, and what does each cost?

    python benchmarks/botorch_against_numpyro.py

SAAS on n=50, d=20, and Matern-5/2 on n=30, d=4, each side's defaults but for thinning, so that there is something to compare:
512 + 256 draws of one chain there (in float32), 8 chains of 150 + 32 here. Means and quantiles of log lengthscales, log noise and
log outputscale: differences over their Monte Carlo errors, which come from effective sizes; of many such z-scores one in twenty is
beyond 2. Theirs fits twice in one process, once with JAX's compilation and once without. BoTorch and JAX live in an environment of
their own (`--botorch PYTHON` names one that is there already), which serves both sides; fresh processes of one thread, CPU time.
"""

import argparse
import json
import math
import time
import warnings

from processes import measure, peer_python

REQUIREMENTS = ["botorch==0.18.*", "numpyro==0.22.*", "jax", "pyro-ppl", "scikit-learn", "arviz-stats", "threadpoolctl", "tqdm"]
PROBLEMS = {"SAAS, n=50, d=20": ("saas", 50, 20), "Matern, n=30, d=4": ("matern", 30, 4)}
LEVELS = 0.1, 0.5, 0.9
DRAWS = 256
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


def statistics(samples):
    """Name -> mean and quantiles with their Monte Carlo errors, and the bulk effective size."""
    import numpy as np

    from torchgpmc.chain_statistics import ess

    table = {}
    for name, draws in logs(samples).items():
        flat = draws.flatten().double()
        table[name] = {"ess": ess(draws.double().numpy(), "bulk"), "rows": []}
        effective = max(1.0, table[name]["ess"])
        table[name]["rows"].append(("mean", float(flat.mean()), float(flat.std()) / math.sqrt(effective)))
        for level in LEVELS:
            # The error of a quantile: half the distance between those one standard error of the level below and above.
            shift = math.sqrt(level * (1 - level) / effective)
            low, value, high = np.quantile(flat.numpy(), [max(0.0, level - shift), level, min(1.0, level + shift)])
            table[name]["rows"].append((f"{level:.0%}", float(value), float(high - low) / 2))
    return table


def worker(problem, side, seed):
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind, *size = PROBLEMS[problem]
    if side == "ours":
        from torchgpmc.integrations import botorch as bridge

        models, fit, chains = bridge, bridge.fit_fully_bayesian_model_nuts, 8
    else:
        import botorch.fit
        from botorch.models import fully_bayesian as models

        fit, chains = botorch.fit.fit_fully_bayesian_model_nuts, 1
    build = {"saas": models.SaasFullyBayesianSingleTaskGP, "matern": models.FullyBayesianSingleTaskGP}[kind]
    seconds = []
    for _ in range(1 if side == "ours" else 2):
        model, loaded = build(*data(*size)), {}
        load = model.load_mcmc_samples

        def keep(samples, load=load, loaded=loaded):
            loaded.update(samples)
            load(samples)

        model.load_mcmc_samples = keep
        began = time.process_time()
        fit(model, num_samples=DRAWS, thinning=1, disable_progbar=True, seed=seed)
        seconds.append(time.process_time() - began)
    if side != "ours":
        loaded["noise"] = loaded["noise"] + LEAST_NOISE
    draws = {name: value.detach().reshape(chains, DRAWS // chains, *value.shape[1:]) for name, value in loaded.items()}
    print(json.dumps({"statistics": statistics(draws), "seconds": seconds}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=3)
    parser.add_argument("--botorch", help="interpreter of an environment with BoTorch, NumPyro and JAX")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    options = parser.parse_args()
    if options.worker:
        problem, side, seed = options.worker
        worker(problem, side, int(seed))
        return
    python = options.botorch or peer_python("botorch", REQUIREMENTS)
    print("| problem | sampler | CPU seconds, first fit | later fits | worst effective size | z-scores | beyond 2 | largest |")
    print("|---|---|---|---|---|---|---|---|")
    for problem in options.problems:
        found = {
            side: measure(python, "botorch_against_numpyro.py", "--worker", problem, side, options.seed)
            for side in ("ours", "BoTorch's")
        }
        ours, theirs = (result["statistics"] for result in found.values())
        scores = {
            f"{label} of log {name}": (a - b) / math.hypot(error, other)
            for name in ours
            for (label, a, error), (_, b, other) in zip(ours[name]["rows"], theirs[name]["rows"], strict=True)
        }
        worst = max(scores, key=lambda name: abs(scores[name]))
        compared = f"{len(scores)} | {sum(abs(z) > 2 for z in scores.values())} | {scores[worst]:.1f} ({worst})"
        for side, result in found.items():
            least = min(entry["ess"] for entry in result["statistics"].values())
            seconds = f"{result['seconds'][0]:.1f} | {result['seconds'][-1]:.1f}"
            print(f"| {problem} | {side} | {seconds} | {least:.0f} | {compared if side == 'ours' else ' | | '} |", flush=True)


if __name__ == "__main__":
    main()
