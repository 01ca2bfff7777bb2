"""Paper E, figure 2 and appendix C: convergence of E||theta|| against n^3 operations, GP classification.

    python benchmarks/paper_e_figure2.py --data ../shared/data --sets thyroid --kernels rbf ard
    python benchmarks/paper_e_figure2.py --data ../shared/data --importance 1 --figure paper_e_appendix_c.png

PM-AMIS (batches of 400, table 3) and PM-MH (proposals from the curvature at the mode), each with importance samples from Laplace's
approximation and from EP. Operations: a factorisation an iteration of Laplace, three an iteration of EP, one more for K; the mode
search and tuning count. The chains of one call are the replicates of PM-MH. The paper has 20 replicates.
"""

import argparse
import pathlib

import torch
from paper_e import GRADIENT, Report, draw, kernel_of, mode_search_cost, of_chains, of_weighted
from real_data import classification_set

import torchgpmc as tg

APPROXIMATIONS = {"LA": (tg.Laplace(), 1), "EP": (tg.EP(), 3)}  # with operations an iteration
TYPICAL_ITERATIONS = 4  # of an approximation within the mode search
TUNING = 100  # transitions


def of_iterations(factorizations, cost):
    """Operations from the number of factorisations: K's, and one an iteration."""
    return 1 + cost * (factorizations - 1)


def metropolis(model, approximation, cost, search, options):
    method = tg.PseudoMarginal(approximation=approximation, num_importance=options.importance, from_mode=True)
    draws = options.operations[-1] // (1 + 2 * cost)
    posterior = tg.sample(
        model, method, num_samples=draws, warmup_steps=2 * TUNING, num_chains=options.replicates, seed=1, progress=False
    )
    work = of_iterations(posterior.stats["n_factorizations"], cost)
    tuning = search + 2 * TUNING * float(work.mean())  # half of warm-up tunes on the approximation, the rest runs the chain
    return of_chains(posterior, work, tuning, options.operations), tuning


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["glass", "thyroid", "breast"])
    parser.add_argument("--kernels", nargs="+", choices=["rbf", "ard"], default=["rbf", "ard"])
    parser.add_argument("--operations", type=int, nargs="+", default=[4000, 8000, 16000, 32000])
    parser.add_argument("--replicates", type=int, default=20)
    parser.add_argument("--importance", type=int, default=64)
    parser.add_argument("--approximations", nargs="+", choices=list(APPROXIMATIONS), default=list(APPROXIMATIONS))
    parser.add_argument("--samplers", nargs="+", choices=["PM-AMIS", "PM-MH"], default=["PM-AMIS", "PM-MH"])
    parser.add_argument("--figure", default="paper_e_figure2.png")
    options = parser.parse_args()
    report = Report(options.operations)
    for name in options.sets:
        x, y = (torch.as_tensor(part) for part in classification_set(options.data, name))
        for kernel in options.kernels:
            model = tg.GP(
                torch.as_tensor(x), torch.as_tensor(y), kernel_of(x.shape[1], kernel == "ard"), tg.likelihoods.Bernoulli()
            )
            for short in options.approximations:
                approximation, cost = APPROXIMATIONS[short]
                search = mode_search_cost(model, approximation, GRADIENT + cost * TYPICAL_ITERATIONS)
                amis = tg.AMIS(approximation=approximation, num_importance=options.importance, batch_sizes=(400,), num_streams=1)

                def weighted(model=model, amis=amis, search=search, cost=cost):
                    def operations(stats):
                        return of_iterations(stats["n_factorizations"][0], cost)

                    return of_weighted(model, amis, search, options.operations, options.replicates, operations), search

                def chains(model=model, approximation=approximation, cost=cost, search=search):
                    return metropolis(model, approximation, cost, search, options)

                makes = {"PM-AMIS": weighted, "PM-MH": chains}
                for sampler in options.samplers:
                    report.add(name, kernel, model, f"{sampler} ({short})", makes[sampler])
            draw(report.rows, options.figure)


if __name__ == "__main__":
    main()
