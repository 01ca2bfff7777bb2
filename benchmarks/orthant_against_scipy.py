"""Error against time on one-factor matrices: ours, and scipy's multivariate_normal.cdf (Genz's code).

    python benchmarks/orthant_against_scipy.py --sizes 50 200

Targets at equal error: 30 times faster at N=50, 500 times at N=200.
"""

import argparse
import time

import numpy as np
import scipy.stats
import torch
from orthant_problems import one_factor

from torchgpmc.orthant import log_probability

SCIPY_POINTS = {50: (50_000, 500_000, 5_000_000), 200: (200_000, 2_000_000)}
OUR_POINTS = (64, 256, 1000, 4000, 10_000, 40_000)


def ours(covariance, points, seed):
    began = time.perf_counter()
    found = log_probability(
        torch.as_tensor(covariance), lower=0.0, num_points=points, generator=torch.Generator().manual_seed(seed)
    )
    return float(found.value), time.perf_counter() - began


def theirs(covariance, points, seed):
    began = time.perf_counter()
    # P(x > 0) = P(x < 0) at mean zero.
    value = scipy.stats.multivariate_normal.cdf(
        np.zeros(len(covariance)), np.zeros(len(covariance)), covariance, maxpts=points, abseps=0.0, releps=0.0,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(np.log(value)), time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--problems", type=int, default=4)
    options = parser.parse_args()
    ours(one_factor(5, 0)[0], 64, 0)
    print("| N | code | points | MAPE, % | ms |\n|---|---|---|---|---|")
    for size in options.sizes:
        cases = [one_factor(size, seed) for seed in range(options.problems)]
        rows = []
        for name, estimate, counts in (("ours", ours, OUR_POINTS), ("scipy", theirs, SCIPY_POINTS[size])):
            for points in counts:
                some = cases if name == "ours" or size < 200 else cases[:2]
                results = [estimate(case[0], points, seed) for seed, case in enumerate(some)]
                error = np.mean([100 * abs(value - case[2]) / abs(case[2]) for (value, _), case in zip(results, some, strict=True)])
                rows.append((name, error, np.median([seconds for _, seconds in results])))
                print(f"| {size} | {name} | {points} | {error:.2g} | {1e3 * rows[-1][2]:.1f} |", flush=True)
        for name, error, seconds in rows:
            reached = [row[2] for row in rows if row[0] == "ours" and row[1] <= error]
            if name == "scipy" and reached:
                print(f"\nN={size}: at {error:.2g} % ours takes 1/{seconds / min(reached):.0f} of scipy's time\n", flush=True)


if __name__ == "__main__":
    main()
