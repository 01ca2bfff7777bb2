"""Paper A, tables 1 and 2 (the pseudo-marginal rows) and the PM column of table 3: efficiency, convergence, cost of an iteration.

    python benchmarks/paper_a_tables.py --sizes 50
    python benchmarks/paper_a_tables.py --sizes 200 --warmup 500 --iterations 1000

Probit GP data of section 4.2, ten chains from the prior, proposals tuned to 25 % acceptance. Effective sizes are those of the worst
hyperparameter, mean (standard deviation) over chains, scaled to the paper's 10,000 iterations; R-hat after half and all of our
iterations. The paper ran 5,000 + 10,000; its AA and SURR rows wait for those samplers. ``--repeat 20`` makes each iteration of
20 updates, as table 3 does, whose PM rows have EP and 64 samples.
"""

import argparse
import time
import warnings

import numpy as np
import torch
from arviz_stats.base import array_stats
from problems import probit_model

import torchgpmc as tg

SCHEMES = {
    f"PM {short} ({count})": tg.PseudoMarginal(approximation=approximation, num_importance=count)
    for short, approximation in (("LA", tg.Laplace()), ("EP", tg.EP()))
    for count in (1, 16, 64)
}
PAPER = {  # effective size isotropic, acceptance, effective size ARD, acceptance
    (50, 2): {"PM LA (1)": (749, 23.9, 131, 13.0), "PM LA (16)": (778, 25.1, 206, 16.7), "PM LA (64)": (752, 24.8, 212, 16.6),
              "PM EP (1)": (747, 24.4, 208, 16.1), "PM EP (16)": (736, 25.0, 246, 19.2), "PM EP (64)": (793, 24.9, 252, 19.9)},
    (50, 10): {"PM LA (1)": (237, 18.2, 19, 7.1), "PM LA (16)": (238, 16.9, 62, 17.6), "PM LA (64)": (348, 21.8, 78, 20.2),
               "PM EP (1)": (282, 19.2, 63, 15.6), "PM EP (16)": (507, 24.7, 107, 24.2), "PM EP (64)": (583, 26.1, 108, 26.3)},
    (200, 2): {"PM LA (1)": (717, 31.7, 318, 38.3), "PM LA (16)": (739, 32.6, 364, 43.1), "PM LA (64)": (730, 32.6, 355, 43.6),
               "PM EP (1)": (736, 32.8, 349, 42.0), "PM EP (16)": (736, 32.7, 365, 43.5), "PM EP (64)": (721, 32.6, 354, 43.9)},
    (200, 10): {"PM LA (1)": (115, 27.1, 27, 12.3), "PM LA (16)": (117, 26.8, 53, 18.0), "PM LA (64)": (145, 28.7, 37, 13.2),
                "PM EP (1)": (75, 18.2, 26, 10.3), "PM EP (16)": (137, 27.6, 52, 17.1), "PM EP (64)": (130, 25.5, 45, 17.4)},
}  # fmt: skip

PAPER_TABLE_3 = {(50, 2): (9057, 4301), (50, 10): (7478, 2207), (200, 2): (8850, 5844), (200, 10): (737, 363)}  # isotropic, ARD


def columns(posterior):
    """Draws of every hyperparameter ``(C, S, P)``."""
    return torch.cat([value.reshape(*value.shape[:2], -1) for value in posterior.samples.values()], -1).numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    print("| n | d | kernel | scheme | ESS of 1e4 (sd) | paper | R-hat, half | all | acceptance, % | paper | n^3 operations | s |")
    print("|---" * 12 + "|")
    for num_data in options.sizes:
        for dimension in options.dimensions:
            for ard in (False, True):
                model = probit_model(num_data, dimension, ard=ard)
                for name in options.schemes:
                    method = SCHEMES[name] if options.repeat == 1 else tg.PseudoMarginal(
                        approximation=SCHEMES[name].approximation, num_importance=SCHEMES[name].num_importance,
                        thinning=options.repeat,
                    )  # fmt: skip
                    began = time.perf_counter()
                    posterior = tg.sample(
                        model, method, num_samples=options.iterations, warmup_steps=options.warmup, num_chains=10, seed=0,
                        progress=False,
                    )  # fmt: skip
                    seconds = time.perf_counter() - began
                    values = columns(posterior)
                    sizes = [min(float(array_stats.ess(chain[None, :, j])) for j in range(values.shape[-1])) for chain in values]
                    sizes = np.array(sizes) * 10_000 / options.iterations
                    half = values[:, : values.shape[1] // 2]
                    rhats = [max(float(array_stats.rhat(part[..., j])) for j in range(values.shape[-1])) for part in (half, values)]
                    paper = (PAPER_TABLE_3[(num_data, dimension)][ard], "")
                    if options.repeat == 1:
                        paper = PAPER[(num_data, dimension)][name][2 * ard : 2 * ard + 2]
                    print(
                        f"| {num_data} | {dimension} | {'ARD' if ard else 'isotropic'} | {name} | {sizes.mean():.0f} "
                        f"({sizes.std(ddof=1):.0f}) | {paper[0]} | {rhats[0]:.2f} | {rhats[1]:.2f} | "
                        f"{100 * float(posterior.stats['acceptance_rate'].mean()):.1f} | {paper[1]} | "
                        f"{float(posterior.stats['n_factorizations'].mean()):.1f} | {seconds:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
