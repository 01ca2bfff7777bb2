"""Inducing points of a ProjectedProcess, moved by a Gaussian fit or where k-means put them, beside those of a SparseGP.

    python benchmarks/projected_points.py --data DATA --splits 3

Labels of banana (400 training rows, M = 20) and pima532 (300, M = 15), standardised on the training rows; up to 1000
others to test. Bernoulli likelihood with a probit link, one lengthscale; it and the variance Gamma(1.1, 1).
"""

import argparse
import pathlib
import time

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import halves, quiet
from real_data import table

import torchgpmc as tg


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--splits", type=int, default=3)
    arguments = parser.parse_args()
    quiet()
    print("| data | split | model | inducing points | bound | held out | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for name, count, points in (("banana", 400, 20), ("pima532", 300, 15)):
        data = torch.as_tensor(table(arguments.data, name)).double()
        for split in range(arguments.splits):
            train, rest = halves(len(data), count, split)
            x, y, test = data[:, :-1], (data[:, -1] > data[:, -1].min()).double(), rest[:1000]
            x = (x - x[train].mean(0)) / x[train].std(0)
            kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(1.1, 1.0)), outputscale_prior=GammaPrior(1.1, 1.0))
            placed = tg.kmeans_inducing_points(x[train], points)
            for kind in (tg.ProjectedProcess, tg.SparseGP):
                model = kind(x[train], y[train], kernel, tg.likelihoods.Bernoulli(), inducing_points=placed)
                for moves in (False, True):
                    began = time.process_time()
                    start = tg.initialize(model, optimize_inducing_points=moves, progress=False)
                    seconds = time.process_time() - began
                    held_out = float(start.predict(x[test]).log_prob(y[test]).mean())
                    print(
                        f"| {name} | {split} | {kind.__name__} | {'moved' if moves else 'k-means'} | {start.elbo:.1f} | "
                        f"{held_out:.4f} | {seconds:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
