"""Latents at fixed hyperparameters: effective draws a CPU second of the worst latent, by every move of them.

    python benchmarks/latent_samplers.py --draws 300
    python benchmarks/latent_samplers.py --data FOLDER --cells 32 --draws 300 --methods "AuxiliaryGradient()" "EllipticalSlice()"

Probit, n = 200, d = 2; or, with ``--data``, the log Gaussian Cox process of ``lgcp64.npz`` (Christensen et al. 2005; Titsias &
Papaspiliopoulos 2018), whose 64 x 64 cells are summed to fewer where ``--cells`` says so. Four chains on one thread, 300 steps of
warm-up (``--warm-up``), draws five steps apart (of NUTS a tenth as many, of one step); what an approximation for white coordinates
takes, and warm-up, are in the seconds. Rows of fewer than 40 effective draws say no more than "few". At the end, what a step of
elliptical slices costs over its evaluations of the log likelihood, those of f given v included.
"""

import argparse
import math
import time
import warnings
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from problems import probit_model

import torchgpmc as tg
from torchgpmc.diagnostics.summaries import effective_sizes
from torchgpmc.runs.run import Settings

METHODS = {
    "AuxiliaryGradient()": tg.AuxiliaryGradient(thinning=5),
    "EllipticalSlice()": tg.EllipticalSlice(thinning=5),
    "EllipticalSlice(whitening=Laplace())": tg.EllipticalSlice(whitening=tg.Laplace(), thinning=5),
    "PCN()": tg.PCN(thinning=5),
    "PCN(whitening=Laplace())": tg.PCN(whitening=tg.Laplace(), thinning=5),
    "PCN(whitening=EP())": tg.PCN(whitening=tg.EP(), thinning=5),
    "ControlVariables()": tg.ControlVariables(thinning=5),
    "ControlVariables(all_at_once=True, underrelaxation=0.95)": tg.ControlVariables(
        all_at_once=True, underrelaxation=0.95, thinning=5
    ),
    "LocalRegions()": tg.LocalRegions(thinning=5),
    "NUTS(whitening=Laplace())": tg.NUTS(whitening=tg.Laplace()),
}
CHAINS = 4


def probit():
    """At the hyperparameters that the data were drawn with."""
    free = probit_model(200, 2, ard=False)
    free.kernel.outputscale, free.kernel.base_kernel.lengthscale = 2.08, 0.35
    return tg.GP(free.train_x, free.train_y, free.kernel.requires_grad_(False), free.likelihood)


def cox_process(folder, cells):
    """Exponential covariance, as the field was simulated.

    Variance 1.91, lengthscale 64/33 where the first cell's centre is at 0 and the last one's at 1, mean log(126) - 1.91 / 2: within
    0.3 nats of the largest likelihood of the 4096 values of the field itself.
    """
    counts = np.load(Path(folder) / "lgcp64.npz")["y"].reshape(64, 64, order="F")
    block = 64 // cells
    counts = counts.reshape(cells, block, cells, block).sum((1, 3))
    centres = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    x = torch.stack(torch.meshgrid(centres, centres, indexing="ij"), -1).reshape(-1, 2)
    kernel, mean = ScaleKernel(MaternKernel(nu=0.5)).double(), gpytorch.means.ConstantMean().double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.91, 64 / 33 * 63 / 64
    mean.constant = math.log(126) - 1.91 / 2
    exposure = torch.full((cells**2,), 1.0 / cells**2, dtype=torch.float64)
    likelihood = tg.likelihoods.Poisson(exposure=exposure)
    y = torch.tensor(counts.reshape(-1), dtype=torch.float64)
    return tg.GP(x, y, kernel.requires_grad_(False), likelihood, mean=mean.requires_grad_(False))


def measured(model, method, draws, warm_up):
    """Effective size of the worst of fifty latents, of the median one, CPU seconds."""
    began = time.process_time()
    posterior = tg.sample(model, method, num_samples=draws, warmup_steps=warm_up, num_chains=CHAINS, seed=0, progress=False)
    seconds = time.process_time() - began
    columns = range(0, posterior.latents.shape[-1], max(1, posterior.latents.shape[-1] // 50))
    sizes = sorted(effective_sizes(posterior.latents[..., column])[0] for column in columns)
    return sizes[0], sizes[len(sizes) // 2], seconds, float(posterior.stats["acceptance_rate"].mean())


def slice_overhead(model, steps=200):
    """CPU seconds of elliptical slices of all chains, over those of as many evaluations of log p(y given v) in lock-step."""
    run = tg.EllipticalSlice().prepare(model, Settings(steps, 0, CHAINS, None))
    generator, density = torch.Generator().manual_seed(0), run.target.density
    state, evaluations = run.init(generator), 0
    began = time.process_time()
    for _ in range(steps):
        state, _, stats = run.advance(state, generator)
        evaluations += int(stats["n_steps"].max())
    middle = time.process_time()
    for _ in range(evaluations):
        density(state.chain.position)
    return (middle - began) / (time.process_time() - middle)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the Cox process; probit without")
    parser.add_argument("--cells", type=int, default=32)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = cox_process(arguments.data, arguments.cells) if arguments.data else probit()
    print("| method | draws | worst of fifty | median | CPU s | worst a second | acceptance |\n|---|---|---|---|---|---|---|")
    for name in arguments.methods:
        draws = arguments.draws // 10 if "NUTS" in name else arguments.draws
        worst, middle, seconds, acceptance = measured(model, METHODS[name], draws, arguments.warm_up)
        shown = f"{worst / seconds:.3g}" if worst >= 40 else f"few ({worst / seconds:.2g})"
        print(f"| `{name}` | {draws} | {worst:.0f} | {middle:.0f} | {seconds:.1f} | {shown} | {acceptance:.2f} |", flush=True)
    if "EllipticalSlice()" in arguments.methods:
        print(f"\nA step of elliptical slices: {slice_overhead(model):.2f} times its evaluations of the likelihood")


if __name__ == "__main__":
    main()
