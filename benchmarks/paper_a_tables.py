"""Paper A, tables 1, 2 and 3: efficiency, convergence and cost of an iteration of PM, AA and SURR.

    python benchmarks/paper_a_tables.py --sizes 50
    python benchmarks/paper_a_tables.py --sizes 200 --warmup 500 --iterations 1000
    python benchmarks/paper_a_tables.py --sizes 50 --kernels isotropic --schemes AA SURR

Probit GP data of section 4.2, ten chains from the prior, proposals tuned to 25 % acceptance. Effective sizes are those of the worst
hyperparameter, mean (standard deviation) over chains, scaled to the paper's 10,000 iterations; R-hat after half and all of our
iterations. The paper ran 5,000 + 10,000. AA and SURR alternate Metropolis on theta with ten elliptical slices of the latents.
``--repeat 20`` makes each iteration of 20 updates, as table 3 does, whose PM rows have EP and 64 samples.
"""

import argparse
import dataclasses
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
} | {
    short: tg.Gibbs(hyper=tg.AdaptiveMH(), latent=tg.EllipticalSlice(), parameterization=parameterization)
    for short, parameterization in (("AA", tg.Ancillary()), ("SURR", tg.Surrogate()))
}
PAPER = {  # effective size isotropic, acceptance, effective size ARD, acceptance
    (50, 2): {"PM LA (1)": (749, 23.9, 131, 13.0), "PM LA (16)": (778, 25.1, 206, 16.7), "PM LA (64)": (752, 24.8, 212, 16.6),
              "AA": (287, 22.7, 20, ""), "SURR": (154, 22.4, 21, ""),
              "PM EP (1)": (747, 24.4, 208, 16.1), "PM EP (16)": (736, 25.0, 246, 19.2), "PM EP (64)": (793, 24.9, 252, 19.9)},
    (50, 10): {"PM LA (1)": (237, 18.2, 19, 7.1), "PM LA (16)": (238, 16.9, 62, 17.6), "PM LA (64)": (348, 21.8, 78, 20.2),
               "AA": (71, 22.8, 74, ""), "SURR": (52, 21.8, 45, ""),
               "PM EP (1)": (282, 19.2, 63, 15.6), "PM EP (16)": (507, 24.7, 107, 24.2), "PM EP (64)": (583, 26.1, 108, 26.3)},
    (200, 2): {"PM LA (1)": (717, 31.7, 318, 38.3), "PM LA (16)": (739, 32.6, 364, 43.1), "PM LA (64)": (730, 32.6, 355, 43.6),
               "AA": (112, "", 41, ""), "SURR": (54, "", 61, ""),
               "PM EP (1)": (736, 32.8, 349, 42.0), "PM EP (16)": (736, 32.7, 365, 43.5), "PM EP (64)": (721, 32.6, 354, 43.9)},
    (200, 10): {"PM LA (1)": (115, 27.1, 27, 12.3), "PM LA (16)": (117, 26.8, 53, 18.0), "PM LA (64)": (145, 28.7, 37, 13.2),
                "AA": (26, "", 22, ""), "SURR": (18, "", 10, ""),
                "PM EP (1)": (75, 18.2, 26, 10.3), "PM EP (16)": (137, 27.6, 52, 17.1), "PM EP (64)": (130, 25.5, 45, 17.4)},
}  # fmt: skip

PAPER_TABLE_3 = {  # isotropic, ARD
    (50, 2): {"PM": (9057, 4301), "AA": (1571, 57), "SURR": (702, 64)},
    (50, 10): {"PM": (7478, 2207), "AA": (211, 464), "SURR": (133, 207)},
    (200, 2): {"PM": (8850, 5844), "AA": (327, 143), "SURR": (234, 339)},
    (200, 10): {"PM": (737, 363), "AA": (37, 42), "SURR": (25, 22)},
}


def columns(posterior):
    """Draws of every hyperparameter ``(C, S, P)``."""
    return torch.cat([value.reshape(*value.shape[:2], -1) for value in posterior.samples.values()], -1).numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--kernels", nargs="+", choices=["isotropic", "ARD"], default=["isotropic", "ARD"])
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    print(
        "| n | d | kernel | scheme | ESS of 1e4 (sd) | paper | R-hat, half | all | acceptance, % | paper | n^3 operations | CPU s |"
    )
    print("|---" * 12 + "|")
    for num_data in options.sizes:
        for dimension in options.dimensions:
            for kernel in options.kernels:
                ard = kernel == "ARD"
                model = probit_model(num_data, dimension, ard=ard)
                for name in options.schemes:
                    method = dataclasses.replace(SCHEMES[name], thinning=options.repeat)
                    began = time.process_time()
                    posterior = tg.sample(
                        model, method, num_samples=options.iterations, warmup_steps=options.warmup, num_chains=10, seed=0,
                        progress=False,
                    )  # fmt: skip
                    seconds = time.process_time() - began
                    values = columns(posterior)
                    sizes = [min(float(array_stats.ess(chain[None, :, j])) for j in range(values.shape[-1])) for chain in values]
                    sizes = np.array(sizes) * 10_000 / options.iterations
                    half = values[:, : values.shape[1] // 2]
                    rhats = [max(float(array_stats.rhat(part[..., j])) for j in range(values.shape[-1])) for part in (half, values)]
                    paper = (PAPER_TABLE_3[(num_data, dimension)][name.split()[0]][ard], "")
                    if options.repeat == 1:
                        paper = PAPER[(num_data, dimension)][name][2 * ard : 2 * ard + 2]
                    print(
                        f"| {num_data} | {dimension} | {kernel} | {name} | {sizes.mean():.0f} "
                        f"({sizes.std(ddof=1):.0f}) | {paper[0]} | {rhats[0]:.2f} | {rhats[1]:.2f} | "
                        f"{100 * float(posterior.stats['acceptance_rate'].mean()):.1f} | {paper[1]} | "
                        f"{float(posterior.stats['n_factorizations'].mean()):.1f} | {seconds:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
