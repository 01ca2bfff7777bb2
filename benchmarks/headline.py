"""AMIS by the error it leaves: posterior variance over the mean squared error of the posterior mean across seeds, per second.

    python benchmarks/headline.py

Probit GP, n=200, d=2 isotropic, paper A's priors; worst hyperparameter. The truth is one long run. Kish's size and k-hat are
reported beside it, and the largest weight, which tells a heavy tail from a bounded one. Mode search is inside the time.
"""

import argparse
import time
import warnings

import torch
from problems import probit_model

import torchgpmc as tg


def moments(posterior):
    """Weighted mean and variance of every hyperparameter, constrained."""
    weights = torch.softmax(posterior.log_weights.flatten(), 0)
    values = torch.cat([value[0].reshape(len(weights), -1) for value in posterior.samples.values()], -1)
    mean = weights @ values
    return mean, weights @ (values - mean).square()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--long", type=int, default=60_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    model = probit_model(200, 2, ard=False)
    truth, variance = moments(tg.sample(model, tg.AMIS(approximation=tg.EP()), num_samples=options.long, seed=999, progress=False))
    print("| method | effective (variance over MSE) | a second | Kish's size | k-hat: median, worst | largest weight | seconds |")
    print("|---" * 7 + "|")
    for name, method in {"AMIS, Laplace (16)": tg.AMIS(), "AMIS, EP (16)": tg.AMIS(approximation=tg.EP())}.items():
        means, seconds, kish, khat, largest = [], [], [], [], []
        for seed in range(options.seeds):
            began = time.perf_counter()
            posterior = tg.sample(model, method, num_samples=options.draws, seed=seed, progress=False)
            seconds.append(time.perf_counter() - began)
            means.append(moments(posterior)[0])
            kish.append(tg.diagnostics.kish_effective_size(posterior.log_weights))
            khat.append(tg.diagnostics.pareto_khat(posterior.log_weights))
            largest.append(float(torch.softmax(posterior.log_weights.flatten(), 0).max()) * options.draws)
        error = (torch.stack(means) - truth).square().mean(0)
        size = float((variance / error).min())
        time_each = float(torch.tensor(seconds).median())
        print(
            f"| {name} | {size:.0f} of {options.draws} | {size / time_each:.0f} | {sum(kish) / len(kish):.0f} | "
            f"{sorted(khat)[len(khat) // 2]:.2f}, {max(khat):.2f} | {max(largest):.1f} times the mean | {time_each:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
