"""Paper E, figure 1 and appendices A-B: convergence of E||theta|| against n^3 operations, GP regression.

    python benchmarks/paper_e_figure1.py --data ../shared/data --sets parkinsons --kernels rbf ard

Interquartile range over replicates of the estimate of E||theta|| at growing budgets. One operation an evaluation of the marginal
likelihood, two more for its gradient (the paper's count). Samplers are those of the paper's table 4, with the settings of its
tables 3 and 5; -I, -D and -H start from the mode and take identity, diagonal or full curvature. The chains of one call are the
replicates of an MCMC method: they share the tuning of their step size, which is charged to each. The paper has 100 replicates.
"""

import argparse
import pathlib

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior
from paper_e import GRADIENT, Report, draw, kernel_of, mode_search_cost, of_chains, of_weighted
from real_data import standardised, table

import torchgpmc as tg
from torchgpmc.approximations import Conjugate
from torchgpmc.samplers import MassMatrix

MATRICES = {"I": MassMatrix.IDENTITY, "D": MassMatrix.DIAGONAL, "H": MassMatrix.DENSE}
FAMILIES = {  # options, operations an evaluation, warm-up, least evaluations a transition
    "MH": (lambda matrix: tg.AdaptiveMH(mass_matrix=matrix, from_mode=True), 1, 100, 1),
    "HMC": (
        lambda matrix: tg.HMC(num_steps=10, mass_matrix=matrix, from_mode=True, target_accept_prob=0.65, random_length=False),
        GRADIENT,
        30,
        10,
    ),
    "NUTS": (
        lambda matrix: tg.NUTS(mass_matrix=matrix, from_mode=True, adapt_step_size=False, step_size=0.1),
        GRADIENT,
        0,
        20,
    ),
    "NUTSDA": (lambda matrix: tg.NUTS(mass_matrix=matrix, from_mode=True), GRADIENT, 30, 5),
}
CHAINS = {
    **{f"{name}-{letter}": (family, matrix) for name, family in FAMILIES.items() for letter, matrix in MATRICES.items()},
    "SS": ((lambda _: tg.Slice(from_mode=True), 1, 0, 12), MassMatrix.DIAGONAL),
}


def weighted(ard):
    """Tables 3 and 5, normal proposals in the logarithms, no defence and one stream of draws as there.

    AMIS-MAMIS has a sixth of the paper's draws in its AMIS part, which is what our budgets outlast.
    """
    paper = {"normal_scale": False, "degrees_of_freedom": None, "defensive_share": 0, "num_streams": 1}
    equal = (100,) if ard else (25,)
    growing = tuple(3000 + 1000 * t for t in range(5)) if ard else tuple(26 * t for t in range(1, 47))
    switched = (100,) * 20 + tuple(1000 * t for t in range(1, 6))
    return {
        "AMIS": tg.AMIS(batch_sizes=equal, **paper),
        "AMIS-D": tg.AMIS(batch_sizes=equal, diagonal=True, **paper),
        "MAMIS": tg.MAMIS(batch_sizes=growing, prior_strength=1e-3, **paper),
        "MAMIS-D": tg.MAMIS(batch_sizes=growing, prior_strength=1e-3, diagonal=True, **paper),
        "MAMIS-P": tg.MAMIS(batch_sizes=growing, **paper),
        "AMIS-MAMIS": tg.AMIS(batch_sizes=switched, switch_to_modified_after=20, **paper),
        "AMIS, our defaults": tg.AMIS(),
        "MAMIS, our defaults": tg.MAMIS(),
    }


def regression_set(folder, name, seed=0):
    """Standardised inputs and response; of Parkinsons four records for each patient, drawn at random as in the paper."""
    columns = table(folder, name)
    if name == "parkinsons":
        generator = np.random.default_rng(seed)
        records = [generator.choice(np.flatnonzero(columns[:, 0] == who), 4, replace=False) for who in np.unique(columns[:, 0])]
        # The first column is the patient and the last but one another response; the paper has one column more.
        columns = np.delete(columns[np.concatenate(records)], [0, columns.shape[1] - 2], axis=1)
    return standardised(columns[:, :-1]), standardised(columns[:, -1])


def model_of(x, y, ard):
    likelihood = GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.1))
    return tg.GPRegression(torch.as_tensor(x), torch.as_tensor(y), kernel_of(x.shape[1], ard), likelihood)


def one_each(stats):
    """Operations of each draw ``(S,)``."""
    return torch.ones(stats["lp"].shape[-1])


def chains(model, sampler, search, budgets, replicates):
    (make, cost, warmup, evaluations), matrix = CHAINS[sampler]
    draws = round(1.3 * budgets[-1] / (cost * evaluations))
    posterior = tg.sample(
        model, make(matrix), num_samples=draws, warmup_steps=warmup, num_chains=replicates, seed=1, progress=False
    )
    work = cost * posterior.stats["n_steps"]
    tuning = search + cost * (posterior.info["num_evaluations"] - float(posterior.stats["n_steps"].sum())) / replicates
    return of_chains(posterior, work, tuning, budgets), tuning


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*weighted(False), *CHAINS]
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["parkinsons", "housing", "concrete"])
    parser.add_argument("--kernels", nargs="+", choices=["rbf", "ard"], default=["rbf", "ard"])
    parser.add_argument("--operations", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--replicates", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", choices=names, default=names)
    parser.add_argument("--figure", default="paper_e_figure1.png")
    options = parser.parse_args()
    report = Report(options.operations)
    for name in options.sets:
        x, y = regression_set(options.data, name)
        for kernel in options.kernels:
            model = model_of(x, y, kernel == "ard")
            search = mode_search_cost(model, Conjugate(), GRADIENT)
            importance = weighted(kernel == "ard")
            for sampler in options.samplers:

                def run(sampler=sampler, model=model, importance=importance, search=search):
                    if sampler in importance:
                        method = importance[sampler]
                        found = of_weighted(model, method, search, options.operations, options.replicates, one_each)
                        return found, search
                    return chains(model, sampler, search, options.operations, options.replicates)

                report.add(name, kernel, model, sampler, run)
            draw(report.rows, options.figure)


if __name__ == "__main__":
    main()
