"""HMC on (v, theta) together against Gibbs, HMC on v and Metropolis on theta (Hensman et al. 2015, sections 5.1 and 5.2).

    python benchmarks/hmc_against_gibbs.py --data DATA --problems coal isotropic ARD --draws 300 --warmup 200

Ten chains; trajectories of random length, which ``tg.tune_hmc`` chose for HMC on (v, theta), begun as ever; then the same HMC from
the Gaussian fit, in coordinates that are white under it; then Gibbs with that HMC for v. Effective sizes are the slowest
coordinate's of all chains together; TN-ESS is that a CPU second, without tuning. PSRF: the R-hat of the 20 slowest coordinates, the
largest and the median.
"""

import argparse
import pathlib
import time

import coal
import image
import numpy as np
import torch
from held_out import halves, quiet
from real_data import table

import torchgpmc as tg
from torchgpmc.diagnostics.chain_statistics import ess, rhat

CHAINS, SLOWEST = 10, 20
PAPER = {  # effective size and that a second, as remembered from the printed paper: HMC, Gibbs
    "isotropic": ("11, 1.0e-3", "53, 5.1e-3"),
    "ARD": ("14, 5.1e-3", "1.6, 1.5e-4"),
    "coal": ("6.7, 3.1e-2", "9.7, 1.9e-2"),
}


def model_of(problem, folder, points):
    if problem == "coal":
        dates = torch.as_tensor(table(folder, "coal")).view(-1, 1)
        train, _ = halves(len(dates), len(dates) // 2, 0)
        return coal.sparse(dates[train], (float(dates.min()), float(dates.max())))
    x, y, _, _ = image.split_of(torch.as_tensor(table(folder, "image")), 0)
    return image.sparse(x, y, points, problem == "ARD")


def row(problem, name, model, method, arguments, paper="", **begin):
    began = time.process_time()
    settings = {"num_samples": arguments.draws, "warmup_steps": arguments.warmup, "num_chains": CHAINS, "seed": 0}
    posterior = tg.sample(model, method, progress=False, **settings, **begin)
    seconds = time.process_time() - began
    traces = torch.cat([posterior.theta, posterior.whitened], -1).movedim(-1, 0).numpy()
    sizes = np.array([ess(trace, "bulk") for trace in traces])
    scales = np.array([rhat(trace) for trace in traces[sizes.argsort()[:SLOWEST]]])
    of_theta = sizes[: posterior.theta.shape[-1]].min()
    print(
        f"| {problem} | {name} | {sizes.min():.0f} | {sizes.min() / seconds:.2g} | {of_theta:.0f} | {scales.max():.2f}, "
        f"{np.median(scales):.2f} | {seconds:.0f} | {paper} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--problems", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--points", type=int, default=50, help="inducing points of the image problems")
    parser.add_argument("--draws", type=int, default=300, help="of each of the ten chains")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--trials", type=int, default=15, help="of step size and trajectory length")
    arguments = parser.parse_args()
    quiet()
    print("| problem | method | effective | TN-ESS | of theta | PSRF: largest, median | CPU s | the paper's |")
    print("|---|---|---|---|---|---|---|---|")
    for problem in arguments.problems:
        start = tg.initialize(model_of(problem, arguments.data, arguments.points), progress=False)
        model, paper = start.model, PAPER[problem]
        options = {"max_steps": 40, "num_trials": arguments.trials, "trial_steps": 10, "warmup_steps": 50}
        began = time.process_time()
        method = tg.tune_hmc(model, num_chains=CHAINS, seed=0, **options)
        tuning = time.process_time() - began
        name = f"HMC, 1 to {method.num_steps} steps (tuned in {tuning:.0f} s)"
        row(problem, name, model, method, arguments, paper[0])
        row(problem, "the same, white under the fit", model, method, arguments, start=start)
        gibbs = tg.Gibbs(latent=method, hyper=tg.AdaptiveMH(), parameterization=tg.Ancillary(), latent_steps=1)
        row(problem, "Gibbs", model, gibbs, arguments, paper[1])


if __name__ == "__main__":
    main()
