"""Covariances at ordinary and at short lengthscales, with exponents clamped (ours) and not: denormal numbers cost a hundredfold.

python benchmarks/short_lengthscales.py
"""

import argparse
import json
import statistics
import sys
import time

from processes import measure, median


def worker(lengthscale):
    import torch
    from gpytorch.kernels import RBFKernel

    from torchgpmc.adapter.covariance import covariance_function

    x = torch.linspace(0, 1, 400, dtype=torch.float64).unsqueeze(-1)
    bound = covariance_function(RBFKernel().double(), x).bind(x, x)
    values = {"raw_lengthscale": torch.full((4, 1, 1), lengthscale, dtype=torch.float64)}
    square = (x - x.T).square()

    def clamped():
        covariance = bound(values)
        return covariance @ covariance

    def plain():
        covariance = torch.exp(-0.5 * square / values["raw_lengthscale"] ** 2)
        return covariance @ covariance

    result = {}
    for name, function in (("clamped", clamped), ("plain", plain)):
        times = []
        for _ in range(20):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        result[name] = 1e3 * statistics.median(times)
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=float)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    print("| lengthscale | clamped (ms) | plain (ms) | plain / clamped |\n|---|---|---|---|")
    for lengthscale in (0.3, 0.03, 0.01, 0.003):
        results = [measure(sys.executable, "short_lengthscales.py", "--worker", lengthscale) for _ in range(options.runs)]
        clamped, plain = median(results, "clamped"), median(results, "plain")
        print(f"| {lengthscale} | {clamped:.2f} | {plain:.2f} | {plain / clamped:.1f} |")


if __name__ == "__main__":
    main()
