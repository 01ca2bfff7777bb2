"""Probit GP evidence at 64 hyperparameter settings at once: error against time, orthant integrals beside importance sampling.

    python benchmarks/orthant_evidence.py

n=200, d=2 isotropic; thetas as a sampler visits them (about the mode of Laplace's marginal). The truth is a known-split estimate
with a hundred times the points. Errors are of the log.
"""

import argparse
import time

import numpy as np
import torch
from problems import probit_model

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal
from torchgpmc.evidence.orthants import probit_problem
from torchgpmc.importance import find_modes
from torchgpmc.orthant import KnownSplit, SeparationOfVariables


def settings(model, count, generator):
    """Draws from the normal approximation of p(theta | y)."""
    mode = find_modes(ApproximateMarginal(model, tg.Laplace()), model.layout.starting_points(4, generator))[0]
    factor = torch.linalg.cholesky(mode.covariance)
    return mode.position + torch.randn(count, len(mode.position), generator=generator, dtype=torch.float64) @ factor.T


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=200)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    model = probit_model(options.num_data, 2, ard=False)
    theta = settings(model, options.settings, torch.Generator().manual_seed(0))

    def integral(method, points):
        def estimate(generator):
            with torch.no_grad():
                problem = probit_problem(model, model.prior(theta)).problem
                return method.estimate(problem, points, generator).value

        return estimate

    def estimator(made):
        return lambda generator: made.draw(theta, generator).value

    rows = {
        "importance, Laplace, 16": estimator(tg.evidence.importance(model, tg.Laplace(), num_importance=16)),
        "importance, Laplace, 64": estimator(tg.evidence.importance(model, tg.Laplace(), num_importance=64)),
        "importance, EP, 16": estimator(tg.evidence.importance(model, tg.EP(), num_importance=16)),
        "importance, EP, 64": estimator(tg.evidence.importance(model, tg.EP(), num_importance=64)),
        "Orthant(64), with latents": estimator(tg.evidence.Orthant(64).estimator(model)),
        "Orthant(256), with latents": estimator(tg.evidence.Orthant(256).estimator(model)),
        "separation of variables, 256": integral(SeparationOfVariables(), 256),
        "separation of variables, 1000": integral(SeparationOfVariables(), 1000),
        "separation of variables, 10000": integral(SeparationOfVariables(), 10_000),
        "the same in the order given": integral(SeparationOfVariables(reordering=False), 10_000),
        "the same without tilting": integral(SeparationOfVariables(tilting=False), 10_000),
        "neither (plain GHK)": integral(SeparationOfVariables(tilting=False, reordering=False), 10_000),
        "known split, 64": integral(KnownSplit(1.0), 64),
        "known split, 256": integral(KnownSplit(1.0), 256),
        "known split, 1000": integral(KnownSplit(1.0), 1000),
    }
    truth = torch.stack([integral(KnownSplit(1.0), 25_000)(torch.Generator().manual_seed(99 + k)) for k in range(2)])
    spread = float((truth[0] - truth[1]).square().mean().sqrt()) / 2
    truth = truth.mean(0)
    print(f"log evidence about {float(truth.mean()):.2f}; the truth's own error is {spread:.1g}\n")
    print("| estimate | root mean square error of the log | in % of the log | ms a setting |\n|---|---|---|---|")
    for name, estimate in rows.items():
        times, errors = [], []
        repeats = 1 if "10000" in name else options.repeats
        for seed in range(repeats):
            began = time.perf_counter()
            value = estimate(torch.Generator().manual_seed(seed))
            times.append((time.perf_counter() - began) / len(theta))
            errors.append((value - truth).square().mean())
        error = float(torch.stack(errors).mean().sqrt())
        percent = 100 * error / float(truth.abs().mean())
        print(f"| {name} | {error:.5f} | {percent:.5f} | {1e3 * np.median(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
