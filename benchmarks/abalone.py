"""Abalone, male against female: 2835 data, isotropic RBF, until AMIS has 1000 effective draws.

    python benchmarks/abalone.py --data ../shared/data

Targets: under 30 minutes on 2 cores, mode search included, and within 8 GiB.
"""

import argparse
import pathlib
import resource
import time

import torch
from paper_e import kernel_of
from real_data import classification_set

import torchgpmc as tg


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--effective", type=float, default=1000.0)
    options = parser.parse_args()
    x, y = (torch.as_tensor(part) for part in classification_set(options.data, "abalone"))
    model = tg.GP(x, y, kernel_of(x.shape[1], ard=False), tg.likelihoods.Bernoulli())
    began = time.perf_counter()
    method = tg.AMIS(effective_size=options.effective, batch_size=200, growth=1.0)
    posterior = tg.sample(model, method, num_samples=4000, seed=0, progress=False)
    seconds = time.perf_counter() - began
    print(posterior.summary())
    weights = posterior.log_weights
    print(f"{posterior.num_draws} draws, Kish's size {tg.diagnostics.weights.kish_effective_size(weights):.0f}, ", end="")
    print(f"k-hat {tg.diagnostics.weights.pareto_khat(weights):.2f}, {seconds / 60:.1f} minutes, ", end="")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
