"""What a datum of softmax costs, by how wide its normals are: expectations with slopes, and predictive probabilities.

    python benchmarks/softmax_rules.py [--data 2000]

One thread; microseconds of the processor a datum, the least of four calls. A sparse model asks for an expectation at every datum
and chain for every gradient, a prediction for a probability at every point and draw.
"""

import argparse
import time

import torch

from torchgpmc.likelihoods.log_sum_exp import log_sum_exp_and_slopes
from torchgpmc.likelihoods.softmax import log_probabilities_of_normals

# Standard deviation of f, classes, spread of the means.
CASES = [
    (0.05, 3, 2.0),
    (0.3, 3, 2.0),
    (0.7, 3, 2.0),
    (2.0, 3, 2.0),
    (10.0, 3, 10.0),
    (0.3, 10, 3.0),
    (2.0, 10, 5.0),
    (30.0, 4, 50.0),
]


def microseconds(function, mean, variance):
    times = []
    for _ in range(4):
        began = time.process_time()
        function(mean, variance)
        times.append(time.process_time() - began)
    return 1e6 * min(times) / len(mean)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2000)
    count = parser.parse_args().data
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| deviation of f | classes | expectation, us | probabilities, us |", "|---|---|---|---|", sep="\n")
    for deviation, classes, spread in CASES:
        mean = spread * torch.randn(count, classes, generator=generator, dtype=torch.float64)
        variance = (deviation * (1 + 0.3 * torch.rand(count, classes, generator=generator, dtype=torch.float64))).square()
        found = [microseconds(function, mean, variance) for function in (log_sum_exp_and_slopes, log_probabilities_of_normals)]
        print(f"| {deviation} | {classes} | {found[0]:.1f} | {found[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
